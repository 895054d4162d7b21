"""What a function body is made of: operations, calls of modules, loops over siblings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from ..capture import ModuleCall, Recompute, Region
from ..capture.guards import is_guard
from ..effects import is_mutating
from ..split import sizes_in


@dataclass(frozen=True, slots=True)
class Op:
    """One node; `items` are the nodes for the elements of its result if it is unpacked, with
    None for an element that nobody reads. A leaf module may be recomputed in backward."""

    node: fx.Node
    items: tuple[fx.Node | None, ...] = ()
    recompute: Recompute | None = None

    @property
    def results(self) -> tuple[fx.Node, ...]:
        return tuple(item for item in self.items if item) if self.items else (self.node,)

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return (self.node, *(item for item in self.items if item))


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call of a module that is no leaf; `chain` says that it is an nn.Sequential that
    runs its children one after the other, `recompute` that it is done again in backward."""

    call: ModuleCall
    body: Body
    chain: bool = False
    recompute: Recompute | None = None

    @property
    def results(self) -> tuple[fx.Node, ...]:
        return self.body.results

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return tuple(node for item in self.body.items for node in item.nodes)


@dataclass(frozen=True, slots=True)
class Loop:
    """Calls of siblings, each with what the one before returned.

    `carried` pairs the position of an argument with that of the result it takes.
    """

    calls: tuple[Call, ...]
    carried: tuple[tuple[int, int], ...]

    @property
    def results(self) -> tuple[fx.Node, ...]:
        return self.calls[-1].results

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return tuple(node for call in self.calls for node in call.nodes)


@dataclass(frozen=True, slots=True)
class Segment:
    """What is done again in backward and is no call of one module: a method of its own."""

    recompute: Recompute
    body: Body

    @property
    def results(self) -> tuple[fx.Node, ...]:
        return self.body.results

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return tuple(node for item in self.body.items for node in item.nodes)


Item = Op | Call | Loop | Segment


class Conflict(Exception):
    """Modules whose calls cannot be methods; they are written out where they are called."""

    def __init__(self, paths: Iterable[str]) -> None:
        super().__init__()
        self.paths = frozenset(paths)


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """A function: `inputs` are its tensor arguments, `symbols` sizes that it cannot read off a
    tensor of its own and takes as int arguments, `regions` those around the whole function."""

    path: str
    type_name: str
    inputs: tuple[fx.Node, ...]
    input_names: tuple[str, ...]
    symbols: tuple[str, ...]
    items: tuple[Item, ...]
    results: tuple[fx.Node, ...]
    regions: tuple[Region, ...] = ()


def inputs_of(item: Item) -> tuple[fx.Node, ...]:
    """The values that an item reads, each as often as it reads it."""
    match item:
        case Op(node):
            found: list[fx.Node] = []
            fx.map_arg((node.args, node.kwargs), found.append)
            return tuple(found)
        case Call(_, body) | Segment(_, body):
            return body.inputs
        case Loop(calls):
            return calls[0].body.inputs


def regions_of(item: Item) -> tuple[Region, ...]:
    match item:
        case Op(node):
            return tuple(node.meta.get("regions", ()))
        case Call(_, body) | Segment(_, body):
            return body.regions
        case Loop(calls):
            return calls[0].body.regions


def own_name(node: fx.Node, path: str) -> str | None:
    """The full name of a `get_attr` node's tensor if it is below the module `path`."""
    target = str(node.target)
    return target if not path or target.startswith(f"{path}.") else None


def symbols_of(item: Item) -> tuple[str, ...]:
    """The sizes that an item needs to be told in the function it stands in."""
    match item:
        case Op(node):
            return tuple(sizes_in((node.args, node.kwargs)))
        case Call(_, body) | Segment(_, body):
            return body.symbols
        case Loop(calls):
            return calls[0].body.symbols


def is_effectful(item: Item) -> bool:
    """Whether the order of the item among others matters: it draws random numbers, mutates, or
    may refuse."""
    return any(
        node.meta.get("random") or is_mutating(node) or is_guard(node) for node in item.nodes
    )


# Operations whose result is still the same thing, in another form.
FORMS = frozenset(
    {"to", "float", "half", "double", "bfloat16", "long", "int", "bool", "type", "type_as"}
    | {"contiguous", "clone", "detach"}
)


def hint_of(node: fx.Node) -> str:
    """What the user's code calls a value: by its own variable, or by that of the value of which
    it is only another form. Empty if by nothing."""
    hint = node.meta.get("hint")
    if hint is None and node.op == "call_method" and node.target in FORMS:
        source = node.args[0]
        return hint_of(source) if isinstance(source, fx.Node) else ""
    return str(node.target) if node.op == "placeholder" else hint or ""
