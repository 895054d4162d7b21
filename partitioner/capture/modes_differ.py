"""Two graphs that no graph with branches can hold -> the error that says where and why."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from ...runtime.errors import CaptureError
from .branch import DifferentValues
from .graph import tensor_spec
from .merge import Different, Pair
from .structure import map_leaves

_TENSOR = "a tensor"
_ALONE = 'Capture it for training alone: --mode train (mode="train" in Python)'


def modes_differ(
    train: fx.Graph, evaluation: fx.Graph, difference: Pair, why: Different, model: nn.Module
) -> CaptureError:
    """`difference` are the first nodes, one of each mode, that are not alike; `why` no graph with
    branches can hold both."""
    ours, theirs = (_result(graph) for graph in (train, evaluation))
    if ours != theirs:
        return CaptureError(
            f"{type(model).__name__}.forward returns {ours} in training and {theirs} in "
            "evaluation.",
            f"{_ALONE}; or return the same structure in both modes.",
        )
    if isinstance(why, DifferentValues):
        shapes = [tensor_spec(node) for node in (why.train, why.evaluation)]
        return CaptureError(
            f"what {_place(why.train)} makes is {shapes[0]} in training, and {shapes[1]} in "
            "evaluation; modules that run in both modes are given it.",
            f"{_ALONE}.",
        )
    cure = f"{_ALONE}."
    if (kept := _module_of(difference, model)) is not None:
        cure = f"{_ALONE}; or keep the module that decides as one node: --leaf {kept}."
    return CaptureError(
        "forward does other work in training than in evaluation, from "
        f"{_place(difference[0])} in training and {_place(difference[1])} in evaluation on, and "
        "what follows needs both.",
        cure,
    )


def _result(graph: fx.Graph) -> str:
    """The structure of what forward returns, such as `(a tensor, {aux: a tensor})`."""
    (output,) = graph.find_nodes(op="output")
    return _told(map_leaves(_kind, output.args[0]))


def _kind(leaf: Any) -> Any:
    return _TENSOR if isinstance(leaf, fx.Node) else leaf


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_told(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_told, value)) + ")"
    return str(value)


def _place(node: fx.Node) -> str:
    source = node.meta["source"]
    place = f"{source[0]}:{source[1]}" if source else node.name
    return f"{place} ({getattr(node.target, '__name__', node.target)})"


def _module_of(difference: Pair, model: nn.Module) -> str | None:
    """The class of the innermost module of both nodes; None where that is the model itself."""
    stacks = [[call.path for call in node.meta["calls"] if call.path] for node in difference]
    common = [one for one, other in zip(*stacks, strict=False) if one == other]
    return type(model.get_submodule(common[-1])).__name__ if common else None
