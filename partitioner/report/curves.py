"""A plan -> idle share and time against the number of micro-batches, in SVG units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...runtime.forecast import forecast_one_step, told_schedules
from ...runtime.pages.chart import Chart, Series, chart
from ...runtime.plan import Plan
from ...runtime.schedules import AUTO
from ...runtime.wording import write_ms, write_share

_COUNTS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Sample:
    """What one step of a schedule takes with so many micro-batches."""

    schedule: str
    micro_batches: int
    step_ms: float
    idle_share: float

    @property
    def each_ms(self) -> float:
        return self.step_ms / self.micro_batches

    @property
    def step(self) -> str:
        return write_ms(self.step_ms)

    @property
    def idle(self) -> str:
        return write_share(self.idle_share)


@dataclass(frozen=True, slots=True)
class Curves:
    charts: tuple[Chart, ...]
    samples: tuple[Sample, ...]
    table: tuple[tuple[int, tuple[Sample, ...]], ...]
    schedules: tuple[str, ...]


def curves(plan: Plan) -> Curves:
    """Both charts and the table of their numbers."""
    schedules = drawn_schedules(plan)
    samples = tuple(_sample(plan, schedule, count) for count in _COUNTS for schedule in schedules)
    return Curves(
        charts=(
            _chart("Idle share", samples, lambda sample: sample.idle_share, write_share),
            _chart("Time of one micro-batch", samples, lambda sample: sample.each_ms, write_ms),
        ),
        samples=samples,
        table=tuple(
            (count, tuple(sample for sample in samples if sample.micro_batches == count))
            for count in _COUNTS
        ),
        schedules=schedules,
    )


def drawn_schedules(plan: Plan) -> tuple[str, ...]:
    """The plan's own schedule or 1f1b, and one to compare with. Computed ones are left out: each
    number of micro-batches would take seconds."""
    told = [name for name in told_schedules(plan) if name not in ("gpipe", AUTO)]
    return tuple(dict.fromkeys((told[0], told[-1])))


def _sample(plan: Plan, schedule: str, count: int) -> Sample:
    step = forecast_one_step(plan, schedule, count)
    return Sample(schedule, count, step.step_ms, step.idle_share)


def _chart(
    heading: str,
    samples: Sequence[Sample],
    height_of: Callable[[Sample], float],
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
    drawn = chart(heading, lines, x_unit="micro-batches", write=write, floor=0.0, is_even=True)
    assert drawn is not None  # there are always samples
    return drawn
