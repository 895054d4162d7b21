"""Job and process groups -> the setup of a rank: schedule, transport and data, agreed on by all
ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from ..checkpoint.contents import FoundCheckpoint, first_good
from ..checkpoint.folders import WEIGHTS, FolderLock, clear_unfinished
from ..checkpoint.remote import initial_weights
from ..checkpoint.resuming import candidates, keep_records_until
from ..checkpoint.storage import check_exportable
from ..config.batch_layout import StepBatch
from ..config.mixed_precision import find_boundary_dtypes
from ..config.resolve import costs_at_sizes, sized_plan
from ..config.segments import make_segment
from ..config.settings import RunConfig, Settings
from ..control.learning_rate import learning_rate_of
from ..data.task import GIVEN, Task
from ..distributed.connections import (
    agree_on_transport,
    collectives_of_tensor_ranks,
    group_of_gradients,
)
from ..distributed.failure import RankFolder
from ..distributed.process_groups import SharedStore, World
from ..distributed.tensor_group import tensor_ranks
from ..executor.instrumented import Activities, Activity
from ..executor.precision import BoundaryDtypes
from ..executor.run import Criterion, needed_inputs
from ..freezing.arena import open_arena
from ..freezing.cache import Cache
from ..freezing.elastic import AUTO_CACHE, BATCH, NO_CACHE
from ..limits import bytes_of
from ..monitoring.diagnostics import wait_for_debugger
from ..monitoring.records import Reporter
from ..monitoring.run_files import METRICS
from ..plan.plan import Plan
from ..plan.sharing import GRADIENTS
from ..process import keep_freed_memory
from ..schedule.schedule import Schedule
from ..schedule.text import to_text
from ..tensor_parallel.ranks import ONE_RANK, TensorRanks
from ..transports.choose import (
    TransportChoice,
)
from .batches import Data, evaluation_warning, open_data, prepare_data
from .checkpointing import check_model, check_steps
from .run_summary import announce, describe_data, forecast_run

_NEWS_BYTES = 1000


@dataclass(frozen=True)
class Job:
    """Everything that a rank needs to start.

    config: the resolved options of the run.
    task: the task of the model.
    planned: the plan as it was made.
    folder: the run's folder.
    code: the SHA-256 of each file of the stages when the command began.
    settings: the options as given; None where no run is started.
    started: the options with which an elastic run began; None before its first phase.
    code_of_phases: the SHA-256 of each file of the stages of later phases, by folder, at that time.
    planned_depth: the number of blocks that were frozen when the plan was made.
    lock: the lock of the folder, which the process that leads the run holds.
    """

    config: RunConfig
    task: Task
    planned: Plan
    folder: Path
    code: Mapping[str, str]
    settings: Settings | None = None
    started: RunConfig | None = None
    code_of_phases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    planned_depth: int = 0
    lock: FolderLock = field(default_factory=lambda: FolderLock("run"), compare=False)

    @property
    def plan(self) -> Plan:
        """The plan at the sizes of this run."""
        return sized_plan(self.planned, self.config)

    @property
    def unit(self) -> int:
        """The samples of a step before steps grow; 0 if steps keep their size."""
        started = self.started or self.config
        return StepBatch.of(started).samples if started.grow == BATCH else 0

    @property
    def repeating(self) -> Settings:
        """The options that repeat the run: the resolved ones, or those that were given while what
        follows from the steps of epochs is unknown."""
        is_open = self.config.epochs is not None
        return self.settings if is_open and self.settings is not None else self.config


@dataclass(frozen=True)
class Setup:
    """The setup of a rank, agreed on with the others.

    job, world: the job, and the process groups.
    schedule: the schedule of a step.
    dtypes: the dtypes of tensors between ranks.
    transport: the transport of the pipeline.
    gradient_group: the group that sums gradients; None without replicas.
    checkpoint: the checkpoint to resume from, if there is one.
    data: this rank's data; None if its stages read none.
    fields: the fields of the data that its stages read.
    reporter: the reporter, on rank 0.
    on_step: called with every step that this rank completes.
    activities, board: the record of this rank's activities, and the shared store.
    criterion: the loss function, where the caller has given one and no name of one.
    cache: what frozen blocks have computed; None without --cache.
    tensor_ranks: the ranks that share out the layers of this rank's stages.
    """

    job: Job
    world: World
    schedule: Schedule
    dtypes: BoundaryDtypes
    transport: TransportChoice
    gradient_group: dist.ProcessGroup | None
    checkpoint: FoundCheckpoint | None
    data: Data | None
    fields: tuple[str, ...]
    reporter: Reporter | None
    on_step: Callable[[int], None]
    activities: Activities
    board: SharedStore
    criterion: Criterion | None = None
    cache: Cache | None = None
    tensor_ranks: TensorRanks = ONE_RANK

    @property
    def start(self) -> int:
        """The number of steps that were made before."""
        return self.checkpoint.facts.step if self.checkpoint else 0

    @property
    def batch(self) -> StepBatch:
        """The samples of each step."""
        read = self.checkpoint.facts.samples if self.checkpoint else 0
        batch = StepBatch.of(self.job.config, first_step=self.start, first_sample=read)
        return replace(batch, unit=self.job.unit)

    @property
    def learning_rate(self) -> Callable[[int], float]:
        """The factor of the learning rate at a step, counted from 0."""
        return learning_rate_of(self.job.started or self.job.config, self.batch)

    @property
    def weights(self) -> str | None:
        """The location of the stages' weights, if not in the generated folder."""
        if self.checkpoint is not None and self.checkpoint.held is None:
            return str(self.checkpoint.path / WEIGHTS)
        return initial_weights(self.job.config, self.job.folder)


