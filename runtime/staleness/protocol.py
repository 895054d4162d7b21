"""The interface of a staleness method: the parts it decides, its requirements and its hooks.

All published methods can be written with these hooks: they choose the weights that a forward and a
backward read, change the gradient of a micro-batch or of an accumulation window, scale the learning
rate, and wrap the optimizer step. Each stage has its own object of each method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..schedule.asynchronous import Delays
from .weight_versions import View, Weights, WeightVersions

Part = Literal["forward", "backward", "horizon", "gradient", "rate", "momentum", "step"]
"""A part of training on stale weights that only one method may decide:

- forward: the weights that a forward reads
- backward: the weights that a backward reads
- horizon: how many steps ahead weights are predicted
- gradient: the correction of gradients
- rate: the learning rate
- momentum: how long gradients are averaged
- step: the optimizer step
"""

Need = Literal[
    "forward weights",
    "gap",
    "recomputation",
    "response to gradients",
    "known step sizes",
    "all gradients",
    "whole windows",
    "velocity",
    "direction",
    "moments",
    "inertia",
    "formula",
    "update rule",
    "nesterov",
    "rates",
    "hidden matrices",
]
"""A requirement of a method:

- forward weights: the weights of the forward are still available after its backward
- gap: the difference between the forward's weights and the live ones: the former are available, or
  they are one step of a known optimizer old
- recomputation: the backward repeats the forward
- response to gradients: an optimizer whose momentum moves the weights by a known share of a
  gradient in each step after it
- known step sizes: an optimizer whose state gives the sizes of its steps
- all gradients: those of every micro-batch of a step are on one rank; replicas have some each
- whole windows: accumulation windows of more micro-batches than any stage runs ahead
- velocity: an optimizer whose momentum has the units of weights
- direction: an optimizer whose last step has a direction
- moments: an optimizer with Adam's moments of every weight
- inertia: an optimizer that keeps moving the weights without gradients
- formula: an optimizer whose steps have a formula
- update rule: an optimizer whose weight decay is known
- nesterov: an optimizer with Nesterov momentum
- rates: another method that expects learning rates
- hidden matrices: an optimizer of hidden matrices, with AdamW for all other weights
"""


State = Mapping[str, Weights]
"""The state that a method keeps between two segments: key -> tensors by weight name."""


class BackwardReads(Enum):
    """The weights that a backward reads, unless it reads a view."""

    FORWARD = "forward"
    """The weights that its forward read."""
    LIVE = "live"
    """The live weights."""
    AS_SAVED = "as saved"
    """The weights that autograd saved in the forward; with recompute, the live weights."""


@dataclass(frozen=True, slots=True)
class VersionPair:
    """The weight versions of a micro-batch at a stage, known from the schedule before the run."""

    micro_batch: int
    forward_version: int
    backward_version: int
    """Also the number of steps before the one that uses the micro-batch's gradient."""

    @property
    def delay(self) -> int:
        """The number of optimizer steps between the forward and the backward."""
        return self.backward_version - self.forward_version

    @property
    def crosses_step(self) -> bool:
        """True if the optimizer steps between the forward and the backward."""
        return self.delay > 0


class Steps(Protocol):
    """The interface of a stage's optimizer for methods; `optimizer` is None for a stage without
    parameters."""

    @property
    def optimizer(self) -> Optimizer | None: ...

    @property
    def moves_weights(self) -> bool:
        """True if the optimizer's `eval()` moves the weights to those to evaluate, and its
        `train()` back, as those of schedule-free optimizers (Defazio et al., NeurIPS 2024)."""
        ...

    def future_lr(self, steps: int) -> tuple[float, ...]:
        """Factors on the base learning rate for each of the next `steps` steps."""
        ...

    @property
    def annealing_steps(self) -> int:
        """The number of steps after which `pipemare-rate` returns to the scheduled learning
        rate."""
        ...

    def clip_factor(self, gradients: Sequence[Tensor], scale: float) -> float:
        """The factor by which the next step would clip the stage's gradients if they were
        `gradients` times `scale`; an estimate made without waiting for other stages."""
        ...

    def follow(self, act: Callable[[], None]) -> None:
        """Calls `act` after every step of the stage."""
        ...

    def spread(self, tensors: Mapping[Tensor, Tensor]) -> None:
        """Gives tensors, by their weight, the values that they have in the replica that has the
        optimizer's state of that weight. Collective among the replicas."""
        ...


