"""Memory that forward changes in place -> nodes that cuts must keep together or in order.

A `Family` is all tensors in one piece of memory that is changed. A cut may go through a family if
the nodes behind it need a single tensor from before it, or several views of a single one: the next
stage receives this tensor, copies it, and takes the views again (see `split/ssa.py`). Otherwise,
and for state, all changes stay with the nodes before them.

`AssignedBuffers` handles buffers that forward binds to a new tensor, as in
`self.mean = 0.9 * self.mean + 0.1 * x.mean(0)`. Only the contents of the buffer outlive forward, so
the graph copies the new tensor into the buffer: at the earliest place behind all readers of the
old contents and all later changes of the new ones. `make_tables` is for forwards that make a buffer
once for the sizes of their first inputs, which no copy could hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Generic, TypeVar

import torch
from torch import Tensor, fx, nn

from ...runtime.errors import CaptureError
from .arguments import Arguments
from .bindings import Bindings
from .graph import Capture, is_external
from .model_state import is_on_meta, unchanged, without_cache
from .values import CallSite, copied_for_its_layout, viewed

Item = TypeVar("Item", int, fx.Node)

# In place, but they change more than values: a copy would behave differently.
_OF_MORE_THAN_VALUES = frozenset(
    {"requires_grad_", "detach_", "resize_", "resize_as_", "set_", "share_memory_", "rename_"}
    | {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_"}
)


class Family:
    """Tensors in memory that is changed in place, and the nodes that touch it.

    storages: the numbers of the memory
    externals: the inputs, parameters, buffers and constants in it
    touching: the nodes that make, view, read or change it, in program order, perhaps the output too
    changes: the positions, in `touching`, of the nodes that change it
    position: the position of each node in `touching`; -1 for externals
    tensor_of: for each node with a value in the memory, the first node of the same tensor
    viewed: for each tensor that is a view, the tensor that it views
    """

    def __init__(self, storages: frozenset[int], nodes: Iterable[fx.Node]) -> None:
        self.storages = storages
        members = list(nodes)
        self.externals = tuple(node for node in members if is_external(node))
        self.touching = tuple(node for node in members if not is_external(node))
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
        """Records a node's tensor: the result of a change in place, a view, or a new tensor."""
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
        """True if the memory belongs to a parameter, a buffer or a constant."""
        touched = any(node.meta["touches"] & self.storages for node in self.touching)
        return touched or any(node.op == "get_attr" for node in self.externals)

    @property
    def is_given(self) -> bool:
        """True if the memory belongs to an input of the model."""
        return any(node.op == "placeholder" for node in self.externals)

    @cached_property
    def settled(self) -> int:
        """The last position that changes the memory, or reaches it without an argument in it."""
        last = self.changes[-1]
        for place, node in enumerate(self.touching):
            if node.meta["touches"] & self.storages:
                last = max(last, place)
        return last

    @property
    def until_settled(self) -> Sequence[fx.Node]:
        """The nodes that touch the memory up to `settled`."""
        return self.touching[: self.settled + 1]

    @cached_property
    def is_plain(self) -> bool:
        """True if every change only changes values, of a tensor that is an argument of the node."""
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
        """The one tensor that a stage beginning at a position has to receive; None if there is no
        such tensor."""
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
        """A tensor, the tensor that it views, the tensor that this one views, and so on."""
        line = [tensor]
        while line[-1] in self.viewed:
            line.append(self.viewed[line[-1]])
        return line

    def together(self) -> Iterator[Sequence[fx.Node]]:
        """Sequences of nodes that no cut may divide."""
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
        """Pairs of nodes; the second may not be in an earlier stage than the first."""
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
    first_places = []
    for storages in dict.fromkeys(group_of.get(number, frozenset({number})) for number in changed):
        places = sorted({place for storage in storages for place in touching[storage]})
        first_places.append((places, storages))
    return [
        Family(storages, [nodes[place] for place in places])
        for places, storages in sorted(first_places, key=lambda pair: pair[0])
    ]


