"""`--callbacks file.py:make` -> calls of the user's code at events, and what it asks of the run.

`make(config, folder)` runs on rank 0 and returns an object with some of these methods, each of
which may return a `Request`:

    on_step(record)          after a step, with its StepRecord
    on_evaluation(record)    after an evaluation, with its EvalRecord
    on_checkpoint(step)      after a checkpoint was copied, which is then written
    on_end(summary)          after the last step, with the Summary; its request has no effect

Rank 0 collects what they ask for, and all ranks do it after the same step: in a synchronous run
after that step, in an asynchronous one when the pipeline drains.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config.settings import RunConfig, SettingsError
from ..distributed.process_groups import World
from ..executor.instrumented import Activities, Activity
from ..formatting import kind_of
from ..monitoring.records import EvalRecord, Reporter, StepRecord, Summary
from ..rng import drawing_from, import_seeded
from ..user_code import user_errors_as

HOOKS = ("on_step", "on_evaluation", "on_checkpoint", "on_end")
"""The methods that an object of callbacks may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Requests of a callback to the run.

    stop: make no further step; the run ends as after its last one.
    save: write a checkpoint.
    evaluate: evaluate the weights.
    lr_factor: the factor on the scheduled learning rate of all later steps, until another is set.
    """

    stop: bool = False
    save: bool = False
    evaluate: bool = False
    lr_factor: float | None = None

    def __or__(self, later: Request) -> Request:
        """Both requests together; a later factor replaces an earlier one."""
        return Request(
            stop=self.stop or later.stop,
            save=self.save or later.save,
            evaluate=self.evaluate or later.evaluate,
            lr_factor=self.lr_factor if later.lr_factor is None else later.lr_factor,
        )


class Callbacks(Reporter):
    """The user's callbacks on rank 0. Raises SettingsError, with the line, where their code fails,
    or returns something else than None or a Request."""

    def __init__(self, config: RunConfig, folder: Path, activities: Activities) -> None:
        self._activities = activities
        self._what, self._seed = f"--callbacks {config.callbacks}", config.seed
        spec = str(config.callbacks)
        make = import_seeded(spec, "--callbacks", SettingsError, self._seed)
        with drawing_from(self._seed, "callbacks"), user_errors_as(SettingsError, self._what):
            self._own = make(config, folder)
        if not any(callable(getattr(self._own, hook, None)) for hook in HOOKS):
            raise SettingsError(
                f"{self._what} returned {kind_of(self._own)} without callbacks.",
                f"Give its class one of the methods {', '.join(HOOKS)}.",
            )
        self._asked = Request()
        self._calls = 0

    def on_step(self, record: StepRecord) -> None:
        self._call("on_step", record)

    def on_eval(self, record: EvalRecord) -> None:
        self._call("on_evaluation", record)

    def on_end(self, summary: Summary) -> None:
        self._call("on_end", summary)

    def on_checkpoint(self, step: int) -> None:
        """The state after a step was copied for a checkpoint."""
        self._call("on_checkpoint", step)

    def take(self) -> Request:
        """The requests since the last call."""
        request, self._asked = self._asked, Request()
        return request

    def _call(self, hook: str, *arguments: Any) -> None:
        own = getattr(self._own, hook, None)
        if own is None:
            return
        self._calls += 1
        key = ("callbacks", hook, self._calls)
        runs = self._activities.during(Activity("other", f"runs {self._what}"))
        where = f"{self._what}: {hook}"
        with runs, drawing_from(self._seed, *key), user_errors_as(SettingsError, where):
            request = own(*arguments)
        if request is not None:
            self._asked |= self._checked(hook, request)

    def _checked(self, hook: str, request: Any) -> Request:
        if not isinstance(request, Request):
            raise SettingsError(
                f"{self._what}: {hook} returned {kind_of(request)}.",
                "Return None or asyncpipe.Request(stop=True).",
            )
        factor = request.lr_factor
        if factor is not None and not 0 <= factor < math.inf:
            raise SettingsError(
                f"{self._what}: {hook} asked for the learning rate factor {factor}.",
                "Ask for a finite number, 0 or more.",
            )
        return request


def agreed(world: World, own: Callbacks | None) -> Request:
    """The requests of the callbacks on rank 0, on every rank. Collective."""
    text = json.dumps(asdict(own.take())) if own is not None else ""
    return Request(**json.loads(world.text_of_first(text)))


@dataclass(frozen=True, slots=True)
class Patience:
    """The evaluations of a run for `--early-stop`.

    best: the lowest loss so far.
    since: the number of evaluations since it.
    """

    best: float = math.inf
    since: int = 0

    def after(self, loss: float) -> Patience:
        """The same after an evaluation.

        >>> Patience(0.5, 1).after(0.4), Patience(0.5, 1).after(0.5)
        (Patience(best=0.4, since=0), Patience(best=0.5, since=2))
        """
        return Patience(loss) if loss < self.best else Patience(self.best, self.since + 1)

    def state(self) -> Sequence[Any]:
        """As JSON."""
        return [None if math.isinf(self.best) else self.best, self.since]

    @classmethod
    def of(cls, state: Sequence[Any]) -> Patience:
        """From the `state` of a checkpoint."""
        best, since = state
        return cls(math.inf if best is None else best, since)
