"""A captured model -> the same model with layers that several ranks share out.

probe      runs an operation on the ranks' parts: do the results make the whole value?
candidates the ways in which an operation might run on parts
trials     tries them: how an operation runs on parts, or why it fails
derive     the splits of a model, from the operations in order
decisions  how an operation runs on parts, and the layer that does it in generated code
sequence   the values between split layers of which each rank has a part of the positions
rewrite    the splits -> a graph of split layers and the sums between them
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from torch import fx

from ...runtime.errors import PlanError
from ..capture import Capture
from ..capture.bindings import renamed
from .derive import Derivation, derive
from .exchanging import has_loss
from .rewrite import SplitModel, rewrite
from .sequence import with_positions

__all__ = ["SplitModel", "has_loss", "split_over_ranks"]


def split_over_ranks(
    capture: Capture, inputs: Mapping[str, Any], size: int, stages: int, *, sequence: bool = False
) -> SplitModel:
    """The capture with the layers that `size` tensor ranks can share out, found on the example
    `inputs`, so that it can be cut into `stages`; with `sequence`, each rank has a part of the
    positions between them. Notes say which layers each rank computes whole, and why.

    Raises PlanError if there is no such layer, or no operation between them that runs on parts of
    the positions.
    """
    graph, calls = renamed(capture.graph, capture.calls, attrgetter("name"))
    capture = replace(capture, graph=graph, calls=calls)  # which are changed
    derivation = derive(capture, inputs, size, stages)
    notes = tuple(_notes(derivation))
    if not derivation.decisions:
        why = f": {notes[0]}" if notes else ""
        raise PlanError(
            f"no layer can be shared out over {size} tensor ranks{why}.",
            "Leave out --tensor-parallel, or choose a number that divides heads and widths.",
        )
    if sequence:
        derivation = with_positions(capture, inputs, derivation)
        notes += derivation.positions.notes
    return rewrite(replace(capture, notes=(*capture.notes, *notes)), derivation)


def _notes(derivation: Derivation) -> list[str]:
    """A sentence for each reason, with the layers of all blocks that it applies to."""
    by_reason: dict[str, dict[str, int]] = {}
    for node, closed in derivation.closed.items():
        layer = re.sub(r"\.\d+\.", ".*.", _layer(node))
        layers = by_reason.setdefault(closed.reason, {})
        layers[layer] = layers.get(layer, 0) + 1
    return [
        f"each tensor rank computes {', '.join(layers)} whole: {reason}"
        for reason, layers in by_reason.items()
    ]


def _layer(node: fx.Node) -> str:
    """The path of the module whose weights a node reads, or the name of the weights."""
    if node.op == "call_module":
        return str(node.target)
    names = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
    return max(names, key=len, default=node.name)
