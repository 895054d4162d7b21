"""Values -> the Python expressions that make them again, and the imports that these need.

constants: a value that is not a tensor -> an expression
callables: a function or class -> its name in a generated file
sizes: symbolic sizes -> expressions, and the tensors of a function from which it reads sizes
tensors: a tensor outside the state_dict -> an expression, if there is a simple one

Tensors without such an expression are saved with the weights, under their names in the original
(`extra_tensors`), and the code holds an empty buffer of their shape.
"""

from __future__ import annotations

import ast
import builtins
import cmath
import math
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
import torch
import torch.nn.functional
from torch import Tensor, fx
from torch.overrides import resolve_name
from torch.utils._sympy.functions import FloorDiv

from ...runtime.errors import PlanError
from ..capture import Capture, Region, Size, state_of
from ..capture.random_numbers import Draw
from ..capture.values import size_text
from ..split.split import StageGraph, used_names
from . import layout
from .items import Item, regions_of, symbols_of
from .layout import Code, bracket, call, infix, is_module, is_path, prefixed, quoted
from .methods import decided

_CONSTANTS: Mapping[float, Code] = {
    math.pi: Code("math.pi"),
    math.sqrt(2.0 / math.pi): Code("math.sqrt(2.0 / math.pi)"),
    math.sqrt(2.0): Code("math.sqrt(2.0)"),
    torch.finfo(torch.float32).min: Code("torch.finfo(torch.float32).min"),
    torch.finfo(torch.float32).max: Code("torch.finfo(torch.float32).max"),
    torch.finfo(torch.bfloat16).min: Code("torch.finfo(torch.bfloat16).min"),
    torch.finfo(torch.float16).min: Code("torch.finfo(torch.float16).min"),
    torch.finfo(torch.float64).min: Code("torch.finfo(torch.float64).min"),
}

_TYPES_AS_DTYPES = (bool, int, float, complex)


def write_constant(value: Any) -> Code:
    """The expression that makes a value other than a tensor; raises PlanError if there is none."""
    if isinstance(value, np.generic):
        value = value.item()
    match value:
        case None | bool() | int():
            return Code(repr(value), layout.UNARY if _is_negative(value) else layout.ATOM)
        case float():
            if value in _CONSTANTS:
                return _CONSTANTS[value]
            if not math.isfinite(value):
                return Code(f'float("{value}")')
            return Code(repr(value), layout.UNARY if value < 0 else layout.ATOM)
        case str():
            return Code(quoted(value))
        case types.EllipsisType():
            return Code("...")
        case torch.dtype() | torch.memory_format() | torch.layout():
            return Code(str(value))
        case type() if value in _TYPES_AS_DTYPES:
            return Code(value.__name__)
        case type() if isinstance(value, type(torch.FloatTensor)):
            return Code(f"{value.__module__}.{value.__name__}")
        case range():
            return Code(repr(value))
        case torch.device():
            text = f'torch.device("{value}")'
            return Code(text)
        case slice():
            ends = (value.start, value.stop, value.step)
            return call("slice", tuple(map(write_constant, ends)))
        case list():
            return bracket("[", tuple(map(write_constant, value)), "]")
        case tuple():
            return bracket("(", tuple(map(write_constant, value)), ")", lone_comma=True)
        case dict():
            pairs = [
                prefixed(f"{write_constant(key)}: ", write_constant(item))
                for key, item in value.items()
            ]
            return bracket("{", tuple(pairs), "}")
        case complex():
            if cmath.isfinite(value):
                return Code(repr(value))
            return call("complex", (write_constant(value.real), write_constant(value.imag)))
    raise PlanError(
        f"cannot write {_short(value)} ({type(value).__name__}) as an argument in generated code.",
        "Keep the module that uses it as one node: --leaf CLASS",
    )


def _is_negative(value: Any) -> bool:
    return isinstance(value, int) and value < 0


def _short(value: Any) -> str:
    first, *more = repr(value).split("\n")
    return f"{first[:60]}.." if more or len(first) > 60 else first


