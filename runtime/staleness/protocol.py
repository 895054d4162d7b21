"""What a staleness method is: what it decides for a stage, what it needs, and its hooks.

The hooks are those in which all published methods can be written: which weights a forward reads
and which its backward, how a micro-batch's and a window's gradient is changed, how far the learning
rate is scaled, and what is done around a step. A method has one object a stage.
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

from ..delays import Delays
from ..versions import View, Weights, WeightVersions

Part = Literal["forward", "backward", "horizon", "gradient", "rate", "step"]
"""What of training on stale weights one method alone can decide: which weights a forward reads,
which a backward, how far ahead weights look, what becomes of a gradient, the learning rate, and
the step."""

Need = Literal[
    "forward weights",
    "recomputation",
    "momentum",
    "adam",
    "sgd's momentum",
    "known step sizes",
    "whole windows",
    "velocity",
    "direction",
    "inertia",
    "nesterov",
    "rates",
]
"""What a method cannot do without: the weights of the forward when the gradient is there; a second
forward; an optimizer with a momentum buffer, with Adam's two moments, SGD with momentum, or one
whose steps' sizes are known from its state; windows of more micro-batches than any stage runs
ahead; an optimizer whose momentum is in the units of weights, one whose last step has a direction,
one that goes on without gradients, one with a momentum of Nesterov's; another method that expects
learning rates."""


State = Mapping[str, Weights]
"""What a method keeps over a drain: a part of it -> its tensors by the names of the weights."""


class Reads(Enum):
    """The weights that a backward reads, if not a view: those that its forward read, the live ones,
    or `AS_SAVED`: what the forward saved, and live ones in a second forward."""

    FORWARD = "forward"
    LIVE = "live"
    AS_SAVED = "as saved"


@dataclass(frozen=True, slots=True)
class Passage:
    """A micro-batch's way through a stage, known from the schedule before it begins.

    `backward_version` is also the number of steps before the one that uses its gradient.
    """

    micro_batch: int
    forward_version: int
    backward_version: int

    @property
    def horizon(self) -> int:
        """The steps between the forward and the backward."""
        return self.backward_version - self.forward_version

    @property
    def straddles(self) -> bool:
        """Whether a step lies between the forward and the backward."""
        return self.horizon > 0


class Steps(Protocol):
    """A stage's optimizer as methods see it; `optimizer` is None for a stage without parameters."""

    @property
    def optimizer(self) -> Optimizer | None: ...

    def future_lr(self, steps: int) -> tuple[float, ...]:
        """What the base learning rate is multiplied by in each of the next `steps` steps."""
        ...

    @property
    def annealing_steps(self) -> int:
        """The steps over which `pipemare-rate` comes back to the scheduled learning rate."""
        ...

    def clip_factor(self, gradients: Sequence[Tensor], scale: float) -> float:
        """The factor by which the coming step would clip the stage's gradients if they were
        `gradients` times `scale`; estimated without waiting for other stages."""
        ...


@dataclass(frozen=True, slots=True)
class Outlook:
    """A stage's optimizer, and what a prediction is to expect of it.

    `lr_scale` is the staleness methods' factor on the step that makes a version, of the stage's own
    weights or of a shared one that is named. Expected is what
    the scheduler says, if the outlook `follows_schedule`, and else the coming step's learning rate
    for all; times the factors of the methods.
    """

    steps: Steps
    weights: WeightVersions
    lr_scale: Callable[[int, str | None], float]
    follows_schedule: bool

    @property
    def optimizer(self) -> Optimizer | None:
        return self.steps.optimizer

    @property
    def annealing_steps(self) -> int:
        """Those of the optimizer."""
        return self.steps.annealing_steps

    def future_lr(self, steps: int) -> tuple[float, ...]:
        """What the scheduler says, without the methods' factors."""
        return self.steps.future_lr(steps)

    def clip_factor(self, gradients: Sequence[Tensor], scale: float) -> float:
        """The factor by which the optimizer would clip such gradients."""
        return self.steps.clip_factor(gradients, scale)

    def expected_lr(self, steps: int, name: str | None = None) -> tuple[float, ...]:
        """What the base learning rate is expected to be multiplied by in each of the next steps,
        for the stage's own weights or for a shared one that is named."""
        ahead = self.future_lr(steps) if self.follows_schedule else self.future_lr(1) * steps
        coming = self.weights.version + 1
        return tuple(
            factor * self.lr_scale(version, name) for version, factor in enumerate(ahead, coming)
        )


