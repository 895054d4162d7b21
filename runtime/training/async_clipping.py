"""A stage that steps alone -> the gradient norm that it is clipped by, and the bound of that norm.

    stage       its own norm, and the whole bound
    proportion  its own norm, and sqrt(n_j / n) of the bound: n_j of all n weights are its own, so
                that the squares of all bounds add up to the bound's. (FTPipe takes n_j / n.)
    global      the norm of all stages at the same step; each step waits until all stages make it
    known       the same, with the other stages' squares of D steps before: D = ceil((W+1)/k)

W is the most that any stage runs ahead. When a stage makes step v, every other has made step v - D:
those before it have sent on the last forward of step v, and so made their backwards of up to W + 1
micro-batches before, and those after it are ahead in backwards. So `known` waits for no stage, and
goes by the same norms in every run. The first D asynchronous steps have none to go by, and are
clipped as by `global`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import nn

from ..activity import Activities, Activity
from ..launching.world import World
from .clipping import Agreed, Share, StepMessage, gradients_of, squared_norm
from .settings import Settings, SettingsError


class StageNorms:
    """The norms of one rank's stages, `clip_by` of the settings. All ranks construct it together.

    Raises SettingsError where ranks with several stages would have to wait for themselves.
    """

    def __init__(
        self,
        settings: Settings,
        world: World,
        stages: int,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        shares: Mapping[int, Share],
        activities: Activities,
    ) -> None:
        self._by, self._limit = settings.clip_by or "stage", settings.clip or 0.0
        self._world, self._stages = world, stages
        self._parameters, self._shares = parameters, shares
        self._activities = activities
        self._messages: dict[int, StepMessage | Agreed] = {}
        if self._by in ("global", "known") and world.ranks != stages:
            raise SettingsError(
                f"--clip-by {self._by} needs a rank for each of the {stages} stages, and there are "
                f"{world.ranks}.",
                "--clip-by proportion",
            )
        self._part: dict[int, float] = {}
        if self._by == "proportion":
            own = {stage: _numbers(weights) for stage, weights in parameters.items()}
            (total,) = world.sums([float(sum(own.values()))])
            self._part = {stage: math.sqrt(count / total) for stage, count in own.items()}

    def state(self) -> dict[str, list[float]]:
        """The squares of all stages, by version, that later steps will be clipped by. Every rank
        has them, and waits for none after a drain."""
        return {
            str(version): list(_agreed(message).squares)
            for version, message in self._messages.items()
        }

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Takes up what `state` gave, if it was of as many stages."""
        self._messages = {
            int(version): Agreed(tuple(squares), overflowed=False, loss=0.0)
            for version, squares in state.items()
            if len(squares) == self._stages
        }

    def of(self, stage: int, version: int, late: int) -> tuple[float, float]:
        """The norm for the step to `version`, and its bound; `late` is D of `known`."""
        if self._by in ("stage", "proportion"):
            square = squared_norm(gradients_of(self._parameters[stage]))
            return math.sqrt(float(square)), self._limit * self._part.get(stage, 1.0)
        own = squared_norm(gradients_of(self._shares[stage].counted))
        message: StepMessage | Agreed = StepMessage(
            {stage: own}, self._stages, self._world.control, loss=0.0
        )
        if self._by == "known":
            self._messages[version] = message
            message = self._messages.get(version - late, message)
            self._messages.pop(version - late, None)
        with self._activities.during(Activity("meet", "the norms of all stages")):
            squares = list(_agreed(message).squares)
        squares[stage] = float(own)
        return math.sqrt(sum(squares)), self._limit


def steps_until_known(ahead: Sequence[int], step_every: int) -> int:
    """D: the steps by which others' norms are late, where stages run so far `ahead`.

    >>> steps_until_known((3, 2, 1, 0), 1), steps_until_known((3, 2, 1, 0), 4)
    (4, 1)
    """
    return -(-(max(ahead) + 1) // step_every)


def _agreed(message: StepMessage | Agreed) -> Agreed:
    return message if isinstance(message, Agreed) else message.agreed()


def _numbers(weights: Sequence[nn.Parameter]) -> int:
    return sum(weight.numel() for weight in weights if weight.requires_grad)
