"""Statements of a function -> its lines: blocks, paragraphs under headings, names of variables.

Each statement can carry a comment with the type, shape, file and line of its node or item.

A value that the user never named and that only the next statements read is folded into the
expression that reads it. Statements keep the order of the program: an operation that mutates or
draws random numbers never moves, and nothing moves past it. Variables have the names of the user's
code; a name is used again after its value is dead.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from ...runtime import tensor_parallel
from ...runtime.plan.plan import TensorSpec
from ..capture import Capture
from ..capture.values import AUGMENTED, is_mutating
from . import layout
from .items import (
    FORMS,
    Item,
    Loop,
    Op,
    RecomputedSegment,
    SubmoduleCall,
    ValueReads,
    hint_of,
    regions_of,
)
from .layout import WIDTH, Code, in_comment, is_name, lay_out


@dataclass(frozen=True, slots=True)
class Opener:
    """A line that opens a block.

    key: neighbors in blocks of equal keys share one block
    text: the line
    other: the key of the block after which this one is an `else:`
    """

    key: object
    text: str
    other: object = None


@dataclass(frozen=True, slots=True)
class CodeOrigin:
    """The source of a statement in the original: the module, and the file and line if known."""

    path: str
    file: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True)
class Statement:
    prefix: str
    code: Code
    comment: str = ""
    blocks: tuple[Opener, ...] = ()
    origin: CodeOrigin | None = None


def write_lines(statements: Sequence[Statement], *, headings: bool) -> list[str]:
    """The indented lines of a method's body. With `headings`, statements of one module and file of
    the original form a paragraph under a comment that names them."""
    if not headings:
        return list(_Blocks().lines(statements))
    lines: list[str] = []
    blocks = _Blocks()
    for paragraph in _paragraphs(statements):
        heading = _heading(paragraph, is_first=not lines)
        if heading:
            lines += [""] if lines else []
            lines.append(f"        # {in_comment(heading)}")
            blocks = _Blocks()
        lines += blocks.lines(paragraph)
    return lines


class _Blocks:
    """The open blocks, and the depths at which an `else:` opened them."""

    def __init__(self) -> None:
        self._open: tuple[Opener, ...] = ()
        self._else_at: set[int] = set()

    def lines(self, statements: Sequence[Statement]) -> Iterator[str]:
        for statement in statements:
            yield from self._enter(statement.blocks)
            indent = 8 + 4 * len(statement.blocks)
            yield lay_out(
                statement.prefix, statement.code, indent=indent, comment=statement.comment
            )

    def _enter(self, blocks: tuple[Opener, ...]) -> Iterator[str]:
        before, self._open = self._open, blocks
        shared = 0
        for opener, other in zip(before, blocks, strict=False):
            if opener.key != other.key:
                break
            shared += 1
        after_else = shared in self._else_at
        self._else_at = {depth for depth in self._else_at if depth < shared}
        for depth in range(shared, len(blocks)):
            is_else = depth == shared < len(before) and before[depth].key == blocks[depth].other
            if is_else and not after_else:
                self._else_at.add(depth)
                yield " " * (8 + 4 * depth) + "else:"
            else:
                yield " " * (8 + 4 * depth) + blocks[depth].text


def _paragraphs(statements: Sequence[Statement]) -> Iterator[list[Statement]]:
    """Runs of statements of one module and file; a statement without an origin belongs to the
    paragraph that follows."""
    run: list[Statement] = []
    waiting: list[Statement] = []
    path, file = "", ""
    for statement in statements:
        waiting.append(statement)
        origin = statement.origin
        if origin is None:
            continue
        if run and (origin.path != path or (origin.file and file and origin.file != file)):
            yield run
            run, file = [], ""
        run += waiting
        waiting = []
        path, file = origin.path, origin.file or file
    if run or waiting:
        yield run + waiting


def _heading(paragraph: Sequence[Statement], *, is_first: bool) -> str:
    origins = [statement.origin for statement in paragraph if statement.origin is not None]
    if not origins:
        return ""
    lines = [origin.line for origin in origins if origin.line]
    file = next((os.path.basename(origin.file) for origin in origins if origin.file), "")
    where = ""
    if lines:
        last = f"-{max(lines)}" if max(lines) > min(lines) else ""
        where = f"{file}:{min(lines)}{last}"
    path = origins[0].path if where or not is_first else ""
    text = f"{path}, {where}" if path and where else path or where
    return text if len(text) + 10 <= WIDTH else where


def line_of(node: fx.Node) -> tuple[str, int] | None:
    """The user's file and line that a node comes from, if it has one."""
    return node.meta.get("source")


