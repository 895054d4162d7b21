"""Capture -> the nodes that are cheaper to compute again than to send.

They are parameter-free functions of integer inputs, of sizes and of tensors outside the
state_dict alone: masks, positions, casts, rotary tables.
"""

from __future__ import annotations

from torch import fx

from .capture import Capture
from .capture.guards import is_guard
from .effects import is_mutating

# Functions that are not worth a word beside sending their result.
_HEAVY = ("matmul", "mm", "bmm", "addmm", "baddbmm", "conv", "linear", "attention", "einsum")
_LONGEST_RECOMPUTATION = 64


def recomputable(capture: Capture) -> set[fx.Node]:
    """Nodes that depend on integer inputs, sizes and tensors outside the state_dict alone."""
    free = _free_tensors(capture)
    mutated = {
        argument
        for node in capture.graph.nodes
        if is_mutating(node)
        for argument in node.all_input_nodes
    }
    ancestors: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in capture.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            if not value.is_floating_point() and not value.is_complex() and node not in mutated:
                ancestors[node] = frozenset()
        elif node.op == "get_attr":
            if node.target in free and node not in mutated:
                ancestors[node] = frozenset()
        elif (
            node.op in ("call_function", "call_method")
            and not node.meta.get("random")
            and not is_mutating(node)
            and not is_guard(node)
            and node not in mutated
            and not any(word in str(node.target) for word in _HEAVY)
            and all(source in ancestors for source in node.all_input_nodes)
        ):
            made = frozenset({node}).union(*(ancestors[item] for item in node.all_input_nodes))
            if len(made) <= _LONGEST_RECOMPUTATION:
                ancestors[node] = made
    return {node for node in ancestors if node.op not in ("placeholder", "get_attr")}


def _free_tensors(capture: Capture) -> set[str]:
    """Constants and non-persistent buffers: outside the state_dict, so any stage may have them."""
    saved = set(capture.model.state_dict(keep_vars=True))
    buffers = {name for name, _ in capture.model.named_buffers(remove_duplicate=False)}
    return (buffers - saved) | set(capture.constants)