def verify_separate(capture: Capture) -> None:
    """Raises CaptureError for two tensors that share memory of which one changes: stages would hold
    each in memory of its own, and a change of one would not reach the other."""
    model, nodes = capture.model, list(capture.graph.find_nodes(op="get_attr"))
    parameters, constants = dict(model.named_parameters()), capture.constants
    changed = frozenset[int]().union(*(node.meta["mutates"] for node in capture.graph.nodes))
    changing = {str(node.target) for node in nodes if node.meta["storages"] & changed}
    changing |= {name for name, parameter in parameters.items() if parameter.requires_grad}
    named = {**parameters, **dict(model.named_buffers()), **constants}
    for one, other in _overlapping({name: each for name, each in named.items() if each.numel()}):
        if not changing.isdisjoint((one, other)):
            raise CaptureError(
                f"{one} and {other} are two tensors in the same memory, and stages would hold each "
                "in its own: a change of one would not reach the other.",
                "Use one tensor in both places, compute one from the other in forward, or copy it "
                "with clone().",
            )


def _overlapping(named: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """The names of tensors that have a number in common. Addresses tell it, for NumPy and DLPack
    make storages of their own in the same memory; on meta they begin at 0 in every storage."""
    of_device: dict[object, list[tuple[str, int]]] = defaultdict(list)  # with the end in bytes
    for name in sorted(named, key=lambda name: named[name].data_ptr()):
        tensor, start = named[name], named[name].data_ptr()
        device = tensor.untyped_storage()._cdata if tensor.is_meta else tensor.device
        near = [(other, end) for other, end in of_device[device] if end > start]
        yield from ((other, name) for other, _ in near if _overlap(named[other], tensor))
        of_device[device] = [*near, (name, start + (_reach(tensor) + 1) * tensor.itemsize)]


def _overlap(first: Tensor, second: Tensor) -> bool:
    """True if two tensors, the first of which does not begin later, have a number in common."""
    apart, odd = divmod(second.data_ptr() - first.data_ptr(), first.itemsize)
    if first is second or first.dtype != second.dtype or odd or not apart:
        return first is not second
    places = torch.arange(max(_reach(first), apart + _reach(second)) + 1)
    of_first = places.as_strided(first.shape, first.stride())
    of_second = places.as_strided(second.shape, second.stride(), apart)
    return bool(torch.isin(of_second, of_first).any())


def _reach(tensor: Tensor) -> int:
    """The distance from the first to the last number of a tensor in its memory."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(sum((size - 1) * step for size, step in steps))


def colocated(capture: Capture) -> list[frozenset[fx.Node]]:
    """Groups of two or more nodes that have to be in one stage, in program order.

    Nodes for inputs, parameters and buffers are not grouped: every stage has its own.
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
    members = [frozenset(node for node in group if not is_external(node)) for group in groups.all()]
    return sorted(
        (group for group in members if len(group) > 1),
        key=lambda group: min(order[node] for node in group),
    )


def in_order(capture: Capture) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of nodes that touch the same changed memory: the second may not be in an earlier stage
    than the first, even without reading its value."""
    return list(dict.fromkeys(pair for family in families(capture) for pair in family.in_order()))


def draws_in_order(capture: Capture) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of successive nodes that draw random numbers: in another order each would get the
    other's numbers."""
    return list(pairwise(node for node in capture.graph.nodes if node.meta["random"]))


def _must_follow(node: fx.Node) -> bool:
    """True if the readers of a node's value must be in its stage: it is not a tensor, its shape
    depends on the values of tensors, or only one mode computes it."""
    if not isinstance(node.meta["val"], Tensor):
        return True
    if any(region.is_decided for region in node.meta["regions"]) or "decision" in node.meta:
        return True
    return bool(node.meta["data_dependent"])


def _decided(nodes: Iterable[fx.Node]) -> dict[int, list[fx.Node]]:
    """For each random decision, its node and the nodes that it may leave out."""
    nodes_of: dict[int, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if "decision" in node.meta:
            nodes_of[node.meta["decision"]].append(node)
        for region in node.meta.get("regions", ()):
            if region.decision >= 0:
                nodes_of[region.decision].append(node)
    return nodes_of


def _back_to_its_maker(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes from a value back to the one that allocated its memory. A stage receives tensors
    contiguous, so that a call that copies them in the model would return a view there."""
    current: fx.Node | None = node
    while current is not None and not is_external(current):
        yield current
        own, inputs = current.meta["storages"], current.all_input_nodes
        current = next((other for other in inputs if own & other.meta["storages"]), None)


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
        groups: dict[Item, list[Item]] = defaultdict(list)
        for item in self._parent:
            groups[self._root(item)].append(item)
        return list(groups.values())


class RemadeBufferError(CaptureError):
    """A forward that replaces a buffer by a tensor of another dtype or shape."""


def _fits(value: Tensor, buffer: Tensor) -> bool:
    """True if the value can be copied into the buffer, as far as sizes are known."""
    own, others = reversed(buffer.shape), reversed(value.shape)
    known = ((a, b) for a, b in zip(own, others, strict=False) if isinstance(b, int))
    if value.dtype != buffer.dtype or value.dim() > buffer.dim():
        return False
    return all(b in (a, 1) for a, b in known)


class AssignedBuffers:
    """The assignments of new tensors to buffers in forward; the last one of each buffer counts."""

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings
        self._last: dict[tuple[int, str], tuple[Tensor, Tensor, fx.Node]] = {}

    def note(self, module: nn.Module, name: str, value: Tensor, place: str) -> None:
        """Records `module.name = value`, before the assignment, at this place of the user's code.

        Raises RemadeBufferError for a tensor that does not fit the buffer's dtype and shape.
        """
        current = module._buffers[name]
        assert current is not None
        if value is current or id(value) not in self._bindings.bound:
            return
        if not _fits(value, current):
            old, new = (
                f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                for tensor in (current, value)
            )
            raise RemadeBufferError(
                f"{place} replaces the buffer {name} ({old}) by another kind of tensor ({new}), "
                "and stages keep the dtype and the shape of a buffer.",
                "If forward makes it once for inputs of this size, call the model once with the "
                "example inputs before you partition it.",
            )
        before = self._last.get((id(module), name))
        buffer = before[0] if before else current
        last = next(iter(reversed(self._bindings.graph.nodes)))
        self._last[id(module), name] = (buffer, value, last)

    def write(self) -> None:
        """Adds `buffer.copy_(value)` to the graph for each assigned buffer."""
        graph = self._bindings.graph
        for buffer, value, place in self._last.values():
            node, source = self._bindings.node(buffer), self._bindings.node(value)
            old = self._bindings.storage(buffer)
            new = self._bindings.storage(value)
            for other in graph.nodes:
                reads = any(old in used.meta["storages"] for used in other.all_input_nodes)
                if place < other and (reads or {old, new} & other.meta["mutates"]):
                    place = other
            with graph.inserting_after(max(place, source, node)):
                self._bindings.add(
                    ("call_method", "copy_", (node, source)),
                    buffer,
                    CallSite(calls=source.meta["calls"], regions=source.meta["regions"]),
                    changed=[buffer],
                )


def runs(model: nn.Module, given: Arguments) -> bool:
    """True if the model itself runs on the example, or is on meta."""
    return is_on_meta(model) or _tables_made(model, given) is not None


def make_tables(model: nn.Module, given: Arguments) -> str:
    """Gives the model the buffers that its forward makes for inputs like the example where it had
    others of another dtype or shape; returns their names.

    Buffers that a checkpoint holds keep theirs, and nothing is made for a model on meta.
    """
    tables = [] if is_on_meta(model) else _tables_made(model, given) or []
    for module, name, table in tables:
        module._buffers[name] = table
    return ", ".join(sorted({name for _, name, _ in tables}))


def _tables_made(model: nn.Module, given: Arguments) -> list[tuple[nn.Module, str, Tensor]] | None:
    """The buffers without a checkpoint entry whose dtype or shape one call changes, with their new
    values; None if forward raises. The model is restored."""
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
    tensors = {name: tensor.to(device) for name, tensor in given.tensors.items()}
    buffers = [
        (module, name, tensor.dtype, tensor.shape)
        for module in model.modules()
        for name, tensor in module._buffers.items()
        if tensor is not None and name in module._non_persistent_buffers_set
    ]
    with unchanged(model, dict(model.named_parameters())), without_cache(model), torch.no_grad():
        try:
            given.call(model, tensors)
        except Exception:
            return None
        after = [(*before, before[0]._buffers.get(before[1])) for before in buffers]
    return [
        (module, name, table)
        for module, name, dtype, shape, table in after
        if table is not None and (table.dtype, table.shape) != (dtype, shape)
    ]