def origin_of(item: Item) -> CodeOrigin:
    """The module in whose forward the original computes an item, and the line of an operation."""
    calls = item.nodes[0].meta.get("calls", ())
    match item:
        case Op(node):
            file, line = line_of(node) or ("", 0)
            return CodeOrigin(calls[-1].path if calls else "", file, line)
        case RecomputedSegment(recompute):
            around = calls[: recompute.depth]
        case SubmoduleCall(call):
            around = calls[: calls.index(call)]
        case Loop(run):
            around = calls[: calls.index(run[0].call)]
    return CodeOrigin(around[-1].path if around else "")


def shape_of(item: Item, capture: Capture) -> str:
    """The shape that all tensors among an item's results have; empty if they differ."""
    results = [node for node in item.results if isinstance(node.meta.get("val"), Tensor)]
    shapes = dict.fromkeys(str(_of_rank(capture.tensor_spec(node), node)) for node in results)
    return next(iter(shapes)) if len(shapes) == 1 else ""


def _of_rank(spec: TensorSpec, node: fx.Node) -> TensorSpec:
    """The shape of a value of which each tensor rank may have a part of the positions."""
    if (part := node.meta.get("part")) is None:
        return spec
    shape = [f"local({n})" if dim == part.dim else n for dim, n in enumerate(spec.shape)]
    return replace(spec, shape=tuple(shape))


def type_of(node: fx.Node) -> str:
    """The annotation of a value: of an argument or of a result."""
    value = node.meta.get("val")
    if isinstance(value, list):
        return "list[Tensor]"
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return "int" if isinstance(value, torch.SymInt) else "float"
    return "tuple[Tensor, ...]" if isinstance(value, tuple) else "Tensor"


RESERVED = frozenset(
    {"self", "torch", "nn", "F", "Tensor", "math", "operator", "index", "cast", "random", "np"}
    | {"float", "int", "max", "min", "len", "range", "str", "abs", "round", "slice", "tuple"}
    | {*tensor_parallel.__all__}
)


@dataclass(slots=True)
class Variables:
    """The values of each variable.

    Two values share a variable only if the later one is the earlier one, changed in place; a name
    passes to another value only when nothing will read the former.
    """

    last_read: Mapping[fx.Node, int]
    symbols: frozenset[str]
    name_of: dict[fx.Node, str] = field(default_factory=dict)
    holds: dict[str, set[fx.Node]] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    numbers: dict[str, bool] = field(default_factory=dict)

    def bind(self, node: fx.Node, name: str) -> None:
        for former in self.holds.pop(name, set()):
            del self.name_of[former]
        self.holds[name] = {node}
        self.name_of[node] = name
        self.numbers[name] = is_number(node)

    def fits(self, name: str, node: fx.Node) -> bool:
        """Returns whether the variable is new, or holds numbers or tensors as the node does."""
        return self.numbers.get(name, is_number(node)) == is_number(node)

    def alias(self, node: fx.Node, name: str) -> None:
        self.holds.setdefault(name, set()).add(node)
        self.name_of[node] = name

    def is_live(self, name: str, after: int) -> bool:
        """Returns whether an item after that position reads a value of the variable."""
        return any(self.last_read.get(node, -1) > after for node in self.holds.get(name, ()))

    def is_reserved(self, name: str) -> bool:
        return name in RESERVED or name in self.symbols or name in self.modules

    def is_taken(self, name: str, after: int) -> bool:
        return self.is_reserved(name) or self.is_live(name, after)


