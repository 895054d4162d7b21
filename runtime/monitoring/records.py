"""The events of a run -> records, and the reporters that receive them.

A `Reporter` shows or stores a run; it is called in the process of rank 0 only.
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

from ..schedule.simulate import Timeline
from .idle import IdleSplit

PARTS_OF_TIME = ("busy", "waiting", "sending", "data", "overhead", "exchange", "writing")
"""The parts of a rank's time: it computes, or it is idle for one of six reasons."""


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """The plan's prediction for a run.

    step_ms, idle_share: time and idle share of a step without the optimizer; None without costs.
    forward_ms, backward_ms: time of a micro-batch at each stage; empty if unknown.
    peak_bytes: peak memory of each rank of a pipeline; empty if unknown.
    """

    step_ms: float | None
    idle_share: float | None
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    peak_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartRecord:
    """A run before its first step.

    facts: the setup in words, by name.
    predicted: the plan's prediction.
    micro_batches: micro-batches of a step in each replica.
    replicas: the number of replicas.
    stages_of_rank: the stages of each rank of a pipeline.
    environment: hardware and software, as `describe_environment` returns it.
    methods: the staleness methods of an asynchronous run.
    tensor_ranks: the ranks that share out the layers of each stage.
    """

    facts: tuple[tuple[str, str], ...]
    predicted: PredictedStep
    micro_batches: int
    replicas: int
    stages_of_rank: tuple[tuple[int, ...], ...]
    environment: Mapping[str, Any]
    methods: tuple[str, ...] = ()
    tensor_ranks: int = 1

    def to_json(self) -> str:
        """Its line of metrics.jsonl."""
        return _line("start", asdict(self) | {"facts": dict(self.facts), "time_s": _now_s()})


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step. Rate, idle shares and step time cover the steps since the last logged
    one.

    step, steps: the step, counted from 1, and the number of steps of the run.
    loss, lr: the mean loss and the learning rate.
    grad_norm: the norm of all gradients; None if it was not computed.
    rate, unit: `unit` ("tok" or "samples") per second.
    step_ms: the time of a step.
    idle: the idle share of each rank.
    time: the shares of each rank's time, for each of PARTS_OF_TIME.
    mem_bytes: the largest peak memory of any rank.
    elapsed_s: the duration of the run.
    logged: True if a line is due.
    epoch, epoch_per_s: the samples consumed so far, and those consumed in a second, relative to
        those of the data set; the second is None where the data have no length.
    exchange_s, writing_s: the seconds of a step in which each rank summed gradients over its
        replicas, and in which it wrote checkpoints and records.
    sent_bytes: the bytes that all ranks sent in this step, by purpose, without purposes that have
        none.
    summed_elements: the elements of the gradients of this step that were summed over replicas; 0
        without replicas.
    syncs_per_s: the steps with such sums in a second.
    loss_scale, skipped: under float16, the loss scale of the next step, and the number of steps
        that were skipped so far because a gradient overflowed.
    delay_mean, delay_max: in an asynchronous run, the mean and maximum number of steps between the
        forward and the backward of the step's micro-batches, at all stages, from the ranks'
        ledgers.
    gap: the norm of the difference between the weights of the forward and the live weights of the
        backward, relative to the live ones (root mean squares over micro-batches and stages, from a
        part of the weights).
    grad_norm_by_stage: the norms of the gradients of each stage, of which grad_norm is the norm.
    gap_by_stage: the gap of each stage alone.
    mem_bytes_by_rank: the peak memory of each rank so far.
    base_bytes_by_rank: the part of it from before its stages were loaded.
    action_ms: milliseconds of one action of a kind (F, B, W, and S for the optimizer step) at each
        stage.
    frozen: the number of frozen blocks, and of all blocks; None without --freeze.
    block_norms: the norms of each block's gradients between the last two events of freezing, if its
        rule reads them.
    block_distances: the distances between each block's outputs at the last two events of freezing,
        if its rule reads them; 0 for frozen blocks.
    cache_hits: the share of the step's micro-batches for which no frozen block ran, at all stages
        that have some; None without --cache.
    cache_bytes: the bytes of the caches of all hosts.
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
    epoch_per_s: float | None = None
    exchange_s: tuple[float, ...] = ()
    writing_s: tuple[float, ...] = ()
    sent_bytes: Mapping[str, int] = field(default_factory=dict)
    summed_elements: int = 0
    syncs_per_s: float = 0.0
    loss_scale: float | None = None
    skipped: int = 0
    delay_mean: float | None = None
    delay_max: int | None = None
    gap: float | None = None
    grad_norm_by_stage: tuple[float, ...] = ()
    gap_by_stage: tuple[float, ...] = ()
    mem_bytes_by_rank: tuple[int, ...] = ()
    base_bytes_by_rank: tuple[int, ...] = ()
    action_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    frozen: tuple[int, int] | None = None
    block_norms: tuple[float, ...] = ()
    block_distances: tuple[float, ...] = ()
    cache_hits: float | None = None
    cache_bytes: int = 0

    @property
    def idle_share(self) -> float:
        """The mean idle share over ranks."""
        return sum(self.idle) / len(self.idle)

    def loss_to_json(self) -> str:
        """The line of metrics.jsonl of a step that is not logged."""
        values = {"step": self.step, "loss": self.loss, "elapsed_s": round(self.elapsed_s, 3)}
        return _line("loss", values)

    def to_json(self) -> str:
        """Its line of metrics.jsonl."""
        record = asdict(self) | {"idle_share": round(self.idle_share, 4)}
        for part, shares in record.pop("time").items():
            record[f"{part}_shares"] = [round(share, 4) for share in shares]
        for name in ("exchange_s", "writing_s"):
            record[name] = [round(seconds, 6) for seconds in record[name]]
        if not any(self.exchange_s):
            del record["summed_elements"], record["syncs_per_s"]
            record = {name: record[name] for name in record if not name.startswith("exchange")}
        if frozen := record.pop("frozen"):
            record["frozen_blocks"], _ = frozen
        by_stage = "grad_norm_by_stage", "gap_by_stage"
        for name in ("sent_bytes", *by_stage, "block_norms", "block_distances"):
            if not record[name]:
                del record[name]
        if self.epoch_per_s is None:
            del record["epoch_per_s"]
        if self.cache_hits is None:
            del record["cache_hits"], record["cache_bytes"]
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
    """An evaluation.

    step: the number of steps before it.
    loss: the mean loss over the samples.
    accuracy: the share of correct answers of a classifier.
    batches: the number of micro-batches.
    samples: the number of samples that were evaluated.
    length: the number of samples of the evaluation data.
    metrics: the means of the user's metrics over the samples, by name.
    """

    step: int
    loss: float
    accuracy: float | None
    batches: int
    samples: int
    length: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """Its line of metrics.jsonl, with each metric by its name."""
        record = asdict(self)
        return _line("eval", record | record.pop("metrics"))


