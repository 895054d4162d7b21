"""The setup of a rank -> its stages with their weights, and what runs and steps them.

Runs, comparisons and a `Pipeline` in a loop of the user's own train with the same `TrainedStages`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack

from torch import Tensor, nn

from ..checkpoint.contents import PROBE, FoundCheckpoint, Rank
from ..config.asynchronous_options import delays_of
from ..config.batch_layout import StepBatch
from ..config.mixed_precision import precision_of, weights_dtype
from ..config.segments import RunSegment, schedule_of
from ..config.settings import RunConfig
from ..control.user_optimizer import reach_warning
from ..data.task import GIVEN, TARGET, sizes_of
from ..distributed.connections import make_transport
from ..distributed.process_groups import LOSS_WARNING, OPTIMIZER_WARNING
from ..executor.compiled import compile_again, compile_stage
from ..executor.executor import Executor
from ..executor.instrumented import Activity
from ..executor.loading import load_stage, stage_builder
from ..executor.loss_weights import LossTargets
from ..executor.mailbox import Sizes
from ..executor.observed_transport import ObservedTransport
from ..executor.run import Criterion, Feed, RunOptions
from ..executor.tied_parameters import verify_tied_alike
from ..formatting import counted
from ..freezing.block_outputs import SAMPLES
from ..freezing.blocks import FreezeError
from ..freezing.elastic import pipelines
from ..freezing.freezing import Freezing
from ..freezing.plasticity import Similarities
from ..freezing.rules import Events, Progress, parse_rule
from ..monitoring.gather import RankFigures
from ..optimizers.facts import OPTIMIZERS
from ..plan.plan import Plan
from ..schedule.schedule import Schedule
from .evaluation import find_criterion, forward_schedule
from .optimizer_step import OptimizerStepper
from .own_optimizer import OwnOptimizer
from .replica_gradients import first_buffers, share_buffers
from .setup import Setup
from .stage_optimizer import StageSteps

FREEZING = "freezing"
"""The key of the progress of freezing in a checkpoint."""


@dataclass(frozen=True)
class Probe:
    """The micro-batch for which the outputs of blocks are compared.

    feed: returns the values that the stages of this rank read.
    sizes: its sizes.
    kept: the values of all inputs, if they cannot be read from the data again.
    """

    feed: Feed
    sizes: Sizes
    kept: Mapping[str, Tensor] = field(default_factory=dict)


class TrainedStages:
    """The stages of a rank, with what trains them, segment by segment.

    config, plan: the options, and the plan at the sizes of the run.
    modules: the stages by number.
    executor: runs their forwards and backwards.
    stepper: makes their optimizer steps.
    freezing: the blocks that no longer train; None without --freeze.
    events: the steps after which blocks may freeze; who trains with the stages sets them.
    block_norms: the norms of each block's gradients between the last two events, if the rule of
        freezing reads them.
    probe: the micro-batch for which the outputs of blocks are compared, if the rule reads them; who
        trains with the stages sets it.
    cache: what frozen blocks have computed; None without --cache.
    tensor_ranks: the ranks that share out the layers of these stages.

    Arguments:
    report: called with the metrics of a step once all stages of the rank have made it.
    after_step: called with each stage after its step.
    own: as for OptimizerStepper.
    """

    def __init__(
        self,
        setup: Setup,
        report: Callable[[RankFigures], None],
        after_step: Callable[[int], None] | None = None,
        own: OwnOptimizer | None = None,
    ) -> None:
        self.config, self.plan, self._world = setup.job.config, setup.job.plan, setup.world
        self._schedules: dict[RunSegment, Schedule] = {}
        self.modules = load_stages(setup)
        self.executor = make_executor(setup, self.modules, self.config.methods)
        self.events: Events | None = None
        self.block_norms: tuple[float, ...] = ()
        self.probe: Probe | None = None
        self._forward_like = setup.schedule
        self._squares: dict[int, Tensor | float] = {}
        self.freezing = _freezing_of(setup, self.modules)
        self.cache = setup.cache
        self.tensor_ranks = setup.tensor_ranks
        if self.freezing is not None and self.freezing.progress.depth:
            self._set_plan(self.freezing.apply())
        world = self._world
        if not self.config.has_network:
            world = replace(world, control=None, tied_groups={})
        self.stepper = OptimizerStepper(
            _exchanged(self.plan, self.config),
            self.modules,
            self.config,
            world,
            lambda figures: report(figures.caching(setup.activities.take_cached())),
            lr_scale=self.executor.lr_scale,
            activities=setup.activities,
            gradient_group=setup.gradient_group,
            delays=setup.schedule.delays,
            after_step=after_step,
            own=own,
            learning_rate=setup.learning_rate,
            tensor_ranks=setup.tensor_ranks,
        )
        _warn_of_optimizer(setup, self.stepper.optimizers.values())
        self.executor.attach(self.stepper.optimizers)
        if self.freezing is not None and self.freezing.reads_gradients:
            self.stepper.before_step = self._add_squares

    @property
    def frozen(self) -> int:
        """The number of blocks that `freeze` has frozen so far."""
        return self.freezing.progress.depth if self.freezing is not None else 0

    def freeze_due(self, step: int) -> bool:
        """Freezes blocks if an event is due after a step; returns True if more are frozen then.
        Between two segments, and collective."""
        return (event := self.event_at(step)) is not None and self.freeze(event, step)

    def event_at(self, step: int) -> int | None:
        """The number of the event of freezing that is due after a step; None if there is none."""
        if self.freezing is None or self.events is None:
            return None
        number = self.events.number(step)
        return number if number > self.freezing.progress.event else None

    def take_note(self, event: int) -> bool:
        """Counts an event whose blocks freeze in other stages; returns True if there are some.
        Collective."""
        assert self.freezing is not None
        self._gather_squares()
        self.block_norms = tuple(map(math.sqrt, self.freezing.progress.squares))
        if self.freezing.observed_blocks:
            self.freezing.see(self._similarities())
        if has_more := self.freezing.after(event):
            share_buffers(self.modules, self._world)  # evaluation mode reads them
        return has_more

    def freeze(self, event: int, step: int) -> bool:
        """Freezes, after a step and between two segments, the blocks that the rule says at an
        event; returns True if these are more than before. Collective."""
        if has_more := self.take_note(event):
            self._narrow(step)
        return has_more

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Continues after a step from the progress that `state` returned, where no fewer blocks are
        frozen than now. Collective."""
        if self.freezing is None or FREEZING not in state:
            return
        self.freezing.restore(Progress.of(state[FREEZING]))
        if self.cache is not None:
            self.cache.forget()
        self._narrow(step)
        self.probe = None
        if state[PROBE]:
            self.set_probe(state[PROBE])

    def _narrow(self, step: int) -> None:
        assert self.freezing is not None
        if self.config.compile:
            compile_again()
        self._set_plan(self.freezing.apply())
        self.stepper.narrow(step)
        self.executor.attach(self.stepper.optimizers)

    def _set_plan(self, plan: Plan) -> None:
        self.plan = plan
        self.executor.narrow(_exchanged(plan, self.config))
        self._schedules = {}
        if self.cache is not None and self.freezing is not None:
            self.freezing.attach(self.cache, self.executor.stages, plan)

    def set_probe(self, values: Mapping[str, Tensor]) -> None:
        """Chooses these values as the micro-batch for which the outputs of blocks are compared, if
        the rule reads them and has no micro-batch yet. Raises FreezeError for a single sample."""
        if self.probe is not None or self.freezing is None or not self.freezing.observed_blocks:
            return
        kept = {name: value.detach().clone() for name, value in values.items()}
        sizes = sizes_of(self.plan, {name: kept[name] for name in kept if name != TARGET})
        if sizes["batch"] < 2:
            raise FreezeError(
                "--freeze plasticity compares the samples of a micro-batch, but the first one has "
                f"{sizes['batch']}.",
                'Give larger batches, or freeze="gradnorm:1/3".',
            )
        self.probe = Probe(lambda number: kept, sizes, kept)

    def _similarities(self) -> dict[int, Similarities]:
        """The similarities of all observed blocks for the probe. Collective."""
        freezing, probe = self.freezing, self.probe
        assert freezing is not None and probe is not None
        schedule = forward_schedule(self.plan, self._forward_like, 1)
        with (
            first_buffers(self.modules, self._world),
            freezing.observed(self.config.seed) as found,
        ):
            self.executor.run(schedule, probe.feed, training=False, losses=False, sizes=probe.sizes)
        own = found if self._world.is_writer else {}
        length, blocks = min(SAMPLES, probe.sizes["batch"]) ** 2, freezing.observed_blocks
        nothing = (0.0,) * length
        flat = self._world.sums([x for block in blocks for x in own.get(block, nothing)])
        return {
            block: tuple(flat[place * length : (place + 1) * length])
            for place, block in enumerate(blocks)
        }

    def _add_squares(self, stage: int) -> None:
        """Adds the squares of the gradients of a stage's blocks."""
        assert self.freezing is not None
        share = self.stepper.shares[stage]
        for block, parameters in self.freezing.trained(stage):
            square = share.square([each for each in parameters if share.counts(each)])
            self._squares[block] = self._squares.get(block, 0.0) + square

    def _gather_squares(self) -> None:
        """Adds the squares of all ranks to the progress; replicas have the same."""
        assert self.freezing is not None
        if self.freezing.reads_gradients:
            own = self._squares if self._world.copy == 0 else {}
            squares = [float(own.get(block, 0.0)) for block in range(len(self.freezing.blocks))]
            self.freezing.progress = self.freezing.progress.plus(self._world.sums(squares))
            self._squares = {}

    def state(self) -> dict[str, Any]:
        """The progress of freezing, as JSON; empty without --freeze. Collective."""
        if self.freezing is not None:
            self._gather_squares()
        return {} if self.freezing is None else {FREEZING: self.freezing.progress.to_json()}

    def as_rank(self) -> Rank:
        """The parts whose state a checkpoint has."""
        return Rank(
            self.plan,
            self._world,
            self.modules,
            self.executor,
            self.stepper.optimizers,
            self.config.is_async,
            self.probe.kept if self.probe is not None else {},
        )

    def schedule_of(self, segment: RunSegment) -> Schedule:
        """The schedule of a segment; that of the last one is kept for others like it."""
        like = replace(segment, steps=range(len(segment.steps)))
        if like not in self._schedules:
            self._schedules = {like: schedule_of(self.plan, self.config, like)}
        return self._schedules[like]

    def run(
        self,
        segment: RunSegment,
        schedule: Schedule,
        feed: Feed,
        batch: StepBatch,
        first: int,
        **options: Unpack[RunOptions],
    ) -> Iterator[None]:
        """Trains the steps of a segment on the micro-batches of a feed, which are numbered from
        `first`; yields after each step of a stage."""
        start = segment.steps.start
        delays = delays_of(schedule, self.config, first, start)
        self.stepper.start_segment(
            start + 1, first, delays, flushed=segment.synchronous, batch=batch
        )
        options |= {
            "first_micro_batch": first,
            "micro_batches_in_all": len(batch.sizes),
            "observer": self.stepper,
            "loss_scale": self.stepper.loss_scale,
        }
        yield from self.executor.paused(schedule, feed, **options)
        for step in segment.steps if not self.modules else ():
            self.stepper.be_idle(step + 1)
        if self.config.data == GIVEN:
            self._warn_of_cache()

    def close(self) -> None:
        """Ends the connections to other ranks, when everything sent has arrived."""
        self.executor.close()
        self.tensor_ranks.close()

    def _warn_of_cache(self) -> None:
        """Warns a loop of the user's own that a stage of this rank computes frozen blocks again."""
        if self.cache is None:
            return
        for text in self.cache.news():
            self.cache.reported.add(text)
            warnings.warn(f"cache: {text}", stacklevel=2)


