"""A stage's parameters and options -> its optimizer and learning-rate schedule.

`uncompiled` unwraps methods of torch's optimizers: torch excludes them from its compiler, and for
that loads the compiler at their first call, which costs about a second of a rank's start and up
to 80 MB. No rank compiles its optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from inspect import unwrap
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..config.settings import RunConfig
from ..control.learning_rate import learning_rate_of
from ..control.user_optimizer import (
    load_user_state,
    make_user_optimizer,
    moves_weights,
    user_state_of,
)
from ..errors import PlanError
from ..optimizers.facts import OPTIMIZERS, OptimizerFacts
from ..optimizers.param_groups import APART, NOT_HIDDEN, Joint, hidden_matrices
from ..plan.plan import Plan
from ..sharding.matrices import NO_MATRICES, WholeMatrices
from ..sharding.owned_steps import OwnedSteps
from ..sharding.shards import WHOLE, Shards
from ..staleness.protocol import Steps
from .clipping import NormShare, StageNorms

_KEPT_OUT = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


@cache
def uncompiled(kind: type[Optimizer]) -> Callable[..., Optimizer]:
    """A class of the same name and behavior whose methods are unwrapped."""
    plain = {name: unwrap(getattr(kind, name)) for name in _KEPT_OUT}
    step = torch.no_grad()(unwrap(kind.step))
    return type(kind.__name__, (kind,), {**plain, "step": step})


class StageSteps(Steps, Protocol):
    """The optimizer steps of one stage; `shards` and `matrices` are the owners of its parameters
    among its replicas and tensor ranks."""

    shards: Shards
    matrices: WholeMatrices

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The optimizer's state of a parameter."""
        ...

    def load(self, states: Mapping[Tensor, Mapping[str, Tensor]], steps: int) -> None:
        """Restores the states that `state_of` returned, after `steps` steps."""
        ...

    def step(self, lr_scale: float = 1.0, shared: Mapping[str, float] | None = None) -> None:
        """Makes one step, at the scheduled learning rate times `lr_scale`, or for a tied parameter
        times its scale in `shared`."""
        ...

    def skip(self) -> None:
        """Leaves one step out."""
        ...


