"""A stage that steps alone -> the gradient norms that it is clipped by, and the bounds of them.

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

A parameter that several stages hold is stepped by each of them and must stay equal, so it is
clipped by what all its holders know alike and without a wait: under `stage` and `proportion` by its
own norm, as if it were a stage; under `known` by the norm of all stages of D steps before, or by
its own if that is larger. Its gradient has the same bits at all holders, and so has
`squared_norm_alike`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from ..activity import Activities, Activity
from ..launching.world import World
from .clipping import (
    Agreed,
    Share,
    StepMessage,
    clip_factor,
    gradients_of,
    squared_norm,
    squared_norm_alike,
)
from .settings import Settings, SettingsError

_LAST = "last"
"""The key of the squares of the last step, among versions."""


class Norm(NamedTuple):
    """A norm that gradients are clipped by, and its bound."""

    norm: float
    bound: float

    @property
    def factor(self) -> float:
        return clip_factor(self.norm, self.bound)


def check_ranks(settings: Settings, stages: int, ranks: int) -> None:
    """Raises SettingsError where ranks with several stages would have to wait for themselves."""
    if settings.clip_by in ("global", "known") and ranks != stages:
        raise SettingsError(
            f"--clip-by {settings.clip_by} needs a rank for each of the {stages} stages, and there "
            f"are {ranks}.",
            "--clip-by proportion",
        )


class StageNorms:
    """The norms of one rank's stages, `clip_by` of the settings. All ranks construct it together.

    `shares` are the parameters of its stages. Raises SettingsError as `check_ranks` does.
    """

    def __init__(
        self,
        settings: Settings,
        world: World,
        stages: int,
        shares: Mapping[int, Share],
        activities: Activities,
    ) -> None:
        check_ranks(settings, stages, world.ranks)
        self._by, self._limit = settings.clip_by or "stage", settings.clip or 0.0
        self._world, self._stages, self._shares = world, stages, shares
        self._activities = activities
        self._messages: dict[int, StepMessage | Agreed] = {}
        self._last: list[float] = [0.0] * stages
        """The squares of all stages that the last step was clipped by."""
        self._weights = 0.0
        if self._by == "proportion":
            counted = float(sum(_numbers(share.counted) for share in shares.values()))
            (self._weights,) = world.sums([counted])

    def state(self) -> dict[str, list[float]]:
        """The squares of all stages, by version, that later steps will be clipped by, and those of
        the last step. Every rank has them, and waits for none after a drain."""
        squares = {
            str(version): list(_agreed(message).squares)
            for version, message in self._messages.items()
        }
        return squares | {_LAST: self._last}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Takes up what `state` gave, if it was of as many stages."""
        fitting = {key: squares for key, squares in state.items() if len(squares) == self._stages}
        self._last = list(fitting.pop(_LAST, self._last))
        self._messages = {
            int(version): Agreed(tuple(squares), overflowed=False, loss=0.0)
            for version, squares in fitting.items()
        }

    def of(self, stage: int, version: int, late: int) -> tuple[Norm, dict[str, Norm]]:
        """What the stage's own gradients are clipped by in the step to `version`, and each of its
        shared ones, by name; `late` is D of `known`."""
        share = self._shares[stage]
        shared = {
            name: math.sqrt(float(squared_norm_alike(parameter.grad)))
            for name, parameter in share.shared_by_name.items()
            if parameter.grad is not None
        }
        if self._by in ("stage", "proportion"):
            own_norm = math.sqrt(float(squared_norm(gradients_of(share.own))))
            return Norm(own_norm, self._bound(share.own)), {
                name: Norm(norm, self._bound([share.shared_by_name[name]]))
                for name, norm in shared.items()
            }
        own = squared_norm(gradients_of(share.counted))
        message: StepMessage | Agreed = StepMessage(
            {stage: own}, self._stages, self._world.control, loss=0.0
        )
        if self._by == "known":
            self._messages[version] = message
            message = self._messages.get(version - late, message)
            self._messages.pop(version - late, None)
        with self._activities.during(Activity("meet", "the norms of all stages")):
            self._last = list(_agreed(message).squares)
        norm_of_shared = math.sqrt(sum(self._last))
        return Norm(self._with_own(stage, float(own)), self._limit), {
            name: Norm(
                max(norm_of_shared, norm) if self._by == "known" else norm_of_shared, self._limit
            )
            for name, norm in shared.items()
        }

    def expected_factor(self, stage: int, gradients: Sequence[Tensor], scale: float) -> float:
        """The factor by which the coming step would clip the stage's own gradients if they were
        `scale` times these; by `global` and `known` if the others' squares were those of the last
        step."""
        own = float(squared_norm(gradients)) * scale**2
        if self._by in ("stage", "proportion"):
            return clip_factor(math.sqrt(own), self._bound(self._shares[stage].own))
        return clip_factor(self._with_own(stage, own), self._limit)

    def _with_own(self, stage: int, own: float) -> float:
        """The norm of all stages, of which this one's square is newer than the others'."""
        return math.sqrt(sum([*self._last[:stage], own, *self._last[stage + 1 :]]))

    def _bound(self, weights: Iterable[nn.Parameter]) -> float:
        if self._by == "stage":
            return self._limit
        return self._limit * math.sqrt(_numbers(weights) / self._weights)


def steps_until_known(ahead: Sequence[int], step_every: int) -> int:
    """D: the steps by which others' norms are late, where stages run so far `ahead`.

    >>> steps_until_known((3, 2, 1, 0), 1), steps_until_known((3, 2, 1, 0), 4)
    (4, 1)
    """
    return -(-(max(ahead) + 1) // step_every)


def _agreed(message: StepMessage | Agreed) -> Agreed:
    return message if isinstance(message, Agreed) else message.agreed()


def _numbers(weights: Iterable[nn.Parameter]) -> int:
    return sum(weight.numel() for weight in weights if weight.requires_grad)
