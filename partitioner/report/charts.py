"""A plan -> the bars and curves of its report.

Bars show the time of every stage next to an even split, and the memory of every rank. Curves show
the idle share and the time against the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ...runtime.formatting import Column, Table, write_bytes, write_ms, write_share
from ...runtime.plan.forecast import compared_schedules, forecast_one_step
from ...runtime.plan.plan import Plan
from ...runtime.reports.charts import Bar, Chart, Series, chart, segment
from ...runtime.reports.memory_over_time import KINDS, MEANINGS
from ...runtime.schedule.builders import AUTO

_FAR = 2.5  # a limit this many times above the fullest rank would make all bars short


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars on one scale.

    rows: the bars
    comparison: bars below the others, for comparison
    line: the position of a vertical line across all bars, in percent
    line_title: the hover text of the line
    legend: the entries of the legend
    note: a sentence below the bars
    """

    rows: tuple[Bar, ...]
    comparison: tuple[Bar, ...] = ()
    line: float | None = None
    line_title: str = ""
    legend: tuple[tuple[str, str, str], ...] = ()
    note: str = ""


# --- time -----------------------------------------------------------------------------------------


def cost_bars(plan: Plan) -> Bars:
    """Forward, backward and transfers of every stage, the even split below, the proven bound; the
    replicas of a stage share its time."""
    shares = [max(1, len(stage.ranks)) for stage in plan.stages]
    times = [
        (stage.forward_ms / share, stage.backward_ms / share)
        for stage, share in zip(plan.stages, shares, strict=True)
    ]
    even = [
        (forward_ms / share, backward_ms / share)
        for (forward_ms, backward_ms), share in zip(plan.even_split, shares, strict=False)
    ]
    scale = max(
        (
            *(stage.load_ms for stage in plan.stages),
            *(sum(pair) for pair in (*times, *even)),
            plan.lower_bound_ms,
            plan.even_split_ms,
        )
    )
    scale = scale or 1.0
    rows = []
    for stage, pair in zip(plan.stages, times, strict=True):
        rest_ms = max(0.0, stage.load_ms - sum(pair))
        is_slowest = len(plan.stages) > 1 and stage.load_ms >= plan.bottleneck_ms * (1 - 1e-9)
        rows.append(
            _time_bar(
                f"stage {stage.index}",
                (*pair, rest_ms),
                stage.load_ms,
                scale,
                is_slowest=is_slowest,
            )
        )
    worst = max((sum(pair) for pair in even), default=0.0)
    comparison = [
        _time_bar(
            f"even {index}", pair, sum(pair), scale, is_slowest=len(even) > 1 and sum(pair) == worst
        )
        for index, pair in enumerate(even)
    ]
    return Bars(
        rows=tuple(rows),
        comparison=tuple(comparison),
        line=100 * plan.lower_bound_ms / scale,
        line_title=f"lower bound: no plan has a bottleneck below {write_ms(plan.lower_bound_ms)}",
    )


def _time_bar(
    label: str, times_ms: Sequence[float], load_ms: float, scale: float, *, is_slowest: bool
) -> Bar:
    kinds = ("forward", "backward", "transfers")
    segments = tuple(
        segment(kind, kind[0].upper(), time_ms / scale, f"{label}: {kind} {write_ms(time_ms)}")
        for kind, time_ms in zip(kinds, times_ms, strict=False)
        if time_ms > 0
    )
    parts = " + ".join(write_ms(time_ms).removesuffix(" ms") for time_ms in times_ms[:2])
    return Bar(label, segments, write_ms(load_ms), f"{parts} ms", is_slowest)


# --- memory ---------------------------------------------------------------------------------------


def memory_bars(plan: Plan) -> Bars:
    """The peak memory of every rank by use, compared with the memory of its device."""
    ranks = _memory_of_ranks(plan)
    limits = [rank.memory_bytes for rank in plan.setting.ranks] or [None] * len(ranks)
    most = max(sum(parts.values()) for parts in ranks) or 1
    near = [limit for limit in limits if limit is not None and limit <= _FAR * most]
    scale = max((most, *near))
    rows = []
    for rank, (parts, limit) in enumerate(zip(ranks, limits, strict=True)):
        total = sum(parts.values())
        over = limit is not None and total > limit
        rows.append(
            Bar(
                label=f"rank {rank}",
                segments=tuple(
                    segment(
                        kind,
                        KINDS[kind],
                        size / scale,
                        f"rank {rank}: {MEANINGS[kind]} {write_bytes(size)}",
                    )
                    for kind, size in parts.items()
                    if size
                ),
                value=write_bytes(total),
                title=_against(total, limit),
                over_from=100 * limit / scale if limit is not None and over else None,
                over_percent=100 * (total - limit) / scale if limit is not None and over else 0.0,
                limit=100 * limit / scale if limit is not None and limit <= scale else None,
            )
        )
    seen = {kind for parts in ranks for kind, size in parts.items() if size}
    return Bars(
        rows=tuple(rows),
        legend=tuple((kind, KINDS[kind], MEANINGS[kind]) for kind in KINDS if kind in seen),
        note=_limits_note(limits, scale),
    )