class StageOptimizer(OwnedSteps):
    """The optimizer and the learning-rate schedule of one stage, stepped together.

    Weight decay applies to matrices only, not to biases, scales of norms and other vectors. For a
    stage without parameters, a step does nothing.

    lr_factor: the factor of a callback on the scheduled learning rate.

    Arguments:
    hidden, shared: as for `make_optimizer`.
    clip_factor: the factor by which a coming step would clip; without it nothing is clipped.
    learning_rate: the factor of the learning rate at a step, by default that of the options.
    shards: the owners of the parameters; the optimizer has those of this replica.
    matrices: the owners of split weights that are stepped as wholes; the optimizer has those of
        this tensor rank.
    """

    def __init__(
        self,
        stage: nn.Module,
        config: RunConfig,
        *,
        hidden: Sequence[Tensor] = (),
        shared: Mapping[str, Tensor] | None = None,
        clip_factor: Callable[[Sequence[Tensor], float], float] | None = None,
        learning_rate: Callable[[int], float] | None = None,
        shards: Shards = WHOLE,
        matrices: WholeMatrices = NO_MATRICES,
    ) -> None:
        super().__init__(shards, matrices)
        named = [
            (name, own)
            for name, parameter in stage.named_parameters()
            if parameter.requires_grad and shards.owns(parameter)
            if (own := matrices.stepped(parameter)) is not None
        ]
        hidden = [own for each in hidden if (own := matrices.stepped(each)) is not None]
        stepped = {name: matrices.stepped(each) for name, each in (shared or {}).items()}
        apart = {name: own for name, own in stepped.items() if own is not None}
        self._is_users = config.optimizer not in OPTIMIZERS
        self._config = config
        self._factor = learning_rate or learning_rate_of(config)
        self.lr_factor = 1.0
        self._clip_factor = clip_factor
        self.optimizer: Optimizer | None = None
        if named and self._is_users:
            self.optimizer = make_user_optimizer(named, config, apart)
            self.moves_weights = moves_weights(self.optimizer)
        elif named:
            trainable = [parameter for _, parameter in named]
            self.optimizer = make_optimizer(trainable, config, hidden=hidden, shared=apart)
        if self.optimizer is not None:
            self._scheduler = LambdaLR(self.optimizer, self._factor)

    def future_lr(self, steps: int) -> tuple[float, ...]:
        """The factors of the base learning rate in the next `steps` optimizer steps; empty for a
        stage without parameters."""
        if self.optimizer is None:
            return ()
        done = self._scheduler.last_epoch
        return tuple(self.lr_factor * self._factor(done + ahead) for ahead in range(steps))

    @property
    def annealing_steps(self) -> int:
        """The steps over which `pipemare-rate` returns to the scheduled learning rate."""
        return self._config.annealing_steps or 1

    def clip_factor(self, gradients: Sequence[Tensor], scale: float) -> float:
        """The factor by which the coming step would clip gradients that are `scale` times these."""
        return 1.0 if self._clip_factor is None else self._clip_factor(gradients, scale)

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The optimizer's state of a parameter; of one that is stepped as a whole on its owner."""
        own = self.matrices.stepped(parameter)
        if own is None or self.optimizer is None:
            return {}
        if self._is_users:
            return user_state_of(self.optimizer, own)
        state = self.optimizer.state.get(own, {})
        return {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def load(self, states: Mapping[Tensor, Mapping[str, Tensor]], steps: int) -> None:
        """Restores the states that `state_of` returned, after `steps` steps; ignores states of
        another optimizer.

        torch's `load_state_dict` would also cast the counters to the dtype of the weights.
        """
        if self.optimizer is None:
            return
        self._scheduler.last_epoch = steps
        stepped = ((self.matrices.stepped(each), state) for each, state in states.items())
        states = {own: state for own, state in stepped if own is not None}
        for group, base_lr in zip(
            self.optimizer.param_groups, self._scheduler.base_lrs, strict=True
        ):
            group["lr"] = base_lr * self._factor(steps)
            if self._is_users:
                for parameter in (tensor for tensor in group["params"] if tensor in states):
                    load_user_state(self.optimizer, parameter, states[parameter])
                continue
            counts_there = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                state = states.get(parameter, {})
                if state.keys() >= _kept_by(self.optimizer, group, parameter):
                    self.optimizer.state[parameter] = {
                        key: value.to(parameter.device if counts_there else "cpu", copy=True)
                        if key in _NUMBERS
                        else value.to(parameter.device, parameter.dtype, copy=True)
                        for key, value in state.items()
                    }

    def step(self, lr_scale: float = 1.0, shared: Mapping[str, float] | None = None) -> None:
        """Makes one optimizer step, at the scheduled learning rate times `lr_scale`, or for a tied
        parameter times its scale in `shared`. Collective among replicas and tensor ranks that own
        different parameters: all receive the new weights."""
        with self.matrices.gathered():
            if self.optimizer is not None:
                self._step(self.optimizer, lr_scale, shared or {})
        self.finish_step()

    def _step(self, optimizer: Optimizer, lr_scale: float, shared: Mapping[str, float]) -> None:
        groups = optimizer.param_groups
        scheduled = [group["lr"] for group in groups]
        for group, lr in zip(groups, scheduled, strict=True):
            scale = self.lr_factor * shared.get(group.get(APART, ""), lr_scale)
            if scale != 1.0:
                group["lr"] = lr * scale
        optimizer.step()
        for group, lr in zip(groups, scheduled, strict=True):
            group["lr"] = lr
        self._scheduler.step()

    def skip(self) -> None:
        """Skips a step; the learning rate still advances, as in a loop that steps its scheduler."""
        if self.optimizer is None:
            return
        with warnings.catch_warnings():
            # torch warns of a scheduler that steps before the optimizer's first step.
            warnings.simplefilter("ignore", UserWarning)
            self._scheduler.step()


def built_in_steps(
    plan: Plan,
    index: int,
    stage: nn.Module,
    config: RunConfig,
    share: NormShare,
    *,
    norms: StageNorms | None,
    refresh_every: int,
    learning_rate: Callable[[int], float] | None,
) -> StageOptimizer:
    """The steps of stage `index` by the optimizer that the options name; `norms` are those by which
    each stage clips alone, if it does."""
    if config.refresh_every:
        config = replace(config, refresh_every=refresh_every)
    return StageOptimizer(
        stage,
        config,
        hidden=hidden_matrices(plan, index, stage),
        shared=share.shared_by_name if config.is_async else None,
        clip_factor=partial(norms.expected_factor, index) if norms else None,
        learning_rate=learning_rate,
        shards=share.shards,
        matrices=share.matrices,
    )


_NUMBERS = ("step", "mu_product")
"""State of optimizers that is not as large as the weights."""


def _kept_by(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> set[str]:
    """The names of the optimizer's state of a parameter of a group that it has stepped."""
    parts = optimizer.parts if isinstance(optimizer, Joint) else (optimizer,)
    (part,) = (part for part in parts if any(other is group for other in part.param_groups))
    facts = _facts_of(part)
    return set(facts.state if parameter.ndim > 1 else facts.state_of_vectors or facts.state)


def _facts_of(optimizer: Optimizer) -> OptimizerFacts:
    """The facts of an optimizer by the name of its class."""
    name = type(optimizer).__name__
    return next(facts for facts in OPTIMIZERS.values() if facts.code.endswith(f":{name}"))


def make_optimizer(
    parameters: Iterable[Tensor],
    config: RunConfig,
    *,
    hidden: Sequence[Tensor] = (),
    shared: Mapping[str, Tensor] | None = None,
) -> Optimizer:
    """The optimizer of the run, with weight decay for matrices and without for vectors.

    An optimizer of hidden matrices steps those in `hidden`, and AdamW everything else. Each of the
    `shared`, by name, has its own group, whose option `APART` is that name. Raises PlanError for
    complex parameters if the optimizer steps none.
    """
    given, apart = list(parameters), shared or {}
    facts = OPTIMIZERS[config.optimizer]
    if facts.real_only and any(parameter.is_complex() for parameter in given):
        raise PlanError(
            f"--optimizer {config.optimizer} does not step complex parameters, and the model has "
            "some.",
            "Use --optimizer adamw.",
        )
    if not facts.hidden_matrices_only:
        return _plain(given, config, facts, apart)
    own = {id(matrix) for matrix in hidden}
    matrices = [parameter for parameter in given if id(parameter) in own]
    others = [parameter for parameter in given if id(parameter) not in own]
    parts = []
    if matrices:
        part = uncompiled(facts.load())(
            matrices,
            lr=config.lr,
            weight_decay=config.weight_decay,
            **_arguments(facts, config),
        )
        parts.append(part)
    if others:
        parts.append(_plain(others, config, OPTIMIZERS["adamw"], apart, NOT_HIDDEN))
    return parts[0] if len(parts) == 1 else uncompiled(Joint)(parts)


def _arguments(facts: OptimizerFacts, config: RunConfig) -> dict[str, Any]:
    """The arguments of the optimizer's class besides the learning rate and the weight decay."""
    values = {
        "momentum": config.momentum,
        "nesterov": config.nesterov,
        "betas": config.betas,
        "eps": config.eps,
        "refresh_every": config.refresh_every,
    }
    return {**{name: values[name] for name in facts.takes}, **facts.arguments}


def _plain(
    parameters: Sequence[Tensor],
    config: RunConfig,
    facts: OptimizerFacts,
    shared: Mapping[str, Tensor],
    others: str = "",
) -> Optimizer:
    """An optimizer of all parameters, which differ only in their weight decay; the groups of those
    that are not `shared` are set apart as `others`."""
    name_of = {id(parameter): own for own, parameter in shared.items()}
    own = [parameter for parameter in parameters if id(parameter) not in name_of]
    decay = config.weight_decay
    groups: list[dict[str, Any]] = [
        {"params": [each for each in own if each.ndim >= 2], "weight_decay": decay},
        {"params": [each for each in own if each.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group | {APART: others} for group in groups if group["params"]]
    groups += [
        {
            "params": [parameter],
            "weight_decay": decay if parameter.ndim >= 2 else 0.0,
            APART: name_of[id(parameter)],
        }
        for parameter in parameters
        if id(parameter) in name_of
    ]
    arguments = _arguments(facts, config)
    if facts.fused:
        arguments["fused"] = all(_can_fuse(parameter) for parameter in parameters)
    return uncompiled(facts.load())(groups, lr=config.lr, **arguments)


def _can_fuse(parameter: Tensor) -> bool:
    return parameter.device.type in ("cpu", "cuda") and torch.is_floating_point(parameter)
