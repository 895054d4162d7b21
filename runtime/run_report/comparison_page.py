"""A comparison of runs -> its page."""

from __future__ import annotations

from ..pages.chart import Chart, Series, chart
from ..pages.templating import in_script, render
from ..wording import write_count, write_share
from .comparison import Comparison, as_json
from .measures import rate_field
from .records import points

_MOST = 8
"""Lines that a chart has colours for."""


def render_comparison(comparison: Comparison) -> str:
    """One page that stands alone; of more than eight runs the first are drawn."""
    charts = [
        _chart(comparison, "Loss", "loss", "step"),
        _chart(comparison, "Loss", "loss", "elapsed_s"),
        _chart(comparison, "Evaluation loss", "loss", "step", evaluated=True),
        _chart(comparison, "Evaluation loss", "loss", "elapsed_s", evaluated=True),
        _chart(comparison, "Throughput", "", "step"),
        _chart(comparison, "Idle share", "idle_share", "step"),
    ]
    return render(
        "run_comparison.html.j2",
        title=" · ".join(comparison.names),
        status=f"{len(comparison.runs)} runs",
        is_good=False,
        command="",
        facts=[
            (name, str(run.folder))
            for name, run in zip(comparison.names, comparison.runs, strict=True)
        ],
        cards=[],
        headings=("", *comparison.names),
        drawn=comparison.names[:_MOST],
        charts=[(drawn, axis) for drawn, axis in charts if drawn is not None],
        rows=comparison.rows,
        differences=comparison.differences,
        comparison_json=in_script(as_json(comparison)),
    )


def _chart(
    comparison: Comparison, heading: str, name: str, by: str, *, evaluated: bool = False
) -> tuple[Chart | None, str]:
    """A line for each run; the throughput without a name, which depends on the run."""
    pairs = list(zip(comparison.names, comparison.runs, strict=True))[:_MOST]
    series = [
        Series(label, points(run.evals if evaluated else run.steps, name or rate_field(run), by))
        for label, run in pairs
    ]
    write = {"": write_count, "idle_share": write_share}.get(name, "{:.4g}".format)
    unit = "step" if by == "step" else "s"
    floor = None if name == "loss" else 0.0
    axis = "by steps" if by == "step" else "by seconds"
    return chart(heading, series, x_unit=unit, write=write, floor=floor), axis
