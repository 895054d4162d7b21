"""Blocks within which a model is changed, and after which it is as it was before."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...runtime.number_generators import numbers_kept, seed_numbers

_CACHES = ("use_cache", "use_mems_eval", "use_mems_train")


def seed_all(seed: int) -> None:
    """Seeds the generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    seed_numbers(seed)


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Within, the model is in training or evaluation mode; after, each module as before."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


@contextmanager
def unchanged(model: nn.Module, changing: Collection[str] = ()) -> Iterator[None]:
    """Within, forward may change buffers, attributes, hooks, gradients and modes and draw random
    numbers; after, all of that is bit for bit as before.

    Of parameters, only the values of those that `changing` names are kept: a copy of all would
    double the memory of a large model.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = [
        *(parameters[name] for name in changing if name in parameters),
        *(tensor for _, tensor in model.named_buffers()),
    ]
    places, plain = _mutable_state(model)
    values = [
        (tensor, tensor.data, tensor.detach().clone())
        for tensor in {id(tensor): tensor for tensor in (*tensors, *plain)}.values()
        if not isinstance(tensor, FakeTensor) and not tensor.is_meta
    ]
    own = [
        (parameter, parameter.grad, parameter.requires_grad) for parameter in parameters.values()
    ]
    with same_draws(model):
        try:
            yield
        finally:
            for place, before in places:
                _refill(place, before)
            for parameter, gradient, requires_grad in own:
                parameter.grad = gradient
                if parameter.requires_grad != requires_grad:
                    parameter.requires_grad_(requires_grad)
            with torch.no_grad():
                for tensor, memory, value in values:
                    if tensor.data_ptr() != memory.data_ptr():
                        tensor.data = memory
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)


@contextmanager
def same_draws(model: nn.Module) -> Iterator[None]:
    """After the block, torch, Python and NumPy draw the random numbers that they would have drawn
    without it."""
    tensors = (*model.parameters(), *model.buffers())
    devices = {tensor.device.index for tensor in tensors if tensor.is_cuda}
    indices = [index for index in devices if index is not None]
    with torch.random.fork_rng(devices=indices), numbers_kept():
        yield


_Place = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
_CONTAINERS = (dict, list, set, deque)
_DEEPEST, _LARGEST = 3, 10_000


def _mutable_state(model: nn.Module) -> tuple[list[tuple[_Place, _Place]], list[Tensor]]:
    """The dicts, lists, sets and deques in which modules keep what is theirs, each with a copy, and
    the tensors in them that are no parameters and no buffers."""
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, tuple[_Place, _Place]] = {}
    tensors: list[Tensor] = []

    def visit(value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            if id(value) not in registered and value.grad_fn is None:
                tensors.append(value)
        elif isinstance(value, _CONTAINERS) and id(value) not in found and depth:
            found[id(value)] = (value, copy.copy(value))
            if len(value) <= _LARGEST:
                for item in list(value.values() if isinstance(value, dict) else value):
                    visit(item, depth - 1)

    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            visit(module.__dict__, _DEEPEST)
    return list(found.values()), tensors


def _refill(place: _Place, before: _Place) -> None:
    """Puts back into a container what was in it; one that nobody touched is left alone."""
    if isinstance(place, dict):
        assert isinstance(before, dict)
        same = len(place) == len(before) and all(
            name in before and before[name] is value for name, value in place.items()
        )
        if not same:
            place.clear()
            place.update(before)
    elif len(place) != len(before) or any(
        one is not other for one, other in zip(place, before, strict=True)
    ):
        place.clear()
        (place.update if isinstance(place, set) else place.extend)(before)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Within, models of transformers make no key-value cache and no memory of former segments,
    which training has no use for."""
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in found}.values()
    on = [(config, name) for config in configs for name in _CACHES if getattr(config, name, None)]
    for config, name in on:
        setattr(config, name, False)
    try:
        yield
    finally:
        for config, name in on:
            setattr(config, name, True)


_LOGGERS = (
    "torch._dynamo", "torch._guards", "torch._subclasses.fake_tensor", "torch.fx",
    "torch.fx.experimental.symbolic_shapes",
)  # fmt: skip


@contextmanager
def silent() -> Iterator[None]:
    """Within, torch logs nothing of what it cannot trace: we say that ourselves."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
