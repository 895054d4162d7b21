"""Operators that run -> whether one of them draws random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class RandomDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sets `drawn` when an operator draws; whoever asks sets it back to False."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.drawn and torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn = _draws(func, args, kwargs)
        return func(*args, **kwargs)


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call really draws: attention with dropout 0 is tagged, but does not."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else None
            return bool(kwargs.get("dropout_p", given))
    return True


def has_hidden_draws(module: nn.Module) -> bool:
    """Whether a module draws inside an operator that is not marked as random: dropout between
    the layers of a recurrent network."""
    return isinstance(module, nn.RNNBase) and module.training and module.dropout > 0
