"""Calls of `torch.utils.checkpoint.checkpoint` -> what of a trace is done again in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .values import Recompute


class Recomputes:
    """The checkpoints within which forward is now, the outermost first."""

    def __init__(self, model: nn.Module) -> None:
        self.open: list[Recompute] = []
        self._model = model
        self._count = 0

    @contextmanager
    def within(
        self, function: Any, depth: int, use_reentrant: bool, preserve_rng_state: bool
    ) -> Iterator[None]:
        """Around a checkpointed function, which is called within `depth` modules."""
        while isinstance(function, functools.partial):
            function = function.func
        self._count += 1
        # Calls of the two modes are different calls.
        sign = 1 if self._model.training else -1
        self.open.append(
            Recompute(
                number=sign * self._count,
                depth=depth,
                function=getattr(function, "__name__", ""),
                use_reentrant=use_reentrant,
                preserve_rng_state=preserve_rng_state,
            )
        )
        try:
            yield
        finally:
            self.open.pop()


def reentrant(
    recomputing: Callable[..., AbstractContextManager[None]],
    function: Any,
    preserve_rng_state: bool,
    *args: Any,
) -> Any:
    """The older `checkpoint`, which gives no gradient if none of its arguments needs one."""
    has_gradient = any(isinstance(value, Tensor) and value.requires_grad for value in args)
    with (
        torch.set_grad_enabled(torch.is_grad_enabled() and has_gradient),
        recomputing(function, use_reentrant=True, preserve_rng_state=preserve_rng_state),
    ):
        return function(*args)
