"""A stage's optimizer -> what of it a correction goes by: rates, decay, and the moment of a step.

The learning rate of a step is known for certain only when the optimizer begins it: a schedule and
other methods change it. So what needs it is done at that moment, in a hook of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import AdamW, Muon, NAdam, Optimizer

from ..optimizers.joint import Joint
from ..optimizers.soap import Soap
from .protocol import Outlook

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """How a weight is stepped: the options of its group, and whether its decay is decoupled,
    w <- (1 - lr decay) w, or a part of the gradient."""

    options: Options
    decoupled: bool

    @property
    def lr(self) -> float:
        """As it is now; in a step, that of the step."""
        return float(self.options["lr"])

    @property
    def decay(self) -> float:
        return float(self.options.get("weight_decay", 0.0))

    def scheduled_lr(self, outlook: Outlook) -> float:
        """That of the coming step, as the schedule has it."""
        return float(self.options.get("initial_lr", self.options["lr"])) * outlook.future_lr(1)[0]

    def decayed(self, weight: Tensor) -> Tensor:
        """A copy of the weight, less what the step is to take off it without a gradient."""
        return weight * (1 - self.lr * self.decay) if self.decoupled else weight.clone()


def rules(optimizer: Optimizer, live: Mapping[str, Tensor]) -> dict[str, Rule]:
    """The rule of each of a stage's live weights, by name."""
    parts = optimizer.parts if isinstance(optimizer, Joint) else (optimizer,)
    by_identity = {
        id(weight): Rule(group, _is_decoupled(part, group))
        for part in parts
        for group in part.param_groups
        for weight in group["params"]
    }
    return {name: by_identity[id(weight)] for name, weight in live.items()}


@contextmanager
def at_step(optimizer: Optimizer, act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` when the optimizer begins a step, if it does so within."""
    handle = optimizer.register_step_pre_hook(lambda *_: act())
    try:
        yield
    finally:
        handle.remove()


def _is_decoupled(optimizer: Optimizer, group: Options) -> bool:
    if isinstance(optimizer, NAdam):
        return bool(group["decoupled_weight_decay"])
    return isinstance(optimizer, AdamW | Muon | Soap)
