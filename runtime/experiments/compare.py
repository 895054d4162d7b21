"""Settings and methods to compare -> runs, their table and their plot.

Runs are recorded in a file of JSON lines under a key of everything that decides their losses: the
code of the stages and the resolved options that differ from their defaults. So a comparison that
was interrupted, or is started again with more methods, repeats nothing.

A row of the table is a method with an optimizer. Its loss is the mean over seeds at the learning
rate with the lowest mean; its gap is to the synchronous runs with the same optimizer at their own
best learning rate.

The plot, an SVG, has the loss against steps and against simulated time. Lines are means over seeds,
bands reach from the lowest to the highest; colors distinguish methods, synchronous runs are dashed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

from ..config.settings import Settings, SettingsError
from ..errors import DataError
from ..formatting import Column, Table, write_duration, write_loss
from ..launch.job import make_job
from ..options import options_of
from ..plan.plan import read_plan
from ..plan.trust import code_hashes, is_trusted, remember, untrusted, verify_no_links
from ..reports.charts import WIDTH, Chart, Series, chart
from ..reports.rendering import render
from ..serialization import read_json_lines, shaped
from .trial import ComparedMethod, Curve, read_method, step_ends_ms, train_alone

ASYNCHRONOUS = "async-1f1b"


@dataclass(frozen=True, slots=True)
class Arm:
    """A run to make."""

    method: ComparedMethod
    settings: Settings


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A finished run; `key` is a hash of everything that decides its losses."""

    key: str
    method: str
    optimizer: str
    lr: float
    seed: int
    stages: int
    micro_batches: int
    steps: int
    curve: Curve

    @property
    def name(self) -> str:
        """The method without its optimizer; `sync` for synchronous runs."""
        return self.method.partition(",")[0].partition(":")[0] + _rest(self.method)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


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


def _rest(method: str) -> str:
    _, comma, options = method.partition(",")
    return comma + options


Ends = Callable[[ComparedRun], Sequence[float]]
"""The end of each step of a run, in simulated milliseconds."""


@dataclass(frozen=True, slots=True)
class MethodRow:
    """A row of the table: a method with an optimizer."""

    method: str
    optimizer: str
    lr: float
    """The best learning rate."""
    tried: tuple[float, ...]
    """All learning rates."""
    seeds: int
    loss: float
    """The mean loss over seeds."""
    spread: float
    """The highest minus the lowest loss over seeds."""
    gap: float | None
    """The loss minus that of the synchronous runs; None without synchronous runs."""
    share: float | None
    """The gap as a share of the synchronous loss."""
    minutes: float
    """The simulated time of all steps."""
    speed_up: float | None
    """The time of the synchronous run divided by this one's, for all steps."""
    sooner: float | None
    """The same for the times until both are within `TOLERANCE` of the synchronous run's last loss;
    None if this one never is."""
    runs: tuple[ComparedRun, ...]


TOLERANCE = 0.01


def rows(runs: Iterable[ComparedRun], ends: Ends) -> list[MethodRow]:
    """The table, grouped by optimizer, with synchronous runs first."""
    grouped: dict[tuple[str, str], list[ComparedRun]] = {}
    for run in runs:
        grouped.setdefault((run.optimizer, run.name), []).append(run)
    table = [_row(name, optimizer, own, ends) for (optimizer, name), own in grouped.items()]
    baselines = {row.optimizer: row for row in table if row.method.split(",")[0] == "sync"}
    compared = [_compared(row, baselines.get(row.optimizer), ends) for row in table]
    return sorted(compared, key=lambda row: (row.optimizer, row.gap != 0.0, row.loss))


COLUMNS = (
    Column("method", "text"), Column("optimizer", "text"), Column("lr"),
    Column("seeds", leave_out=2), Column("loss"), Column("spread", leave_out=3), Column("gap"),
    Column("gap %", leave_out=1), Column("time"), Column("speed-up"), Column("sooner", leave_out=4),
)  # fmt: skip


