"""What happens during a run -> records: for the person who watches, and as JSON lines.

Whoever shows a run implements `Reporter`; it is called in the process of rank 0 only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from ..idle import IdleSplit
from ..timeline import Timeline

PARTS_OF_TIME = ("busy", "waiting", "sending", "data", "overhead")
"""What a rank's time goes into: it computes, or it is idle for one of four reasons."""


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
    micro-batches, at all stages, as the ledgers of the ranks have them.
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

    @property
    def idle_share(self) -> float:
        """The mean over ranks."""
        return sum(self.idle) / len(self.idle)

    def to_json(self) -> str:
        record = asdict(self) | {"idle_share": round(self.idle_share, 4)}
        for part, shares in record.pop("time").items():
            record[f"{part}_shares"] = [round(share, 4) for share in shares]
        if self.loss_scale is None:
            del record["loss_scale"], record["skipped"]
        if self.delay_mean is None:
            del record["delay_mean"], record["delay_max"]
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


class Reporter(Protocol):
    """Shows a run. `on_step` is called for every step; `record.logged` says that a line is due."""

    def on_start(self, facts: Sequence[tuple[str, str]]) -> None: ...

    def on_warning(self, text: str) -> None: ...

    def on_note(self, about: str, text: str) -> None:
        """Something was decided on the way."""

    def on_step(self, record: StepRecord) -> None: ...

    def on_eval(self, record: EvalRecord) -> None: ...

    def on_end(self, summary: Summary) -> None: ...

    def on_timelines(self, costs: str, simulated: Timeline, measured: Timeline) -> None:
        """After the end of a run that was traced: one step as simulated, and at which costs, and
        as measured."""


class MetricsFile:
    """A reporter that appends every logged record to `metrics.jsonl` and passes all on."""

    def __init__(self, path: Path, shown: Reporter) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._shown = shown

    def on_start(self, facts: Sequence[tuple[str, str]]) -> None:
        self._shown.on_start(facts)

    def on_warning(self, text: str) -> None:
        self._shown.on_warning(text)

    def on_note(self, about: str, text: str) -> None:
        self._write(_line("note", {"about": about, "text": text}))
        self._shown.on_note(about, text)

    def on_step(self, record: StepRecord) -> None:
        if record.logged:
            self._write(record.to_json())
        self._shown.on_step(record)

    def on_eval(self, record: EvalRecord) -> None:
        self._write(record.to_json())
        self._shown.on_eval(record)

    def on_end(self, summary: Summary) -> None:
        self._write(summary.to_json())
        self._file.close()
        self._shown.on_end(summary)

    def on_timelines(self, costs: str, simulated: Timeline, measured: Timeline) -> None:
        self._shown.on_timelines(costs, simulated, measured)

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


def _line(event: str, values: dict[str, object]) -> str:
    return json.dumps({"event": event} | values)
