"""What happens during a run -> records, and who is told of them.

Whoever shows a run, or keeps it, is a `Reporter`; it is called in the process of rank 0 only.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..idle import IdleSplit
from ..timeline import Timeline

PARTS_OF_TIME = ("busy", "waiting", "sending", "data", "overhead")
"""What a rank's time goes into: it computes, or it is idle for one of four reasons."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the plan says that a run will take: a step (None without costs; optimizers are free),
    a micro-batch at each stage, and each rank of a pipeline at its peak (empty where unknown)."""

    step_ms: float | None
    idle_share: float | None
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    peak_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartRecord:
    """A run that is about to begin, in the words of `facts` and in numbers.

    A step has `micro_batches` in each of the `replicas`, whose ranks have the stages that
    `stages_of_rank` tells. `environment` is as `environment.describe` gives it, and `methods` are
    the staleness methods of an asynchronous run.
    """

    facts: tuple[tuple[str, str], ...]
    predicted: Predicted
    micro_batches: int
    replicas: int
    stages_of_rank: tuple[tuple[int, ...], ...]
    environment: Mapping[str, Any]
    methods: tuple[str, ...] = ()

    def to_json(self) -> str:
        return _line("start", asdict(self) | {"facts": dict(self.facts), "time_s": _now_s()})


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step. Rate, idle shares and step time are over the steps since the last
    logged one; `idle` has an entry a rank, `grad_norm` is None where nobody took it.

    `time` has the parts of each rank's time that PARTS_OF_TIME names, as shares.
    `rate` is in `unit` ("tok" or "samples") per second, `mem_bytes` the most of any rank, `epoch`
    the samples consumed so far by those of the data set.
    Under float16 `loss_scale` is that of the next step, and `skipped` counts the steps so far that
    were left out because a gradient overflowed. In an asynchronous run `delay_mean` and `delay_max`
    are the mean and the most steps between the forward and the backward of the step's
    micro-batches, at all stages, as the ledgers of the ranks have them, and `gap` is the norm of
    what lies between the weights that they read in the forward and the live ones that they met in
    the backward, relative to that of the live ones (root mean squares over the micro-batches and
    stages, from a part of the weights).

    `mem_bytes_by_rank` are the most of each rank so far, and of these `base_bytes_by_rank` were
    there before its stages. `action_ms` are the milliseconds of one action of a kind (F, B, W and
    S, the optimizer's step) at each stage.
    """

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float | None
    rate: float
    unit: str
    idle: tuple[float, ...]
    time: Mapping[str, tuple[float, ...]]
    mem_bytes: int
    step_ms: float
    elapsed_s: float
    logged: bool
    epoch: float = 0.0
    loss_scale: float | None = None
    skipped: int = 0
    delay_mean: float | None = None
    delay_max: int | None = None
    gap: float | None = None
    mem_bytes_by_rank: tuple[int, ...] = ()
    base_bytes_by_rank: tuple[int, ...] = ()
    action_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def idle_share(self) -> float:
        """The mean over ranks."""
        return sum(self.idle) / len(self.idle)

    def to_json(self) -> str:
        record = asdict(self) | {"idle_share": round(self.idle_share, 4)}
        for part, shares in record.pop("time").items():
            record[f"{part}_shares"] = [round(share, 4) for share in shares]
        record["action_ms"] = {
            kind: [round(ms, 4) for ms in stages] for kind, stages in self.action_ms.items()
        }
        if self.loss_scale is None:
            del record["loss_scale"], record["skipped"]
        if self.delay_mean is None:
            del record["delay_mean"], record["delay_max"], record["gap"]
        record["epoch"] = round(self.epoch, 6)
        del record["logged"], record["steps"], record["unit"], record["rate"]
        return _line("step", record | {f"{self.unit}_per_s": round(self.rate, 1)})


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """The mean loss over `batches` micro-batches of evaluation data after `step` steps, and the
    share of right answers of a classifier."""

    step: int
    loss: float
    accuracy: float | None
    batches: int

    def to_json(self) -> str:
        return _line("eval", asdict(self))


