"""An optimizer of the user's own -> the steps of a rank's stages.

A torch optimizer steps every parameter that it has. The stages of a rank step at different moments,
and staleness methods scale their learning rates, so each step sees a view of the optimizer's groups
with the parameters of one stage alone.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..config.settings import RunConfig, SettingsError
from ..control.user_optimizer import load_user_state, reach_warning, user_state_of
from ..plan.plan import Plan
from ..sharding.owned_steps import OwnedSteps
from .clipping import NormShare

_SCHEDULED = ("lr", "momentum", "betas")
"""The entries of a group that schedulers of torch change."""
_FORGOTTEN = 100
"""The steps in a row whose gradients add up, after which a warning asks for the optimizer."""


class OwnOptimizer:
    """The optimizer that the user gives with a step, and the scheduler that follows its steps.

    left: the gradients of a step without an optimizer, which the user's loop applies.
    """

    def __init__(self, plan: Plan, config: RunConfig) -> None:
        self._plan, self._config = plan, config
        self.left: dict[nn.Parameter, Tensor] = {}
        self.optimizer: Optimizer | None = None
        self._scheduler: LRScheduler | None = None
        self._first_step = 0
        self._options: list[list[dict[str, Any]]] = []
        self._before: dict[nn.Parameter, Tensor] = {}
        self._added = 0

    def use(
        self,
        optimizer: Optimizer | None,
        scheduler: LRScheduler | None,
        step: int,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        """Sets the optimizer of this rank's parameters, and the scheduler that is stepped after
        each of its steps, from `step` (counted from 0) on; sets the gradients so far aside.

        Raises SettingsError for an optimizer or a scheduler that cannot be stepped here.
        """
        if optimizer is not None and optimizer is not self.optimizer:
            check_optimizer(optimizer, parameters)
            if text := reach_warning(optimizer, self._plan, self._config):
                warnings.warn(text, stacklevel=4)
        if scheduler is not None:
            check_scheduler(scheduler, optimizer)
        self.optimizer, self._scheduler = optimizer, scheduler
        self._first_step, self._options = step, []
        self._before = {each: each.grad for each in parameters if each.grad is not None}
        for parameter in self._before:
            parameter.grad = None

    def forget_frozen(self) -> None:
        """Drops the optimizer's state of parameters that no longer need a gradient."""
        if self.optimizer is not None:
            for parameter in list(self.optimizer.state):
                if not parameter.requires_grad:
                    del self.optimizer.state[parameter]

    def leave_gradients(self) -> None:
        """Leaves the gradients of a step that had no optimizer, added to those before."""
        if self.optimizer is not None:
            return
        for parameter, gradient in chain(self._before.items(), self.left.items()):
            own = parameter.grad
            parameter.grad = gradient if own is None else own + gradient
        self._added = self._added + 1 if self._before else 0
        self._before = {}
        self.left.clear()
        if self._added == _FORGOTTEN:
            warnings.warn(
                f"the gradients of {_FORGOTTEN} steps have been added up, and no optimizer has "
                "used them. Give step(batch, optimizer=optimizer), or call optimizer.step() and "
                "optimizer.zero_grad() in the loop.",
                stacklevel=4,
            )

    def options_at(self, step: int) -> list[dict[str, Any]] | None:
        """The options of each group that the scheduler sets at a step, counted from 0; None if the
        user sets them.

        Stages reach a step at different moments, and its first one steps the scheduler.
        """
        if self._scheduler is None or self.optimizer is None:
            return None
        while len(self._options) <= step - self._first_step:
            if self._options:
                self._scheduler.step()
            groups = self.optimizer.param_groups
            self._options.append(
                [{key: group[key] for key in _SCHEDULED if key in group} for group in groups]
            )
        return self._options[step - self._first_step]

    def finish(self) -> None:
        """Steps the scheduler for the last step, as a loop does."""
        if self._scheduler is not None and self._options:
            self._scheduler.step()


def check_optimizer(optimizer: object, parameters: Sequence[nn.Parameter]) -> None:
    """Raises SettingsError for what is not an optimizer of these parameters that steps on their
    gradients alone."""
    if not isinstance(optimizer, Optimizer):
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        noun = "the class" if kind is optimizer else "an object of class"
        raise SettingsError(
            f"optimizer is {noun} {kind.__name__}, not a torch.optim.Optimizer.",
            "Give for example torch.optim.AdamW(pipe.parameters(), lr=1e-3).",
        )
    if needed := _needed(type(optimizer).step):
        raise SettingsError(
            f"{type(optimizer).__name__}.step() needs a {needed}, to compute the loss again within "
            "a step, and a step of the pipeline computes it once.",
            "Use an optimizer that steps on gradients, such as torch.optim.AdamW, or call step "
            "without an optimizer and use the gradients that it leaves.",
        )
    own = set(map(id, parameters))
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if others := sum(id(parameter) not in own for parameter in given):
        raise SettingsError(
            f"{others} of the {len(given)} parameters of the optimizer are not of this pipeline's "
            "stages on this rank, so that it would not train them.",
            "Make the optimizer from pipe.parameters() of this Pipeline.",
        )


