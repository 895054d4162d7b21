"""The parameters, buffers and constants of a captured model; drawn ones for a model on meta."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from ..capture import Capture
from ..capture.graph import attribute
from ..capture.model_state import is_on_meta, repeated_noise

_MOST_BYTES = 3 * 2**30
"""The most memory of drawn tensors that are kept for the next operation."""


class ModelTensors:
    """The tensors of a model by name. Those of a model on meta are drawn where they are read, and
    dropped before memory is short: each name has the same numbers again."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.are_drawn = is_on_meta(capture.model)
        self._kept: dict[int, Tensor] = {}

    def like(self, node: fx.Node) -> Tensor:
        """The tensor that a `get_attr` node reads, on meta if the model is."""
        return attribute(self._capture.model, self._capture.constants, str(node.target))

    def is_parameter(self, node: fx.Node) -> bool:
        """True if a `get_attr` node reads a parameter."""
        name = str(node.target)
        path, _, last = name.rpartition(".")
        if node.op != "get_attr" or name in self._capture.constants:
            return False
        return last in self._capture.model.get_submodule(path)._parameters

    def of_node(self, node: fx.Node) -> Tensor:
        """The tensor that a `get_attr` node reads."""
        return self._with_values(self.like(node), str(node.target))

    def of_module(self, path: str) -> dict[str, Tensor]:
        """The parameters and buffers of a module, by their names in it."""
        module = self._capture.model.get_submodule(path)
        named = (*module.named_parameters(), *module.named_buffers())
        return {name: self._with_values(tensor, f"{path}.{name}") for name, tensor in named}

    def _with_values(self, tensor: Tensor, name: str) -> Tensor:
        if not tensor.is_meta:
            return tensor
        key = id(tensor)
        if key in self._kept:
            self._kept[key] = self._kept.pop(key)
            return self._kept[key]
        bytes_left = _MOST_BYTES - tensor.numel() * tensor.element_size()
        while self._kept and sum(t.nbytes for t in self._kept.values()) > bytes_left:
            self._kept.pop(next(iter(self._kept)))
        self._kept[key] = _drawn(tensor, sum(name.encode()))
        return self._kept[key]


def _drawn(like: Tensor, place: int) -> Tensor:
    """Numbers such as a model may have: weights of both signs, vectors and buffers around one,
    indices of the first two rows of a table, masks of all positions before."""
    shape = like.shape
    if like.dtype == torch.bool:
        mask = torch.ones(shape, dtype=torch.bool)
        return mask.tril() if mask.dim() > 1 else mask
    numbers = repeated_noise(like.numel(), place).view(shape)
    if not like.is_floating_point() and not like.is_complex():
        return (numbers > 0).to(like.dtype)
    if isinstance(like, nn.Parameter) and like.dim() > 1:
        return numbers.mul_(shape[-1] ** -0.5).to(like.dtype)
    return numbers.mul_(0.2).exp_().to(like.dtype)