def _exchanged(plan: Plan, config: RunConfig) -> Plan:
    """The plan, without a network without tied parameters: each holder steps its own."""
    return plan if config.has_network else replace(plan, shared=())


def frozen_blocks(checkpoint: FoundCheckpoint | None) -> int:
    """The number of frozen blocks in a checkpoint; 0 without one."""
    return Progress.of(checkpoint.facts.trainer.get(FREEZING) if checkpoint else None).depth


def describe_phase(setup: Setup) -> str:
    """A phase that follows another one, as a phrase."""
    assert setup.checkpoint is not None
    depth, world = frozen_blocks(setup.checkpoint), setup.world
    trained = pipelines(len(setup.job.plan.stages), world.replicas, world.ranks)
    grown = f", {setup.batch.samples} samples per step" if setup.job.unit else ""
    return f"{counted(depth, 'block')} frozen: {trained}{grown}, after step {setup.start}"


def _freezing_of(setup: Setup, modules: Mapping[int, nn.Module]) -> Freezing | None:
    config, plan, checkpoint = setup.job.config, setup.job.plan, setup.checkpoint
    if config.freeze is None:
        return None
    state = checkpoint.facts.trainer.get(FREEZING) if checkpoint else None
    builds = [stage_builder(config.folder, stage, setup.job.code) for stage in plan.stages]
    return Freezing(
        parse_rule(config.freeze),
        config.freeze_most,
        plan,
        builds,
        modules,
        Progress.of(state),
        setup.job.planned_depth,
    )


