"""Job and process groups -> the run of a rank, phase by phase.

A run has one phase. An elastic run has one for each number of frozen blocks that its rule reaches:
where blocks freeze, the ranks hand the state of their stages over in memory, form the groups of the
next phase, and continue with its stages, as if they had resumed from a checkpoint.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoint.contents import FoundCheckpoint
from ..config.settings import RunConfig, SettingsError
from ..distributed.failure import RankFolder
from ..distributed.process_groups import SharedStore, World, be_patient, regrouped
from ..errors import AsyncPipeError, PlanError
from ..executor.instrumented import Activities, Activity
from ..executor.loading import stage_builder
from ..formatting import counted
from ..freezing.block_outputs import check_observable
from ..freezing.blocks import blocks_of
from ..freezing.elastic import (
    BATCH,
    FOLDER,
    OFF,
    REPLICAS,
    SCHEDULES,
    Elastic,
    pipelines,
    read_elastic,
)
from ..freezing.rules import PLASTICITY, parse_rule
from ..limits import typed
from ..monitoring.diagnostics import memory_watched
from ..monitoring.records import Reporter
from ..monitoring.trackers import reporting
from ..monitoring.watchdog import Watchdog
from ..plan.plan import read_plan
from ..plan.trust import code_hashes, is_trusted, untrusted
from ..rng import drawing_from
from ..user_code import exits_as_errors
from ..watch.worker import start_viewer
from .checkpointing import Stopping
from .loop import Run
from .read_ahead import readers_end
from .replica_gradients import describe_statistics
from .setup import Job, Setup, agree, continued, find_checkpoint, set_up, write_schedule
from .stages import describe_phase, frozen_blocks


def train(
    job: Job,
    world: World,
    make_reporter: Callable[[RunConfig], Reporter],
    on_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Trains this rank's stages; every rank calls it.

    Random numbers that user code draws depend on the seed alone and are the same on all ranks. The
    reporter is created on rank 0 only. `on_step` is called with every step that this rank
    completes. Raises the AsyncPipeError that ends this rank, and Stopped when the run was asked to
    stop.
    """
    activities, board = Activities(), SharedStore(world)
    with (
        drawing_from(job.config.seed, "run"),
        readers_end(),
        Watchdog(job.config, job.folder, world, activities) as watchdog,
        memory_watched(job.plan, job.config, world, activities),
        Stopping(board, patience_s=job.config.patience_s) as stopping,
    ):
        job, checkpoint, skipped = find_checkpoint(job, world, activities)
        shown = partial(_make_shown, make_reporter, job.folder)
        with reporting(job.config, job.folder, world, shown) as reporter, exits_as_errors():
            if reporter is not None:
                watchdog.tell = reporter.on_warning
                for text in skipped:
                    reporter.on_warning(text)
            job, world = in_phase(job, world, checkpoint)
            check_phases(job)
            setup = set_up(job, world, reporter, checkpoint, on_step, activities, board)
            if job.config.elastic:
                gc.freeze()  # collections between phases need not look at what outlives them
            with activities.during(Activity("other", "loads its stages")):
                run = Run(setup, stopping)
            _note_plan(setup)
            is_noted = _note_statistics(setup)
            while (handed_over := run.train()) is not None:
                earlier = run.earlier
                del run
                gc.collect()  # its stages make room for the next ones, although objects form cycles
                setup = next_phase(setup, handed_over)
                with activities.during(Activity("other", "loads its stages")):
                    run = Run(setup, stopping, earlier=earlier)
                is_noted = is_noted or _note_statistics(setup)
            run.end()


def _note_plan(setup: Setup) -> None:
    """Reports phases that were planned for a run with other options."""
    started = setup.job.started
    if started is None or setup.reporter is None:
        return
    elastic = read_elastic(Path(started.folder))
    if text := elastic.difference(started.grow, started.cache):
        setup.reporter.on_note("phases", text)


