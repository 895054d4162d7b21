"""Sizes that a function uses -> the tensors of its own that it reads them off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sympy
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from ..capture import Size
from .items import Item, symbols_of
from .layout import Code
from .size_expressions import write_size


@dataclass(frozen=True, slots=True)
class Source:
    """Where a symbol comes from: a dimension of a tensor, and the expression of the symbol in
    that dimension's length, which is called `length` there (the symbol itself when None)."""

    symbol: str
    node: fx.Node
    dimension: int
    expression: sympy.Expr | None = None


@dataclass(frozen=True, slots=True)
class Sources:
    found: tuple[Source, ...]
    unknown: tuple[str, ...]


LENGTH = sympy.Symbol("length", integer=True, positive=True)


def find_sources(
    needed: Sequence[str], inputs: Sequence[fx.Node], items: Sequence[Item]
) -> Sources:
    """A source for each symbol in `needed`: an argument of the function if one has it, else the
    first result that has it and is made before the symbol is needed."""
    found: dict[str, Source] = {}
    wanted = tuple(dict.fromkeys(needed))
    first_use = {
        symbol: min(place for place, item in enumerate(items) if symbol in symbols_of(item))
        for symbol in wanted
    }
    made = [(-1, node) for node in inputs] + [
        (place, node) for place, item in enumerate(items) for node in item.results
    ]
    for exact in (True, False):
        for symbol in wanted:
            if symbol in found:
                continue
            for place, node in made:
                if place >= first_use[symbol]:
                    break
                if (source := _source(symbol, node, found, exact=exact)) is not None:
                    found[symbol] = source
                    break
    return Sources(
        tuple(found[symbol] for symbol in wanted if symbol in found),
        tuple(sorted(symbol for symbol in wanted if symbol not in found)),
    )


def _source(symbol: str, node: fx.Node, known: dict[str, Source], *, exact: bool) -> Source | None:
    for dimension, size in enumerate(node.meta.get("shape") or ()):
        if not isinstance(size, Size):
            continue
        names = {item.name for item in size.expr.free_symbols}
        if exact:
            if size.expr.is_Symbol and size.expr.name == symbol:
                return Source(symbol, node, dimension)
        elif symbol in names and names - {symbol} <= set(known):
            own = next(item for item in size.expr.free_symbols if item.name == symbol)
            if size.expr.is_polynomial(own) and sympy.degree(size.expr, own) == 1:
                factor = size.expr.coeff(own, 1)
                rest = sympy.expand(size.expr - factor * own)
                difference = LENGTH - rest
                whole = difference if factor == 1 else FloorDiv(difference, factor)
                return Source(symbol, node, dimension, whole)
    return None


def write_sources(
    sources: Sequence[Source], node: fx.Node, tensor: Code
) -> Iterator[tuple[str, Code]]:
    """The statements that read sizes off one tensor, as names and expressions."""
    plain = {source.dimension: source.symbol for source in sources if source.expression is None}
    if len(plain) > 1:
        names = [plain.get(dimension, "_") for dimension in range(len(node.meta["shape"]))]
        yield ", ".join(names), Code(f"{tensor}.shape")
    elif plain:
        ((dimension, symbol),) = plain.items()
        yield symbol, Code(f"{tensor}.size({dimension})")
    for source in sources:
        if source.expression is not None:
            length = Code(f"{tensor}.size({source.dimension})")

            def name_size(symbol: str, length: Code = length) -> Code:
                return length if symbol == LENGTH.name else Code(symbol)

            yield source.symbol, write_size(source.expression, name_size)
