"""The parameters, buffers and constants of a captured model; drawn ones for a model on meta.

Copies of its module tree share the tensors, and have other modules or parts of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn

from ...runtime.tensor_parallel.ranks import Split
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


# --- copies of the module tree ---------------------------------------------------------------


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(
        (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    )


def names_of(model: nn.Module) -> dict[str, list[str]]:
    """All names of each tensor, by each of them."""
    names: dict[int, list[str]] = {}
    tensors = tensors_of(model)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {name: names[id(tensor)] for name, tensor in tensors.items()}


def with_modules(model: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of the module tree with other modules at some paths; it shares the tensors."""
    by_id = {id(model.get_submodule(path)): module for path, module in modules.items()}
    copies: dict[int, nn.Module] = {}

    def copied(module: nn.Module) -> nn.Module:
        if id(module) not in copies:
            new = copies[id(module)] = by_id.get(id(module)) or _shallow_copy(module)
            if new is not module:
                new.__dict__["_parameters"] = dict(new._parameters)
                new.__dict__["_buffers"] = dict(new._buffers)
                new.__dict__["_modules"] = {
                    name: child and copied(child) for name, child in new._modules.items()
                }
        return copies[id(module)]

    return copied(model)


def _shallow_copy(module: nn.Module) -> nn.Module:
    """A copy as `copy.copy` makes it, also of modules with parametrizations, which refuse that."""
    new = module.__new__(type(module))
    new.__dict__.update(module.__dict__)
    return new


def model_of_rank(model: nn.Module, parts: Mapping[str, Split], size: int) -> nn.Module:
    """A copy of the module tree in which split tensors are the parts of the first rank."""
    copied = with_modules(model, {})
    tensors = tensors_of(model)
    made: dict[tuple[int, Split], Tensor] = {}
    for name, split in parts.items():
        whole = tensors[name]
        path, _, last = name.rpartition(".")
        owner = copied.get_submodule(path)
        part = made.setdefault((id(whole), split), _part(whole, split, size))
        setattr(owner, last, part)
    return copied


def _part(whole: Tensor, split: Split, size: int) -> Tensor:
    part = split.part(whole.detach(), 0, size).contiguous()
    return nn.Parameter(part, whole.requires_grad) if isinstance(whole, nn.Parameter) else part