def is_number(node: fx.Node) -> bool:
    """Returns whether a value is a number that was read off a tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat))


_SHAPES = frozenset({"view", "reshape", "transpose", "permute", "expand", "flatten", "item"})


def candidates(node: fx.Node, item: Item, reader: Item | None, output: str) -> list[str]:
    """Names for a value, best first. `reader` is the only item that reads it, `output` the name of
    the value among the outputs of the model."""
    names = [node.meta.get("hint") or "", output, hint_of(node)]
    if reader is not None and len(reader.results) == 1:
        names.append(reader.results[0].meta.get("hint") or "")
    if isinstance(item, SubmoduleCall):
        names.append(own_part(item.call.path))
    elif node.op == "call_module":
        names.append(own_part(str(node.target)))
    elif node.op in ("call_function", "call_method"):
        target = node.args[1] if node.target is getattr else node.target
        plain = target if isinstance(target, str) else getattr(target, "__name__", "value")
        plain = {"getitem": "item", "item": "number"}.get(plain, plain.strip("_"))
        if hint_of(node) and plain in _SHAPES | FORMS:
            names.append(f"{hint_of(node)}_{plain}")
        names.append(plain)
    return names


# Letters that look like digits, to which linters object, and the name of unused values.
_AMBIGUOUS = ("l", "O", "I", "_")


def is_good(name: str) -> bool:
    """Returns whether a variable may have the name."""
    return is_name(name) and name not in _AMBIGUOUS


def own_part(path: str) -> str:
    """`ln_1` for `h.0.ln_1`, `blocks_1` for `blocks.1`."""
    names = path.split(".")
    start = next((i for i in range(len(names) - 1, -1, -1) if not names[i].isdigit()), 0)
    return "_".join(names[start:])


def item_name(path: str, type_name: str) -> str:
    """The name for an item of a list of modules: `layer` for `layers.3`, `block` for the GPT2Block
    `h.3`."""
    parent = path.split(".")[-2] if "." in path else ""
    if len(parent) >= 4 and parent.isalpha() and parent.islower():
        name = parent.removesuffix("s") if not parent.endswith("ss") else parent
    else:
        start = max((i for i, letter in enumerate(type_name) if letter.isupper()), default=0)
        name = type_name[start:].lower().strip("0123456789")
    return name if is_good(name) else "block"


@dataclass(frozen=True, slots=True)
class Folded:
    """The expression of a value without a variable, to be inserted where the value is read.

    code: the expression
    names: the names in it
    is_effectful: whether its order matters
    statement: writes the expression as a statement of its own instead
    """

    code: Code
    names: frozenset[str]
    is_effectful: bool
    statement: Callable[[], None]


class Folds:
    """The folded values that nothing has read yet; `used` are those in the current expression."""

    def __init__(self) -> None:
        self._waiting: dict[fx.Node, Folded] = {}
        self.used: list[fx.Node] = []

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._waiting

    def fold(self, node: fx.Node, folded: Folded) -> None:
        self._waiting[node] = folded

    def begin_expression(self) -> None:
        self.used = []

    def use(self, node: fx.Node) -> Code:
        self.used.append(node)
        return self._waiting[node].code

    def drop(self, nodes: Iterable[fx.Node]) -> None:
        """Forgets values that are now inside another expression or statement."""
        for node in nodes:
            self._waiting.pop(node, None)

    def names_in(self, nodes: Iterable[fx.Node]) -> frozenset[str]:
        return frozenset[str]().union(*(self._waiting[node].names for node in nodes))

    def is_name_used(self, name: str) -> bool:
        return any(name in folded.names for folded in self._waiting.values())

    def unfold(self, node: fx.Node) -> None:
        """Writes the value as a statement of its own instead."""
        self._waiting.pop(node).statement()

    def unfold_readers(self, name: str) -> None:
        """Writes the expressions that read a variable, before the variable gets another value."""
        for node in [node for node, folded in self._waiting.items() if name in folded.names]:
            self.unfold(node)

    def unfold_all(self, but: Collection[fx.Node] = frozenset()) -> None:
        while waiting := [node for node in self._waiting if node not in but]:
            self.unfold(waiting[0])

    def unfold_effectful(self, but: Collection[fx.Node]) -> None:
        for node in [node for node, folded in self._waiting.items() if folded.is_effectful]:
            if node not in but:
                self.unfold(node)

    def unfold_longest(self) -> None:
        """Gives a variable to the longest used expression; to all of them if order matters."""
        if any(self._waiting[node].is_effectful for node in self.used):
            self.unfold_all()
        else:
            self.unfold(max(self.used, key=lambda node: len(self._waiting[node].code.flat)))


def can_fold(
    item: Op | SubmoduleCall | RecomputedSegment,
    code: Code,
    position: int,
    reads: ValueReads,
    is_taken: Callable[[str], bool],
) -> bool:
    """Returns whether the only reader of the only result of the item at `position` may contain its
    expression."""
    if len(item.results) != 1 or (isinstance(item, Op) and item.items):
        return False
    (result,) = item.results
    reader: Item | None = reads.reader(result)
    if reader is None or isinstance(reader, Loop) or len(code.flat) > layout.WIDTH - 24:
        return False
    if regions_of(reader) != regions_of(item):
        return False
    hint = result.meta.get("hint")
    is_next = reads.of(result) == [position + 1]
    if hint is None or not is_good(hint):
        return is_next or line_of(result) == line_of(reader.nodes[-1])
    return is_next and is_taken(hint)


def is_statement(node: fx.Node) -> bool:
    """Returns whether a node is written as a statement on its first argument."""
    if node.op == "call_method":
        return is_mutating(node) and str(node.target).endswith("_")
    return node.op == "call_function" and (
        node.target in AUGMENTED or node.target in (operator.setitem, setattr)
    )
