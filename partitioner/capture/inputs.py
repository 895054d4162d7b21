"""Example inputs -> which of their sizes are free, and inputs of other sizes like them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .fakes import Dynamic


def dynamic_sizes(inputs: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    """The free sizes by default: `batch` is dimension 0 of every tensor, `sequence` dimension 1
    of two-dimensional tensors of integers. A tensor of another length has a symbol of its own.

    >>> dynamic_sizes({"input_ids": torch.ones(4, 11, dtype=torch.long),
    ...                "labels": torch.ones(4, 7, dtype=torch.long)})
    {'input_ids': {0: 'batch', 1: 'sequence'}, 'labels': {0: 'batch', 1: 'labels_sequence'}}
    """
    found: dict[str, dict[int, str]] = {}
    lengths: dict[int, str] = {}
    for name, value in inputs.items():
        if value.dim() == 0:
            continue
        found[name] = {0: "batch"}
        if value.dim() == 2 and not value.is_floating_point() and not value.is_complex():
            symbol = f"{name}_sequence" if lengths else "sequence"
            found[name][1] = lengths.setdefault(value.shape[1], symbol)
    return found


def without_symbol(dims: Dynamic, symbol: str) -> dict[str, dict[int, str]]:
    return {
        name: {dim: other for dim, other in named.items() if other != symbol}
        for name, named in dims.items()
    }


def sizes_in(inputs: Mapping[str, Tensor], dims: Dynamic) -> dict[str, int]:
    """The numbers that the symbols stand for in these inputs."""
    return {
        symbol: inputs[name].shape[dim]
        for name, named in dims.items()
        if name in inputs
        for dim, symbol in named.items()
    }


def other_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Small sizes that differ from the given ones and from each other.

    >>> other_sizes({"batch": 4, "sequence": 128})
    {'batch': 3, 'sequence': 17}
    """
    others: dict[str, int] = {}
    for number, (name, size) in enumerate(sizes.items()):
        others[name] = min(size - 1, 3 + 14 * number) if size > 2 else 3
    return others


def enlarged(inputs: Mapping[str, Tensor], dims: Dynamic) -> dict[str, Tensor]:
    """The inputs with free sizes of 1 made 2: a size of 1 broadcasts, and cannot stand for any."""
    sizes = {symbol: max(size, 2) for symbol, size in sizes_in(inputs, dims).items()}
    return resized(inputs, dims, sizes)


def resized(
    inputs: Mapping[str, Tensor], dims: Dynamic, sizes: Mapping[str, int]
) -> dict[str, Tensor]:
    """Inputs of other sizes whose values are those of the given ones, over and over."""
    result = dict(inputs)
    for name, named in dims.items():
        if name not in inputs:
            continue
        tensor = inputs[name]
        for dim, symbol in named.items():
            length = tensor.shape[dim]
            if length != sizes[symbol]:
                index = torch.arange(sizes[symbol], device=tensor.device) % length
                tensor = tensor.index_select(dim, index)
        result[name] = tensor
    return result
