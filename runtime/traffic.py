"""How many bytes a plan sends from stage to stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .plan import Boundary, Plan, TensorSpec

_ITEM_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "float16": 2,
    "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


def spec_bytes(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    """Bytes of one tensor of that spec at the given sizes."""
    return math.prod(spec.resolve(sizes)) * _ITEM_BYTES[spec.dtype]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one micro-batch that go forward from one stage to another; what gradients take
    comes back. `if_sent` is what would go if the target computed nothing again."""

    source: int
    target: int
    sent: int
    if_sent: int


def traffic(plan: Plan) -> tuple[Traffic, ...]:
    """What goes between every two stages, with and without computing again."""
    sent = _bytes_between(plan, plan.boundaries)
    if_sent = _bytes_between(plan, plan.if_sent or plan.boundaries)
    return tuple(
        Traffic(*pair, sent.get(pair, 0), if_sent.get(pair, 0))
        for pair in sorted(sent.keys() | if_sent.keys())
    )


def _bytes_between(plan: Plan, boundaries: Iterable[Boundary]) -> dict[tuple[int, int], int]:
    total: dict[tuple[int, int], int] = {}
    for boundary in boundaries:
        size = spec_bytes(boundary.tensor, plan.sizes)
        for target in boundary.targets:
            pair = boundary.source, target
            total[pair] = total.get(pair, 0) + size
    return total
