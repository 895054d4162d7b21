"""Which runs a comparison has, and those that are done: a file of JSON lines.

A run is known by all that decides its losses: the code of the stages and the resolved options that
are not as usual. So a comparison that was interrupted, or that is asked for once more
with other methods, repeats nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path

from ..errors import DataError
from ..launching.jobs import make_job
from ..reading import read_json_lines, shaped
from ..training.settings import OF_THIS_CALL, Settings
from .methods import Method
from .trial import Curve, train_alone

_OF_PLACE = OF_THIS_CALL | {"folder", "ranks", "log_every", "threads", "pin", "transport", "trace"}
ASYNCHRONOUS = "async-1f1b"


@dataclass(frozen=True, slots=True)
class Arm:
    """A run to make."""

    method: Method
    settings: Settings


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is done. `key` stands for all that decides its losses."""

    key: str
    method: str
    optimizer: str
    lr: float
    seed: int
    stages: int
    micro_batches: int
    steps: int
    curve: Curve

    @property
    def name(self) -> str:
        """The method without its optimizer: that of synchronous runs is `sync`."""
        return self.method.partition(",")[0].partition(":")[0] + _rest(self.method)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def arms(
    settings: Settings,
    methods: Sequence[Method],
    *,
    optimizers: Sequence[str] = (),
    lrs: Sequence[float] = (),
    seeds: Sequence[int] = (),
) -> list[Arm]:
    """The runs of all combinations, seeds outermost. What a method has of its own is not varied;
    no optimizers, learning rates or seeds means those of the settings."""
    made = []
    for seed, method in product(seeds or (settings.seed,), methods):
        named = (method.optimizer,) if method.optimizer else tuple(optimizers) or (None,)
        rates = (None,) if "lr" in method.own else tuple(lrs) or (None,)
        for optimizer, lr in product(named, rates):
            given = {"optimizer": optimizer, "lr": lr, **method.own}
            chosen = {name: value for name, value in given.items() if value is not None}
            changed = replace(
                settings,
                seed=seed,
                schedule="single" if method.is_sync else ASYNCHRONOUS,
                staleness=None if method.is_sync else method.staleness,
                **chosen,
            )
            made.append(Arm(method, changed))
    return made


def read_runs(path: Path) -> dict[str, Run]:
    """The runs of a file by key; none of a file that is not there. Raises DataError for a line that
    is no run."""
    if not path.is_file():
        return {}
    cure = "Remove the line, or give another folder with --output."
    # Of a run that ended early an evaluation may be no number.
    lines = read_json_lines(path, DataError, cure, finite=False)
    return {run.key: run for run in (shaped(Run, raw, origin) for raw, origin in lines)}


def make_runs(wanted: Iterable[Arm], path: Path) -> Iterator[tuple[Run, bool]]:
    """Each run, and whether it was made now; what is made is appended to the file at once.

    Raises AsyncPipeError where a run's options do not fit each other or the plan.
    """
    done = read_runs(path)
    for arm in wanted:
        known = key_of(arm, path.parent)
        if known in done:
            yield done[known], False
            continue
        job = make_job(arm.settings, path.parent)
        curve = train_alone(arm.settings, path.parent)
        run = Run(
            known,
            str(arm.method),
            str(job.settings.optimizer),
            float(job.settings.lr or 0.0),
            job.settings.seed,
            len(job.plan.stages),
            job.settings.micro_batches or 1,
            job.settings.steps,
            curve,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(run.to_json() + "\n")
        done[known] = run
        yield run, True


def key_of(arm: Arm, folder: Path) -> str:
    """What stands for all that decides the losses of a run."""
    job = make_job(arm.settings, folder)
    options = {
        option.name: getattr(job.settings, option.name)
        for option in fields(job.settings)
        if option.name not in _OF_PLACE and getattr(job.settings, option.name) != option.default
    }
    content = [options, [stage.sha256 for stage in job.planned.stages]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _rest(method: str) -> str:
    _, comma, options = method.partition(",")
    return comma + options
