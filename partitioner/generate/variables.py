"""Values -> names of variables: those of the user's code, used again once a value is dead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from .items import FORMS, Call, Item, hint_of
from .quoting import is_name

RESERVED = frozenset(
    {"self", "torch", "nn", "F", "Tensor", "math", "operator", "index", "cast", "random", "np"}
    | {"float", "int", "max", "min", "len", "range", "str", "abs", "round", "slice", "tuple"}
)


@dataclass(slots=True)
class Variables:
    """Which value each variable holds.

    Two values share a variable only if the later is the earlier, changed in place; a name goes
    to another value only when nothing will read the former.
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
        """Whether the variable, if it was used before, holds numbers or tensors as the node is."""
        return self.numbers.get(name, is_number(node)) == is_number(node)

    def alias(self, node: fx.Node, name: str) -> None:
        self.holds.setdefault(name, set()).add(node)
        self.name_of[node] = name

    def is_live(self, name: str, after: int) -> bool:
        """Whether a value that the variable holds is read after the item at that position."""
        return any(self.last_read.get(node, -1) > after for node in self.holds.get(name, ()))

    def is_taken(self, name: str, after: int) -> bool:
        return (
            name in RESERVED
            or name in self.symbols
            or name in self.modules
            or self.is_live(name, after)
        )


def is_number(node: fx.Node) -> bool:
    """Whether a value is a number that was read off a tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat))


_SHAPES = frozenset({"view", "reshape", "transpose", "permute", "expand", "flatten", "item"})


def candidates(node: fx.Node, item: Item, reader: Item | None, output: str) -> list[str]:
    """Names for a value, best first. `reader` is the item that alone reads it, `output` what
    the model calls it among its outputs."""
    names = [node.meta.get("hint") or "", output, hint_of(node)]
    if reader is not None and len(reader.results) == 1:
        names.append(reader.results[0].meta.get("hint") or "")
    if isinstance(item, Call):
        names.append(own_part(item.call.path))
    elif node.op == "call_module":
        names.append(own_part(str(node.target)))
    elif node.op in ("call_function", "call_method"):
        target = node.target
        plain = target if isinstance(target, str) else getattr(target, "__name__", "value")
        plain = {"getitem": "item", "item": "number"}.get(plain, plain.strip("_"))
        if hint_of(node) and plain in _SHAPES | FORMS:
            names.append(f"{hint_of(node)}_{plain}")
        names.append(plain)
    return names


# Letters that look like digits, to which linters object, and the name of what nobody reads.
_AMBIGUOUS = ("l", "O", "I", "_")


def is_good(name: str) -> bool:
    """Whether a variable may have the name."""
    return is_name(name) and name not in _AMBIGUOUS


def own_part(path: str) -> str:
    """`ln_1` for `h.0.ln_1`, `blocks_1` for `blocks.1`."""
    names = path.split(".")
    start = next((i for i in range(len(names) - 1, -1, -1) if not names[i].isdigit()), 0)
    return "_".join(names[start:])


def item_name(path: str, type_name: str) -> str:
    """What to call one of a list of modules: `layer` for `layers.3`, `block` for the GPT2Block
    `h.3`."""
    parent = path.split(".")[-2] if "." in path else ""
    if len(parent) >= 4 and parent.isalpha() and parent.islower():
        name = parent.removesuffix("s") if not parent.endswith("ss") else parent
    else:
        start = max((i for i, letter in enumerate(type_name) if letter.isupper()), default=0)
        name = type_name[start:].lower().strip("0123456789")
    return name if is_good(name) else "block"
