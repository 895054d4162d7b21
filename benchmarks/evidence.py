"""Runs of the convergence benchmark -> tables in Markdown and plots in SVG, one for each case.

A case is a model in p stages with k micro-batches per step. Synchronous runs are the same for all
cases, so they are made once; their time is computed for each case. Times assume stages of equal
cost, as planners make them: the real times of so small a model would measure its overheads.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from scipy.stats import ttest_ind

from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.experiments.compare import Arm
from asyncpipe.runtime.experiments.method_plots import draw
from asyncpipe.runtime.experiments.method_rows import (
    ComparedRun,
    Ends,
    MethodRow,
    method_table,
    rows,
)
from asyncpipe.runtime.experiments.trial import step_ends_ms
from asyncpipe.runtime.launch.job import make_job
from asyncpipe.runtime.plan.plan import Plan


@dataclass(frozen=True)
class Case:
    """A task and its setting; `steps` if they differ from those of the task."""

    task: str
    stages: int
    every: int
    steps: int | None = None

    def __str__(self) -> str:
        length = f", {self.steps} updates" if self.steps else ""
        return f"{self.task}, p = {self.stages}, k = {self.every}{length}"

    @property
    def file(self) -> str:
        length = f"_{self.steps}" if self.steps else ""
        return f"convergence_{self.task}_p{self.stages}_k{self.every}{length}.svg"


def rows_of(
    arms: Mapping[Case, Iterable[tuple[Arm, str]]], runs: Mapping[str, ComparedRun]
) -> dict[Case, tuple[list[MethodRow], Ends]]:
    """The table of each case that has at least one asynchronous run."""
    found = {}
    for case, wanted in sorted(arms.items(), key=lambda item: _order(item[0])):
        known = {key: (runs[key], arm) for arm, key in wanted if key in runs}
        if all(arm.method.is_sync for _, arm in known.values()):
            continue
        ends = _ends({key: _in_case(arm, case) for key, (_, arm) in known.items()})
        found[case] = rows([run for run, _ in known.values()], ends), ends
    return found


def _order(case: Case) -> tuple[str, int, int, int]:
    return case.task, case.stages, case.every, case.steps or 0


def write(found: Mapping[Case, tuple[list[MethodRow], Ends]], folder: Path) -> None:
    """Writes convergence.md with all tables, and a plot of each case."""
    parts = []
    for case, (table, ends) in found.items():
        (folder / case.file).write_text(draw(table, ends, title=str(case), loss="validation loss"))
        parts.append(f"## {case}\n\n{method_table(table).to_markdown()}{_intervals(table)}")
    (folder / "convergence.md").write_text("\n".join(parts))


def _intervals(table: Sequence[MethodRow]) -> str:
    """The gaps with their 95% confidence intervals (Welch), where both sides have several seeds."""
    baselines = {row.optimizer: _losses(row) for row in table if row.gap == 0.0}
    lines = []
    for row in table:
        base, own = baselines.get(row.optimizer, []), _losses(row)
        if row.gap and min(len(base), len(own)) > 1:
            interval = ttest_ind(own, base, equal_var=False).confidence_interval()
            low, high = (100 * float(edge) / mean(base) for edge in interval)
            name = f"{row.method} with {row.optimizer}"
            seeds = f"{len(own)} and {len(base)} seeds"
            lines.append(
                f"- {name}: {row.share:+.1%}, from {low:+.1f}% to {high:+.1f}% ({seeds})\n"
            )
    return "".join(["\nGaps with 95% confidence intervals:\n\n", *lines]) if lines else ""


def _losses(row: MethodRow) -> list[float]:
    return [run.curve.last for run in row.runs]


def _in_case(arm: Arm, case: Case) -> Settings:
    """The settings for the time of a run: a synchronous run has the steps of the case."""
    if not arm.method.is_sync:
        return arm.settings
    size = (arm.settings.micro_batches or 1) * (arm.settings.micro_batch_size or 1) // case.every
    folder = Path(arm.settings.folder).with_name(f"{case.task}_{case.stages}p")
    return replace(
        arm.settings, folder=str(folder), micro_batches=case.every, micro_batch_size=size
    )


def _with_equal_stages(plan: Plan) -> Plan:
    """A plan in which each stage takes 1 ms forward and 2 ms backward, and transfers nothing."""
    stages = tuple(
        replace(stage, forward_ms=1.0, backward_ms=2.0, forward_talk_ms=0.0, backward_talk_ms=0.0)
        for stage in plan.stages
    )
    return replace(plan, stages=stages, setting=replace(plan.setting, transfer_ms=()))


def _ends(settings_of: Mapping[str, Settings]) -> Ends:
    known: dict[str, tuple[float, ...]] = {}

    def ends(run: ComparedRun) -> tuple[float, ...]:
        if run.key not in known:
            job = make_job(settings_of[run.key], Path())
            known[run.key] = step_ends_ms(replace(job, planned=_with_equal_stages(job.planned)))
        return known[run.key]

    return ends
