"""Expressions as text with an optional exploded form -> lines that no formatter changes.

An expression that fits in 88 columns stands on one line. One that does not is exploded at its
outermost bracket, an item a line, each with a trailing comma: formatters keep such a literal
exploded at every width, so that the text is stable at 88, 100 and 120 columns alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .quoting import in_comment, is_name, quoted

WIDTH = 88

# How tightly an expression binds; an operand that binds less tightly than its operator needs
# parentheses.
CONDITIONAL, NOT, COMPARE, BIT_OR, BIT_XOR, BIT_AND, SHIFT, ADD, MULTIPLY, UNARY, POWER, ATOM = (
    range(12)
)


@dataclass(frozen=True, slots=True)
class Code:
    """One expression: its flat text, how tightly it binds and, if it ends in a bracket with
    items, the three parts by which it can be exploded."""

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
    return bracket(f"{function}(", items, ")")


def prefixed(prefix: str, code: Code) -> Code:
    """The expression with text before it that belongs to it, such as `name=`."""
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