def load_stages(setup: Setup) -> dict[int, nn.Module]:
    """The stages of this rank by number, on its device, in training mode."""
    config, world, code = setup.job.config, setup.world, setup.job.code
    modules, own = {}, world.grid.stages_of(world.rank, setup.schedule)
    verify_tied_alike(config.folder, setup.job.planned, own, setup.tensor_ranks, code)
    for stage in own:
        module = load_stage(
            config.folder,
            setup.job.planned,
            stage,
            weights=setup.weights,
            device=world.machine.device,
            dtype=weights_dtype(config),
            code=code,
            ranks=setup.tensor_ranks,
        )
        modules[stage] = module.train()
        if config.compile:
            compile_stage(modules[stage])
    return modules


def make_executor(setup: Setup, modules: Mapping[int, nn.Module], staleness: str) -> Executor:
    """The executor of this rank's stages with these staleness methods; every rank calls it."""
    job, world, schedule = setup.job, setup.world, setup.schedule
    config, plan, device = job.config, job.plan, world.machine.device
    transport = make_transport(setup.transport, world, config, plan, schedule, device)
    criterion = setup.criterion
    if criterion is None and config.criterion:
        criterion = find_criterion(config.criterion, config.seed)
    return Executor(
        _exchanged(plan, config),
        modules,
        ObservedTransport(
            transport,
            setup.activities,
            first_rank=world.grid.pipeline_of(world.rank)[0],
            every=world.tensor_ranks,
        ),
        rank_of_stage=schedule.rank_of_stage,
        replicas=schedule.replicas,
        staleness=staleness,
        criterion=criterion,
        device=device,
        precision=precision_of(config),
        dtypes=setup.dtypes,
        seed=config.seed,
        batch_norm_per_step=config.batch_norm == "mini-batch",
        ema=config.ema,
        targets=_targets(setup, modules, criterion),
    )