def _note_statistics(setup: Setup) -> bool:
    """Reports batch norms that replicas train; returns True if there are some."""
    depth, plan = frozen_blocks(setup.checkpoint), setup.job.plan
    if setup.world.grid.most_copies == 1:
        return False
    text = describe_statistics(plan, blocks_of(plan).first_names(depth) if depth else ())
    if text and setup.reporter is not None:
        setup.reporter.on_note("batch norm", text)
    return bool(text)


def _make_shown(
    make_reporter: Callable[[RunConfig], Reporter], folder: Path, config: RunConfig
) -> Reporter:
    """The reporter that shows the run, which alone has the address of `--watch`: files and trackers
    would keep it. A restarted run keeps its viewer."""
    reporter = make_reporter(config)
    if config.watch and not RankFolder(folder).why_again:
        try:
            reporter.on_note("watch", start_viewer(folder))
        except (AsyncPipeError, OSError) as error:
            reporter.on_warning(f"--watch has no effect: {error}")
    return reporter


def check_elastic(job: Job) -> None:
    """Raises SettingsError or PlanError where a run cannot be elastic."""
    config = job.config
    _check_growth(config)
    if not config.elastic:
        return
    if config.freeze is None:
        raise SettingsError("--elastic, but no blocks freeze.", "--freeze schedule:1/3")
    if config.schedule not in SCHEDULES:
        raise SettingsError(
            f"--elastic, but --schedule is {config.schedule}.",
            f"--schedule {' or '.join(SCHEDULES)}",
        )
    for name in ("schedule_file", "compile"):
        if value := getattr(config, name):
            raise SettingsError(
                f"{typed(name, value)} cannot be combined with --elastic, whose stages change.",
                "Leave one of them out.",
            )
    elastic, ranks = read_elastic(Path(config.folder)), config.pipelines * len(job.plan.stages)
    total = config.micro_batches * config.pipelines
    for phase in elastic.phases:
        is_shared = config.grow != REPLICAS or total % (ranks // phase.stages) == 0
        if ranks % phase.stages or not is_shared:
            trained = pipelines(phase.stages, ranks // phase.stages, ranks)
            raise SettingsError(
                f"--elastic trains {trained} from {phase.depth} frozen blocks on, which cannot "
                f"share out {total} micro-batches.",
                f"--micro-batches {elastic.micro_batches}",
            )
        folder = Path(config.folder) / phase.folder
        if not (config.trust or is_trusted(folder)):
            raise untrusted(folder)


def check_phases(job: Job) -> None:
    """Raises FreezeError if the rule compares outputs of a block that some phase divides."""
    started = job.started
    if started is None or parse_rule(str(started.freeze)).kind != PLASTICITY:
        return
    blocks = blocks_of(job.plan)
    most = blocks.most if started.freeze_most is None else min(started.freeze_most, blocks.most)
    for phase in read_elastic(Path(started.folder)).phases[1:]:
        folder = Path(started.folder) / phase.folder
        plan, code = read_plan(folder), job.code_of_phases[phase.folder]
        builds = [stage_builder(folder, stage, code) for stage in plan.stages]
        check_observable(plan, blocks, range(phase.depth, most), builds)


def _check_growth(config: RunConfig) -> None:
    """Raises SettingsError for steps that cannot grow."""
    if config.scale_lr != "none" and config.grow != BATCH:
        raise SettingsError(
            f"--scale-lr {config.scale_lr}, but all steps have the same samples.", "--grow batch"
        )
    if config.grow != BATCH:
        return
    if not config.elastic:
        raise SettingsError(
            f"--grow {BATCH}, but the number of replicas does not change.", "Add --elastic."
        )
    if config.global_batch_size is not None:
        raise SettingsError(
            f"--grow {BATCH} requires micro-batches of one size, but a step has "
            f"{config.global_batch_size} samples in micro-batches of {config.micro_batch_size}.",
            "Give --micro-batches and --micro-batch-size.",
        )


def in_phase(job: Job, world: World, checkpoint: FoundCheckpoint | None) -> tuple[Job, World]:
    """The job and the world of the phase that continues from a checkpoint; those that were given if
    the run is not elastic. Collective. Raises PlanError for damaged phases."""
    started = job.started or job.config
    if not started.elastic:
        return job, world
    elastic = read_elastic(Path(started.folder))
    phase = elastic.at(frozen_blocks(checkpoint))
    codes = _code_of(elastic, started, world) if job.started is None else job.code_of_phases
    folder = Path(started.folder) / phase.folder
    replicas = started.pipelines if started.grow == OFF else world.ranks // phase.stages
    config = replace(
        started,
        folder=str(folder),
        schedule=started.schedule if phase.stages > 1 else "single",
        ranks=None,
        replicas=replicas,
        init_from=started.init_from or str(Path(started.folder) / "weights"),
        **_batch_of_phase(started, replicas),
    )
    if unit := replace(job, started=started).unit:
        made, read = (checkpoint.facts.step, checkpoint.facts.samples) if checkpoint else (0, 0)
        samples = started.samples or started.steps * unit
        config = continued(replace(config, samples=samples, trace=None), made, read)
        if "-" not in (started.trace or "-") or started.trace_steps.stop <= config.steps + 1:
            config = replace(config, trace=started.trace)
    planned = job.planned if folder == Path(job.config.folder) else read_plan(folder)
    if len(planned.stages) != phase.stages:
        raise PlanError(
            f"{folder} has {counted(len(planned.stages), 'stage')}, but its list of phases says "
            f"{phase.stages}.",
            "Partition the model again.",
        )
    code = codes.get(phase.folder, job.code)  # the first phase has the code of the job
    own = replace(
        job,
        config=config,
        planned=planned,
        code=code,
        started=started,
        code_of_phases=codes,
        planned_depth=phase.depth,
    )
    world = regrouped(world, own.plan, replicas, config.patience_s)
    if world.pipeline_rank >= phase.stages:
        be_patient(world)
    return own, world


def _batch_of_phase(started: RunConfig, replicas: int) -> dict[str, Any]:
    """The options of the batch with so many replicas: they share the micro-batches of a first step
    out, or each has as many as a first replica. Then the last step has the samples that remain."""
    if started.grow == BATCH:
        return {"remainder": started.remainder or "proportional"}
    if started.grow == OFF:
        return {}
    return {"micro_batches": started.micro_batches * started.pipelines // replicas}


def _code_of(elastic: Elastic, config: RunConfig, world: World) -> Mapping[str, Mapping[str, str]]:
    """The SHA-256 of the files of all later phases, by folder: stages that are changed afterwards
    are refused. Collective. Raises SettingsError if hosts have different code."""
    folder = Path(config.folder)
    codes = {phase.folder: code_hashes(folder / phase.folder) for phase in elastic.phases[1:]}
    content = json.dumps(codes, sort_keys=True).encode()
    if len(set(world.gathered(hashlib.sha256(content).digest()))) > 1:
        raise SettingsError(
            f"{folder / FOLDER} differs between hosts.",
            "Copy the generated folder to all of them.",
        )
    return codes


def next_phase(setup: Setup, handed_over: FoundCheckpoint) -> Setup:
    """The setup of the phase that begins with this state. Collective."""
    with setup.activities.during(Activity("meet", "the groups of the next phase")):
        job, world = in_phase(setup.job, setup.world, handed_over)
    following = agree(
        job,
        world,
        setup.activities,
        setup.board,
        checkpoint=handed_over,
        reporter=setup.reporter,
        on_step=setup.on_step,
    )
    following = replace(following, cache=setup.cache)
    if setup.reporter is not None:
        write_schedule(job.folder, following.schedule)
        setup.reporter.on_note("phase", describe_phase(following))
    return following