@dataclass(frozen=True, slots=True)
class StalenessSummary:
    """The delays of a whole run.

    passages: the number of backwards, one per micro-batch and stage.
    delay_mean, delay_max: the mean and maximum of their delays in steps.
    unexpected: those at other versions than the closed form of the schedule gives.
    """

    passages: int = 0
    delay_mean: float = 0.0
    delay_max: int = 0
    unexpected: int = 0


@dataclass(frozen=True, slots=True)
class Pace:
    """The passes over the data set after the warm-up, with the time that they took.

    epochs, seconds: the passes, and the wall-clock time from the end of the warm-up to that of the
        last step, evaluations and checkpoints included.
    warm_up: the step that is left out, in which processes start up.
    """

    epochs: float
    seconds: float
    warm_up: int

    @property
    def epoch_per_s(self) -> float:
        """The quotient."""
        return self.epochs / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of a run.

    steps, seconds: the steps of the run and its duration.
    first_loss, last_loss: the mean losses of the first and the last step.
    eval_loss, accuracy: those of the last evaluation; None without one or for no classifier.
    output: the folder of the run.
    idle: the share of all ranks' time in which they did not compute, in typical steps.
    idle_parts, idle_parts_by_rank: its parts over all ranks, and for each rank's own time.
    simulated_idle: the same of a simulated step; None if the plan has no measured costs.
    simulated_step_ms: the simulated time of a step; None if the plan has no measured costs.
    step_ms: the time of a step, without the first one.
    rate, unit: `unit` per second, without the first step.
    weights, exported: the folders of the weights, and of their export if there is one.
    trace: the file of the measured timeline, if requested.
    staleness: the delays of an asynchronous run.
    epoch: the number of passes over the data set.
    sent_bytes: the bytes that all ranks sent in a step, by purpose; the median over steps.
    pace: the epochs in a second after the warm-up; None where the data have no length.
    metrics: the user's metrics of the last evaluation, by name.
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
    sent_bytes: Mapping[str, int] = field(default_factory=dict)
    pace: Pace | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """Its line of metrics.jsonl."""
        record = asdict(self)
        if not self.idle_parts.exchange:
            for split in (record["idle_parts"], *record["idle_parts_by_rank"]):
                del split["exchange"]
        for name in ("metrics", "sent_bytes", "pace"):
            if not record[name]:
                del record[name]
        return _line("end", record)


