"""Settings and what is varied -> all runs, their table and their plot.

methods     text -> how a run differs from the others
runs        which runs there are; those that are done, in a file
trial       settings -> the losses of one run
rounds      a schedule of many ranks on one
walltime    plan -> when each step would be over
table       runs -> rows: loss, gap, spread, time
plot        rows -> loss against steps and time, in SVG
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ..launching.jobs import make_job
from ..plan import Plan, read_plan
from ..training.resolve import sized_plan
from ..training.settings import Settings
from .methods import SYNC, read_method
from .plot import draw
from .runs import ASYNCHRONOUS, Run, arms, key_of, make_runs
from .table import Ends, Row, markdown, rows
from .walltime import step_ends_ms


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows, and the folder with runs.jsonl, table.md and curves.svg. `repeated` runs were made
    before."""

    rows: tuple[Row, ...]
    folder: Path
    made: int
    repeated: int


def compare(
    settings: Settings,
    methods: Sequence[str],
    *,
    optimizers: Sequence[str] = (),
    lrs: Sequence[float] = (),
    seeds: Sequence[int] = (),
    on_run: Callable[[Run, int, int], None] = lambda run, number, of: None,
) -> Comparison:
    """Makes the runs that are missing, and writes the table and the plot of all of them.

    Without an `eval_every` of their own runs are evaluated ten times. `on_run` is told each run,
    its number and how many there are. Raises AsyncPipeError where a method is not known or does not
    fit the model, before anything is run.
    """

    plan = read_plan(settings.folder)
    folder = Path(settings.output or Path("runs") / Path(settings.folder).resolve().name)
    folder = folder if settings.output else folder / "comparison"
    settings = replace(
        settings, output=None, eval_every=settings.eval_every or max(1, settings.steps // 10)
    )
    wanted = arms(
        settings,
        [read_method(text) for text in methods],
        optimizers=optimizers,
        lrs=lrs,
        seeds=seeds,
    )
    for arm in wanted:
        key_of(arm, folder)
    runs, made = [], 0
    for number, (run, is_new) in enumerate(make_runs(wanted, folder / "runs.jsonl"), 1):
        runs.append(run)
        made += is_new
        on_run(run, number, len(wanted))
    ends = ends_of(sized_plan(plan, make_job(settings, folder).settings))
    found = rows(runs, ends)
    (folder / "table.md").write_text(markdown(found), encoding="utf-8")
    (folder / "curves.svg").write_text(draw(found, ends, title=plan.name), encoding="utf-8")
    return Comparison(tuple(found), folder, made, len(runs) - made)


def ends_of(plan: Plan) -> Ends:
    """When each step of a run of this plan is over, simulated once for all that step alike."""

    @cache
    def ends(micro_batches: int, steps: int, is_sync: bool, sync_start: int) -> Sequence[float]:
        schedule = None if is_sync else ASYNCHRONOUS
        return step_ends_ms(plan, micro_batches, steps, schedule=schedule, sync_start=sync_start)

    def of_run(run: Run) -> Sequence[float]:
        is_sync = read_method(run.method).staleness == SYNC
        return ends(run.micro_batches, run.steps, is_sync, run.sync_start)

    return of_run
