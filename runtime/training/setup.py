"""Settings -> what a rank trains with, agreed on with the others, and told before it begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from ..activity import Activities, Activity
from ..boundary_dtypes import BoundaryDtypes
from ..checkpoint.checkpoints import check_model, check_steps
from ..checkpoint.elsewhere import initial_weights
from ..checkpoint.finding import Found, first_good
from ..checkpoint.folders import WEIGHTS, clear_unfinished
from ..checkpoint.resuming import candidates, keep_records_until
from ..data.task import Task
from ..host_memory import keep_freed_memory
from ..launching.failure import RankFolder
from ..launching.folder_lock import FolderLock
from ..launching.world import World
from ..pipeline import needed_inputs
from ..plan import Plan
from ..run_report.records import METRICS
from ..schedule import Schedule
from ..schedule_text import to_text
from ..transports.choose import Choice
from ..watching.debugger import wait_for_debugger
from ..watching.metrics import Reporter
from .board import Board
from .export import check_exportable
from .facts import announce, describe_data, forecast_run
from .half import find_boundary_dtypes
from .resolve import sized_plan
from .segments import make_segment
from .settings import Settings
from .sources import Data, open_data, prepare_data
from .transport import agree_on_transport, group_of_gradients


@dataclass(frozen=True)
class Job:
    """All that a rank needs to begin: resolved settings, the plan as it was made, and the run's
    folder, of which the process that leads the run holds the `lock`."""

    settings: Settings
    task: Task
    planned: Plan
    folder: Path
    lock: FolderLock = field(default_factory=lambda: FolderLock("run"), compare=False)

    @property
    def plan(self) -> Plan:
        """The plan at the sizes of this run."""
        return sized_plan(self.planned, self.settings)


@dataclass(frozen=True)
class Setup:
    """What a rank trains with, when it has agreed on it with the others: the schedule, the
    transport, the group that sums gradients, the checkpoint to go on from; and what it alone has:
    its data, of which its stages read `fields`, and on rank 0 a reporter."""

    job: Job
    world: World
    schedule: Schedule
    dtypes: BoundaryDtypes
    transport: Choice
    copies: dist.ProcessGroup | None
    found: Found | None
    data: Data | None
    fields: tuple[str, ...]
    reporter: Reporter | None
    on_step: Callable[[int], None]
    activities: Activities
    board: Board

    @property
    def start(self) -> int:
        """The steps that were made before."""
        return self.found.facts.step if self.found else 0

    @property
    def weights(self) -> str | None:
        """Where the stages' weights are, if not in the generated folder."""
        if self.found is not None:
            return str(self.found.path / WEIGHTS)
        return initial_weights(self.job.settings, self.job.folder)


def set_up(
    job: Job,
    world: World,
    reporter: Reporter | None,
    found: Found | None,
    on_step: Callable[[int], None],
    activities: Activities,
    board: Board,
) -> Setup:
    """Agrees with the other ranks on how to train, and has rank 0 tell of it; every rank calls
    it."""
    settings, plan = job.settings, job.plan
    machine = world.machine
    torch.set_num_threads(machine.threads)
    keep_freed_memory()
    if settings.export_hf:
        check_exportable(Path(settings.folder), settings.export_hf)
    schedule = make_segment(plan, settings, steps=1)
    dtypes = find_boundary_dtypes(settings, plan)
    forecast = forecast_run(plan, job.planned, settings, machine.cores, schedule, dtypes)
    if reporter is not None:
        write_schedule(job.folder, schedule)
    wait_for_debugger(settings, world, reporter)
    if world.rank == 0:
        with activities.during(Activity("other", "prepares the data")):
            prepare_data(settings, job.task, job.folder)
    with activities.during(Activity("meet", "the data are prepared")):
        world.meet()
    with activities.during(Activity("meet", "the choice of a transport")):
        transport = agree_on_transport(world, settings, world.machine.device)
        copies = group_of_gradients(world, settings, world.machine.device)
    own = world.grid.stages_of(world.rank, schedule)
    fields = needed_inputs(plan, own, criterion=settings.criterion is not None)
    data = open_data(settings, job.task, plan, job.folder) if fields or reporter else None
    if reporter is not None and data is not None:
        readers = describe_data(data, plan, schedule, settings)
        announce(
            reporter,
            job,
            schedule,
            machine,
            transport=transport,
            data=readers,
            forecast=forecast,
            dtypes=dtypes,
        )
        if why := RankFolder(job.folder).why_again:
            reporter.on_note("restart", why)
    return Setup(
        job,
        world,
        schedule,
        dtypes,
        transport,
        copies,
        found,
        data if fields else None,
        fields,
        reporter,
        on_step,
        activities,
        board,
    )


def find_checkpoint(
    job: Job, world: World, activities: Activities
) -> tuple[Found | None, list[str]]:
    """The checkpoint that the run goes on from, and which were passed over. Of the records of its
    folder those up to it are left."""
    settings = job.settings
    asked, may_skip = candidates(settings, job.folder)
    if world.rank == 0:
        clear_unfinished(job.folder)
    with activities.during(Activity("meet", "the checkpoint to go on from")):
        found, skipped = first_good(asked, world, may_skip=may_skip)
    if found is not None:
        check_steps(settings, found)
        check_model(job.planned, Path(settings.folder), found)
    if world.rank == 0:
        keep_records_until(job.folder / METRICS, found.facts.step if found else 0)
    return found, skipped


def write_schedule(folder: Path, schedule: Schedule) -> None:
    """Leaves the schedule in the run's folder, as `--schedule FILE` reads it."""
    (folder / "schedule.txt").write_text(to_text(schedule.compute), encoding="utf-8")
