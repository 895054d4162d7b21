"""Metrics of all ranks -> step records for the reporter, on rank 0."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from ..data.streams import UNKNOWN_LENGTH
from ..distributed.process_groups import WARNINGS
from ..executor.instrumented import CACHE_BYTES, CACHE_FIGURES, COMPUTING, PURPOSES, Activity, Kind
from ..monitoring.gather import Gather, RankFigures
from ..monitoring.idle import RankTime
from ..monitoring.records import PARTS_OF_TIME, Pace, Reporter, StalenessSummary, StepRecord
from ..plan.plan import Plan

if TYPE_CHECKING:
    from .setup import Setup

_STEADY = 1000


def _tokens(plan: Plan, sample: str) -> int:
    """The tokens of a sample of text, in the input with this name."""
    (spec,) = (spec for spec in plan.inputs if spec.name == sample)
    return math.prod(spec.sample_sizes(plan.sizes))


class Watch:
    """Combines the metrics of all ranks for a step into a record, and reports it.

    Rates, idle shares and step times of a record cover the steps since the last logged one; those
    of the run cover its last 1000 steps. The first step of a process is a warm-up and counts only
    in its own record.

    Arguments:
    length: the samples of an epoch.

    records: the records of the run's first step and of the last one.
    lr_factor: the factor of a callback on the learning rates of later steps.
    frozen: the number of blocks that are frozen in later steps, and of all; None without --freeze.
    block_norms, block_distances: as for StepRecord.
    """

    def __init__(
        self,
        setup: Setup,
        reporter: Reporter,
        gather: Gather,
        *,
        length: int,
    ) -> None:
        config, batch, task = setup.job.config, setup.batch, setup.job.task
        is_text = task.kind == "text"
        self._config = config
        self._factor = setup.learning_rate
        self._gather = gather
        self._reporter = reporter
        self._batch, self._length = batch, length
        self._before_s = setup.checkpoint.facts.seconds if setup.checkpoint else 0.0
        self._activities = setup.activities
        self._unit = "tok" if is_text else "samples"
        self._per_sample = _tokens(setup.job.plan, task.sample) if is_text else 1
        self._warm: tuple[int, float, float] | None = None
        self._started_s = perf_counter()
        self._interval: list[list[RankFigures]] = []
        self.staleness = StalenessSummary() if config.is_async else None
        self._steady: deque[list[RankFigures]] = deque(maxlen=_STEADY)
        self.records: list[StepRecord] = []
        self.step = batch.first_step
        self.lr_factor = 1.0
        self.frozen: tuple[int, int] | None = None
        self.block_norms: tuple[float, ...] = ()
        self.block_distances: tuple[float, ...] = ()
        self._cache, self._board, self._awaited_warnings = setup.cache, setup.board, list(WARNINGS)

    def poll(self) -> None:
        """Reports every step for which all ranks have sent their metrics."""
        while (figures := self._gather.take()) is not None:
            self._take(figures)

    def drain(self, step: int) -> None:
        """Reports the steps up to `step`, and waits for metrics that are missing."""
        while self.step < step:
            figures = self._gather.take(wait_s=self._config.patience_s)
            assert figures is not None
            self._take(figures)

    @property
    def times(self) -> tuple[RankTime, ...]:
        """How each rank spends its time in a typical step: the mean of the middle half of the steps
        by duration."""
        by_length = sorted(self._steady, key=lambda ranks: max(rank.wall_s for rank in ranks))
        aside = len(by_length) // 4
        usual = by_length[aside : len(by_length) - aside]
        return tuple(_mean_time(figures) for figures in zip(*usual, strict=True))

    @property
    def steady(self) -> Sequence[Sequence[RankFigures]]:
        """The metrics of the first tensor rank of every rank for the last steps, without the first
        one of the run."""
        return tuple(ranks[:: self._config.tensor_ranks] for ranks in self._steady)

    @property
    def elapsed_s(self) -> float:
        """The duration of the run, without the pause before it was resumed."""
        return self._before_s + perf_counter() - self._started_s

    @property
    def rate(self) -> float:
        """Samples or tokens per second in a typical step."""
        return 1000 * self._per_sample * self._batch.samples / self.step_ms if self.step_ms else 0.0

    @property
    def pace(self) -> Pace | None:
        """The epochs after the first step of the process; None before others, and where the data
        have no length."""
        if self._warm is None or self.step == self._warm[0] or self._length == UNKNOWN_LENGTH:
            return None
        warm_up, epoch, elapsed_s = self._warm
        last = self.records[-1]
        return Pace(last.epoch - epoch, last.elapsed_s - elapsed_s, warm_up)

    @property
    def sent_bytes(self) -> dict[str, int]:
        """The bytes that all ranks send in a step, by purpose: the median over steps."""
        of_steps = [sent_of(figures) for figures in self._steady]
        names = dict.fromkeys(name for sent in of_steps for name in sent)
        medians = {name: int(median(sent.get(name, 0) for sent in of_steps)) for name in names}
        return {name: sent for name, sent in medians.items() if sent}

    @property
    def step_ms(self) -> float:
        """The milliseconds of a step: the median over steps of the slowest rank."""
        walls = [max(rank.wall_s for rank in ranks) for ranks in self._steady]
        return 1000 * median(walls) if walls else 0.0

    @property
    def optimizer_ms(self) -> tuple[float, ...]:
        """The milliseconds of the optimizers of the first tensor rank of each rank: the median over
        steps."""
        by_rank = zip(*self.steady, strict=True)
        return tuple(1000 * median(step.optimizer_s for step in steps) for steps in by_rank)

    def _take(self, figures: list[RankFigures]) -> None:
        self._interval.append(figures)
        if self._cache is not None:
            for name in CACHE_FIGURES:
                self._cache.totals[name] += int(sum(getattr(rank, name) for rank in figures))
        self.step = step = int(figures[0].step)
        is_first = step == self._batch.first_step + 1
        if not is_first or self._config.steps == step:
            self._steady.append(figures)
        record = self._record(step, figures)
        if self.staleness is not None:
            self.staleness = _with_delays(self.staleness, figures)
        if record.logged or is_first:
            self._interval.clear()
        self.records = [*self.records[:1], record]
        if is_first:
            self._warm = step, record.epoch, record.elapsed_s
        with self._activities.during(Activity("writing", "reports a step")):
            self._reporter.on_step(record)
            made = step - self._batch.first_step
            if self._awaited_warnings and not made & (made - 1):
                self._report_warnings()

    def _report_warnings(self) -> None:
        """Reports what ranks have posted under WARNINGS."""
        for key in tuple(self._awaited_warnings):
            if (text := self._board.read(key)) is not None:
                self._awaited_warnings.remove(key)
                self._reporter.on_warning(text)

    def _record(self, step: int, figures: list[RankFigures]) -> StepRecord:
        config = self._config
        late = _with_delays(StalenessSummary(), figures) if config.is_async else None
        losses = [rank.loss for rank in figures if not math.isnan(rank.loss)]
        squares, gaps, weights = (
            _by_stage(figures, name) for name in ("squares", "gaps", "weights")
        )
        is_known = not any(map(math.isnan, squares))
        walls = [max(rank.wall_s for rank in ranks) for ranks in self._interval]
        wall_s = max(sum(walls), 1e-9)
        samples = [self._batch.position(at) for at in (step - len(walls), step)]
        summed = int(sum(rank.summed for rank in figures))
        return StepRecord(
            step=step,
            steps=config.steps,
            loss=sum(losses) if losses else math.nan,
            lr=config.lr * self.lr_factor * self._factor(step - 1),
            grad_norm=math.sqrt(sum(squares)) if is_known else None,
            grad_norm_by_stage=tuple(map(math.sqrt, squares)) if is_known else (),
            rate=self._per_sample * (samples[1] - samples[0]) / wall_s,
            unit=self._unit,
            idle=tuple(self._share_of(rank, "idle_s") for rank in range(len(figures))),
            time={
                part: tuple(self._share_of(rank, f"{part}_s") for rank in range(len(figures)))
                for part in PARTS_OF_TIME
            },
            mem_bytes=int(max(rank.mem_bytes for rank in figures)),
            step_ms=wall_s * 1000 / len(walls),
            elapsed_s=self.elapsed_s,
            logged=config.is_logged(step),
            epoch=samples[1] / self._length,
            epoch_per_s=None
            if self._length == UNKNOWN_LENGTH
            else (samples[1] - samples[0]) / self._length / wall_s,
            exchange_s=tuple(self._a_step(rank, "exchange_s") for rank in range(len(figures))),
            writing_s=tuple(self._a_step(rank, "writing_s") for rank in range(len(figures))),
            sent_bytes=sent_of(figures),
            summed_elements=summed,
            syncs_per_s=len(walls) / wall_s if summed else 0.0,
            loss_scale=figures[0].loss_scale if config.is_scaled else None,
            skipped=int(figures[0].skipped),
            delay_mean=round(late.delay_mean, 4) if late else None,
            delay_max=late.delay_max if late else None,
            gap=_relative(sum(gaps), sum(weights)) if late else None,
            gap_by_stage=tuple(map(_relative, gaps, weights)) if late and any(weights) else (),
            mem_bytes_by_rank=tuple(int(rank.mem_bytes) for rank in figures),
            base_bytes_by_rank=tuple(int(rank.base_bytes) for rank in figures),
            action_ms=self._action_ms(),
            frozen=self.frozen,
            block_norms=self.block_norms,
            block_distances=self.block_distances,
            cache_hits=_share_of_hits(figures),
            cache_bytes=self._cache.totals[CACHE_BYTES] if self._cache else 0,
        )

    def _action_ms(self) -> dict[str, tuple[float, ...]]:
        """The time of one action of each kind at each stage since the last logged step. Each rank
        of a stage runs some of its micro-batches; all of them make its optimizer steps."""
        config, interval = self._config, self._interval
        stages = len(interval[0][0].stage_s) // len(COMPUTING)
        in_step = config.micro_batches * config.pipelines * config.tensor_ranks

        def by_rank(stage: int, *kinds: Kind) -> list[float]:
            places = [COMPUTING.index(kind) * stages + stage for kind in kinds]
            return [
                1000 * sum(figures.stage_s[place] for figures in steps for place in places)
                for steps in zip(*interval, strict=True)
            ]

        def of_one(kind: Kind, stage: int) -> float:
            if kind != "S":
                return sum(by_rank(stage, kind)) / in_step / len(interval)
            times = by_rank(stage, "S", "norm")
            return sum(times) / max(1, sum(ms > 0 for ms in times)) / len(interval)

        kinds: tuple[Kind, ...] = ("F", "B", "W", "S", "cache")
        times_of_kind = {
            kind: tuple(of_one(kind, stage) for stage in range(stages)) for kind in kinds
        }
        return {kind: times for kind, times in times_of_kind.items() if any(times)}

    def _a_step(self, rank: int, part: str) -> float:
        """The seconds of a part in a step of the rank, since the last logged one."""
        seconds = [float(getattr(step[rank], part)) for step in self._interval]
        return sum(seconds) / len(seconds)

    def _share_of(self, rank: int, part: str) -> float:
        """The share of a part in the rank's time, since the last logged step."""
        part_s = sum(getattr(figures[rank], part) for figures in self._interval)
        wall_s = sum(figures[rank].wall_s for figures in self._interval)
        return part_s / wall_s if wall_s else 0.0