def _memory_of_ranks(plan: Plan) -> list[dict[str, int]]:
    """The memory of each rank at its peak by use; the stages of a rank share the memory that one
    operation needs."""
    count = len(plan.setting.ranks) or 1 + max(
        max(stage.ranks, default=stage.index) for stage in plan.stages
    )
    ranks = [dict.fromkeys(KINDS, 0) for _ in range(count)]
    for stage in plan.stages:
        for rank in stage.ranks or (stage.index,):
            for kind, size in asdict(stage.memory).items():
                before = ranks[rank][kind]
                ranks[rank][kind] = max(before, size) if kind == "transient" else before + size
    return ranks


def _against(total: int, limit: int | None) -> str:
    if limit is None:
        return ""
    if total > limit:
        return f"{write_bytes(total - limit)} over {write_bytes(limit)}"
    return f"{write_share(total / limit)} of {write_bytes(limit)}"


def _limits_note(limits: Sequence[int | None], scale: float) -> str:
    far = {limit for limit in limits if limit is not None and limit > scale}
    if all(limit is None for limit in limits):
        return "No memory limit was given; --memory-limit adds one, and plans stay below it."
    if far:
        names = " and ".join(write_bytes(limit) for limit in sorted(far))
        return f"The limit of {names} is beyond the scale."
    return "The line is the memory of the device; a stage beyond it would run out of memory."


_COUNTS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The time and the idle share of one step of a schedule with this number of micro-batches."""

    schedule: str
    micro_batches: int
    step_ms: float
    idle_share: float

    @property
    def each_ms(self) -> float:
        return self.step_ms / self.micro_batches


@dataclass(frozen=True, slots=True)
class Curves:
    charts: tuple[Chart, ...]
    samples: tuple[CurvePoint, ...]
    table: Table
    schedules: tuple[str, ...]


def curves(plan: Plan) -> Curves:
    """Both charts and the table of their numbers."""
    schedules = drawn_schedules(plan)
    samples = tuple(_sample(plan, schedule, count) for count in _COUNTS for schedule in schedules)
    return Curves(
        charts=(
            _chart("Idle share", samples, lambda sample: sample.idle_share, write_share),
            _chart("Time per micro-batch", samples, lambda sample: sample.each_ms, write_ms),
        ),
        samples=samples,
        table=_table(schedules, samples),
        schedules=schedules,
    )


def _table(schedules: Sequence[str], samples: Sequence[CurvePoint]) -> Table:
    headings = (f"{figure}, {schedule}" for schedule in schedules for figure in ("step", "idle"))
    rows = (
        (
            str(count),
            *(
                cell
                for sample in samples
                if sample.micro_batches == count
                for cell in (write_ms(sample.step_ms), write_share(sample.idle_share))
            ),
        )
        for count in _COUNTS
    )
    return Table((Column("micro-batches"), *map(Column, headings)), tuple(rows))


def drawn_schedules(plan: Plan) -> tuple[str, ...]:
    """The plan's own schedule or 1f1b, and one for comparison. Computed schedules are left out,
    because each number of micro-batches would take seconds, and 2bw, which takes as long as
    async-1f1b and needs many micro-batches."""
    names = [name for name in compared_schedules(plan) if name not in ("gpipe", "2bw", AUTO)]
    return tuple(dict.fromkeys((names[0], names[-1])))


def _sample(plan: Plan, schedule: str, count: int) -> CurvePoint:
    step = forecast_one_step(plan, schedule, count)
    return CurvePoint(schedule, count, step.step_ms, step.idle_share)


def _chart(
    heading: str,
    samples: Sequence[CurvePoint],
    height_of: Callable[[CurvePoint], float],
    write: Callable[[float], str],
) -> Chart:
    lines = [
        Series(
            schedule,
            tuple(
                (float(sample.micro_batches), height_of(sample))
                for sample in samples
                if sample.schedule == schedule
            ),
        )
        for schedule in dict.fromkeys(sample.schedule for sample in samples)
    ]
    drawn = chart(
        heading,
        lines,
        x_unit="micro-batches",
        x_title="micro-batches per step",
        write=write,
        floor=0.0,
        is_even=True,
    )
    assert drawn is not None  # there are always samples
    return drawn