def set_up(
    job: Job,
    world: World,
    reporter: Reporter | None,
    checkpoint: FoundCheckpoint | None,
    on_step: Callable[[int], None],
    activities: Activities,
    board: SharedStore,
) -> Setup:
    """Prepares this process, agrees with the other ranks on the setup, and reports it on rank 0;
    every rank calls it."""
    config, plan, machine = job.config, job.plan, world.machine
    torch.set_num_threads(machine.threads)
    keep_freed_memory(few=config.zero >= GRADIENTS)
    if config.export_hf:
        check_exportable(Path(config.folder), config.export_hf)
    wait_for_debugger(config, world, reporter)
    setup = agree(
        job, world, activities, board, checkpoint=checkpoint, reporter=reporter, on_step=on_step
    )
    setup = with_cache(setup)
    schedule, data = setup.schedule, setup.data
    if reporter is None:
        return setup
    write_schedule(job.folder, schedule)
    data = data or open_data(config, job.task, plan, job.folder)
    forecast = forecast_run(plan, job.planned, config, machine.cores, schedule, setup.dtypes)
    announce(
        reporter,
        job,
        schedule,
        machine,
        transport=setup.transport,
        data=describe_data(data, plan, schedule, config),
        forecast=forecast,
        dtypes=setup.dtypes,
    )
    if long := evaluation_warning(config, costs_at_sizes(plan, job.planned), data, forecast):
        reporter.on_warning(long)
    if why := RankFolder(job.folder).why_again:
        reporter.on_note("restart", why)
    return setup


def agree(
    job: Job,
    world: World,
    activities: Activities,
    board: SharedStore,
    *,
    checkpoint: FoundCheckpoint | None = None,
    reporter: Reporter | None = None,
    on_step: Callable[[int], None] = lambda step: None,
    criterion: Criterion | None = None,
) -> Setup:
    """The setup that all ranks agree on; every rank calls it. `criterion` is as for Setup."""
    config, plan = job.config, job.plan
    if config.device == "cuda":
        torch.cuda.set_device(world.machine.device)  # for NCCL and kernels that name no device
    reads_data = config.data != GIVEN
    schedule = make_segment(plan, config, steps=1)
    dtypes = find_boundary_dtypes(config, plan, job.code)
    if reads_data:
        _prepare_together(job, world, activities)
    with activities.during(Activity("meet", "the choice of a transport")):
        transport = agree_on_transport(world, config, world.machine.device)
        gradient_group = group_of_gradients(world, config, world.machine.device)
        collectives = collectives_of_tensor_ranks(world, config, world.machine.device, transport)
    own = world.grid.stages_of(world.rank, schedule)
    fields = needed_inputs(plan, own, criterion=config.criterion is not None)
    return Setup(
        job,
        world,
        schedule,
        dtypes,
        transport,
        gradient_group,
        checkpoint,
        open_data(config, job.task, plan, job.folder) if fields and reads_data else None,
        fields,
        reporter,
        on_step,
        activities,
        board,
        criterion,
        tensor_ranks=tensor_ranks(world, collectives, activities),
    )


