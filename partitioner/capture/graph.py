"""A captured model: the graph, the inputs it takes, the module calls it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from ...runtime.plan import TensorSpec
from .arguments import Arguments
from .values import CallRecord, ModuleCall, size_text


@dataclass(frozen=True)
class Capture:
    """A model's forward as one `torch.fx.Graph` of named modules and torch functions.

    `inputs` are the tensors that forward takes, in the graph's order, and `arguments` how it
    takes them; `sizes` what the symbols
    were in the example; `constants` the tensors that forward reads and that are neither a
    parameter nor a buffer, by the name that `get_attr` nodes use for them; `changed` the parameters
    that forward changes in place; `modes` those that it is for, True for training. `flags` has by
    path what `training` of a module is in training and in evaluation mode, where that is not what
    the mode is: its owner overrides `train`.
    """

    graph: fx.Graph
    model: nn.Module
    inputs: tuple[TensorSpec, ...]
    arguments: Arguments
    sizes: Mapping[str, int]
    calls: Mapping[ModuleCall, CallRecord]
    constants: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    modes: tuple[bool, ...] = (True, False)
    flags: Mapping[str, tuple[bool, bool]] = field(default_factory=dict)

    def tensor_spec(self, node: fx.Node) -> TensorSpec:
        """Name, dtype and symbolic shape of a node whose value is a tensor.

        Raises TypeError when the node's value is not a tensor.
        """
        return tensor_spec(node)


def tensor_spec(node: fx.Node) -> TensorSpec:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise TypeError(f"{node.name} is {type(value).__name__}, not a tensor")
    return TensorSpec(
        name=node.name,
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(
            size if isinstance(size, int) else size_text(size.expr) for size in node.meta["shape"]
        ),
        requires_grad=value.requires_grad,
    )


def is_external(node: fx.Node) -> bool:
    """Whether the node stands for something given: an input, a parameter, a buffer, a constant."""
    return node.op in ("placeholder", "get_attr")


def attribute(model: nn.Module, constants: Mapping[str, Tensor], name: str) -> Tensor:
    """The tensor that a `get_attr` node of that name stands for."""
    if name in constants:
        return constants[name]
    path, _, last = name.rpartition(".")
    value = getattr(model.get_submodule(path), last)
    assert isinstance(value, torch.Tensor)
    return value
