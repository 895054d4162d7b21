"""Capture and placement -> the same, without memory that changes and lies in two stages.

A stage that continues to change a tensor of an earlier stage changes a copy of the tensor that it
receives, takes the views of it again, and all later readers of the tensor read the copy:

    y = self.linear(x)              y = self.linear(x)
    high = y[:, 4:]                 ---------------------------------- receives y
    ------------------------  ->    y = y.clone()
    high.mul_(2)                    high = y[:, 4:]
    return self.head(y)             high.mul_(2)
                                    return self.head(y)

State stays in the stage that changes it, and later stages receive its contents at that point.
Memory that no boundary cuts stays as the author wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from typing import Any

from torch import fx

from ...runtime.errors import PlanError
from ..capture import Capture, ModuleCall
from ..capture.aliasing import Family, families
from ..capture.graph import is_external
from ..capture.values import view_again, viewed

Call = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


def separated(
    capture: Capture, stage_of: Mapping[fx.Node, int]
) -> tuple[Capture, dict[fx.Node, int]]:
    """A capture of new nodes with the old names and few more, and the stages of its nodes.

    Returns the arguments if no changed memory is cut. `stage_of` gives the stage of every node
    except placeholders, attributes and the output. Raises PlanError when a placement cuts memory
    that cannot be cut (see `colocated` and `in_order`).
    """
    last = max(stage_of.values(), default=0)
    cut = [family for family in families(capture) if _is_cut(family, stage_of, last)]
    if not cut:
        return capture, dict(stage_of)
    separation = _Separation(capture, stage_of)
    for family in cut:
        separation.separate(family)
    return separation.result()


def _is_cut(family: Family, stage_of: Mapping[fx.Node, int], last: int) -> bool:
    stages = [stage_of[node] for node in family.touching if node in stage_of]
    if len(set(stages)) == 1:
        is_returned = any(
            source in family.externals for source in _output_reads(family.touching[-1])
        )
        return is_returned and stages[0] != last
    changing = [stage_of[family.touching[place]] for place in family.changes]
    return bool(family.externals) or changing[-1] != stages[0]


def _output_reads(node: fx.Node) -> Sequence[fx.Node]:
    return node.all_input_nodes if node.op == "output" else ()


@dataclass
class _Version:
    """The contents of a family's memory from a position on.

    start: the position
    stage: the stage whose memory this version is
    storages: the storages of this version by those of the family
    tensors: the tensors of this version by those of the family
    at: the node before which the nodes of this version are inserted; None for the first version
    """

    start: int
    stage: int
    storages: Mapping[int, int]
    tensors: dict[fx.Node, fx.Node] = field(default_factory=dict)
    at: fx.Node | None = None


class GraphCopy:
    """A copy of a capture's graph with the old names, to which nodes can be added: plans are made
    again for one capture, whose own graph stays as it is."""

    def __init__(self, capture: Capture, stage_of: Mapping[fx.Node, int]) -> None:
        self._capture = capture
        self._old_stage = stage_of
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}
        for node in capture.graph.nodes:
            self._new[node] = self._graph.node_copy(node, self._new.__getitem__)
        self._stage = {self._new[node]: stage for node, stage in stage_of.items()}
        self._last = max(stage_of.values())
        self._renamed: dict[tuple[int, fx.Node], fx.Node] = {}
        used = {storage for node in self._new for storage in node.meta["storages"]}
        self._fresh = count(1 + max(map(abs, used), default=0))
        self._nodes_of: dict[ModuleCall, list[fx.Node]] = {}
        for node in stage_of:
            for call in node.meta["calls"]:
                self._nodes_of.setdefault(call, []).append(node)

    def result(self) -> tuple[Capture, dict[fx.Node, int]]:
        calls = {}
        for call, record in self._capture.calls.items():
            stages = {self._old_stage[node] for node in self._nodes_of.get(call, ())}
            stage = stages.pop() if len(stages) == 1 else -1

            def renamed(node: fx.Node, stage: int = stage) -> fx.Node | None:
                return self._renamed.get((stage, node)) or self._new.get(node)

            arguments, result = fx.map_arg((dict(record.arguments), record.result), renamed)
            calls[call] = replace(record, arguments=arguments, result=result)
        order = [node for node in self._graph.nodes if node in self._stage]
        stage_of = {node: self._stage[node] for node in order}
        return replace(self._capture, graph=self._graph, calls=calls), stage_of

    def _number(self, storage: int) -> int:
        fresh = next(self._fresh)
        return fresh if storage >= 0 else -1 - fresh

    def _outermost(self, node: fx.Node) -> tuple[list[fx.Node], int]:
        """The nodes of the outermost module call around a node that lies entirely in one stage, and
        the number of calls around that call; the node alone if there is no such call."""
        for depth, call in enumerate(node.meta["calls"]):
            nodes = self._nodes_of[call]
            if len({self._old_stage[other] for other in nodes}) == 1:
                return nodes, depth
        return [node], len(node.meta["calls"])


class _Separation(GraphCopy):
    """A copy of a capture's graph, in which families are cut one after the other."""

    def result(self) -> tuple[Capture, dict[fx.Node, int]]:
        self._drop_views()
        return super().result()

    def _drop_views(self) -> None:
        """Erases views whose readers all have views of their own now; leaves no stage empty."""
        for old, node in reversed(list(self._new.items())):
            number = self._stage.get(node)
            if node.users or not old.users or viewed(old) is None:
                continue
            if sum(stage == number for stage in self._stage.values()) > 1:
                del self._new[old], self._stage[node]
                self._graph.erase_node(node)

    # --- a family ---------------------------------------------------------------------------

    def separate(self, family: Family) -> None:
        nodes = [node for node in family.touching if node.op != "output"]
        settled = family.settled + 1
        if any(self._old_stage[node] > self._old_stage[later] for node, later in family.in_order()):
            raise _not_there(nodes[0])
        version = _Version(0, self._old_stage[nodes[0]], {})
        start = 0
        for stage, run in groupby(nodes[:settled], self._old_stage.__getitem__):
            end = start + len(list(run))
            if start > 0 and any(start <= place < end for place in family.changes):
                version = self._entered(family, version, start, stage)
            for node in nodes[start:end]:
                self._rename(family, version, node)
            start = end
        if family.externals:
            self._hand_out(family, version)
        else:
            for node in family.touching[settled:]:
                self._rename(family, version, node)

    def _entered(self, family: Family, before: _Version, start: int, stage: int) -> _Version:
        """The version that begins with a copy of the last version."""
        entry = family.entry(start)
        if entry is None or not family.is_plain or family.is_held:
            raise _not_there(family.touching[start])
        first = family.touching[start]
        storages = {storage: self._number(storage) for storage in sorted(family.storages)}
        at = self._new[self._outermost(first)[0][0]]
        version = _Version(start, stage, storages, at=at)
        if is_external(entry):
            version.tensors[entry] = self._new[entry]
        else:
            source = self._latest(family, before, entry, start)
            call: Call = ("call_method", "clone", (source,), {})
            with self._graph.inserting_before(version.at):
                version.tensors[entry] = self._add(call, source, entry, first, stage, storages)
            version.tensors[entry].meta["regions"] = ()
        return version

    def _rename(self, family: Family, version: _Version, node: fx.Node) -> None:
        """Makes a node read the tensors of a version instead of older ones."""
        if not version.start:
            return
        for source in node.all_input_nodes:
            if source in family.tensor_of and family.position[source] < version.start:
                tensor = self._tensor(family, version, family.tensor_of[source])
                self._replace(node, source, tensor)
        _renumber(self._new[node], version.storages)

    def _replace(self, reader: fx.Node, source: fx.Node, tensor: fx.Node) -> None:
        self._new[reader].replace_input_with(self._new[source], tensor)
        if reader in self._old_stage:
            self._renamed[self._old_stage[reader], source] = tensor

    def _tensor(self, family: Family, version: _Version, tensor: fx.Node) -> fx.Node:
        """The tensor of this version that corresponds to one of an earlier version: the copy, or a
        view of it."""
        if tensor not in version.tensors:
            source = self._tensor(family, version, family.viewed[tensor])
            assert version.at is not None
            with self._graph.inserting_before(version.at):
                view = self._add(
                    view_again(tensor, source),
                    self._new[tensor],
                    tensor,
                    family.touching[version.start],
                    version.stage,
                    version.storages,
                )
            version.tensors[tensor] = view
        return version.tensors[tensor]

    def _latest(self, family: Family, version: _Version, tensor: fx.Node, before: int) -> fx.Node:
        """The last name of a tensor in a version."""
        for node in reversed(family.touching[version.start : before]):
            if family.tensor_of.get(node) is tensor:
                return self._new[node]
        if version.start:
            return self._tensor(family, version, tensor)
        return self._new[tensor]

    def _hand_out(self, family: Family, version: _Version) -> None:
        """Makes later stages read copies of the state after its last change."""
        settled = family.settled + 1
        home = self._old_stage[family.touching[family.settled]]
        storages = {storage: self._number(storage) for storage in sorted(family.storages)}
        handed: dict[fx.Node, fx.Node] = {}
        for reader in family.touching[settled:]:
            if self._old_stage.get(reader, self._last) == home:
                self._rename(family, version, reader)
                continue
            _renumber(self._new[reader], storages)
            for source in reader.all_input_nodes:
                if source not in family.tensor_of or self._old_stage.get(source, home) > home:
                    continue
                if reader.op == "output" and not is_external(source):
                    continue
                if source not in handed:
                    handed[source] = self._handed(family, version, source, storages)
                self._replace(reader, source, handed[source])

    def _handed(
        self, family: Family, version: _Version, source: fx.Node, storages: Mapping[int, int]
    ) -> fx.Node:
        """A copy of a tensor in the state, after the module call that contains the last change."""
        tensor, beside = family.tensor_of[source], family.touching[family.settled]
        if family.position[source] > family.settled:
            value, beside = self._new[source], source
        else:
            value = self._latest(family, version, tensor, family.settled + 1)
        call: Call = ("call_method", "clone", (value,), {})
        with self._graph.inserting_after(self._new[self._outermost(beside)[0][-1]]):
            stage = self._old_stage[beside]
            copied = self._add(call, value, tensor, beside, stage, storages)
        copied.meta["regions"] = ()
        if tensor.op == "get_attr":
            copied.meta["hint"] = str(tensor.target).rpartition(".")[2]
        return copied

    # --- nodes ------------------------------------------------------------------------------

    def _add(
        self,
        call: Call,
        like: fx.Node,
        of: fx.Node,
        beside: fx.Node,
        stage: int,
        storages: Mapping[int, int],
    ) -> fx.Node:
        """A node with the value of a second node, at the place of a third node in the model's
        code. Its memory stands for the memory of the tensor `of` in the given capture."""
        node = self._graph.create_node(*call)
        nodes, depth = self._outermost(beside)
        node.meta.update(
            like.meta,
            calls=beside.meta["calls"][:depth],
            source=beside.meta["source"] if nodes == [beside] else None,
            storages=frozenset(storages.get(number, number) for number in of.meta["storages"]),
            mutates=frozenset(),
            touches=frozenset(),
            random=False,
            from_sizes=False,
        )
        self._stage[node] = stage
        return node


def _renumber(node: fx.Node, storages: Mapping[int, int]) -> None:
    for key in ("storages", "mutates", "touches"):
        node.meta[key] = frozenset(storages.get(number, number) for number in node.meta[key])


def _not_there(node: fx.Node) -> PlanError:
    return PlanError(
        f"the plan cuts memory that is changed in place, at {node.name}, where no copy would do.",
        "Keep what makes the tensor and what changes it in one stage.",
    )