def cells(row: MethodRow) -> tuple[str, ...]:
    """The texts of a row, one for each of COLUMNS."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form) if math.isfinite(value) else "-"

    return (
        row.method,
        row.optimizer,
        f"{row.lr:g}",
        str(row.seeds),
        number(row.loss, ".4f"),
        number(row.spread, ".4f"),
        number(row.gap, "+.4f"),
        number(row.share, "+.1%"),
        write_duration(60 * row.minutes),
        number(row.speed_up, ".2f"),
        "never" if row.gap is not None and row.sooner is None else number(row.sooner, ".2f"),
    )


def method_table(table_rows: Sequence[MethodRow]) -> Table:
    """The table of a comparison."""
    return Table(COLUMNS, tuple(map(cells, table_rows)))


def _row(name: str, optimizer: str, runs: Sequence[ComparedRun], ends: Ends) -> MethodRow:
    by_lr: dict[float, list[ComparedRun]] = {}
    for run in runs:
        by_lr.setdefault(run.lr, []).append(run)
    lr, best = min(by_lr.items(), key=lambda item: _mean(item[1]))
    losses = [run.curve.last for run in best]
    spread = max(losses) - min(losses) if math.isfinite(max(losses)) else math.inf
    return MethodRow(
        name,
        optimizer,
        lr,
        tuple(sorted(by_lr)),
        len(best),
        _mean(best),
        spread,
        None,
        None,
        ends(best[0])[-1] / 60_000,
        None,
        None,
        tuple(best),
    )


def _compared(row: MethodRow, baseline: MethodRow | None, ends: Ends) -> MethodRow:
    if baseline is None:
        return row
    target = baseline.loss * (1 + TOLERANCE)
    sync_ms, own_ms = (time_to(of.runs, target, ends) for of in (baseline, row))
    return replace(
        row,
        gap=row.loss - baseline.loss,
        share=row.loss / baseline.loss - 1 if baseline.loss else None,
        speed_up=baseline.minutes / row.minutes if row.minutes else None,
        sooner=sync_ms / own_ms if sync_ms and own_ms else None,
    )


def time_to(runs: Sequence[ComparedRun], loss: float, ends: Ends) -> float | None:
    """Simulated milliseconds until the mean curve of the runs, with linear interpolation between
    evaluations, reaches `loss`; None if it never does."""
    at = [ends(runs[0])[step - 1] for step in runs[0].curve.steps]
    losses = mean_curve(runs)
    for index, value in enumerate(losses):
        if value <= loss:
            if index == 0:
                return at[0]
            before = losses[index - 1]
            part = (before - loss) / (before - value)
            return at[index - 1] + part * (at[index] - at[index - 1])
    return None


def mean_curve(runs: Sequence[ComparedRun]) -> tuple[float, ...]:
    """The mean of the evaluated losses over runs, up to the end of the shortest."""
    losses_by_step = zip(*(run.curve.evaluated for run in runs), strict=False)
    return tuple(sum(losses) / len(losses) for losses in losses_by_step)


def _mean(runs: Sequence[ComparedRun]) -> float:
    return sum(run.curve.last for run in runs) / len(runs)


_HEIGHT = 300
_COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#aa7700", "#aa3377", "#0088aa", "#777777", "#332288",
    "#882255", "#44aa99",
)  # fmt: skip
_DASHES = ("none", "12 3", "8 4", "5 5", "3 6")


@dataclass(frozen=True, slots=True)
class Look:
    """The style of the lines of a row; a line that covers another one has gaps."""

    label: str
    colour: str
    dashes: str


def draw(
    rows: Sequence[MethodRow], ends: Ends, *, title: str, loss: str = "evaluation loss"
) -> str:
    """The SVG of all rows with complete runs."""
    drawn = [row for row in rows if math.isfinite(row.loss)]
    minutes = max((row.minutes for row in drawn), default=0.0)
    unit, per_ms = ("min", 1 / 60_000) if minutes >= 2 else ("s", 1 / 1000)
    looks = [
        Look(_label(row), _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)])
        for number, row in enumerate(drawn)
    ]
    by_step = [_series(row, None) for row in drawn]
    by_time = [_series(row, [end * per_ms for end in ends(row.runs[0])]) for row in drawn]
    charts = (
        _chart(f"{loss}, by optimizer steps", by_step, "step"),
        _chart(f"{loss}, by simulated {unit}, one device a stage", by_time, unit),
    )
    return render(
        "curves.svg.j2",
        title=title,
        charts=[chart for chart in charts if chart is not None],
        looks=looks,
        width=WIDTH,
        height=_HEIGHT,
    )


def _label(row: MethodRow) -> str:
    return f"{row.method}, {row.optimizer}, lr {row.lr:g}: {write_loss(row.loss)}"


def _series(row: MethodRow, at: Sequence[float] | None) -> Series:
    y = mean_curve(row.runs)
    x = [float(step) if at is None else at[step - 1] for step in row.runs[0].curve.steps]
    losses_by_step = list(zip(*(run.curve.evaluated for run in row.runs), strict=False))
    return Series(
        _label(row),
        tuple(zip(x, y, strict=False)),
        tuple((place, min(ys), max(ys)) for place, ys in zip(x, losses_by_step, strict=False)),
    )


def _chart(heading: str, series: Sequence[Series], unit: str) -> Chart | None:
    # Losses above the second evaluation of the worst are similar in all rows.
    seconds = [sorted(high for _, _, high in line.band)[-2:][0] for line in series]
    return chart(
        heading,
        series,
        x_unit=unit,
        write="{:.4g}".format,
        ceiling=max(seconds, default=None),
        x_floor=0.0,
        height=_HEIGHT,
    )


@dataclass(frozen=True, slots=True)
class MethodComparison:
    """The result of a comparison."""

    rows: tuple[MethodRow, ...]
    folder: Path
    """The folder with runs.jsonl, table.md and curves.svg."""
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
    return MethodComparison(tuple(table), folder, new_runs, len(runs) - new_runs)


def ends_of(settings_of: Mapping[str, Settings]) -> Ends:
    """The ends of each run's steps, by the settings of its key."""

    @cache
    def ends(key: str) -> Sequence[float]:
        return step_ends_ms(make_job(settings_of[key], Path()))

    return lambda run: ends(run.key)
