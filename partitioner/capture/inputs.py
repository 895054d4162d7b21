"""Example inputs -> which of their sizes are free, and inputs of other sizes like them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .fakes import Dynamic
from .samples import BATCH, resized


def dynamic_sizes(inputs: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    """The free sizes by default: `batch` is dimension 0 of every tensor, `sequence` dimension 1
    of two-dimensional tensors of integers. A tensor of another size has a symbol of its own, and
    one of size 1 beside others broadcasts and keeps it.

    >>> import torch
    >>> dynamic_sizes({"input_ids": torch.ones(4, 11, dtype=torch.long),
    ...                "labels": torch.ones(4, 7, dtype=torch.long),
    ...                "prompt": torch.ones(3, 8)})
    {'input_ids': {0: 'batch', 1: 'sequence'}, 'labels': {0: 'batch', 1: 'labels_sequence'}, \
'prompt': {0: 'prompt_rows'}}
    """
    found: dict[str, dict[int, str]] = {}
    lengths: dict[int, str] = {}
    rows: dict[int, str] = {}
    is_single = all(value.shape[0] == 1 for value in inputs.values() if value.dim())
    for name, value in inputs.items():
        if value.dim() == 0:
            continue
        size = value.shape[0]
        found[name] = {}
        if size > 1 or is_single:
            found[name][0] = rows.setdefault(size, f"{name}_rows" if rows else BATCH)
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


def enlarged(inputs: Mapping[str, Tensor], dims: Dynamic) -> dict[str, Tensor]:
    """The inputs with free sizes of 1 made 2: a size of 1 broadcasts, and cannot stand for any."""
    sizes = {symbol: max(size, 2) for symbol, size in sizes_in(inputs, dims).items()}
    return resized(inputs, dims, sizes)
