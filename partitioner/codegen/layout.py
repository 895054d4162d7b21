"""Expressions and texts -> lines of Python that no formatter changes.

An expression that fits in 88 columns stands on one line. A longer one is exploded at its outermost
bracket, one item a line, each with a trailing comma: formatters keep such a literal exploded at
every width, so that the text is stable at 88, 100 and 120 columns. Binary operators get only the
parentheses that they need, and imports the order of import sorters. Many equal neighbors in a list
or dict become a comprehension.

Texts that others chose, such as the names of modules, enter a file only through the functions
here: as a string, as a part of a docstring or comment, or as a name after a check that it is valid.
"""

from __future__ import annotations

import ast
import keyword
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeGuard

from ...runtime import tensor_parallel
from ...runtime.errors import PlanError
from ...runtime.formatting import hiding_in, one_line, visible


def quoted(text: str) -> str:
    """The string literal of a text, with double quotes where these need no escapes.

    >>> print(quoted("plain"), quoted('a"b'), quoted("it's"))
    "plain" 'a"b' "it's"
    """
    literal = visible(repr(text))
    return f'"{literal[1:-1]}"' if literal[0] == "'" and '"' not in text else literal


def in_docstring(text: str) -> str:
    """The lines of a raw docstring, with no line that ends it."""
    return visible(text).replace('"""', "'''")


def fits_docstring(text: str) -> bool:
    """Returns whether a line can be a whole docstring without changes."""
    return one_line(text) == text and not {'"', "\\"} & set(text)


def in_comment(text: str) -> str:
    """The text as the rest of a line after `#`."""
    return one_line(text)


def is_number(text: str) -> bool:
    """Returns whether `text` is a number in the form that `str` gives it."""
    return text.isascii() and text.isdecimal() and str(int(text)) == text


def is_name(text: str) -> bool:
    """Returns whether `text` can be the name of a variable, and of an attribute within a class: no
    keyword, and no name that Python mangles, as it does `__x` in a class."""
    return _can_be_written(text) and not text.startswith("__")


def _can_be_written(text: str) -> bool:
    is_plain = text.isidentifier() and unicodedata.normalize("NFKC", text) == text
    return is_plain and not hiding_in(text) and not keyword.iskeyword(text)


def is_module(text: object) -> TypeGuard[str]:
    """Returns whether `text` can be the name of a module in an import outside of classes."""
    return isinstance(text, str) and all(map(_can_be_written, text.split(".")))


def is_path(text: object) -> TypeGuard[str]:
    """Returns whether `text` consists of names with dots between them."""
    return isinstance(text, str) and all(map(is_name, text.split(".")))


def class_name(text: str) -> str:
    """The name of the generated class for an original class with this name."""
    return text if is_name(text) else "Module"


WIDTH = 88

# How tightly an expression binds; an operand that binds less tightly than its operator needs
# parentheses.
CONDITIONAL, NOT, COMPARE, BIT_OR, BIT_XOR, BIT_AND, SHIFT, ADD, MULTIPLY, UNARY, POWER, ATOM = (
    range(12)
)


@dataclass(frozen=True, slots=True)
class Code:
    """One expression.

    flat: its text on one line
    binds: how tightly it binds
    head, items, tail: the three parts of an expression that ends in a bracket with items, at which
        it can be exploded
    """

    flat: str
    binds: int = ATOM
    head: str = ""
    items: tuple[Code, ...] = ()
    tail: str = ""

    def __str__(self) -> str:
        return self.flat

    def within(self, binds: int) -> str:
        """The flat text, in parentheses if it binds less tightly than `binds`."""
        return self.flat if self.binds >= binds else f"({self.flat})"


def bracket(head: str, items: tuple[Code, ...], tail: str, *, lone_comma: bool = False) -> Code:
    """`head item, item tail`, such as `f(a, b)`; `lone_comma` writes the comma of a 1-tuple.

    >>> bracket("f(", (Code("a"), Code("b=1")), ")").flat
    'f(a, b=1)'
    """
    inside = ", ".join(item.flat for item in items)
    comma = "," if lone_comma and len(items) == 1 else ""
    return Code(f"{head}{inside}{comma}{tail}", ATOM, head, items, tail)


def call(function: str, items: tuple[Code, ...]) -> Code:
    """The expression `function(items)`."""
    return bracket(f"{function}(", items, ")")


def prefixed(prefix: str, code: Code) -> Code:
    """The expression with a prefix that belongs to it, such as `name=`."""
    return replace(code, flat=prefix + code.flat, head=prefix + code.head)


def named(name: str, code: Code) -> Code:
    """The expression as an argument of this name.

    >>> named("x", Code("1")).flat, named("a b", Code("1")).flat
    ('x=1', '**{"a b": 1}')
    """
    if is_name(name):
        return prefixed(f"{name}=", code)
    return bracket("**{", (prefixed(f"{quoted(name)}: ", code),), "}")


def lay_out(prefix: str, code: Code, suffix: str = "", *, indent: int, comment: str = "") -> str:
    """Lines `prefix code suffix  # comment`; a comment that does not fit is left out.

    >>> print(lay_out("x = ", call("f", (Code("a"), Code("b"))), indent=4, comment="f32[2]"))
        x = f(a, b)  # f32[2]
    """
    margin = " " * indent
    beside = f"  # {in_comment(comment)}" if comment else ""
    flat = f"{margin}{prefix}{code.flat}{suffix}"
    if len(flat + beside) <= WIDTH:
        return flat + beside
    if len(flat) <= WIDTH or not code.items:
        return flat
    lines = [f"{margin}{prefix}{code.head}"]
    lines += [lay_out("", item, ",", indent=indent + 4) for item in code.items]
    return "\n".join([*lines, f"{margin}{code.tail}{suffix}{beside}"])


