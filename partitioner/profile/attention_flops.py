"""The floating-point operations of attention on a CPU, for which torch's counter has no formula.

Predictions of 16-bit models run on fake tensors of a CPU (`measure.py`), whose kernel of
`scaled_dot_product_attention` is another one than those that torch counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

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


ON_CPU = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _forward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}
