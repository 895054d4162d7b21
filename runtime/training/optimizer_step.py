"""The actions of a pipeline -> optimizer steps, and the metrics of each step."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter, process_time
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..config.batch_layout import StepBatch
from ..config.settings import RunConfig
from ..distributed.equality import held_parameters
from ..distributed.process_groups import World
from ..executor.instrumented import Activities, Activity, Kind, Spent
from ..executor.weight_binding import Gap
from ..monitoring.gather import RankFigures, base_bytes, figures_of, lateness, peak_memory_bytes
from ..optimizers.loss_scale import LossScale
from ..optimizers.param_groups import NOT_HIDDEN
from ..optimizers.soap import refresh_periods
from ..plan.plan import Plan
from ..schedule.asynchronous import Delays
from ..schedule.schedule import Action, Numbering
from ..sharding.matrices import share_out_matrices
from ..sharding.owners import divide
from ..staleness.weight_versions import LedgerEntry
from ..tensor_parallel.ranks import ONE_RANK, TensorRanks
from .clipping import (
    Finite,
    StageNorms,
    StepMessage,
    clip_factor,
    gradients_of,
    mean_loss,
    scale_gradients,
    share_of,
    steps_until_known,
)
from .own_optimizer import OwnOptimizer, StageView
from .replica_gradients import Summed, SummingObserver, gradient_sums
from .stage_optimizer import StageOptimizer, StageSteps, built_in_steps

_WRITING: tuple[Kind, int] = ("writing", -1)
_MEETING: tuple[Kind, int] = ("meet", -1)


class OptimizerStepper(SummingObserver):
    """Clips and steps the stages of one rank, and reports the metrics of every step.

    Synchronous schedules clip by the norm of all stages. Each stage's share is computed after its
    last backward; once a rank has the shares of all its stages it sends them to the other ranks,
    and it waits for the result when all its stages are ready to step. Without clipping and loss
    scale no rank waits. In an asynchronous schedule each stage steps alone, by a norm of
    `StageNorms`. With replicas, gradients are sent as soon as they are final; under every schedule
    a stage waits for their sums before its step, and then computes its share of the norm.

    outputs: the model's outputs by micro-batch, where a caller wants them kept.
    lr_factor: the factor on the scheduled learning rate.
    is_synchronous: True if the stages step together in this segment.

    Arguments:
    report: called with the metrics of a step once all stages of the rank have made it.
    lr_scale: the scale of the learning rate for a stage, a version and a tied parameter's name.
    gradient_group: the group of the ranks with the same stages.
    delays: the steps by which the gradients of each of the plan's stages are late (default 0).
    after_step: called with each stage after its step.
    own: steps the stages in place of the optimizer that the options name.
    learning_rate: as for StageOptimizer.
    tensor_ranks: the ranks that share out the layers of the stages.
    """

    def __init__(
        self,
        plan: Plan,
        modules: Mapping[int, nn.Module],
        config: RunConfig,
        world: World,
        report: Callable[[RankFigures], None],
        *,
        lr_scale: Callable[[int, int, str | None], float],
        activities: Activities | None = None,
        gradient_group: dist.ProcessGroup | None = None,
        delays: Sequence[int] = (),
        after_step: Callable[[int], None] | None = None,
        own: OwnOptimizer | None = None,
        learning_rate: Callable[[int], float] | None = None,
        tensor_ranks: TensorRanks = ONE_RANK,
    ) -> None:
        super().__init__(activities or Activities())
        self._after_step = after_step
        self.outputs: dict[int, dict[str, Tensor]] | None = None
        self.before_step: Callable[[int], None] = lambda stage: None
        self._plan, self._modules, self._config, self._world = plan, modules, config, world
        self._own, self._gradient_group = own, gradient_group
        self._learning_rate = learning_rate
        self._report, self._lr_scale = report, lr_scale
        self._stages = len(plan.stages)
        late = delays or [0] * self._stages
        self._refresh_periods = refresh_periods(late, config.refresh_every or 1)
        # Freezing keeps the owners.
        self._shards = divide(plan, modules, config, gradient_group)
        self._matrices = share_out_matrices(plan, modules, config, tensor_ranks, self._shards)
        self._make_optimizers()
        self._scale = None if config.loss_scale is None else LossScale(config.loss_scale)
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._set_batch(StepBatch.of(config), 0)
        self._losses: dict[int, list[tuple[Tensor, int]]] = defaultdict(list)
        self._passages: dict[int, list[LedgerEntry]] = defaultdict(list)
        self._gaps: dict[int, dict[int, list[Gap]]] = defaultdict(lambda: defaultdict(list))
        self._delays = Delays((0,) * self._stages, 1)
        self.is_synchronous = not config.is_async
        # By step, as one asynchronous stage may be some steps ahead of another.
        self._squares_of: dict[int, dict[int, Tensor]] = defaultdict(dict)
        self._stepped: Counter[int] = Counter()
        self._complete: set[int] = set()
        self._message: StepMessage | None = None
        self._finite = Finite(config, has_own=own is not None)
        self._is_skipped = False
        self._optimizer_s = 0.0
        self._base_bytes = base_bytes(modules, world.machine.device)

    def _make_optimizers(self) -> None:
        plan, config, world, modules = self._plan, self._config, self._world, self._modules
        self._parameters = {j: list(module.parameters()) for j, module in modules.items()}
        tensor_rank, shards = world.tensor_rank, self._shards
        self.shares = {
            j: replace(share_of(plan, j, each, tensor_rank, shards[j]), matrices=self._matrices[j])
            for j, each in modules.items()
        }
        self.sums = gradient_sums(
            self.shares, held_parameters(plan, modules, world), world, self._gradient_group
        )
        self._norms: StageNorms | None = None
        if config.is_async and config.clip:
            self._norms = StageNorms(config, world, self._stages, self.shares, self.activities)
        self._optimizers: dict[int, StageSteps] = {
            j: StageView(module, self._own, self.shares[j])
            if self._own is not None
            else built_in_steps(
                *(plan, j, module, config, self.shares[j]),
                norms=self._norms,
                refresh_every=self._refresh_periods[j],
                learning_rate=self._learning_rate,
            )
            for j, module in modules.items()
        }

    def narrow(self, step: int) -> None:
        """Continues after a step with the parameters that still require a gradient; drops the
        optimizer state of the others. Collective."""
        before, state = self._optimizers, self.state()
        if self.sums is not None:
            self.sums.close()
        self._make_optimizers()
        for stage, optimizer in self._optimizers.items():
            trained = [each for each in self._parameters[stage] if each.requires_grad]
            optimizer.load({each: before[stage].state_of(each) for each in trained}, step)
        self.load(state)
        if self._own is not None:
            self._own.forget_frozen()

    @property
    def optimizers(self) -> Mapping[int, StageSteps]:
        """The optimizers of the rank's stages."""
        return self._optimizers

    @property
    def loss_scale(self) -> float:
        """The factor by which the loss of the next step is multiplied for its backwards."""
        return self._scale.value if self._scale else 1.0

    def state(self) -> dict[str, Any]:
        """The state that the next steps depend on, besides weights, optimizers and data, as JSON;
        valid between two segments and the same on all ranks."""
        return {
            "loss_scale": self._scale.state() if self._scale else None,
            "norms": self._norms.state() if self._norms else None,
            "lr_factor": self.lr_factor,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state` returned, as far as this run uses it."""
        if self._scale and state["loss_scale"]:
            self._scale.load(state["loss_scale"])
        if self._norms and state["norms"]:
            self._norms.load(state["norms"])
        self.set_lr_factor(state.get("lr_factor", 1.0))

    def set_lr_factor(self, factor: float) -> None:
        """Sets the factor on the scheduled learning rate of all later steps."""
        self.lr_factor = factor
        for optimizer in self._optimizers.values():
            if isinstance(optimizer, StageOptimizer):
                optimizer.lr_factor = factor

    def start_segment(
        self,
        step: int = 1,
        first_micro_batch: int = 0,
        delays: Delays | None = None,
        *,
        flushed: bool = False,
        batch: StepBatch | None = None,
    ) -> None:
        """Starts a segment; of the time since the last step, only that of writing counts.

        step: the first step of the segment.
        delays: its expected delays.
        flushed: True for a synchronous segment in an asynchronous run.
        batch: the samples of its micro-batches, if not as before.
        """
        if batch is not None:
            self._set_batch(batch, step - 1)
        self._first_step, self._numbers = step, self._batch.numbering(first_micro_batch)
        self._delays = delays or Delays((0,) * self._stages, 1)
        self.is_synchronous = flushed or not self._config.is_async
        self.activities.step, self.activities.numbers = step, self._numbers
        self._between = self.activities.take()
        self.activities.take_sent()

    lr_factor = 1.0
    _first_step, _numbers = 1, Numbering()
    """The first step of the segment, and the numbers of its micro-batches."""
    _between: Spent = {}  # the time between the last step and the segment

    def _set_batch(self, batch: StepBatch, step: int) -> None:
        world, samples = self._world, sum(batch.sizes_at(step))
        self._batch = batch
        self._sizes = batch.sizes_of(world.replica, step)
        # The share of this rank's samples in those of the step, and of these in a whole step's.
        self._part = sum(world.grid.share_of(world.rank, self._sizes)) / samples
        self._part *= world.tensor_rank == 0  # which reports the loss of the others' same samples
        self._whole = samples / batch.samples

    def on_action(self, action: Action, start_s: float, end_s: float) -> None:
        super().on_action(action, start_s, end_s)
        if action.kind == "S" and self._after_step is not None:
            self._after_step(action.stage)

    def on_loss(self, micro_batch: int, loss: Tensor, targets: float | None) -> None:
        step, place = divmod(self._numbers.index(micro_batch), len(self._sizes))
        self._losses[self._first_step + step].append((loss, self._sizes[place]))

    @property
    def reads_outputs(self) -> bool:
        return self.outputs is not None

    def on_outputs(self, micro_batch: int, outputs: Mapping[str, Tensor]) -> None:
        if self.outputs is not None:
            self.outputs.setdefault(micro_batch, {}).update(outputs)

    def on_ledger_entry(self, entry: LedgerEntry) -> None:
        if self._config.is_async:
            # The closed form counts the micro-batches of this pipeline alone.
            own = self._numbers.first + self._numbers.index(entry.micro_batch)
            self._passages[entry.backward_version + 1].append(replace(entry, micro_batch=own))

    def wants_gap(self, version: int) -> bool:
        return self._config.is_async and self._config.is_logged(version)

    def on_gap(self, stage: int, version: int, gap: Gap) -> None:
        self._gaps[version][stage].append(gap)

    def on_gradients(self, stage: int, version: int) -> None:
        super().on_gradients(stage, version)
        if self.sums is None and self.is_synchronous:
            self._take_own(stage, version)

    def _take_own(self, stage: int, version: int) -> None:
        with self.activities.during(Activity("norm", Action(stage, "S", 1), 1)):
            share = self.shares[stage]
            self._take(stage, version, share.own, share.counted_own)
            if not share.shared:
                self._completed(stage, version)

    def be_idle(self, version: int) -> None:
        """Takes part in a step without a stage: in what all ranks agree on, and its metrics."""
        if self._is_agreed:
            self._completed(-1, version)
            self._agreed_factor(version)
        self._finish_step(version)

    def on_step(self, stage: int, version: int) -> None:
        if self.is_synchronous:
            self._step_together(stage, version)
        else:
            self._step_alone(stage, version)
        if self._stepped[version] == len(self._optimizers):
            self._finish_step(version)

    def _step_alone(self, stage: int, version: int) -> None:
        if self._norm_is_wanted(version):
            share = self.shares[stage]
            self._squares_of[version][stage] = share.square(share.counted)
        if self._norms is None:
            self._step(stage, version, 1.0)
            return
        late = steps_until_known(self._delays.ahead, self._delays.step_every)
        own, shared = self._norms.of(stage, version, late)
        for norm in (own, *shared.values()):
            self._finite.check_norm(version, norm.norm, {stage: norm.norm})
        factors = {name: norm.factor for name, norm in shared.items()}
        self._step(stage, version, own.factor, factors)

    def _take(
        self,
        stage: int,
        version: int,
        parameters: list[nn.Parameter],
        counted: list[nn.Parameter],
    ) -> None:
        """Unscales complete gradients and adds their squares to the stage's."""
        if self._scale:
            self._scale.unscale(gradients_of(parameters))
        if self._norm_is_wanted(version):
            square = self.shares[stage].square(counted)
            squares = self._squares_of[version]
            before = squares.get(stage)
            squares[stage] = square if before is None else before + square

    def _completed(self, stage: int, version: int) -> None:
        """Sends the rank's part of the message after the last of its stages."""
        self._complete.add(stage)
        if len(self._complete) < len(self._optimizers) or not self._is_agreed:
            return
        losses = self._losses.get(version)
        self._message = StepMessage(
            self._squares_of[version],
            self._stages,
            self._world,
            overflowed=self._scale is not None and self._scale.overflowed(),
            loss=mean_loss(losses) * self._part if losses else 0.0,
        )

    def _step_together(self, stage: int, version: int) -> None:
        if self.sums is not None:
            self._take_own(stage, version)
        if shared := self.shares[stage].shared:
            self._take(stage, version, shared, self.shares[stage].owned)
            self._completed(stage, version)
        if not self._is_agreed:
            self._step(stage, version, 1.0)
            return
        # The pipeline drops a stage's gradients after its own step action.
        self._gradients[stage] = [parameter.grad for parameter in self._parameters[stage]]
        if len(self._gradients) < len(self._optimizers):
            return
        for index, gradients in self._gradients.items():
            for parameter, gradient in zip(self._parameters[index], gradients, strict=True):
                parameter.grad = gradient
        factor = self._agreed_factor(version)
        for index in self._gradients:
            self._step(index, version, factor)
            for parameter in self._parameters[index]:
                parameter.grad = None
        self._gradients.clear()

    def _agreed_factor(self, version: int) -> float:
        assert self._message is not None
        with self.activities.during(Activity("meet", "the norm of all gradients")):
            agreed = self._message.agreed()
        self._message = None
        self._finite.check_loss(version, agreed.loss)
        self._is_skipped = agreed.overflowed
        if self._scale:
            self._scale.update(overflowed=agreed.overflowed)
            self._finite.check_scale(version, self.loss_scale)
        if not self._config.clip or self._is_skipped:
            return 1.0
        self._finite.check_norm(version, agreed.norm, dict(enumerate(agreed.squares)))
        return clip_factor(agreed.norm, self._config.clip)

    def _step(
        self, stage: int, version: int, factor: float, of_shared: Mapping[str, float] | None = None
    ) -> None:
        """Steps a stage with its gradients scaled by `factor`, and those of tied parameters by
        `of_shared`: these factors, like the scales of their learning rates, are the same at all
        holders."""
        start_s, start_cpu_s = perf_counter(), process_time()
        if self._is_skipped:
            self._optimizers[stage].skip()
        else:
            self.before_step(stage)
            share, whole = self.shares[stage], self._whole
            scale_gradients(share.own, factor)
            for name, parameter in share.shared_by_name.items():
                scale_gradients([parameter], (of_shared or {}).get(name, factor))
            self._optimizers[stage].step(
                whole * self._lr_scale(stage, version, None),
                {
                    name: whole * self._lr_scale(stage, version, name)
                    for name in (*share.shared_by_name, NOT_HIDDEN)
                },
            )
        self._optimizer_s += min(perf_counter() - start_s, process_time() - start_cpu_s)
        self._stepped[version] += 1

    @property
    def _is_agreed(self) -> bool:
        """True if a step depends on data of other stages."""
        return bool(self._config.clip) or self._scale is not None

    def _norm_is_wanted(self, version: int) -> bool:
        return bool(self._config.clip) or self._config.is_logged(version)

    def _finish_step(self, version: int) -> None:
        spent, sent = self.activities.take(), self.activities.take_sent()
        spent[_WRITING] = spent.get(_WRITING, 0.0) + self._between.pop(_WRITING, 0.0)
        if not self._optimizers:
            spent = {_MEETING: sum(spent.values())}
        summed = self.sums.take_counts(version) if self.sums is not None else Summed()
        losses = self._losses.pop(version, None)
        if losses:
            self._finite.check_loss(version, mean_loss(losses))
        met = self._passages.pop(version, [])
        own_squares = self._squares_of.pop(version, {})
        is_known = bool(own_squares or not self._optimizers) and not self._is_skipped
        if is_known and not self._config.clip:
            self._finite.note_norm(version, math.sqrt(sum(map(float, own_squares.values()))))
        # Replicas have the same gradients; the first one reports their squares.
        squares = dict.fromkeys(self._modules, 0.0 if is_known else math.nan)
        if is_known and self._world.copy == 0:
            squares |= {stage: float(square) for stage, square in own_squares.items()}
        with self.activities.during(Activity("other", "reports a step to rank 0")):
            figures = figures_of(
                spent,
                sent + summed.sent if self._config.has_network else {},
                self._stages,
                step=version,
                loss=self._finite.loss * self._part if losses else math.nan,
                squares=tuple(squares.get(stage, 0.0) for stage in range(self._stages)),
                optimizer_s=self._optimizer_s,
                mem_bytes=peak_memory_bytes(self._world.machine.device),
                base_bytes=self._base_bytes,
                loss_scale=self.loss_scale,
                skipped=self._scale.skipped if self._scale else 0,
                **lateness(met, self._gaps.pop(version, {}), self._delays),
                summed=summed.elements if self._world.copy == 0 else 0,
            )
            self._report(figures)
        del self._stepped[version]
        self._optimizer_s = 0.0
        self._complete.clear()
        self._is_skipped = False
