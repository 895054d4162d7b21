"""Blocks within which a model is changed, and after which it is as it was before."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_CACHES = ("use_cache", "use_mems_eval", "use_mems_train")


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
def unchanged(model: nn.Module) -> Iterator[None]:
    """Within, forward may change buffers and draw random numbers; after, none of it happened."""
    owners = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = {buffer.device.index for _, _, buffer, _ in owners if buffer.is_cuda}
    with torch.random.fork_rng(devices=[index for index in devices if index is not None]):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, before in owners:
                    module._buffers[name] = buffer
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)


@contextmanager
def unchanged_attributes(model: nn.Module) -> Iterator[None]:
    """Within, modules may be given attributes and lose hooks; after, they are as before."""
    changeable: list[MutableMapping[Any, Any]] = [
        mutable
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for mutable in (
            module.__dict__, module._buffers, module._forward_hooks, module._forward_pre_hooks,
        )
    ]  # fmt: skip
    before = [(mutable, dict(mutable)) for mutable in changeable]
    try:
        yield
    finally:
        for mutable, old in before:
            mutable.clear()
            mutable.update(old)


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


_LOGGERS = ("torch._dynamo", "torch._guards", "torch.fx", "torch.fx.experimental.symbolic_shapes")


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
