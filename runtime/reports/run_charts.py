"""Records of a run -> the curves of its page."""

from __future__ import annotations

from collections.abc import Sequence

from ..formatting import write_count, write_share
from ..monitoring.run_files import RunRecords, points
from .charts import Chart, Series, chart
from .measures import (
    UNITS,
    after_first_step,
    metrics_of_evaluations,
    other_series,
    rate_field,
    title_of_field,
)

Points = tuple[tuple[float, float], ...]


def loss_charts(run: RunRecords) -> list[Chart]:
    """Training and evaluation loss over steps, and over the time after the first step."""
    later = after_first_step(run)
    charts = []
    for ran, by, unit, axis, heading in (
        (run, "step", "step", "step", "Loss over steps"),
        (later, "elapsed_s", "s", "seconds after step 1", "Loss over time"),
    ):
        series = [
            Series("training", points(ran.losses, "loss", by)),
            Series("evaluation", points(ran.evals, "loss", by)),
        ]
        x_floor = 0.0 if ran is later else None
        charts.append(
            chart(
                heading, series, x_unit=unit, x_title=axis, write="{:.4g}".format, x_floor=x_floor
            )
        )
    return _drawn(charts)


def speed_charts(run: RunRecords) -> list[Chart]:
    """Throughput and idle share over steps."""
    rate = rate_field(run)
    series = Series(UNITS.get(rate, rate), run.series(rate))
    idle = Series("all ranks", run.series("idle_share"))
    return _drawn(
        [
            chart(f"Throughput, {series.label}", [series], x_unit="step", write=write_count,
                  floor=0.0),
            chart("Idle share, mean of the ranks", [idle], x_unit="step", write=write_share,
                  floor=0.0),
        ]
    )  # fmt: skip


def more_charts(run: RunRecords) -> list[Chart]:
    """Gradient norm, learning rate and loss scale, if the run recorded them."""
    headings = {"grad_norm": "Gradient norm", "lr": "Learning rate", "loss_scale": "Loss scale"}
    return _drawn(
        [
            chart(heading, [Series(heading, run.series(name))], x_unit="step")
            for name, heading in headings.items()
        ]
    )


def other_charts(run: RunRecords) -> list[Chart]:
    """The metrics of the evaluations, and all other numbers of the steps, such as delays; a line
    for each element of a list."""
    charts = [
        chart(title_of_field(name), [Series("evaluation", series)], x_unit="step")
        for name, series in metrics_of_evaluations(run).items()
    ]
    for name, rows in other_series(run).items():
        title, _, of = title_of_field(name).partition(", of each ")
        labels = [title] if len(rows) == 1 else [f"{of or title} {n}" for n in range(len(rows))]
        drawn = map(_relative, rows) if name == "block_distances" else rows
        series = [Series(label, row) for label, row in zip(labels, drawn, strict=True)]
        charts.append(chart(title, series, x_unit="step", floor=0.0))
    return _drawn(charts)


def _relative(points: Points) -> Points:
    """The numbers in relation to the largest one, as `--freeze plasticity` compares them."""
    largest = max((y for _, y in points), default=0.0)
    return tuple((x, y / largest if largest else 0.0) for x, y in points)


def _drawn(charts: Sequence[Chart | None]) -> list[Chart]:
    return [drawn for drawn in charts if drawn is not None]