@dataclass(frozen=True, slots=True)
class StalenessSummary:
    """The delays of a whole run: of `passages`, which are micro-batches at stages, the mean and the
    largest, and how many were at other versions than the closed form of the schedule says."""

    passages: int = 0
    delay_mean: float = 0.0
    delay_max: int = 0
    unexpected: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in one line. The simulated figures are None when the plan has no measured costs.

    `idle` is the share of all ranks' time in which they did not compute, in usual steps;
    `idle_parts` are the parts that it has, `idle_parts_by_rank` those of each rank's own time.
    `trace` is the file of the measured timeline, if one was asked for; `staleness` is of
    asynchronous runs. `rate` is in `unit` per second, like `step_ms` without the first step;
    `epoch` is how often the data set was gone through.
    """

    steps: int
    seconds: float
    first_loss: float
    last_loss: float
    eval_loss: float | None
    accuracy: float | None
    idle: float
    idle_parts: IdleSplit
    idle_parts_by_rank: tuple[IdleSplit, ...]
    simulated_idle: float | None
    step_ms: float
    simulated_step_ms: float | None
    output: str
    weights: str
    exported: str | None
    trace: str | None = None
    staleness: StalenessSummary | None = None
    epoch: float = 0.0
    rate: float = 0.0
    unit: str = ""

    def to_json(self) -> str:
        return _line("end", asdict(self))


class Reporter:
    """Told what happens in a run; every method does nothing unless it is overridden.

    The order is: `on_start`, then steps, evaluations, notes and warnings as they come, and at last
    `on_timelines` and `on_end`, or `on_stop` or `on_failure`. A run that is killed ends without.
    """

    def on_start(self, start: StartRecord) -> None:
        """All is known and nothing has been trained yet."""

    def on_step(self, record: StepRecord) -> None:
        """An optimizer step is over; `record.logged` says that a line is due."""

    def on_eval(self, record: EvalRecord) -> None:
        """The model was evaluated."""

    def on_note(self, about: str, text: str) -> None:
        """Something was decided or done on the way."""

    def on_warning(self, text: str) -> None:
        """Something is legal but probably not meant, or does not go on."""

    def on_timelines(self, costs: str, simulated: Timeline, measured: Timeline) -> None:
        """One step of the run that is over: as it was simulated, at which `costs`, and as it was
        measured."""

    def on_end(self, summary: Summary) -> None:
        """The run made all its steps, and its weights are written."""

    def on_stop(self, text: str) -> None:
        """The run ends because it was told to (SIGTERM, SIGUSR1, `--max-run`), and can go on from
        its checkpoint. Told as a failure, where that makes no difference."""
        self.on_failure(text)

    def on_failure(self, text: str) -> None:
        """The run ends for an error, on this rank or for want of another."""


HOOKS = tuple(name for name in vars(Reporter) if name.startswith("on_"))
"""The methods of a Reporter."""


class MetricsFile(Reporter):
    """Appends what happens to `metrics.jsonl`, one line a record; of the steps those that are
    logged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._step = 0

    def on_start(self, start: StartRecord) -> None:
        self._write(start.to_json())

    def on_step(self, record: StepRecord) -> None:
        self._step = record.step
        if record.logged:
            self._write(record.to_json())

    def on_eval(self, record: EvalRecord) -> None:
        self._write(record.to_json())

    def on_note(self, about: str, text: str) -> None:
        self._tell("note", about=about, text=text)

    def on_warning(self, text: str) -> None:
        self._tell("warning", text=text)

    def on_timelines(self, costs: str, simulated: Timeline, measured: Timeline) -> None:
        drawn = {"simulated": _plain(simulated), "measured": _plain(measured)}
        self._write(_line("timelines", {"costs": costs, **drawn}))

    def on_end(self, summary: Summary) -> None:
        self._write(summary.to_json())

    def on_failure(self, text: str) -> None:
        self._tell("failure", text=text)

    def _tell(self, event: str, **values: str) -> None:
        at = {"step": self._step} if self._step else {}
        self._write(_line(event, values | at | {"time_s": _now_s()}))

    def _write(self, line: str) -> None:
        append_line(self._path, line)


def append_line(path: Path, line: str) -> None:
    """Adds a whole line to a file, or nothing: whoever goes on with the run adds others. Raises
    OSError."""
    content = (line + "\n").encode()
    with path.open("ab", buffering=0) as file:
        whole = file.tell()
        try:
            if file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(whole)
            raise


def _plain(timeline: Timeline) -> list[list[Any]]:
    """Rank, stage, kind and index of every action, with its start and end in milliseconds from the
    first of all."""
    begin_ms = timeline.start_ms
    return [
        [
            event.rank,
            *event.action[:3],
            round(event.start_ms - begin_ms, 3),
            round(event.end_ms - begin_ms, 3),
        ]
        for event in timeline.events
    ]


def _now_s() -> float:
    """Seconds of the clock on the wall."""
    return round(time.time(), 3)


def _line(event: str, values: Mapping[str, object]) -> str:
    return json.dumps({"event": event, **values})
