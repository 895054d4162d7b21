"""Counts floating-point operations, those of attention on a CPU too.

Predictions of 16-bit models run on fake tensors of a CPU (`measure.py`), whose kernel of
`scaled_dot_product_attention` is another one than those that torch's counter has formulas for.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

_Shape = Sequence[int]
_ATEN = torch.ops.aten


def _forward(query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    """Two products: the scores, and the sums of the values that they weigh."""
    scores = prod(query[:-1]) * key[-2]
    return 2 * scores * (query[-1] + value[-1])


def _backward(_: _Shape, query: _Shape, key: _Shape, value: _Shape, *__: Any, **___: Any) -> int:
    """Five products, as torch counts them on a GPU: the scores again, and the gradients of both."""
    scores = prod(query[:-1]) * key[-2]
    return 2 * scores * (3 * query[-1] + 2 * value[-1])


_ON_CPU = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _forward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}


def flop_counter() -> FlopCounterMode:
    """Counts the operations of a block in `get_total_flops()`, forward and backward."""
    counter = FlopCounterMode(display=False, custom_mapping=_ON_CPU)
    counter.mod_tracker = _NoModules()
    return counter


class _NoModules(ModuleTracker):
    """Sets no hooks, which fail inside an autograd function that calls modules."""

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass
