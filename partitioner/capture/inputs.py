"""Example inputs and the symbols of their free sizes -> the numbers, and inputs to trace with."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .fakes import Dynamic
from .samples import resized


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