_STANDARD = ("collections", "math", "operator", "random", "typing")
_SHORT = {"numpy": "np"}


_HOME = {
    f"{tensor_parallel.__name__}.{part}": tensor_parallel.__name__
    for part in ("functions", "layers", "vocabulary")
}
"""The package that exports what its modules define."""


def write_imports(source: str, extra: Iterable[tuple[str, str]]) -> list[str]:
    """Lines that import `torch`, `nn`, `F` and the like where `source` uses them, and the pairs
    `(module, name)` in `extra`; a pair without a name imports the module itself. Raises PlanError
    for a name that Python cannot import."""
    extra = list(extra)
    for module, name in extra:
        if not is_module(module) or not (is_path(name) or (name == "" and is_path(module))):
            raise PlanError(
                f"generated code cannot import {name} of {module}.",
                "Give the class or the function a name that Python can import.",
            )
    used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    plain = ("math", "operator", "torch")
    modules: dict[str, str] = {name: f"import {name}" for name in plain if name in used}
    if "F" in used:
        modules["torch.nn.functional"] = "import torch.nn.functional as F"
    names_of: dict[str, set[str]] = defaultdict(set)
    names_of["torch"] |= {"Tensor", "nn"} & used
    for module, name in extra:
        if name:
            names_of[_HOME.get(module, module)].add(name.partition(".")[0])
        else:
            short = f" as {_SHORT[module]}" if module in _SHORT else ""
            modules[module] = f"import {module}{short}"
    sections = []
    for is_standard in (True, False):
        lines = [modules[name] for name in sorted(modules) if (name in _STANDARD) == is_standard]
        lines += [
            _import_line(module, sorted(names, key=_classes_first))
            for module, names in sorted(names_of.items())
            if (module in _STANDARD) == is_standard
        ]
        sections += [lines] if lines else []
    return "\n\n".join("\n".join(lines) for lines in sections).split("\n")


def _import_line(module: str, names: Sequence[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return "\n".join((f"from {module} import (", *(f"    {name}," for name in names), ")"))


def _classes_first(name: str) -> tuple[bool, str]:
    return (not name[0].isupper(), name)


def infix(symbol: str, binds: int, left: Code, right: Code) -> Code:
    """The expression `left symbol right`, with parentheses where its operands need them."""
    if binds == POWER:
        simple = _is_simple(left) and _is_simple(right)
        simple = simple and left.binds == ATOM
        space = "" if simple else " "
        text = f"{left.within(ATOM)}{space}**{space}{right.within(UNARY)}"
        return Code(text, binds)
    # Python chains comparisons, so a comparison inside a comparison always needs parentheses.
    first = left.within(binds + (binds == COMPARE))
    return Code(f"{first} {symbol} {right.within(binds + 1)}", binds)


def _is_simple(code: Code) -> bool:
    """Returns whether formatters write no spaces around a `**` next to it."""
    return code.flat.removeprefix("-").replace(".", "").replace("_", "").isalnum()


_MANY = 3
_WIDTH_REPEATED = 30  # so that a comprehension fits on a line


def _runs(children: Sequence[tuple[str, Code]]) -> list[list[tuple[str, Code]]]:
    """Groups neighbors with equal expressions and consecutive numbers, if they are many; leaves
    others alone."""
    runs: list[list[tuple[str, Code]]] = []
    for (text, first), group in groupby(enumerate(children), key=_alike):
        run = [child for _, child in group]
        is_many = len(run) >= _MANY or len(run) == len(children) > 1
        if is_many and len(text) < _WIDTH_REPEATED and first is not None:
            runs.append(run)
        else:
            runs += [[child] for child in run]
    return runs


def _alike(placed: tuple[int, tuple[str, Code]]) -> tuple[str, int | None]:
    """The expression of a child, and its number minus its position; None for a name."""
    place, (name, code) = placed
    return code.flat, int(name) - place if is_number(name) else None


def listing(head: str, items: Sequence[Code]) -> Code:
    """`nn.ModuleList([Block() for _ in range(4)])`, from the head and the expressions."""
    runs = _runs([(str(index), code) for index, code in enumerate(items)])
    entries = []
    for run in runs:
        code = run[0][1]
        repeated = f"{code.flat} for _ in range({len(run)})"
        if len(runs) == 1 and len(run) > 1:
            return Code(f"{head}{repeated}])")
        entries.append(Code(f"*({repeated})") if len(run) > 1 else code)
    return _nested(head, tuple(entries), "])")


def mapping(head: str, children: Sequence[tuple[str, Code]]) -> Code:
    """`nn.ModuleDict({"4": Block()})`, from the head and the keys with their expressions."""
    runs = _runs(children)
    entries = []
    for run in runs:
        first, last = int(run[0][0]) if len(run) > 1 else 0, run[-1][0]
        repeated = f"{{str(index): {run[0][1].flat} for index in range({first}, "
        repeated += f"{int(last) + 1})}}" if len(run) > 1 else ""
        if len(runs) == 1 and len(run) > 1:
            inside = repeated.removeprefix("{").removesuffix("}")
            return bracket(head.removesuffix("{"), (_braced(inside),), ")")
        if len(run) > 1:
            entries.append(Code(f"**{repeated}"))
        else:
            entries.append(prefixed(f"{quoted(run[0][0])}: ", run[0][1]))
    return _nested(head, tuple(entries), "})")


def _braced(inside: str) -> Code:
    return Code(f"{{{inside}}}")


def _nested(head: str, items: tuple[Code, ...], tail: str) -> Code:
    """A literal as the only argument of a call: formatters explode the call first."""
    outer, inner = head[:-1], head[-1]
    return bracket(outer, (bracket(inner, items, tail[0]),), tail[1])
