"""Buffers that forward binds to new tensors -> copies into the buffers, where they change nothing.

`self.mean = 0.9 * self.mean + 0.1 * x.mean(0)` makes a new tensor; what outlives forward is the
buffer's contents. The copy goes as early as no reader of the old contents, and no later change of
the new ones, is behind it.
"""

from __future__ import annotations

from torch import Tensor, fx, nn

from .bindings import Bindings


class AssignedBuffers:
    """The last assignment of each buffer: the buffer, the new tensor, the node before it."""

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings
        self._last: dict[tuple[int, str], tuple[Tensor, Tensor, fx.Node]] = {}

    def note(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Is told of `module.name = value` before it is done."""
        current = module._buffers[name]
        assert current is not None
        if value is current or id(value) not in self._bindings.bound:
            return
        before = self._last.get((id(module), name))
        buffer = before[0] if before else current
        place = next(iter(reversed(self._bindings.graph.nodes)))
        self._last[id(module), name] = (buffer, value, place)

    def write(self) -> None:
        """Adds `buffer.copy_(value)` for each."""
        graph = self._bindings.graph
        for buffer, value, place in self._last.values():
            node, source = self._bindings.node(buffer), self._bindings.node(value)
            old = self._bindings.storage(buffer)
            new = self._bindings.storage(value)
            for other in graph.nodes:
                reads = any(old in used.meta["storages"] for used in other.all_input_nodes)
                if place < other and (reads or {old, new} & other.meta["mutates"]):
                    place = other
            with graph.inserting_after(max(place, source, node)):
                self._bindings.add(
                    ("call_method", "copy_", (node, source)),
                    buffer,
                    calls=source.meta["calls"],
                    regions=source.meta["regions"],
                    changed=[buffer],
                )