def sent_of(figures: Sequence[RankFigures]) -> dict[str, int]:
    """The bytes that the ranks sent in a step, by purpose, without purposes that have none."""
    by_purpose = zip(*(rank.sent for rank in figures), strict=True)
    totals = zip(PURPOSES, map(sum, by_purpose), strict=True)
    return {name: int(total) for name, total in totals if total}


def _share_of_hits(figures: Sequence[RankFigures]) -> float | None:
    asked = sum(rank.asked for rank in figures)
    return round(sum(rank.hits for rank in figures) / asked, 4) if asked else None


def _with_delays(before: StalenessSummary, figures: Sequence[RankFigures]) -> StalenessSummary:
    """The delays so far, including those of one more step."""
    passages = before.passages + int(sum(rank.passages for rank in figures))
    delays = before.delay_mean * before.passages + sum(rank.delays for rank in figures)
    return StalenessSummary(
        passages,
        delays / passages,
        max(before.delay_max, *(int(rank.worst_delay) for rank in figures)),
        before.unexpected + int(sum(rank.unexpected for rank in figures)),
    )


def _by_stage(figures: Sequence[RankFigures], name: str) -> list[float]:
    """The sums over ranks of numbers that each has by stage."""
    return [sum(of_stage) for of_stage in zip(*(getattr(r, name) for r in figures), strict=True)]


def _relative(gap: float, weights: float) -> float:
    """A gap as in StepRecord, of squared norms."""
    return float(f"{math.sqrt(gap / max(weights, 1e-300)):.4g}")


def _mean_time(figures: Sequence[RankFigures]) -> RankTime:
    """The mean of one rank's metrics over some steps, in milliseconds."""

    def mean_ms(values: Iterable[float]) -> float:
        return 1000 * sum(values) / len(figures)

    stages = len(figures[0].stage_s) // len(COMPUTING)
    places = [(kind, stage) for kind in COMPUTING for stage in range(stages)]
    stage_ms = {
        place: mean_ms(step.stage_s[at] for step in figures) for at, place in enumerate(places)
    }
    return RankTime(
        {place: ms for place, ms in stage_ms.items() if ms},
        waiting_ms=mean_ms(step.waiting_s for step in figures),
        sending_ms=mean_ms(step.sending_s for step in figures),
        data_ms=mean_ms(step.data_s for step in figures),
        overhead_ms=mean_ms(step.overhead_s for step in figures),
        exchange_ms=mean_ms(step.exchange_s for step in figures),
        writing_ms=mean_ms(step.writing_s for step in figures),
    )