_HOMES = (
    ("F", torch.nn.functional),
    ("torch", torch),
    ("torch.special", torch.special),
    ("torch.fft", torch.fft),
    ("torch.linalg", torch.linalg),
    ("math", math),
    ("operator", operator),
)
# A function that torch and F both have is written with torch's name: torch.relu, not F.relu.
_SORTED_HOMES = (_HOMES[1], _HOMES[0], *_HOMES[2:])


def name_callable(target: Callable[..., Any], require: Callable[[str, str], None]) -> str:
    """The name of a function where `torch`, `F`, `math` and `operator` are imported.

    Calls `require(module, name)` for every further import. Raises PlanError for a function that
    no import can reach.
    """
    short = getattr(target, "__name__", "")
    if getattr(builtins, short, None) is target:
        return short
    if isinstance(target, Draw):
        require(target.__module__.partition(".")[0], "")
        return target.text
    homes = _HOMES if "functional" in (getattr(target, "__module__", "") or "") else _SORTED_HOMES
    for prefix, home in homes:
        if short and getattr(home, short, None) is target:
            return f"{prefix}.{short}"
    owner = getattr(target, "__self__", None)
    if short == "apply" and isinstance(owner, type):
        _import(owner, owner.__qualname__, require)
        return f"{owner.__qualname__}.apply"
    resolved = resolve_name(target) or ""
    if resolved.startswith("torch.Tensor."):
        return resolved.removeprefix("torch.")
    if resolved.startswith("torch.nn.functional."):
        return f"F.{resolved.removeprefix('torch.nn.functional.')}"
    if resolved.startswith("torch."):
        return resolved
    if getattr(torch._C._VariableFunctions, short, None) is target:
        return f"torch.{short}"  # in whose place another package has put a function of its own
    qualified = str(getattr(target, "__qualname__", short))
    _import(target, qualified, require)
    return qualified


def _import(value: Any, qualified: str, require: Callable[[str, str], None]) -> None:
    module = getattr(value, "__module__", None)
    if module == "__main__" or not is_module(module) or not is_path(qualified):
        raise PlanError(
            f"cannot write a call of {qualified or value!r} of {module}: generated code could not "
            f"import it.",
            "Move it to the top level of a module that can be imported.",
        )
    require(module, qualified)


_OPERATORS: Mapping[type[ast.AST], tuple[str, int]] = {
    ast.Add: ("+", layout.ADD),
    ast.Sub: ("-", layout.ADD),
    ast.Mult: ("*", layout.MULTIPLY),
    ast.Div: ("/", layout.MULTIPLY),
    ast.FloorDiv: ("//", layout.MULTIPLY),
    ast.Mod: ("%", layout.MULTIPLY),
    ast.Pow: ("**", layout.POWER),
}