@dataclass(frozen=True, slots=True)
class OptimizerView:
    """A stage's optimizer, and the learning rates that a prediction expects of it."""

    steps: Steps
    weights: WeightVersions
    lr_scale: Callable[[int, str | None], float]
    """Version, name of a shared weight or None -> the product of the methods' learning rate factors
    in the step that makes the version, for that shared weight or for the stage's own weights."""
    follows_schedule: bool
    """Expect the learning rates of the scheduler; otherwise that of the next step for all steps."""

    @property
    def optimizer(self) -> Optimizer | None:
        return self.steps.optimizer

    @property
    def annealing_steps(self) -> int:
        """The optimizer's `annealing_steps`."""
        return self.steps.annealing_steps

    def future_lr(self, steps: int) -> tuple[float, ...]:
        """The scheduler's factors, without those of the methods."""
        return self.steps.future_lr(steps)

    def clip_factor(self, gradients: Sequence[Tensor], scale: float) -> float:
        """The optimizer's `clip_factor`."""
        return self.steps.clip_factor(gradients, scale)

    def spread(self, leaves: Weights) -> None:
        """Gives leaves, by name, the values of the replicas that have the optimizer's state."""
        live = self.weights.live
        self.steps.spread({live[name]: leaf for name, leaf in leaves.items()})

    def expected_lr(self, steps: int, name: str | None = None) -> tuple[float, ...]:
        """The expected factors on the base learning rate for each of the next steps: those of the
        scheduler times those of the methods. For the stage's own weights, or for the shared weight
        `name`."""
        ahead = self.future_lr(steps) if self.follows_schedule else self.future_lr(1) * steps
        coming = self.weights.version + 1
        return tuple(
            factor * self.lr_scale(version, name) for version, factor in enumerate(ahead, coming)
        )


