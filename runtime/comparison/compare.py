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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ..launching.jobs import make_job
from ..links import verify_no_links
from ..plan import read_plan
from ..training.settings import Settings, SettingsError
from ..trust import is_trusted, remember, untrusted
from .methods import read_method
from .plot import draw
from .runs import Run, arms, key_of, make_runs
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
    its number and how many there are. Raises TrustError when the folder came from elsewhere and
    nobody trusts it, AsyncPipeError where a method is not known or does not
    fit the model, before anything is run.
    """

    plan = read_plan(settings.folder)
    if settings.trust:
        remember(settings.folder)
    elif not is_trusted(settings.folder):
        raise untrusted(settings.folder)
    folder = Path(settings.output or Path("runs") / Path(settings.folder).resolve().name)
    folder = folder if settings.output else folder / "comparison"
    verify_no_links(folder, SettingsError)
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
    settings_of: dict[str, Settings] = {}
    for arm, (run, is_new) in zip(wanted, make_runs(wanted, folder / "runs.jsonl"), strict=True):
        runs.append(run)
        settings_of[run.key] = arm.settings
        made += is_new
        on_run(run, len(runs), len(wanted))
    ends = ends_of(settings_of)
    found = rows(runs, ends)
    (folder / "table.md").write_text(markdown(found), encoding="utf-8")
    (folder / "curves.svg").write_text(draw(found, ends, title=plan.name), encoding="utf-8")
    return Comparison(tuple(found), folder, made, len(runs) - made)


def ends_of(settings_of: Mapping[str, Settings]) -> Ends:
    """When each step of a run is over, by the settings of each run's key."""

    @cache
    def ends(key: str) -> Sequence[float]:
        return step_ends_ms(make_job(settings_of[key], Path()))

    return lambda run: ends(run.key)