def _targets(
    setup: Setup, modules: Mapping[int, nn.Module], criterion: Criterion | None
) -> LossTargets:
    """The targets that the loss counts. A warning is posted for rank 0, or shown in a loop of the
    user's own."""
    waits = Activity("exchange", "adds up the targets of its replicas")

    def added(own: Tensor) -> Tensor:
        with setup.activities.during(waits):
            return setup.world.sum_of_copies(own)

    has_copies = setup.world.data_parallel_group is not None and setup.job.config.has_network
    return LossTargets(
        setup.job.plan,
        modules,
        criterion,
        sum_of_copies=added if has_copies else None,
        warn=_warn(setup, LOSS_WARNING),
    )


def _warn_of_optimizer(setup: Setup, steps: Iterable[StageSteps]) -> None:
    """Warns of an optimizer file of the user's whose steps are not those of the plain model."""
    config, plan = setup.job.config, setup.job.plan
    if config.optimizer not in OPTIMIZERS:
        made = (each.optimizer for each in steps)
        texts = {reach_warning(each, plan, config) for each in made if each is not None}
        for text in texts - {""}:
            _warn(setup, OPTIMIZER_WARNING)(text)


def _warn(setup: Setup, key: str) -> Callable[[str], object]:
    """Posts a warning under a key for rank 0, or shows it in a loop of the user's own."""
    is_given = setup.job.config.data == GIVEN
    return warnings.warn if is_given else partial(setup.board.post, key)
