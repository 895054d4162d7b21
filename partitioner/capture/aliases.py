"""A capture -> the memory that it changes: what must stay in one stage, what must keep its order.

A family is all tensors in memory that is changed. A cut may go through one if what comes after it
needs a single tensor of those before it, or tensors that are all views of a single one: that tensor
is handed on, copied, and viewed anew (see `ssa`). Otherwise, and for state, all changes stay with
what came before them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Generic, TypeVar

from torch import Tensor, fx

from .graph import Capture, is_external
from .views import copied_for_its_layout, viewed

Item = TypeVar("Item", int, fx.Node)

# In place, but not what is in the memory: a copy would not do the same.
_OF_MORE_THAN_VALUES = frozenset(
    {"requires_grad_", "detach_", "resize_", "resize_as_", "set_", "share_memory_", "rename_"}
    | {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_"}
)


class Family:
    """Tensors in memory that is changed, and the nodes that touch it.

    `touching` are the nodes that make, view, read or change the memory, in program order, with
    the output as the last if it is one; `changes` the positions of those that change it.
    `tensor_of` tells for each node whose value is in the memory the first node of the same tensor,
    `viewed` for each tensor that is a view of another the other.
    """

    def __init__(self, storages: frozenset[int], nodes: Iterable[fx.Node]) -> None:
        self.storages = storages
        found = list(nodes)
        self.externals = tuple(node for node in found if is_external(node))
        self.touching = tuple(node for node in found if not is_external(node))
        self.changes = tuple(
            place for place, node in enumerate(self.touching) if node.meta["mutates"] & storages
        )
        self.position = {node: place for place, node in enumerate(self.touching)}
        self.position |= dict.fromkeys(self.externals, -1)
        self.tensor_of: dict[fx.Node, fx.Node] = {}
        self.viewed: dict[fx.Node, fx.Node] = {}
        for node in (*self.externals, *self.touching):
            if node.meta["storages"] & storages:
                self._add(node)

    def _add(self, node: fx.Node) -> None:
        """Notes which tensor a node is: one that a change gives back, a view, or another one."""
        shared = [source for source in node.all_input_nodes if source in self.tensor_of]
        for same in shared:
            if node.meta["mutates"] and same.meta["val"] is node.meta["val"]:
                self.tensor_of[node] = self.tensor_of[same]
                return
        self.tensor_of[node] = node
        source = viewed(node)
        if source is not None:
            self.viewed[node] = self.tensor_of[source]

    @property
    def is_held(self) -> bool:
        """Whether the memory is a parameter's, a buffer's or a constant's."""
        touched = any(node.meta["touches"] & self.storages for node in self.touching)
        return touched or any(node.op == "get_attr" for node in self.externals)

    @property
    def is_given(self) -> bool:
        """Whether the memory is a model input's."""
        return any(node.op == "placeholder" for node in self.externals)

    @cached_property
    def settled(self) -> int:
        """The position behind which nobody changes the memory, or knows where it is."""
        last = self.changes[-1]
        for place, node in enumerate(self.touching):
            if node.meta["touches"] & self.storages:
                last = max(last, place)
        return last

    @property
    def until_settled(self) -> Sequence[fx.Node]:
        """What touches the memory until then."""
        return self.touching[: self.settled + 1]

    @cached_property
    def is_plain(self) -> bool:
        """Whether every change is one of values, and of a tensor that the node is given."""
        if self.is_held + len([node for node in self.externals if node.op == "placeholder"]) > 1:
            return False
        for node in self.touching:
            reached = node.meta["touches"].union(*_storages_read(node))
            if not node.meta["mutates"] & self.storages <= reached:
                return False
            if str(node.target) in _OF_MORE_THAN_VALUES:
                return False
            if node.target is getattr and node.args[1] == "data":
                return False
        return True

    def entry(self, place: int) -> fx.Node | None:
        """The tensor from which a stage that begins at a position can go on, if there is one."""
        needed = {
            self.tensor_of[source]
            for node in self.touching[place:]
            for source in node.all_input_nodes
            if source in self.tensor_of and self.position[source] < place
        }
        lines = [self._line(tensor) for tensor in needed]
        if self.is_given:
            lines = [line for line in lines if not is_external(line[-1])]
            return None if lines else self.externals[0]
        if not lines:
            return None
        shared = [node for node in lines[0] if all(node in line for line in lines)]
        return next((node for node in shared if isinstance(node.meta["val"], Tensor)), None)

    def _line(self, tensor: fx.Node) -> list[fx.Node]:
        """A tensor, what it is a view of, what that is a view of, and so on."""
        line = [tensor]
        while line[-1] in self.viewed:
            line.append(self.viewed[line[-1]])
        return line

    def together(self) -> Iterator[Sequence[fx.Node]]:
        """The runs of nodes between which no cut may go."""
        nodes = [node for node in self.touching if node.op != "output"]
        if not self.is_plain:
            is_state = self.is_held or self.is_given
            yield nodes if is_state else nodes[: self.settled + 1]
            return
        if self.is_held:
            yield nodes[: self.settled + 1]
            return
        for place in range(1, self.settled + 1):
            changed = self.is_given and place > self.changes[0]
            if changed or self.entry(place) is None:
                yield nodes[place - 1 : place + 1]

    def in_order(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Pairs of nodes the second of which may not be in an earlier stage than the first."""
        nodes = [node for node in self.touching if node.op != "output"]
        yield from pairwise(nodes[: self.settled + 1])
        for node in nodes[self.settled + 1 :]:
            yield nodes[self.settled], node


def _storages_read(node: fx.Node) -> Iterator[frozenset[int]]:
    for source in node.all_input_nodes:
        yield source.meta["storages"]


def families(capture: Capture) -> list[Family]:
    """The families of a capture, in the order of their first nodes.

    All memory that one node's tensor may be in, in training or evaluation mode, is in one family.
    """
    nodes = list(capture.graph.nodes)
    groups = _Groups[int]()
    touching: dict[int, list[int]] = defaultdict(list)
    for place, node in enumerate(nodes):
        own = node.meta["storages"]
        if isinstance(node.meta["val"], Tensor):
            groups.join(sorted(own))
        for storage in own.union(node.meta["mutates"], node.meta["touches"], *_storages_read(node)):
            touching[storage].append(place)
    group_of = {storage: frozenset(group) for group in groups.all() for storage in group}
    changed = sorted({storage for node in nodes for storage in node.meta["mutates"]})
    found = []
    for storages in dict.fromkeys(group_of.get(one, frozenset({one})) for one in changed):
        places = sorted({place for storage in storages for place in touching[storage]})
        found.append((places, storages))
    return [
        Family(storages, [nodes[place] for place in places])
        for places, storages in sorted(found, key=lambda pair: pair[0])
    ]


def colocated(capture: Capture) -> list[frozenset[fx.Node]]:
    """Groups of two or more nodes that have to be in one stage, in program order.

    Nodes for inputs, parameters and buffers are in no group: every stage has its own.
    """
    nodes = [node for node in capture.graph.nodes if node.op != "output"]
    groups = _Groups[fx.Node]()
    changed = {storage for node in nodes for storage in node.meta["mutates"]}
    for node in nodes:
        if is_external(node):
            continue
        if _must_follow(node):
            groups.join([node, *(user for user in node.users if user.op != "output")])
        source = copied_for_its_layout(node)
        if source and changed & (node.meta["storages"] | source.meta["storages"]):
            groups.join([node, *_back_to_its_maker(source)])
    for decided in _decided(nodes).values():
        groups.join(decided)
    for family in families(capture):
        for run in family.together():
            groups.join(run)
    order = {node: position for position, node in enumerate(nodes)}
    found = [frozenset(node for node in group if not is_external(node)) for group in groups.all()]
    return sorted(
        (group for group in found if len(group) > 1),
        key=lambda group: min(order[node] for node in group),
    )


def in_order(capture: Capture) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of nodes the second of which may not be in an earlier stage than the first, although
    it may not read it: who touches memory that is changed."""
    return list(dict.fromkeys(pair for family in families(capture) for pair in family.in_order()))


def draws_in_order(capture: Capture) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of nodes that draw random numbers, the second right after the first: in another order
    each would get the numbers of another."""
    return list(pairwise(node for node in capture.graph.nodes if node.meta["random"]))


def _must_follow(node: fx.Node) -> bool:
    """Whether the readers of a node's value have to be where it is made: it is no tensor, its
    shape depends on the values of tensors, or one mode alone has it."""
    if not isinstance(node.meta["val"], Tensor):
        return True
    if any(region.is_decided for region in node.meta["regions"]) or "decision" in node.meta:
        return True
    return bool(node.meta["data_dependent"])


def _decided(nodes: Iterable[fx.Node]) -> dict[int, list[fx.Node]]:
    """What each decision leaves out, with the decision."""
    found: dict[int, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if "decision" in node.meta:
            found[node.meta["decision"]].append(node)
        for region in node.meta.get("regions", ()):
            if region.decision >= 0:
                found[region.decision].append(node)
    return found


def _back_to_its_maker(node: fx.Node) -> Iterator[fx.Node]:
    """All that a value is in the memory of. As a stage receives it, it lies in order, and what
    has to copy it otherwise would be a view of it."""
    found: fx.Node | None = node
    while found is not None and not is_external(found):
        yield found
        own, inputs = found.meta["storages"], found.all_input_nodes
        found = next((other for other in inputs if own & other.meta["storages"]), None)


class _Groups(Generic[Item]):
    """Disjoint sets."""

    def __init__(self) -> None:
        self._parent: dict[Item, Item] = {}

    def join(self, items: Iterable[Item]) -> None:
        roots = [self._root(item) for item in items]
        for root in roots[1:]:
            self._parent[root] = roots[0]

    def _root(self, item: Item) -> Item:
        self._parent.setdefault(item, item)
        while self._parent[item] != item:
            self._parent[item] = self._parent[self._parent[item]]
            item = self._parent[item]
        return item

    def all(self) -> list[list[Item]]:
        found: dict[Item, list[Item]] = defaultdict(list)
        for item in self._parent:
            found[self._root(item)].append(item)
        return list(found.values())
