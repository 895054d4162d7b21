"""A profile and a link -> what making a value again costs beside sending it.

All times are milliseconds of one micro-batch at the sizes of the profile, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from .capture import Capture, Size
from .cost import LOCALHOST, Link
from .profiler import Profile

_ENDS = 2  # a transfer takes its time at the sender and at the receiver
_SLOWER = 2  # and a plan also runs on slower links than that of the host that made it
_MICRO_BATCHES_A_STEP = 8
_CALL_MS, _BYTES_PER_MS = 0.005, 10e6


@dataclass(frozen=True, slots=True)
class Prices:
    """What computing each node and sending each value takes.

    A node that `work_ms` does not name counts as long as writing its result to memory takes.
    """

    sizes: Mapping[str, int]
    work_ms: Mapping[str, float]
    link: Link

    @classmethod
    def of(cls, profile: Profile, link: Link = LOCALHOST) -> Prices:
        """The prices of a profiled model."""
        work_ms = {name: cost.forward_ms + cost.backward_ms for name, cost in profile.nodes.items()}
        return cls(profile.sizes, work_ms, link)

    @classmethod
    def guessed(cls, capture: Capture, link: Link = LOCALHOST) -> Prices:
        """Prices without a profile, at the captured sizes."""
        return cls(capture.sizes, {}, link)

    def making_ms(self, node: fx.Node) -> float:
        if node.name in self.work_ms:
            return self.work_ms[node.name]
        return _CALL_MS + num_bytes(node, self.sizes) / _BYTES_PER_MS

    def sending_ms(self, node: fx.Node) -> float:
        """The value forward and, if it has one, its gradient back; inf for what is no tensor."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return math.inf
        once = self.link.transfer_ms(num_bytes(node, self.sizes))
        return _ENDS * _SLOWER * once * (2 if value.requires_grad else 1)

    def holding_ms(self, parameter: Tensor) -> float:
        """One more holder of a parameter: its gradient goes both ways once a step."""
        exchanged = 2 * self.link.transfer_ms(parameter.numel() * parameter.element_size())
        return _ENDS * _SLOWER * exchanged / _MICRO_BATCHES_A_STEP


def num_bytes(node: fx.Node, sizes: Mapping[str, int]) -> int:
    """Bytes of a node's tensor at the given sizes; 0 for what is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0
    shape: Iterable[Any] = node.meta.get("example") or (
        size.evaluate(sizes) if isinstance(size, Size) else size for size in node.meta["shape"]
    )
    return int(math.prod(shape)) * value.element_size()
