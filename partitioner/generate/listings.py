"""The members of a container -> the literal that makes it; many equal neighbours as one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from .layout import Code, bracket, prefixed
from .quoting import quoted

_MANY = 3
_SHORT = 30  # so that a comprehension fits on a line


def _runs(children: Sequence[tuple[str, Code]]) -> list[list[tuple[str, Code]]]:
    """Neighbours with equal expressions, if they are many; else one by one."""
    runs: list[list[tuple[str, Code]]] = []
    for text, group in groupby(children, key=lambda child: child[1].flat):
        run = list(group)
        is_many = len(run) >= _MANY or len(run) == len(children) > 1
        if is_many and len(text) < _SHORT and all(name.isdigit() for name, _ in run):
            runs.append(run)
        else:
            runs += [[child] for child in run]
    return runs


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