class Reporter:
    """Receives the events of a run; every method does nothing unless it is overridden.

    The order is: `on_start`, then steps, evaluations, notes and warnings as they occur, and finally
    `on_timelines` and `on_end`, or `on_stop` or `on_failure`. A run that is killed calls none of
    these.
    """

    def on_start(self, start: StartRecord) -> None:
        """The setup is complete and training begins."""

    def on_step(self, record: StepRecord) -> None:
        """An optimizer step is complete; `record.logged` says that a line is due."""

    def on_eval(self, record: EvalRecord) -> None:
        """The model was evaluated."""

    def on_note(self, about: str, text: str) -> None:
        """A decision or an event during the run, such as a checkpoint."""

    def on_warning(self, text: str) -> None:
        """Something is legal but probably unintended, or the run makes no progress."""

    def on_timelines(self, costs: str, simulated: Timeline, measured: Timeline) -> None:
        """One step of the completed run: as simulated, from which `costs`, and as measured."""

    def on_end(self, summary: Summary) -> None:
        """The run has made all its steps and written its weights."""

    def on_stop(self, text: str) -> None:
        """The run ends because it was asked to (SIGTERM, SIGUSR1, `--max-run`), and can resume from
        its checkpoint. By default the same as a failure."""
        self.on_failure(text)

    def on_failure(self, text: str) -> None:
        """The run ends because of an error, on this rank or on another."""


HOOKS = tuple(name for name in vars(Reporter) if name.startswith("on_"))
"""The methods of a Reporter."""


_ALL_STEPS = 4096


def keeps_loss(step: int) -> bool:
    """Whether the loss of a step that is not logged is recorded: of all the first steps, later of
    every second, fourth and so on, so that a long run has a few thousand.

    >>> keeps_loss(4095), keeps_loss(4097), keeps_loss(4098)
    (True, False, True)
    """
    return step % max(1, (1 << step.bit_length()) // _ALL_STEPS) == 0


class MetricsFile(Reporter):
    """Appends every event to `metrics.jsonl`, one line per record. A step that is not logged has a
    short record of its loss only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._step = 0

    def on_start(self, start: StartRecord) -> None:
        self._write(start.to_json())

    def on_step(self, record: StepRecord) -> None:
        self._step = record.step
        if record.logged:
            self._write(record.to_json())
        elif keeps_loss(record.step):
            self._write(record.loss_to_json())

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
    """Appends a whole line to a file, or nothing, so that a resumed run can append more. Raises
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
    """Rank, stage, kind and index of every action, with its start and end in milliseconds since the
    first one."""
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
    """Wall-clock time in seconds."""
    return round(time.time(), 3)


def _line(event: str, values: Mapping[str, object]) -> str:
    return json.dumps({"event": event, **values})