_RELATIONS: Mapping[type[ast.AST], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip


def write_size(expression: sympy.Basic | int, symbol: Callable[[str], Code]) -> Code:
    """A size such as `batch * (sequence + 1)`, or a condition on sizes, as an expression; `symbol`
    gives the expression of each symbol.

    Raises PlanError for an operation that has no Python text here.
    """

    def write(part: ast.AST) -> Code:
        match part:
            case ast.Constant(value=value):
                return write_constant(value)
            case ast.Name(id=name):
                return symbol(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return Code(f"-{write(operand).within(layout.UNARY)}", layout.UNARY)
            case ast.BinOp(left=left, op=op, right=right):
                sign, binds = _OPERATORS[type(op)]
                return infix(sign, binds, write(left), write(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return infix(_RELATIONS[type(op)], layout.COMPARE, write(left), write(right))
            case ast.BoolOp(op=op, values=values):
                word = " and " if isinstance(op, ast.And) else " or "
                parts = [write(value).within(layout.COMPARE) for value in values]
                return Code(word.join(parts), layout.CONDITIONAL)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Code(f"not {write(operand).within(layout.NOT)}", layout.NOT)
            case ast.Call(func=function, args=args):
                return call(ast.unparse(function), tuple(map(write, args)))
        raise AssertionError(ast.dump(part))

    try:
        text = size_text(sympy.sympify(expression))
    except ValueError as error:
        raise PlanError(f"cannot write a size in generated code: {error}.") from error
    return write(ast.parse(text, mode="eval").body)


@dataclass(frozen=True, slots=True)
class SizeSource:
    """The source of a symbol: a dimension of a tensor.

    symbol: the symbol
    node: the tensor
    dimension: the dimension whose length gives the symbol
    expression: the symbol as an expression of that length, which is called `length` in it; None if
        the length is the symbol itself
    """

    symbol: str
    node: fx.Node
    dimension: int
    expression: sympy.Expr | None = None


@dataclass(frozen=True, slots=True)
class Sources:
    known: tuple[SizeSource, ...]
    unknown: tuple[str, ...]


LENGTH = sympy.Symbol("length", integer=True, positive=True)


def find_sources(
    needed: Sequence[str], inputs: Sequence[fx.Node], items: Sequence[Item]
) -> Sources:
    """Finds a source for each symbol in `needed`: an argument of the function if one has the
    symbol, else the first result that has it and that is computed, in both modes, before the
    symbol is needed."""
    source_of: dict[str, SizeSource] = {}
    wanted = tuple(dict.fromkeys(needed))
    first_use = {
        symbol: min(place for place, item in enumerate(items) if symbol in symbols_of(item))
        for symbol in wanted
    }
    regions = [decided(regions_of(item)) for item in items]
    always = frozenset.intersection(*regions) if regions else frozenset[Region]()
    candidates = [(-1, node) for node in inputs] + [
        (place, node)
        for place, item in enumerate(items)
        if regions[place] == always
        for node in item.results
    ]
    for exact in (True, False):
        for symbol in wanted:
            if symbol in source_of:
                continue
            for place, node in candidates:
                if place >= first_use[symbol]:
                    break
                if (source := _source(symbol, node, source_of, exact=exact)) is not None:
                    source_of[symbol] = source
                    break
    return Sources(
        tuple(source_of[symbol] for symbol in wanted if symbol in source_of),
        tuple(sorted(symbol for symbol in wanted if symbol not in source_of)),
    )


def _source(
    symbol: str, node: fx.Node, known: dict[str, SizeSource], *, exact: bool
) -> SizeSource | None:
    part = node.meta.get("part")
    for dimension, size in enumerate(node.meta.get("shape") or ()):
        if not isinstance(size, Size) or (part is not None and part.dim == dimension):
            continue
        names = {item.name for item in size.expr.free_symbols}
        if exact:
            if size.expr.is_Symbol and size.expr.name == symbol:
                return SizeSource(symbol, node, dimension)
        elif symbol in names and names - {symbol} <= set(known):
            own = next(item for item in size.expr.free_symbols if item.name == symbol)
            if size.expr.is_polynomial(own) and sympy.degree(size.expr, own) == 1:
                factor = size.expr.coeff(own, 1)
                rest = sympy.expand(size.expr - factor * own)
                difference = LENGTH - rest
                whole = difference if factor == 1 else FloorDiv(difference, factor)
                return SizeSource(symbol, node, dimension, whole)
    return None


def write_sources(
    sources: Sequence[SizeSource], node: fx.Node, tensor: Code
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


_SMALL = 16
_LONGEST = 64


def rebuild(tensor: Tensor) -> Code | None:
    """An expression whose value equals the tensor bit for bit, or None.

    >>> print(rebuild(torch.arange(4)[None]))
    torch.arange(4).unsqueeze(0)
    """
    if tensor.device.type == "meta":
        return None
    value = tensor.detach().cpu()
    for code, guess in _guesses(value):
        if len(code.flat) > _LONGEST:
            continue
        if guess.dtype == value.dtype and guess.shape == value.shape and torch.equal(guess, value):
            return code
    return None


def empty(shape: tuple[Code, ...], dtype: torch.dtype) -> Code:
    """`torch.empty(...)` of a shape."""
    sizes = shape or (Code("()"),)
    return call("torch.empty", (*sizes, *_dtype(dtype)))


def _dtype(dtype: torch.dtype) -> tuple[Code, ...]:
    return () if dtype == torch.float32 else (Code(f"dtype={dtype}"),)


def _guesses(value: Tensor) -> Iterator[tuple[Code, Tensor]]:
    sizes = tuple(Code(str(size)) for size in value.shape) or (Code("()"),)
    if value.numel() == 0:
        return
    first = value.flatten()[0]
    if bool((value == first).all()):
        number = first.item()
        if number in (0, 1):
            name = "ones" if number else "zeros"
            yield call(f"torch.{name}", (*sizes, *_dtype(value.dtype))), value
        elif value.dim() == 0:
            guess = torch.tensor(number, dtype=value.dtype)
            yield call("torch.tensor", (_literal(value), *_dtype_of_literal(value))), guess
    width = value.shape[-1] if value.dim() else 0
    if value.dim() == 1:
        yield call("torch.arange", (sizes[0], *_arange_dtype(value))), _arange(width, value)
        yield from _frequencies(value)
    if value.dim() == 2 and value.shape[0] == 1:
        guess = _arange(width, value).unsqueeze(0)
        inner = call("torch.arange", (sizes[1], *_arange_dtype(value)))
        yield Code(f"{inner}.unsqueeze(0)"), guess
    if value.dim() >= 2 and value.shape[-2] == width and value.numel() == width * width:
        square = torch.ones(width, width, dtype=value.dtype).tril().view(value.shape)
        inner = call("torch.ones", (sizes[-1], sizes[-1], *_dtype(value.dtype)))
        text = f"{inner}.tril()"
        if value.dim() > 2:
            text += f".view({', '.join(map(str, sizes))})"
        yield Code(text), square
    if 0 < value.numel() <= _SMALL:
        yield call("torch.tensor", (_literal(value), *_dtype_of_literal(value))), value


def _arange(length: int, like: Tensor) -> Tensor:
    return torch.arange(length).to(like.dtype)


def _arange_dtype(value: Tensor) -> tuple[Code, ...]:
    return () if value.dtype == torch.int64 else (Code(f"dtype={value.dtype}"),)


_BASES = (10000.0, 500000.0, 1000000.0)


def _frequencies(value: Tensor) -> Iterator[tuple[Code, Tensor]]:
    """Guesses the inverse frequencies of rotary positions."""
    if value.dtype != torch.float32:
        return
    dim = 2 * value.shape[0]
    for base in _BASES:
        exponent = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
        text = f"1.0 / ({base} ** (torch.arange(0, {dim}, 2).float() / {dim}))"
        yield Code(text), 1.0 / (base**exponent)


def _literal(value: Tensor) -> Code:
    def write(item: object) -> Code:
        if isinstance(item, list):
            inside = tuple(map(write, item))
            return Code(f"[{', '.join(map(str, inside))}]", head="[", items=inside, tail="]")
        return Code(repr(item) if repr(item) not in ("inf", "-inf", "nan") else f'float("{item}")')

    return write(value.tolist())


def _dtype_of_literal(value: Tensor) -> tuple[Code, ...]:
    natural = (torch.float32, torch.int64, torch.bool)
    return () if value.dtype in natural else (prefixed("dtype=", Code(str(value.dtype))),)


def extra_tensors(capture: Capture, stages: Iterable[StageGraph]) -> dict[str, Tensor]:
    """The tensors outside the state_dict that the generated code needs and cannot make, by their
    names in the original; those of a model on meta have no values."""
    saved = set(state_of(capture.model))
    names = (name for stage in stages for name in used_names(capture, stage)[1])
    tensors = {name: _tensor(capture, name) for name in names if name not in saved}
    return {name: tensor.detach() for name, tensor in tensors.items() if rebuild(tensor) is None}


def _tensor(capture: Capture, name: str) -> Tensor:
    if name in capture.constants:
        return capture.constants[name]
    path, _, last = name.rpartition(".")
    tensor = getattr(capture.model.get_submodule(path), last)
    assert isinstance(tensor, Tensor)
    return tensor
