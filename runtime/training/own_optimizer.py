"""An optimizer of the user's own -> the steps of a rank's stages.

A torch optimizer steps every parameter that it has. The stages of a rank step at different moments,
and staleness methods scale their learning rates, so each step sees a view of the optimizer's groups
with the parameters of one stage alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class OwnOptimizer:
    """The optimizer that the user gives with a step, and the scheduler that follows its steps.

    left: the gradients of a step without an optimizer, which the user's loop applies.
    """

    def __init__(self) -> None:
        self.left: dict[nn.Parameter, Tensor] = {}
        self.optimizer: Optimizer | None = None
        self._scheduler: LRScheduler | None = None
        self._first_step = 0
        self._rates: list[list[float]] = []

    def use(self, optimizer: Optimizer | None, scheduler: LRScheduler | None, step: int) -> None:
        """Sets the optimizer, and the scheduler that is stepped after each of its steps, from
        `step` (counted from 0) on."""
        self.optimizer, self._scheduler = optimizer, scheduler
        self._first_step, self._rates = step, []

    def rates_at(self, step: int) -> list[float] | None:
        """The learning rate of each group at a step, counted from 0; None where the user sets them.

        Stages reach a step at different moments, and its first one steps the scheduler.
        """
        if self._scheduler is None or self.optimizer is None:
            return None
        while len(self._rates) <= step - self._first_step:
            if self._rates:
                self._scheduler.step()
            self._rates.append([group["lr"] for group in self.optimizer.param_groups])
        return self._rates[step - self._first_step]

    def finish(self) -> None:
        """Steps the scheduler for the last step, as a loop does."""
        if self._scheduler is not None and self._rates:
            self._scheduler.step()


class StageView:
    """The steps of one stage by the user's optimizer."""

    annealing_steps = 1

    def __init__(self, stage: nn.Module, own: OwnOptimizer, shared: Mapping[str, Tensor]) -> None:
        self._parameters = [each for each in stage.parameters() if each.requires_grad]
        self._own, self._shared = own, shared
        self._done = 0

    @property
    def optimizer(self) -> Optimizer | None:
        return self._own.optimizer if self._parameters else None

    def future_lr(self, steps: int) -> tuple[float, ...]:
        """The present factor of the learning rate, for every step: the user alone knows the next
        ones."""
        if self.optimizer is None:
            return ()
        group = self.optimizer.param_groups[0]
        return (group["lr"] / (group.get("initial_lr", group["lr"]) or 1.0),) * steps

    def clip_factor(self, gradients: Sequence[Tensor], scale: float) -> float:
        """1: what the user's loop clips is not known before."""
        return 1.0

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The optimizer's state of a parameter."""
        state = self.optimizer.state.get(parameter, {}) if self.optimizer is not None else {}
        return {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def load(self, states: Mapping[Tensor, Mapping[str, Tensor]], steps: int) -> None:
        """Restores the states that `state_of` returned, after `steps` steps."""
        self._done = steps
        if self.optimizer is not None:
            for parameter, state in states.items():
                self.optimizer.state[parameter] = dict(state)

    def skip(self) -> None:
        """Leaves a step out."""
        self._own.rates_at(self._done)
        self._done += 1

    def step(self, lr_scale: float = 1.0, shared: Mapping[str, float] | None = None) -> None:
        """Steps the stage's parameters at the learning rates of its groups times `lr_scale`, or for
        a tied parameter times its scale in `shared`. Without an optimizer, keeps the gradients."""
        rates = self._own.rates_at(self._done)
        self._done += 1
        optimizer = self.optimizer
        if optimizer is None:
            own = {each: each.grad for each in self._parameters if each.grad is not None}
            self._own.left.update(own)
            return
        scales = dict.fromkeys(self._parameters, lr_scale)
        for name, scale in (shared or {}).items():
            scales[self._shared[name]] = scale  # type: ignore[index]
        with _groups_of(optimizer, scales, rates):
            optimizer.step()


@contextmanager
def _groups_of(
    optimizer: Optimizer, scales: Mapping[nn.Parameter, float], rates: list[float] | None
) -> Iterator[None]:
    """Inside, the optimizer has these parameters alone, at scaled learning rates."""
    groups = optimizer.param_groups
    at = [group["lr"] for group in groups] if rates is None else rates
    view: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for group, rate in zip(groups, at, strict=True):
        by_scale: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            if parameter in scales:
                by_scale.setdefault(scales[parameter], []).append(parameter)
        for scale, own in by_scale.items():
            view.append((group, {**group, "params": own, "lr": _scaled(rate, scale)}))
    optimizer.param_groups = [part for _, part in view]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, part in view:  # some optimizers keep numbers of their own in a group
            group.update({key: part[key] for key in part if key not in ("params", "lr")})


def _scaled(rate: Any, scale: float) -> Any:
    return rate if scale == 1.0 else rate * scale
