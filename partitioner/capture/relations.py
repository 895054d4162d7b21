"""A guess of which sizes are free, and a forward that does not agree -> sizes that it leaves free.

Forward runs once more with a symbol for each dimension in question, and none of them is held fast:
torch then knows which of them came to be one number, and which came to be equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import nn

from .arguments import Arguments
from .automatic_leaves import FailedTrace
from .dimensions import SEQUENCE, places, without_symbol
from .fakes import Dynamic, FakeWorld, PinnedSizeError
from .inputs import enlarged, sizes_in
from .leaves import LeafRule
from .samples import BATCH
from .traces import trace_forward


def corrected(
    model: nn.Module,
    given: Arguments,
    dims: Dynamic,
    is_leaf: LeafRule,
    has_to_be_free: Collection[str],
) -> tuple[Dynamic, list[str]]:
    """The free sizes as forward needs them, with a note for each that is another than guessed.

    Dimensions of the same size as a free one may be free as well, where forward asks for the two
    to be equal. A size that has to be free and is not is left to the caller.
    """
    apart = _with_more(given, dims)
    world = FakeWorld(model)
    pins = world.env.pins = {}
    large = replace(given, tensors=enlarged(given.tensors, apart))
    try:
        trace_forward(model, world, large, apart, is_leaf, training=True)
    except FailedTrace:
        pass  # What came before tells something.
    known = {name: world.env.replace(size.node.expr) for name, size in world.symbols.items()}
    result: dict[str, dict[int, str]] = {name: dict(named) for name, named in dims.items()}
    notes: list[str] = []
    for symbol in dict.fromkeys(symbol for named in dims.values() for symbol in named.values()):
        equal = {other for other, size in known.items() if size == known[symbol]}
        where = places(result, symbol)
        if not where:
            continue  # It has come to be another.
        if known[symbol].is_Symbol:
            for name, named in apart.items():
                for dim, other in named.items():
                    if other in equal and result[name].get(dim) != symbol:
                        result[name][dim] = symbol
                        notes.append(f"dimension {dim} of {name} equals {where}{_why(pins, equal)}")
        elif symbol not in has_to_be_free:
            error = next((pins[other] for other in (symbol, *sorted(equal)) if other in pins), None)
            notes += [fixed(error, result, symbol)] if error else []
            result = without_symbol(result, symbol)
    return result, notes


def fixed(error: PinnedSizeError, dims: Dynamic, symbol: str) -> str:
    """The note for a size that forward holds at one value, and that becomes that number."""
    what = f"the {symbol} size" if symbol.endswith(SEQUENCE) else places(dims, symbol)
    return f"{what} is fixed: {error.where.rstrip(',')} works for {error.value} only"


def with_places(error: PinnedSizeError, dims: Dynamic) -> PinnedSizeError:
    """The error with the dimensions of the inputs that it is about, and the options that name
    others."""
    where = places(dims, error.symbol)
    if not where:
        return error
    name = next(name for name, named in dims.items() if error.symbol in named.values())
    flag = "--batch-dim" if error.symbol == BATCH else "--sequence-dim"
    return PinnedSizeError(
        error.symbol,
        error.where,
        error.value,
        f"If it is another dimension, say so: {flag} {name}=DIMENSION, or {flag} {name}=none. "
        f"Else: {error.cure}",
        f" It is {where}.",
    )


def _with_more(given: Arguments, dims: Dynamic) -> dict[str, dict[int, str]]:
    """The free dimensions, and with symbols of their own all others of the same sizes."""
    sizes = set(sizes_in(given.tensors, dims).values()) - {1}
    return {
        name: {
            dim: dims.get(name, {}).get(dim) or f"{name}_{dim}"
            for dim, size in enumerate(tensor.shape)
            if dim in dims.get(name, {}) or size in sizes
        }
        for name, tensor in given.tensors.items()
    }


def _why(pins: Mapping[str, PinnedSizeError], symbols: Collection[str]) -> str:
    """The line that made these sizes equal, or a number."""
    found = next((pins[symbol] for symbol in sorted(symbols) if symbol in pins), None)
    return f": {found.where.rstrip(',')} needs that" if found else ""
