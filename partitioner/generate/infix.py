"""Binary operators, with the parentheses that are needed and no others."""

from . import layout
from .layout import Code


def infix(symbol: str, binds: int, left: Code, right: Code) -> Code:
    if binds == layout.POWER:
        simple = _is_simple(left) and _is_simple(right)
        simple = simple and left.binds == layout.ATOM
        space = "" if simple else " "
        text = f"{left.within(layout.ATOM)}{space}**{space}{right.within(layout.UNARY)}"
        return Code(text, binds)
    # Python chains comparisons, so that a comparison inside one always needs parentheses.
    first = left.within(binds + (binds == layout.COMPARE))
    return Code(f"{first} {symbol} {right.within(binds + 1)}", binds)


def _is_simple(code: Code) -> bool:
    """Whether formatters write no spaces around `**` next to it."""
    return code.flat.removeprefix("-").replace(".", "").replace("_", "").isalnum()
