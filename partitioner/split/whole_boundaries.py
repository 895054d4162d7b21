"""Capture and placement -> the same, with whole values at the boundaries.

Between split layers, tensor ranks can have parts of the positions of a value. A value that a later
stage reads is gathered in the stage that computes it, and each rank of a later stage takes its part
again:

    y = self.block(x)               y = self.block(x)
                                    y = whole_of(y, dim=1)
    ------------------------  ->    ---------------------------------- receives y
                                    y = part_of(y, 1)
    return self.norm(y)             return self.norm(y)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from ...runtime.tensor_parallel.functions import part_of, whole_of
from ..capture import Capture
from .ssa import GraphCopy


def with_whole_boundaries(
    capture: Capture, stage_of: Mapping[fx.Node, int]
) -> tuple[Capture, dict[fx.Node, int]]:
    """A capture of new nodes with the old names and few more, and the stages of its nodes.

    Returns the arguments if no value in parts crosses a boundary. `stage_of` gives the stage of
    every node except placeholders, attributes and the output.
    """
    crossing = [
        node
        for node, stage in stage_of.items()
        if "part" in node.meta and any(stage_of.get(user, stage) > stage for user in node.users)
    ]
    if not crossing:
        return capture, dict(stage_of)
    copy = _WholeBoundaries(capture, stage_of)
    for node in crossing:
        copy.gather(node)
    return copy.result()


class _WholeBoundaries(GraphCopy):
    def gather(self, node: fx.Node) -> None:
        """Sends the whole of a value to the later stages that read it."""
        home, part = self._old_stage[node], node.meta["part"]
        nodes, _ = self._outermost(node)
        with self._graph.inserting_after(self._new[nodes[-1]]):
            whole = self._graph.call_function(whole_of, (self._new[node],), {"dim": part.dim})
        self._note(whole, node, node)
        del whole.meta["part"]
        parts: dict[int, fx.Node] = {}
        for reader in self._capture.graph.nodes:
            stage = self._old_stage.get(reader, home)
            if stage == home or node not in reader.all_input_nodes:
                continue
            if stage not in parts:
                with self._graph.inserting_before(self._new[self._outermost(reader)[0][0]]):
                    parts[stage] = self._graph.call_function(part_of, (whole, part.dim))
                self._note(parts[stage], node, reader)
                self._renamed[stage, node] = parts[stage]
            self._new[reader].replace_input_with(self._new[node], parts[stage])

    def _note(self, new: fx.Node, value: fx.Node, beside: fx.Node) -> None:
        """The facts about a new node with the value of one node, at the place of another."""
        depth = self._outermost(beside)[1]
        nothing: frozenset[Any] = frozenset()
        new.meta.update(
            value.meta,
            calls=beside.meta["calls"][:depth],
            regions=(),
            source=None,
            storages=frozenset([self._number(0)]),
            mutates=nothing,
            touches=nothing,
            random=False,
            from_sizes=False,
        )
        self._stage[new] = self._old_stage[beside]
