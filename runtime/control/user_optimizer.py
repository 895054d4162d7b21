"""`--optimizer file.py:make` -> the optimizer of a stage, and its state as named tensors.

`make(named_parameters, lr)` gets pairs of the original model's names and the parameters of one
stage. A state may have tensors, and values that JSON has: numbers, texts, lists of these. Values of
a parameter's group, which some optimizers change at every step, belong to the state too.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..config.settings import RunConfig, SettingsError
from ..formatting import kind_of
from ..optimizers.param_groups import APART
from ..optimizers.reach import Reach, reach_of
from ..plan.plan import Plan
from ..rng import import_seeded
from ..staleness.compose import that_evaluate_others
from ..user_code import user_errors_as

_VALUES = "values"
"""The name of the part that has the values without tensors, as UTF-8 of JSON."""
_SCHEDULED = ("lr", "initial_lr", APART)
"""Entries of a group that the run sets."""


def make_user_optimizer(
    named: Sequence[tuple[str, Tensor]], config: RunConfig, shared: Mapping[str, Tensor]
) -> Optimizer:
    """The user's optimizer of named parameters of a stage. Each of the `shared`, by name, gets a
    group of its own, whose option `APART` is that name.

    Raises SettingsError where the user's code fails or returns something else.
    """
    spec = config.optimizer
    make = import_seeded(spec, "--optimizer", SettingsError, config.seed)
    with user_errors_as(SettingsError, f"--optimizer {spec}"):
        optimizer = make(list(named), config.lr)
    if not isinstance(optimizer, Optimizer):
        raise SettingsError(
            f"--optimizer {spec} returned {kind_of(optimizer)}.",
            "Return a torch.optim.Optimizer of the parameters.",
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise SettingsError(
            f"--optimizer {spec} returned {kind_of(optimizer)}, whose step computes the "
            "loss again by a closure, but a pipeline computes gradients once for each step.",
            "Choose an optimizer whose step needs no closure.",
        )
    own = {id(parameter) for _, parameter in named}
    if any(id(each) not in own for group in optimizer.param_groups for each in group["params"]):
        raise SettingsError(
            f"--optimizer {spec} returned an optimizer of other tensors than it was given.",
            "Give it the parameters themselves.",
        )
    _set_apart(optimizer, shared)
    if moves_weights(optimizer):
        _check_moved_weights(optimizer, config)
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def moves_weights(optimizer: Optimizer) -> bool:
    """True if an optimizer has `train()` and `eval()`, as schedule-free ones do."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def _check_moved_weights(optimizer: Optimizer, config: RunConfig) -> None:
    others = {
        f"--ema {config.ema}": config.ema is not None,
        f"--freeze {config.freeze}": config.freeze is not None,
        f"--zero {config.zero}": config.zero > 0,
        f"--staleness {config.staleness}": bool(that_evaluate_others(config.methods)),
    }
    for option in (name for name, is_given in others.items() if is_given):
        raise SettingsError(
            f"{type(optimizer).__name__} evaluates other weights than it trains, which is not "
            f"possible with {option}.",
            "Leave that option out, or choose another optimizer.",
        )


def reach_warning(optimizer: Optimizer, plan: Plan, config: RunConfig) -> str:
    """A warning of an optimizer whose steps are not those of the plain model, as a stage or a
    tensor rank lacks gradients on which they depend; "" for others."""
    reach, name = reach_of(optimizer), type(optimizer).__name__
    if reach is Reach.PARAMETERS and (len(plan.stages) > 1 or config.zero):
        return (
            f"{name} steps a parameter by the gradients of others too, and here by those of the "
            "same stage and rank alone: its steps are not those of the plain model. If it clips "
            "gradients by their norm, leave that to --clip."
        )
    if config.tensor_ranks == 1 or reach is Reach.NUMBER:
        return ""
    given = f"--tensor-parallel {config.tensor_ranks}"
    if reach is None:
        return (
            f"{name} could not be tried on other tensors than its parameters. With {given} its "
            "steps are those of the plain model only if it steps each number by itself, as AdamW "
            "does."
        )
    return (
        f"{name} steps the numbers of a parameter by one another, and with {given} a rank has only "
        "parts of some parameters: its steps are not those of the plain model. The built-in muon, "
        "soap and adafactor step whole matrices."
    )


def _set_apart(optimizer: Optimizer, shared: Mapping[str, Tensor]) -> None:
    names = {id(parameter): name for name, parameter in shared.items()}
    for group in list(optimizer.param_groups):
        others = {key: value for key, value in group.items() if key != "params"}
        own = [candidate for candidate in group["params"] if id(candidate) not in names]
        for parameter in (candidate for candidate in group["params"] if id(candidate) in names):
            group["params"] = own
            name = names[id(parameter)]
            optimizer.add_param_group({**others, "params": [parameter], APART: name})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def user_state_of(
    optimizer: Optimizer, parameter: Tensor, *, scheduled: Collection[str] = _SCHEDULED
) -> dict[str, Tensor]:
    """The state of a parameter as tensors, with the options of its group but for those that are
    `scheduled`. Raises SettingsError for a state that has other values."""
    state = optimizer.state.get(parameter, {})
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    others = {key: value for key, value in state.items() if key not in tensors}
    group = _group_of(optimizer, parameter)
    options = {k: value for k, value in group.items() if k not in ("params", *scheduled)}
    try:
        text = json.dumps({"state": others, "group": options}, default=_number)
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"the state of {type(optimizer).__name__} cannot be written to a checkpoint: {error}.",
            "Keep tensors, numbers and texts by parameter or in its group, or leave --save-every "
            "out.",
        ) from None
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return tensors | {_VALUES: content}


def load_user_state(optimizer: Optimizer, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
    """Restores what `user_state_of` returned."""
    tensors = dict(state)
    values = json.loads(bytes(tensors.pop(_VALUES).tolist()))
    group = _group_of(optimizer, parameter)
    for key, value in values["group"].items():
        if isinstance(now := group.get(key), Tensor):
            now.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(now, tuple) else value
    on_device = group.get("capturable") or group.get("fused")
    if tensors or values["state"]:
        optimizer.state[parameter] = values["state"] | {
            key: value.to(parameter.device if value.ndim or on_device else "cpu", copy=True)
            for key, value in tensors.items()
        }


def _number(value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a number or a text")


def _group_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """The group of a parameter; empty for one that the optimizer leaves alone."""
    for group in optimizer.param_groups:
        if any(other is parameter for other in group["params"]):
            return group
    return {}