@dataclass(frozen=True, slots=True)
class StageContext:
    """The position of a method's stage, and the delays of gradients in the segment that begins."""

    stage: int
    delays: Delays
    """The delays of all stages; all zero in a `synchronous` schedule."""
    micro_batches: int
    """The micro-batches of a step in all replicas of the pipeline."""
    synchronous: bool = False
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Name of a weight that other stages hold too -> all stages that hold it."""
    keeps_forward: bool = False
    """True if a method keeps the weights of forwards until their backwards."""

    @property
    def stages(self) -> int:
        return len(self.delays.ahead)

    @property
    def ahead(self) -> int:
        """The number of forwards that the stage runs ahead."""
        return self.delays.ahead[self.stage]

    @property
    def step_every(self) -> int:
        """The number of micro-batches in a step of one pipeline."""
        return self.delays.step_every

    @property
    def delay(self) -> int:
        """The largest number of steps between the version that a forward reads and the live version
        at its backward."""
        return self.delays.most(self.stage)

    def tau(self, version: int, name: str | None = None) -> float:
        """The mean delay of the gradients that the step to `version` uses. A shared weight has its
        own delay, the same at all stages that hold it."""
        if name is not None and name in self.shared:
            return float(self.delays.of_shared_step(self.shared[name], version))
        return float(self.delays.of_step(self.stage, version))


class Staleness:
    """A staleness method, with hooks that do nothing: what no method decides uses the live
    weights."""

    decides: ClassVar[frozenset[Part]] = frozenset()
    """The parts that the method decides; no two methods of a run may decide the same part."""
    leaves: ClassVar[frozenset[Part]] = frozenset()
    """The parts that must stay undecided; no other method may decide them."""
    needs: ClassVar[frozenset[Need]] = frozenset()
    """The requirements of the method."""
    keeps_forward: ClassVar[bool] = False
    """Keep the weights of a forward until its backward, if the optimizer steps in between."""
    expects_rates: ClassVar[bool] = False
    """True if the method predicts with the learning rates of future steps."""
    follows_schedule: ClassVar[bool] = False
    """Predict with the learning rates that the scheduler will set."""
    name: str = ""
    """The name in `--staleness`."""
    context: StageContext
    steps: OptimizerView | None = None

    @property
    def corrects_live(self) -> bool:
        """True if the method corrects the gradients of late micro-batches that read live weights;
        they join those of others afterwards."""
        return False

    @property
    def optimizer(self) -> Optimizer | None:
        """The stage's optimizer, if it has one."""
        return None if self.steps is None else self.steps.optimizer

    def leave(self, weights: WeightVersions, state: State) -> None:
        """Called with the saved state of the method where a run goes on without it: gives the live
        weights the values with which it does."""

    def in_context(self, context: StageContext, state: State) -> StageContext:
        """The stage's context, changed for all methods of the stage; `state` is the state to be
        loaded."""
        return context

    def kept(self) -> Iterator[Tensor]:
        """The tensors that the method keeps between two steps."""
        return _tensors_in(vars(self))

    def begin(self, context: StageContext) -> None:
        """Called before a segment's first action."""
        self.context = context

    def state(self, weights: WeightVersions) -> State:
        """The method's state between two segments, for a checkpoint. The tensors are the method's
        own: copy them."""
        return {}

    def load(self, weights: WeightVersions, state: State) -> None:
        """Restores a `state` that is not empty; called after `begin`. The method takes over the
        tensors, which are on the device of the weights; tensors of some weights may be missing."""

    def forward_view(self, weights: WeightVersions, pair: VersionPair) -> View | None:
        """The weights that the forward reads; None for the live weights."""
        return None

    def backward_reads(self, weights: WeightVersions, pair: VersionPair) -> View | BackwardReads:
        """The weights that the backward reads."""
        return BackwardReads.AS_SAVED

    def after_backward(
        self, weights: WeightVersions, pair: VersionPair, gradients: Weights
    ) -> None:
        """May change the `.grad` of a micro-batch's leaves before they are added to those of its
        window. Called if the forward read an older version than the live one and its weights were
        needed."""

    def factor_on_sent(self, pair: VersionPair) -> Tensor | None:
        """The factor on the gradients that the stage sends to earlier stages for a micro-batch;
        None for 1. Called after `after_backward`."""
        return None

    def transform_gradient(self, weights: WeightVersions) -> None:
        """May change the live `.grad` of a complete window, before it is clipped and used."""

    def lr_scale(self, version: int, name: str | None = None) -> float:
        """The factor on the learning rate of the step that makes `version`: for the stage's own
        weights; for those of them that an optimizer of hidden matrices leaves to AdamW, if `name`
        is `NOT_HIDDEN`; or for the shared weight `name`, for which it is the same at all stages
        that hold it."""
        return 1.0

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        """Wraps the optimizer step on the live weights, which keep their `.grad` until it ends."""
        yield

    def after_step(self, weights: WeightVersions) -> None:
        """Called after a step, when `weights.version` is the new version."""

    @contextmanager
    def eval_weights(self, weights: WeightVersions) -> Iterator[None]:
        """Inside, the live weights are those to evaluate and to save, for a method that trains with
        others."""
        yield


def filled(weights: WeightVersions, tensors: Weights) -> dict[str, Tensor]:
    """A tensor for each weight, in their order; zeros where `tensors` has none."""
    return {
        name: tensors[name] if name in tensors else torch.zeros_like(weight)
        for name, weight in weights.live.items()
    }


def _tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