@dataclass(frozen=True, slots=True)
class Situation:
    """Where a method's stage is, and how late gradients are in the segment that begins.

    `delays` are those of all stages, none in a `synchronous` schedule. `shared` has the stages that
    hold each of this stage's weights that others hold too.
    """

    stage: int
    delays: Delays
    synchronous: bool = False
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        return len(self.delays.ahead)

    @property
    def ahead(self) -> int:
        """The forwards that the stage runs ahead."""
        return self.delays.ahead[self.stage]

    @property
    def step_every(self) -> int:
        """The micro-batches of a step."""
        return self.delays.step_every

    @property
    def delay(self) -> int:
        """The most steps between the version that a forward reads and the one that its backward
        meets."""
        return self.delays.most(self.stage)

    def tau(self, version: int, name: str | None = None) -> float:
        """The mean delay of the gradients that the step to `version` uses. A shared weight that is
        named has another one, the same at all its holders."""
        if name is not None and name in self.shared:
            return float(self.delays.of_shared_step(self.shared[name], version))
        return float(self.delays.of_step(self.stage, version))


class Staleness:
    """The hooks, each doing nothing: what nobody decides is done with live weights."""

    decides: ClassVar[frozenset[Part]] = frozenset()
    leaves: ClassVar[frozenset[Part]] = frozenset()
    """What it says that nothing is done about, so that no other method may decide it."""
    needs: ClassVar[frozenset[Need]] = frozenset()
    keeps_forward: ClassVar[bool] = False
    """Whether the weights of a forward are kept until the backward, if a step lies in between."""
    expects_rates: ClassVar[bool] = False
    """Whether it predicts by the learning rates of steps to come."""
    follows_schedule: ClassVar[bool] = False
    """Whether predictions are to go by the learning rates that the scheduler will set."""
    name: str = ""
    """That of the option it was made by."""
    situation: Situation
    steps: Outlook | None = None

    @property
    def optimizer(self) -> Optimizer | None:
        """The stage's, if there is one."""
        return None if self.steps is None else self.steps.optimizer

    def situated(self, situation: Situation, state: State) -> Situation:
        """The situation as this method makes it for all methods of the stage; `state` is what it
        is about to load."""
        return situation

    def kept(self) -> Iterator[Tensor]:
        """The tensors that the method has between two steps."""
        return _tensors_in(vars(self))

    def begin(self, situation: Situation) -> None:
        """Called before a segment's first action."""
        self.situation = situation

    def state(self, weights: WeightVersions) -> State:
        """What a run that is resumed here needs of this one, between two segments; the tensors are
        the method's own, to be copied."""
        return {}

    def load(self, weights: WeightVersions, state: State) -> None:
        """Takes up what `state` gave, if that was anything, after `begin`. The tensors are the
        method's own, and where the weights are; of some weights there may be none."""

    def forward_view(self, weights: WeightVersions, passage: Passage) -> View | None:
        """What the forward reads, None for the live weights."""
        return None

    def backward_reads(self, weights: WeightVersions, passage: Passage) -> View | Reads:
        """What the backward reads."""
        return Reads.AS_SAVED

    def after_backward(self, weights: WeightVersions, passage: Passage, gradients: Weights) -> None:
        """May change the `.grad` of the leaves of a micro-batch whose forward read an older version
        than is live, before they are added to those of its window. Only where its forward's weights
        are needed."""

    def transform_gradient(self, weights: WeightVersions) -> None:
        """May change the live `.grad` of a finished window, before it is clipped and used."""

    def lr_scale(self, version: int, name: str | None = None) -> float:
        """The factor on the learning rate of the step that makes `version`, for the stage's own
        weights or for a shared one that is named: that is the same at all its holders."""
        return 1.0

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        """Surrounds the optimizer's step on the live weights, whose `.grad` are there until after
        it."""
        yield

    def after_step(self, weights: WeightVersions) -> None:
        """Called when `weights.version` is the new version."""

    @contextmanager
    def settled(self, weights: WeightVersions) -> Iterator[None]:
        """Inside, the live weights are those that the training has come to, for a method that
        keeps others to compute with."""
        yield


def filled(weights: WeightVersions, tensors: Weights) -> dict[str, Tensor]:
    """A tensor of each weight, in their order; zeros where there is none."""
    return {
        name: tensors[name] if name in tensors else torch.zeros_like(weight)
        for name, weight in weights.live.items()
    }


def _tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors_in(one)
