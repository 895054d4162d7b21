"""Capture and placement -> the same, with the outputs that a criterion reads in one stage.

A model without a loss of its own is trained by a criterion outside, which reads its outputs at the
last stage that makes one. The outputs of earlier stages are sent there, and returned as views:

    mean = self.mean(x)             mean = self.mean(x)
    ------------------------  ->    ---------------------------------- receives mean
    y = self.decode(mean)           y = self.decode(mean)
    return y, mean                  mean_out = mean.view_as(mean)
                                    return y, mean_out
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ..capture import Capture
from .ssa import GraphCopy


def with_last_outputs(
    capture: Capture, stage_of: Mapping[fx.Node, int]
) -> tuple[Capture, dict[fx.Node, int]]:
    """A capture of new nodes with the old names and few more, and the stages of its nodes.

    Returns the arguments if one stage makes all outputs. `stage_of` gives the stage of every node
    except placeholders, attributes and the output.
    """
    (output,) = capture.graph.find_nodes(op="output")
    outputs = [node for node in output.all_input_nodes if node in stage_of]
    last = max((stage_of[node] for node in outputs), default=0)
    earlier = [node for node in outputs if stage_of[node] < last]
    if not earlier:
        return capture, dict(stage_of)
    copy = _LastOutputs(capture, stage_of)
    for node in earlier:
        copy.send(node, last)
    return copy.result()


class _LastOutputs(GraphCopy):
    def send(self, node: fx.Node, last: int) -> None:
        """Returns an output from the stage `last`."""
        (output,) = self._graph.find_nodes(op="output")
        own = self._new[node]
        with self._graph.inserting_before(output):
            sent = self._graph.create_node(
                "call_method", "view_as", (own, own), name=f"{node.name}_out"
            )
        sent.meta.update(
            node.meta,
            calls=(),
            regions=(),
            source=None,
            storages=frozenset([self._number(0)]),
            mutates=frozenset(),
            touches=frozenset(),
            random=False,
            from_sizes=False,
        )
        self._stage[sent] = last
        output.replace_input_with(own, sent)