def with_cache(setup: Setup) -> Setup:
    """The setup with the cache that the options ask for, which shares a file with those of the
    other ranks of its host. Collective. Raises FreezeError where no such file can be made."""
    config, world, activities = setup.job.config, setup.world, setup.activities
    if config.cache == NO_CACHE:
        return setup
    is_auto = config.cache == AUTO_CACHE
    size = None if is_auto else bytes_of(config.cache)
    folder = None if config.data == GIVEN else setup.job.folder
    with activities.during(Activity("meet", "the file of the cache")):
        arena = open_arena(folder, size, world.rank, world.gathered)
    return replace(setup, cache=Cache(arena, activities, is_auto))


def news_of_caches(setup: Setup) -> list[str]:
    """The news of the caches of all ranks, each sentence once. Collective."""
    if (cache := setup.cache) is None:
        return []
    own = "\n".join(cache.news()).encode()[:_NEWS_BYTES].ljust(_NEWS_BYTES)
    with setup.activities.during(Activity("meet", "the news of caches")):
        texts = setup.world.gathered(own)
    lines = (text.decode(errors="ignore").strip().splitlines() for text in texts)
    new = (line for line in chain.from_iterable(lines) if line not in cache.reported)
    news = list(dict.fromkeys(new))
    cache.reported.update(news)
    return news


def _prepare_together(job: Job, world: World, activities: Activities) -> None:
    """Rank 0 prepares the data, and all ranks wait for it."""
    if world.rank == 0:
        with activities.during(Activity("other", "prepares the data")):
            prepare_data(job.config, job.task, job.folder)
    with activities.during(Activity("meet", "the data are prepared")):
        world.meet()


def find_checkpoint(
    job: Job, world: World, activities: Activities
) -> tuple[Job, FoundCheckpoint | None, list[str]]:
    """The job with the steps that its samples make after the checkpoint to resume from, the
    checkpoint, and messages about those that were skipped; rank 0 drops the folder's later
    records."""
    config = job.config
    named, may_skip = candidates(config, job.folder)
    if world.rank == 0:
        clear_unfinished(job.folder)
    with activities.during(Activity("meet", "the checkpoint to resume from")):
        checkpoint, skipped = first_good(named, world, may_skip=may_skip)
    if checkpoint is not None:
        facts = checkpoint.facts
        is_open = config.samples is not None and config.samples >= facts.samples
        if is_open and not job.unit:
            job = replace(job, config=continued(config, facts.step, facts.samples))
        check_steps(job.config, checkpoint)
        check_model(job.planned, Path(config.folder), checkpoint)
    if world.rank == 0:
        keep_records_until(job.folder / METRICS, checkpoint.facts.step if checkpoint else 0)
    return job, checkpoint, skipped


def continued(config: RunConfig, step: int, read: int) -> RunConfig:
    """The options of a run that has read so many samples in its steps, as if all of these had been
    of the present batch: only the rest of its samples makes further steps."""
    assert config.samples is not None
    of_step = StepBatch.of(config).samples
    config = replace(config, samples=step * of_step + max(0, config.samples - read))
    assert config.samples is not None
    return replace(config, steps=config.samples // of_step + (config.left_over > 0))


def write_schedule(folder: Path, schedule: Schedule) -> None:
    """Writes the schedule to the run's folder, in the format of `--schedule FILE`."""
    (folder / "schedule.txt").write_text(to_text(schedule.compute), encoding="utf-8")
