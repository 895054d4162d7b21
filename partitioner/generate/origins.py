"""A node or an item -> what is said of it beside the code: its type, shape, file and line."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ..capture import Capture
from .items import Call, Item, Loop, Op, Segment
from .statements import Origin


def line_of(node: fx.Node) -> tuple[str, int] | None:
    return node.meta.get("source")


def origin_of(item: Item) -> Origin:
    """The module in whose forward the original computes an item, and the line of an operation."""
    calls = item.nodes[0].meta.get("calls", ())
    match item:
        case Op(node):
            file, line = line_of(node) or ("", 0)
            return Origin(calls[-1].path if calls else "", file, line)
        case Segment(recompute):
            around = calls[: recompute.depth]
        case Call(call):
            around = calls[: calls.index(call)]
        case Loop(run):
            around = calls[: calls.index(run[0].call)]
    return Origin(around[-1].path if around else "")


def shape_of(item: Item, capture: Capture) -> str:
    """The shape that all tensors among an item's results have; empty if they differ."""
    results = [node for node in item.results if isinstance(node.meta.get("val"), Tensor)]
    shapes = dict.fromkeys(str(capture.tensor_spec(node)) for node in results)
    return next(iter(shapes)) if len(shapes) == 1 else ""


def type_of(node: fx.Node) -> str:
    """The annotation of a value: an argument's or a result's."""
    value = node.meta.get("val")
    if isinstance(value, list):
        return "list[Tensor]"
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return "int" if isinstance(value, torch.SymInt) else "float"
    return "tuple[Tensor, ...]" if isinstance(value, tuple) else "Tensor"