def check_has_optimizer(zero: int, has_optimizer: bool | None) -> None:
    """Raises SettingsError for a step that would leave gradients of which each replica has some."""
    if zero and has_optimizer is False:
        raise SettingsError(
            f"a step without an optimizer leaves all gradients in .grad, and with zero={zero} each "
            "replica has a part of them.",
            "Give step(batch, optimizer=...), or leave zero out.",
        )


def check_scheduler(scheduler: LRScheduler, optimizer: Optimizer | None) -> None:
    """Raises SettingsError for a scheduler that a stream cannot step."""
    name = type(scheduler).__name__
    if needed := _needed(type(scheduler).step):
        raise SettingsError(
            f"{name}.step() needs {needed}, which a stream does not have when it steps.",
            "Use a loop over pipe.step and call scheduler.step(result.loss) there.",
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise SettingsError(
            f"the {name} schedules another optimizer than the one given.",
            "Make the scheduler from the optimizer that the stream gets.",
        )


def _needed(step: Callable[..., Any]) -> str:
    """The first argument that a method must have besides self; "" for none."""
    _, *arguments = inspect.signature(step).parameters.values()
    of_one = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = (a.name for a in arguments if a.default is a.empty and a.kind in of_one)
    return next(needed, "")


class StageView(OwnedSteps):
    """The steps of one stage by the user's optimizer."""

    annealing_steps = 1

    def __init__(self, stage: nn.Module, own: OwnOptimizer, share: NormShare) -> None:
        super().__init__(share.shards)
        self._parameters = [
            parameter
            for parameter in stage.parameters()
            if parameter.requires_grad and self.shards.owns(parameter)
        ]
        self._own, self._shared = own, share.shared_by_name
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
        """1, because the clipping of the user's loop is not known in advance."""
        return 1.0

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The optimizer's state of a parameter, and the options of its group."""
        optimizer = self.optimizer
        return {} if optimizer is None else user_state_of(optimizer, parameter, scheduled=())

    def load(self, states: Mapping[Tensor, Mapping[str, Tensor]], steps: int) -> None:
        """Restores the states that `state_of` returned, after `steps` steps."""
        self._done = steps
        if self.optimizer is not None:
            for parameter, state in states.items():
                load_user_state(self.optimizer, parameter, state)

    def skip(self) -> None:
        """Leaves a step out."""
        self._own.options_at(self._done)
        self._done += 1

    def step(self, lr_scale: float = 1.0, shared: Mapping[str, float] | None = None) -> None:
        """Steps the stage's parameters at the learning rates of its groups times `lr_scale`, or for
        a tied parameter times its scale in `shared`. Without an optimizer, keeps the gradients.
        Collective among replicas that own different parameters."""
        options = self._own.options_at(self._done)
        self._done += 1
        if self.optimizer is None:
            own = {
                parameter: parameter.grad
                for parameter in self._parameters
                if parameter.grad is not None
            }
            self._own.left.update(own)
        else:
            self._step(self.optimizer, lr_scale, shared or {}, options)
        self.finish_step()

    def _step(
        self,
        optimizer: Optimizer,
        lr_scale: float,
        shared: Mapping[str, float],
        options: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        scales = dict.fromkeys(self._parameters, lr_scale)
        of_shared = {own: shared[name] for name, own in self._shared.items() if name in shared}
        scales |= {each: of_shared[each] for each in scales if each in of_shared}
        with _groups_of(optimizer, scales, options):
            optimizer.step()


@contextmanager
def _groups_of(
    optimizer: Optimizer,
    scales: Mapping[nn.Parameter, float],
    options: Sequence[Mapping[str, Any]] | None,
) -> Iterator[None]:
    """Inside, the optimizer has these parameters alone, at scaled learning rates."""
    groups = optimizer.param_groups
    view: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for group, scheduled in zip(groups, options or [{}] * len(groups), strict=True):
        by_scale: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            if parameter in scales:
                by_scale.setdefault(scales[parameter], []).append(parameter)
        for scale, own in by_scale.items():
            part = {**group, **scheduled, "params": own}
            view.append((group, {**part, "lr": _scaled(part["lr"], scale)}))
    optimizer.param_groups = [part for _, part in view]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, part in view:  # some optimizers keep numbers of their own in a group
            set_outside = ("params", *_SCHEDULED)
            group.update({key: part[key] for key in part if key not in set_outside})


def _scaled(rate: Any, scale: float) -> Any:
    return rate if scale == 1.0 else rate * scale
