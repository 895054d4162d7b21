"""The items of a function body, and the positions at which each value of the body is read.

The items are operations, calls of modules, loops over siblings, and recomputed segments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from ..capture import ModuleCall, Recompute, Region
from ..capture.graph import is_guard
from ..capture.values import is_mutating
from ..split.split import sizes_in


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    node: its node; for a leaf module, the call
    items: the nodes for the elements of its result if the result is unpacked, with None for an
        element that nothing reads
    recompute: how backward recomputes a leaf module, if it does
    """

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
class SubmoduleCall:
    """A whole call of a module that is not a leaf.

    call: the record of the call
    body: the operations in it
    chain: whether the module is an nn.Sequential that runs its children one after the other
    recompute: how backward recomputes it, if it does
    """

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
    """Calls of siblings, each with the results of the call before.

    calls: the calls
    carried: pairs of the position of an argument and the position of the result that it takes
    """

    calls: tuple[SubmoduleCall, ...]
    carried: tuple[tuple[int, int], ...]

    @property
    def results(self) -> tuple[fx.Node, ...]:
        return self.calls[-1].results

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return tuple(node for call in self.calls for node in call.nodes)


@dataclass(frozen=True, slots=True)
class RecomputedSegment:
    """Operations that backward recomputes and that are not one module call: a separate method."""

    recompute: Recompute
    body: Body

    @property
    def results(self) -> tuple[fx.Node, ...]:
        return self.body.results

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return tuple(node for item in self.body.items for node in item.nodes)


Item = Op | SubmoduleCall | Loop | RecomputedSegment


class Conflict(Exception):
    """Modules whose calls cannot be methods; their operations are written out at the call."""

    def __init__(self, paths: Iterable[str]) -> None:
        super().__init__()
        self.paths = frozenset(paths)


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """A function.

    path: the module whose method it is
    type_name: the class of that module
    inputs: its tensor arguments
    input_names: their names
    symbols: sizes that it takes as int arguments, because none of its own tensors gives them
    items: its statements
    results: the values that it returns
    regions: the regions around the whole function
    """

    path: str
    type_name: str
    inputs: tuple[fx.Node, ...]
    input_names: tuple[str, ...]
    symbols: tuple[str, ...]
    items: tuple[Item, ...]
    results: tuple[fx.Node, ...]
    regions: tuple[Region, ...] = ()


def inputs_of(item: Item) -> tuple[fx.Node, ...]:
    """The values that an item reads; a value that it reads several times occurs several times."""
    match item:
        case Op(node):
            nodes: list[fx.Node] = []
            fx.map_arg((node.args, node.kwargs), nodes.append)
            return tuple(nodes)
        case SubmoduleCall(_, body) | RecomputedSegment(_, body):
            return body.inputs
        case Loop(calls):
            return calls[0].body.inputs


def regions_of(item: Item) -> tuple[Region, ...]:
    """The regions that an item lies in, the outermost first."""
    match item:
        case Op(node):
            return tuple(node.meta.get("regions", ()))
        case SubmoduleCall(_, body) | RecomputedSegment(_, body):
            return body.regions
        case Loop(calls):
            return calls[0].body.regions


def own_name(node: fx.Node, path: str) -> str | None:
    """The full name of a `get_attr` node's tensor if it is below the module `path`."""
    target = str(node.target)
    return target if not path or target.startswith(f"{path}.") else None


def symbols_of(item: Item) -> tuple[str, ...]:
    """The sizes that an item uses from the function around it."""
    match item:
        case Op(node):
            return tuple(sizes_in((node.args, node.kwargs)))
        case SubmoduleCall(_, body) | RecomputedSegment(_, body):
            return body.symbols
        case Loop(calls):
            return calls[0].body.symbols


def is_effectful(item: Item) -> bool:
    """Returns whether the order of the item matters: it draws random numbers, mutates, or may
    raise."""
    return any(
        node.meta.get("random") or is_mutating(node) or is_guard(node) for node in item.nodes
    )


# Operations whose result is the same value in another form.
FORMS = frozenset(
    {"to", "float", "half", "double", "bfloat16", "long", "int", "bool", "type", "type_as"}
    | {"contiguous", "clone", "detach"}
)


def hint_of(node: fx.Node) -> str:
    """The name of a value in the user's code: its own variable, or the variable of the value of
    which it is only another form. Empty if there is none."""
    hint = node.meta.get("hint")
    if hint is None and node.op == "call_method" and node.target in FORMS:
        source = node.args[0]
        return hint_of(source) if isinstance(source, fx.Node) else ""
    return str(node.target) if node.op == "placeholder" else hint or ""


def conditions_in(items: Iterable[Item]) -> dict[int, fx.Node]:
    """The value that controls each random decision, by its number."""
    nodes = (node for item in items for node in item.nodes)
    return {node.meta["decision"]: node for node in nodes if "decision" in node.meta}


class ValueReads:
    """The positions of the items that read a value, or that a random decision by it may leave out;
    the results of the function are read after the last item."""

    def __init__(self, body: Body) -> None:
        self._items = body.items
        self._positions: dict[fx.Node, list[int]] = defaultdict(list)
        conditions = conditions_in(body.items)
        for position, item in enumerate(body.items):
            decisions = (region.decision for region in regions_of(item))
            deciding = [conditions[number] for number in decisions if number in conditions]
            for node in (*inputs_of(item), *deciding):
                self._positions[node].append(position)
        for node in body.results:
            self._positions[node].append(len(body.items))

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(self._positions)

    def of(self, node: fx.Node) -> list[int]:
        return self._positions.get(node, [])

    @property
    def last(self) -> Mapping[fx.Node, int]:
        return {node: positions[-1] for node, positions in self._positions.items()}

    def reader(self, node: fx.Node) -> Item | None:
        """The item that alone, and once, reads a value."""
        positions = self.of(node)
        is_item = len(positions) == 1 and positions[0] < len(self._items)
        return self._items[positions[0]] if is_item else None
