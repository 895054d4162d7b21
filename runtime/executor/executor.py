"""One rank's stages + a schedule -> a training run: the executor.

One loop runs a rank's actions in order, whatever the schedule. An asynchronous schedule differs in
the places of its steps alone, for which staleness methods compensate around every action.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Unpack, cast

import torch
from torch import Tensor, nn

from ..errors import PlanError, TransportError
from ..plan.plan import Plan, verify_evaluates
from ..rng import GeneratorState
from ..schedule.schedule import Action, Schedule, shared_delay, split_backwards
from ..staleness import Steps, make_staleness
from ..staleness.weight_versions import Weights, WeightVersions
from ..transports.protocol import GENERATOR_STATE, CastingTransport, Handle, Transport
from .criterion import check_loss, loss_of_stage, may_draw
from .instrumented import Observer, RunRecorder, RunReport
from .look_ahead import LookAhead
from .loss_weights import LossTargets, LossWeights
from .mailbox import Mailbox, Sizes, channels_of_each
from .precision import AS_PLANNED, FULL, BoundaryDtypes, Precision
from .recompute import MiniBatchNorm
from .run import (
    TARGET,
    Criterion,
    Feed,
    FeedOnce,
    PipelineRun,
    Program,
    RunOptions,
    check_schedule,
    immediate_backward,
    in_eval_mode,
    needed_inputs,
    numbering,
    output_names,
    program_of,
    sizes_of_each,
    version_pairs,
    window_ends,
    without,
)
from .stage import Stage
from .tied_parameters import SharedGradients, shared_weights
from .weight_binding import WeightBinder, gap_to, sampled


class Executor:
    """One rank of a pipeline: its stages, their weight versions, and its end of the transport.

    - `stages`: this rank's modules by stage
    - `rank_of_stage`: the rank of each stage, by default one stage per rank
    - `replicas`: as for Schedule; the observer sums their gradients, also of shared parameters
    - `staleness`: names in `staleness.METHODS`, joined by +; `attach` gives them the optimizers
    - `criterion`: computes the loss if the model returns none, at the last stage that makes a model
      output
    - `precision`: the precision of forwards
    - `dtypes`: the dtypes of boundary tensors
    - `seed`: the seed of random draws in forwards and in the criterion
    - `ema`: the decay of the average of the weights that is evaluated
    - `batch_norm_per_step`: update running statistics once per step instead of once per micro-batch
    - `targets`: the targets that the loss counts

    Raises PlanError if stages and plan do not fit.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, nn.Module],
        transport: Transport,
        *,
        rank_of_stage: Sequence[int] | None = None,
        replicas: Sequence[Sequence[int]] = (),
        staleness: str = "none",
        criterion: Criterion | None = None,
        device: str | torch.device = "cpu",
        precision: Precision = FULL,
        dtypes: BoundaryDtypes = AS_PLANNED,
        seed: int = 0,
        batch_norm_per_step: bool = False,
        ema: float | None = None,
        targets: LossTargets | None = None,
    ) -> None:
        self.plan = plan
        cast = dtypes.cast(plan)
        self.transport = CastingTransport(transport, cast) if cast else transport
        self.rank_of_stage = tuple(rank_of_stage or range(len(plan.stages)))
        self.replicas = tuple(map(tuple, replicas))
        self.criterion = criterion
        self.device = torch.device(device)
        self.precision = replace(precision, default=plan.default_dtype)
        self.dtypes = dtypes
        self.seed = seed
        ranks = self.replicas or tuple((rank,) for rank in self.rank_of_stage)
        expected = [j for j, of_stage in enumerate(ranks) if transport.rank in of_stage]
        if sorted(stages) != expected:
            raise PlanError(
                f"rank {transport.rank} was given stages {sorted(stages)} instead of {expected}."
            )
        self._batch_norms = {j: MiniBatchNorm(stages[j]) for j in expected if batch_norm_per_step}
        self._methods = staleness, ema
        self.targets = targets or LossTargets(plan, stages, criterion)
        self._make_stages({j: stages[j] for j in expected})
        exchanged = replace(plan, shared=()) if self.replicas else plan
        self.shared = SharedGradients(exchanged, stages, self.transport)
        self._model_outputs = output_names(plan)
        self._needed = needed_inputs(plan, expected, criterion=criterion is not None)
        self._draws_numbers = any(stage.draws_numbers for stage in plan.stages)
        self._state_bytes = len(GeneratorState.seeded(self.device, 0, self._draws_numbers).state)

    def _make_stages(self, modules: Mapping[int, nn.Module]) -> None:
        plan, seed = self.plan, self.seed if may_draw(self.criterion) else None
        self.stages = {
            j: Stage(
                module,
                plan.stages[j],
                loss_of=loss_of_stage(plan, j, self.criterion and self.targets.criterion),
                precision=self.precision,
                batch_norm=self._batch_norms.get(j),
                loss_seed=seed,
                captured_dtypes={spec.name: spec.dtype for spec in plan.inputs},
            )
            for j, module in modules.items()
        }
        self.weights = {j: WeightVersions(j, module) for j, module in modules.items()}
        self.binders = {
            j: WeightBinder(weights, make_staleness(*self._methods), shared_weights(plan, j))
            for j, weights in self.weights.items()
        }

    def narrow(self, plan: Plan) -> None:
        """Continues, between two runs, with the parameters that still require a gradient; `plan` is
        the same but for the gradients that boundary tensors need."""
        before, versions = self.binders, self.versions
        self.plan = plan
        self._make_stages({j: stage.module for j, stage in self.stages.items()})
        for j, binder in self.binders.items():
            self.set_version(j, versions[j])
            binder.load(before[j].state_for(self.weights[j]))
        self.shared.forget_frozen()

    @property
    def versions(self) -> dict[int, int]:
        """Optimizer steps taken so far, by stage."""
        return {stage: weights.version for stage, weights in self.weights.items()}

    def set_version(self, stage: int, version: int) -> None:
        """Sets the number of steps of a stage's weights, when a run is resumed."""
        self.weights[stage].version = version

    def lr_scale(self, stage: int, version: int, name: str | None = None) -> float:
        """The staleness methods' factor on the learning rate of the step that makes `version`, for
        the stage's own weights or for the shared weight `name`."""
        return self.binders[stage].lr_scale(version, name)

    def attach(self, optimizers: Mapping[int, Steps]) -> None:
        """Gives the staleness methods the optimizers of the stages, which the observer steps."""
        for stage, steps in optimizers.items():
            self.binders[stage].attach(steps)

    def run(self, schedule: Schedule, feed: Feed, **options: Unpack[RunOptions]) -> RunReport:
        """Runs this rank's actions of a lowered schedule.

        `feed` is called once for each micro-batch whose inputs a stage of this rank reads, with its
        number from `first_micro_batch` on.

        Raises StageError for an exception in a stage's code, TransportError if a tensor never
        arrives, PlanError if shared parameters differ at the start, DataError if the feed lacks an
        input, ScheduleError if the schedule does not fit the stages or ranks.
        """
        paused = self.paused(schedule, feed, **options)
        while True:
            try:
                next(paused)
            except StopIteration as end:
                return cast(RunReport, end.value)

    def paused(
        self, schedule: Schedule, feed: Feed, **options: Unpack[RunOptions]
    ) -> Generator[None, None, RunReport]:
        """`run` as a generator that yields after each optimizer step of a stage."""
        steps = self.steps(schedule, feed, **options)
        while True:
            try:
                handle = next(steps)
            except StopIteration as end:
                return cast(RunReport, end.value)
            if handle is not None:
                steps.close()
                raise TransportError(
                    f"{handle.channel.waiting(handle.index)}, which lives in the same process.",
                    "Run the ranks' steps() with run_together.",
                )
            yield None

    def steps(
        self, schedule: Schedule, feed: Feed, **options: Unpack[RunOptions]
    ) -> Generator[Handle | None, None, RunReport]:
        """`run` as a generator that yields while it waits for a tensor, for `run_together`, and
        None after each optimizer step of a stage."""
        run = self._prepare(schedule, feed, options)
        yield from self.shared.verify_equal()
        ends, ahead = window_ends(run.program), LookAhead(run, self.stages)
        with self._modes(run.training), self._casts_kept(run.training):
            for position, action in enumerate(run.program):
                if run.leaves_out(action):
                    continue
                ahead.before(position)
                run.loss_weights.before(action)
                match "" if run.is_empty(action) else action.kind:
                    case "F":
                        yield from self._forward(run, action)
                    case "B":
                        is_last = action.stage in ends.get(position, ())
                        yield from self._backward(run, action, is_last)
                    case "W":
                        self._weight_backward(run, action)
                    case "S":
                        yield from self._step(run, action)
                        yield None
                    case "SEND_F" | "SEND_B":
                        run.mailbox.send(action)
                    case "RECV_F" | "RECV_B":
                        run.mailbox.post(action)
                if run.ends_backward(action):
                    version = self.weights[action.stage].version + 1
                    run.recorder.observer.on_micro_batch(action.stage, version)
                for stage in ends.get(position, ()):
                    version = self.weights[stage].version + 1
                    self.shared.publish(stage, version)
                    run.recorder.observer.on_gradients(stage, version)
        yield from self.shared.drain()
        run.mailbox.finish()
        return run.recorder.report()

    @contextmanager
    def eval_weights(self) -> Iterator[None]:
        """Inside, the stages have the weights to evaluate and save; some methods train others."""
        with ExitStack() as inside:
            for binder in self.binders.values():
                inside.enter_context(binder.eval_weights())
            yield

    def close(self) -> None:
        """Waits until everything sent has arrived."""
        self.transport.close()

    def _prepare(self, schedule: Schedule, feed: Feed, options: RunOptions) -> PipelineRun:
        training = options.get("training", True)
        check_schedule(schedule, self.replicas or self.rank_of_stage)
        if training:
            check_loss(self.plan, self.criterion)
        program = program_of(schedule, self.transport.rank, options)
        sizes = sizes_of_each(options.get("sizes") or self.plan.sizes, schedule)
        numbers = numbering(schedule, options)
        for binder in self.binders.values() if training else ():
            binder.begin(schedule, micro_batches=numbers.in_all)
        batches = [own.get("batch", 1) for own in sizes]
        empty = frozenset(index for index, samples in enumerate(batches) if not samples)
        rank, observer = self.transport.rank, options.get("observer") or Observer()
        for stage in self.stages.values():
            stage.loss_alone = self.plan.loss is not None and not observer.reads_outputs
        needed = [name for name in self._needed if name != TARGET or options.get("losses", True)]
        fed = FeedOnce(self.plan, feed, needed, len(self.stages), self.device, rank)
        weighed, step_samples = program if training else (), options.get("step_samples")
        return PipelineRun(
            schedule=schedule,
            program=program,
            training=training,
            feed=fed,
            mailbox=self._mailbox(schedule, without(program, empty), sizes, options),
            empty=empty,
            recorder=RunRecorder(observer, keep_events=options.get("record", False)),
            version_pairs=version_pairs(program, self.versions, numbers),
            loss_weights=LossWeights(self.targets, fed, numbers, weighed, batches, step_samples),
            read={},
            split=split_backwards([program]),
            immediate_backward=immediate_backward(program),
            numbers=numbers,
            loss_scale=options.get("loss_scale", 1.0),
            losses=options.get("losses", True),
            may=options.get("may"),
        )

    def _mailbox(
        self, schedule: Schedule, program: Program, sizes: Sequence[Sizes], options: RunOptions
    ) -> Mailbox:
        training, may = options.get("training", True), options.get("may")
        by_index = channels_of_each(
            self.plan,
            schedule,
            sizes,
            shared_specs=self.shared.specs,
            state_bytes=self._state_bytes,
            dtypes=self.dtypes,
        )
        channels = by_index[0]
        self.shared.open(channels)
        if not training:
            channels = tuple(c for c in channels if c.name != GENERATOR_STATE)
        return Mailbox(
            channels,
            self.transport,
            program,
            in_flight=schedule.in_flight if training else None,
            replicas=tuple(map(len, schedule.replicas)),
            by_index=by_index if len(set(map(id, by_index))) > 1 else (),
            may=may and (lambda index: may(index // schedule.step_every + 1)),
        )

    def _forward(self, run: PipelineRun, action: Action) -> Generator[Handle, None, None]:
        stage = self.stages[action.stage]
        micro_batch = run.numbers.number(action.index)
        fed = run.feed(micro_batch)
        inputs = {name: fed[name] for name in stage.spec.inputs if name in fed}
        for channel in run.mailbox.incoming("activation", action.stage):
            inputs[channel.name] = yield from run.mailbox.take(channel, action.index)
        state = inputs.pop(GENERATOR_STATE, None)
        where = action.stage, action.index
        generator = None
        if run.training and stage.spec.draws_random:
            draws = self.device, self.seed, micro_batch, self._draws_numbers
            generator = GeneratorState.of_micro_batch(*draws, state)
        recompute = (
            stage.spec.recompute and stage.has_backward and where not in run.immediate_backward
        )
        with run.recorder.timing(action):
            if run.training:
                outputs, loss = stage.forward(
                    micro_batch,
                    inputs,
                    fed,
                    weights=self._forward_weights(run, where, recompute),
                    generator=generator,
                    recompute=recompute,
                    split=where in run.split,
                    window=run.window_of(action.index),
                )
                loss = run.loss_weights.weighed(action.index, loss, fed)
            else:
                outputs, loss = stage.evaluate(micro_batch, inputs, fed if run.losses else None)
        run.mailbox.completed(action)
        for channel in run.mailbox.outgoing("activation", action.stage):
            name = channel.name
            value = generator.state if generator and name == GENERATOR_STATE else outputs[name]
            run.mailbox.put(channel, action.index, value)
        if loss is not None and self.plan.loss is not None and run.training:
            outputs[self.plan.loss] = loss
        if own_outputs := {name: outputs[name] for name in outputs if name in self._model_outputs}:
            run.recorder.observer.on_outputs(micro_batch, own_outputs)
        if loss is not None:
            run.recorder.loss(micro_batch, *run.loss_weights.reported(action.index, loss, fed))

    def _backward(
        self, run: PipelineRun, action: Action, is_last: bool
    ) -> Generator[Handle, None, None]:
        stage, binder = self.stages[action.stage], self.binders[action.stage]
        micro_batch = run.numbers.number(action.index)
        where = action.stage, action.index
        version = self.weights[action.stage].version + 1
        is_final = None
        if where not in run.split:
            is_final = run.recorder.observer.on_backward(action.stage, version, is_last=is_last)
        repeats = stage.is_repeatable(micro_batch)
        bound = binder.backward(run.version_pairs[where], repeats=repeats, is_final=is_final)
        channels = run.mailbox.incoming("gradient", action.stage)
        if repeats and not all(channel.is_local for channel in channels):
            # Recompute while the gradient is on its way.
            with run.recorder.timing(action):
                stage.recompute(micro_batch, weights=bound)
        arrived: dict[str, list[Tensor]] = {}
        for channel in channels:
            gradient = yield from run.mailbox.take(channel, action.index)
            arrived.setdefault(channel.name, []).append(gradient)
        with run.recorder.timing(action):
            gradients = stage.backward(
                micro_batch,
                arrived,
                weights=bound,
                loss_divisor=run.loss_weights.divisor(action),
                loss_scale=run.loss_scale,
            )
            if where in run.split:
                self.weights[action.stage].add_gradients(micro_batch)
            else:
                self._finish_micro_batch(run, where)
                gradients = binder.corrected(run.version_pairs[where], gradients)
        run.mailbox.completed(action)
        for channel in run.mailbox.outgoing("gradient", action.stage):
            run.mailbox.put(channel, action.index, gradients[channel.name])

    def _weight_backward(self, run: PipelineRun, action: Action) -> None:
        with run.recorder.timing(action):
            self.stages[action.stage].weight_backward(run.numbers.number(action.index))
            self._finish_micro_batch(run, (action.stage, action.index))

    def _forward_weights(
        self, run: PipelineRun, where: tuple[int, int], recompute: bool
    ) -> Weights | None:
        binder, pair = self.binders[where[0]], run.version_pairs[where]
        bound = binder.forward(pair, repeats=recompute)
        if run.recorder.observer.wants_gap(pair.backward_version + 1):
            run.read[where] = sampled(bound or binder.weights.live)
        return bound

    def _finish_micro_batch(self, run: PipelineRun, where: tuple[int, int]) -> None:
        weights, pair = self.weights[where[0]], run.version_pairs[where]
        if read := run.read.pop(where, None):
            gap = gap_to(weights.live, read)
            run.recorder.observer.on_gap(where[0], pair.backward_version + 1, gap)
        run.recorder.ledger_entry(self.binders[where[0]].finish(pair))

    def _step(self, run: PipelineRun, action: Action) -> Generator[Handle, None, None]:
        version = self.weights[action.stage].version + 1
        window = run.window_of((action.index - 1) * run.schedule.step_every)
        yield from self.shared.collect(action.stage, version, partial(shared_delay, run.schedule))
        with run.recorder.timing(action):
            self.stages[action.stage].finish_window(window)
            run.recorder.observer.on_sums(action.stage, version)
            with self.binders[action.stage].stepping():
                run.recorder.observer.on_step(action.stage, version)
            self.precision.forget_casts()

    def _casts_kept(self, training: bool) -> AbstractContextManager[None]:
        """Casts weights once between two steps, unless forwards read copies with reused memory."""
        is_live = all(binder.is_live for binder in self.binders.values())
        return self.precision.casts_kept() if training and is_live else nullcontext()

    @contextmanager
    def _modes(self, training: bool) -> Iterator[None]:
        """Eval mode and `eval_weights` inside, for a run without training; a training run changes
        neither."""
        if training:
            yield
            return
        verify_evaluates(self.plan)
        with self.eval_weights(), in_eval_mode([stage.module for stage in self.stages.values()]):
            yield
