"""Settings and methods to compare -> runs, their table, their plot and their page.

Runs are recorded in a file of JSON lines under a key of everything that decides their losses: the
code of the stages and the resolved options that differ from their defaults. So a comparison that
was interrupted, or is started again with more methods, repeats nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

from ..config.settings import Settings, SettingsError
from ..errors import DataError
from ..launch.job import make_job
from ..options import options_of
from ..plan.plan import read_plan
from ..plan.trust import code_hashes, is_trusted, remember, untrusted, verify_no_links
from ..reports.rendering import write_page
from ..serialization import read_json_lines, shaped
from .method_plots import comparison_page, draw
from .method_rows import ComparedRun, Ends, MethodRow, method_table, rows
from .trial import ComparedMethod, read_method, step_ends_ms, train_alone

ASYNCHRONOUS = "async-1f1b"


@dataclass(frozen=True, slots=True)
class Arm:
    """A run to make."""

    method: ComparedMethod
    settings: Settings


def arms(
    settings: Settings,
    methods: Sequence[ComparedMethod],
    *,
    optimizers: Sequence[str] = (),
    lrs: Sequence[float] = (),
    seeds: Sequence[int] = (),
) -> list[Arm]:
    """The runs of all combinations, seeds outermost. A method's own options are not varied; without
    optimizers, learning rates or seeds, runs have those of the settings."""
    arms = []
    for seed, method in product(seeds or (settings.seed,), methods):
        named = (method.optimizer,) if method.optimizer else tuple(optimizers) or (None,)
        rates = (None,) if "lr" in method.own else tuple(lrs) or (None,)
        for optimizer, lr in product(named, rates):
            given = {"optimizer": optimizer, "lr": lr, **method.own}
            chosen = {name: value for name, value in given.items() if value is not None}
            changed = replace(
                settings,
                seed=seed,
                schedule="single" if method.is_sync else ASYNCHRONOUS,
                staleness=None if method.is_sync else method.staleness,
                **chosen,
            )
            arms.append(Arm(method, changed))
    return arms


def read_runs(path: Path) -> dict[str, ComparedRun]:
    """The runs of a file by key; empty if the file is missing. Raises DataError for a damaged
    line."""
    if not path.is_file():
        return {}
    cure = "Remove the line, or give another folder with --output."
    # A run that ended early may have an evaluation of NaN.
    lines = read_json_lines(path, DataError, cure, finite=False)
    return {run.key: run for run in (shaped(ComparedRun, raw, origin) for raw, origin in lines)}


def make_runs(
    wanted: Iterable[Arm], path: Path, code: Mapping[str, str] | None = None
) -> Iterator[tuple[ComparedRun, bool]]:
    """Each run, and True if it is new; a new run is appended to the file when it ends. `code` is as
    for make_job.

    Raises AsyncPipeError if a run's options do not fit each other or the plan.
    """
    done = read_runs(path)
    for arm in wanted:
        known = key_of(arm, path.parent, code)
        if known in done:
            yield done[known], False
            continue
        job = make_job(arm.settings, path.parent, code)
        curve = train_alone(arm.settings, path.parent, code)
        run = ComparedRun(
            known,
            str(arm.method),
            job.config.optimizer,
            job.config.lr,
            job.config.seed,
            len(job.plan.stages),
            job.config.micro_batches,
            job.config.steps,
            curve,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(run.to_json() + "\n")
        done[known] = run
        yield run, True


def key_of(arm: Arm, folder: Path, code: Mapping[str, str] | None = None) -> str:
    """A hash of everything that decides the losses of a run."""
    job = make_job(arm.settings, folder, code)
    options = {
        name: value
        for name, option in options_of(Settings).items()
        if option.changes_losses and (value := getattr(job.config, name)) != option.default
    }
    content = [options, [job.code.get(stage.file) for stage in job.planned.stages]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class MethodComparison:
    """The result of a comparison."""

    rows: tuple[MethodRow, ...]
    folder: Path
    """The folder with runs.jsonl, table.md, curves.svg and comparison.html."""
    made: int
    """The number of new runs."""
    repeated: int
    """The number of runs that were finished before."""


def compare(
    settings: Settings,
    methods: Sequence[str],
    *,
    optimizers: Sequence[str] = (),
    lrs: Sequence[float] = (),
    seeds: Sequence[int] = (),
    on_run: Callable[[ComparedRun, int, int], None] = lambda run, number, of: None,
) -> MethodComparison:
    """Runs what is missing, and writes the table and the plot of all runs.

    Without `eval_every`, runs are evaluated ten times. `on_run` is called with each run, its number
    and the number of runs. Raises TrustError for an untrusted folder, AsyncPipeError for a method
    that is unknown or does not fit the model, before any run starts.
    """

    plan = read_plan(settings.folder)
    code = code_hashes(settings.folder)  # before it is looked at whether it is trusted
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
        key_of(arm, folder, code)
    runs, new_runs = [], 0
    settings_of: dict[str, Settings] = {}
    made_runs = make_runs(wanted, folder / "runs.jsonl", code)
    for arm, (run, is_new) in zip(wanted, made_runs, strict=True):
        runs.append(run)
        settings_of[run.key] = arm.settings
        new_runs += is_new
        on_run(run, len(runs), len(wanted))
    ends = ends_of(settings_of)
    table = rows(runs, ends)
    (folder / "table.md").write_text(method_table(table).to_markdown(), encoding="utf-8")
    (folder / "curves.svg").write_text(draw(table, ends, title=plan.name), encoding="utf-8")
    write_page(folder / "comparison.html", comparison_page(table, ends, title=plan.name))
    return MethodComparison(tuple(table), folder, new_runs, len(runs) - new_runs)


def ends_of(settings_of: Mapping[str, Settings]) -> Ends:
    """The ends of each run's steps, by the settings of its key."""

    @cache
    def ends(key: str) -> Sequence[float]:
        return step_ends_ms(make_job(settings_of[key], Path()))

    return lambda run: ends(run.key)
