"""The nodes of one stage -> a tree of function bodies: operations, module calls, loops.

A module call whose nodes all lie in the stage becomes a `SubmoduleCall` with a body of its own,
and later a method. Calls of siblings that pass on one result become a `Loop`. The nodes of a call
that a boundary cuts stand in the body around it, in program order. The inputs and outputs of a body
follow from the data flow; the record of the call gives only names and order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import fx, nn

from ..capture import Capture, ModuleCall, Recompute, Region
from ..split.split import StageGraph
from .constants import find_sources
from .items import (
    Body,
    Item,
    Loop,
    Op,
    RecomputedSegment,
    SubmoduleCall,
    hint_of,
    own_name,
    symbols_of,
)
from .layout import class_name
from .methods import can_be_method, decisions_in


def build(
    capture: Capture,
    stage: StageGraph,
    is_same: Callable[[Body, Body], bool],
    flat: Set[str] = frozenset(),
    names: Mapping[fx.Node, str] | None = None,
) -> Body:
    """The body of a stage's forward.

    `names` are the names that earlier stages give the inputs of this one. `is_same` says whether
    two bodies would be one class; only such calls form a loop. Modules whose path is in `flat` are
    never calls.
    """
    return _Builder(capture, stage, is_same, flat).stage_body(names or {})


def build_flat(stage: StageGraph) -> Body:
    """The body of a stage's forward without calls and loops: one item a node, with its name."""
    return Body(
        path="",
        type_name=f"Stage{stage.index}",
        inputs=stage.inputs,
        input_names=tuple(node.name for node in stage.inputs),
        symbols=(),
        items=tuple(map(Op, stage.nodes)),
        results=stage.outputs,
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a body.

    path, depth: the module whose method it is, and the number of module calls around it
    entered: the recomputed parts around it
    """

    path: str = ""
    depth: int = 0
    entered: frozenset[Recompute] = frozenset()

    def within(self, recompute: Recompute) -> _Place:
        return replace(self, entered=self.entered | {recompute})


class _Builder:
    def __init__(
        self,
        capture: Capture,
        stage: StageGraph,
        is_same: Callable[[Body, Body], bool],
        flat: Set[str],
    ) -> None:
        self._capture = capture
        self._is_same = is_same
        self._stage = stage
        self._inside = set(stage.nodes)
        nodes_of: dict[ModuleCall, set[fx.Node]] = defaultdict(set)
        pieces: dict[Recompute, set[fx.Node]] = defaultdict(set)
        for node in capture.graph.nodes:
            if node.op not in ("placeholder", "get_attr", "output"):
                for call in node.meta.get("calls", ()):
                    nodes_of[call].add(node)
                for recompute in node.meta.get("recomputes", ()):
                    if node in self._inside:
                        pieces[recompute].add(node)
        # The readers of a value: nodes of this stage, and None for readers outside of it.
        self._readers: dict[fx.Node, set[fx.Node | None]] = defaultdict(set)
        for node in stage.nodes:
            for source in node.all_input_nodes:
                self._readers[source].add(node)
        for node in stage.outputs:
            self._readers[node].add(None)
        decisions = decisions_in(stage.nodes)
        self._whole = {
            call
            for call, nodes in nodes_of.items()
            if nodes <= self._inside
            and call.path not in flat
            and call in capture.calls
            and can_be_method(nodes, stage.nodes, self._readers, decisions)
        }
        # A boundary may cut a recomputed part: each stage then recomputes its own piece.
        self._pieces = {
            recompute
            for recompute, nodes in pieces.items()
            if can_be_method(nodes, stage.nodes, self._readers, decisions)
        }

    def stage_body(self, names: Mapping[fx.Node, str]) -> Body:
        stage = self._stage
        items = tuple(self._loops(self._items(stage.nodes, _Place())))
        return Body(
            path="",
            type_name=f"Stage{stage.index}",
            inputs=stage.inputs,
            input_names=tuple(names.get(node) or _own_name(node) for node in stage.inputs),
            symbols=(),
            items=items,
            results=stage.outputs,
        )

    def _call(
        self,
        call: ModuleCall,
        nodes: Sequence[fx.Node],
        place: _Place,
        around: int,
        recompute: Recompute | None,
    ) -> SubmoduleCall:
        record = self._capture.calls[call]
        members = set(nodes)
        read = self._read(nodes, call.path)
        names: dict[fx.Node, str] = {}
        for name, value in record.arguments.items():
            for node in _tensors_in(value):
                if node in read:
                    names.setdefault(node, name if isinstance(value, fx.Node) else "")
        for node in read:
            names[node] = names.get(node) or _own_name(node)
        outputs = [node for node in nodes if self._readers[node] - members]
        wanted = [node for node in _tensors_in(record.result) if node in outputs]
        results = tuple(dict.fromkeys([*wanted, *outputs]))
        items = self._items(nodes, place)
        body = Body(
            path=call.path,
            type_name=class_name(record.type_name.rpartition(".")[2]),
            inputs=tuple(names),
            input_names=tuple(names.values()),
            symbols=(),
            items=tuple(items),
            results=results,
            regions=nodes[0].meta.get("regions", ())[:around],
        )
        needed = [symbol for item in items for symbol in symbols_of(item)]
        unknown = find_sources(needed, body.inputs, items).unknown
        body = replace(body, symbols=unknown)
        if self._is_chain(call.path, body):
            return SubmoduleCall(call, body, True, recompute)
        return SubmoduleCall(call, replace(body, items=tuple(self._loops(items))), False, recompute)

    def _segment(
        self, recompute: Recompute, nodes: Sequence[fx.Node], place: _Place, around: int
    ) -> RecomputedSegment:
        members = set(nodes)
        inputs = tuple(self._read(nodes, place.path))
        items = self._items(nodes, place)
        needed = [symbol for item in items for symbol in symbols_of(item)]
        body = Body(
            path=place.path,
            type_name="",
            inputs=inputs,
            input_names=tuple(map(_own_name, inputs)),
            symbols=find_sources(needed, inputs, items).unknown,
            items=tuple(self._loops(items)),
            results=tuple(node for node in nodes if self._readers[node] - members),
            regions=nodes[0].meta.get("regions", ())[:around],
        )
        return RecomputedSegment(recompute, body)

    def _read(self, nodes: Sequence[fx.Node], path: str) -> dict[fx.Node, None]:
        """The inputs of a method of the module `path`, apart from the module's own tensors."""
        members = set(nodes)
        return dict.fromkeys(
            source
            for node in nodes
            for source in node.all_input_nodes
            if source not in members and not self._is_own(source, path)
        )

    def _is_own(self, node: fx.Node, path: str) -> bool:
        return node.op == "get_attr" and own_name(node, path) is not None

    def _items(self, nodes: Sequence[fx.Node], place: _Place) -> list[Item]:
        """The items of a body: whole calls, recomputed parts, and the rest node by node."""

        def outermost(node: fx.Node) -> ModuleCall | Recompute | None:
            calls = node.meta.get("calls", ())
            for level in range(place.depth, len(calls) + 1):
                for recompute in self._recomputes(node, place, level):
                    return recompute
                if level < len(calls) and calls[level] in self._whole:
                    call: ModuleCall = calls[level]
                    return call
            return None

        items: list[Item] = []
        for scope, group in groupby(nodes, outermost):
            members = list(group)
            around = _regions_around(members, nodes)
            match scope:
                case None:
                    items += map(Op, members)
                case ModuleCall():
                    items.append(self._whole_call(scope, members, place, around))
                case Recompute():
                    items += self._recomputed(scope, members, place.within(scope), around)
        return _unpacked(items, self._readers)

    def _recomputes(self, node: fx.Node, place: _Place, level: int) -> list[Recompute]:
        """The recomputed parts around a node that start below `level` module calls."""
        return [
            recompute
            for recompute in node.meta.get("recomputes", ())
            if recompute.depth == level
            and recompute in self._pieces
            and recompute not in place.entered
        ]

    def _whole_call(
        self, call: ModuleCall, nodes: Sequence[fx.Node], place: _Place, around: int
    ) -> SubmoduleCall:
        """A call of a module; a module whose forward is recomputed from its first to its last line
        counts as a recomputed call."""
        inside = _Place(call.path, nodes[0].meta["calls"].index(call) + 1, place.entered)
        inner = self._recomputes(nodes[0], inside, inside.depth)
        if inner and all(inner[0] in node.meta["recomputes"] for node in nodes):
            return self._call(call, nodes, inside.within(inner[0]), around, inner[0])
        return self._call(call, nodes, inside, around, None)

    def _recomputed(
        self, recompute: Recompute, nodes: Sequence[fx.Node], place: _Place, around: int
    ) -> list[Item]:
        """A recomputed part: the call of a module if it is one, else a separate method."""
        first = nodes[0]
        calls = first.meta.get("calls", ())
        if recompute.depth < len(calls):
            call = calls[recompute.depth]
            whole = call in self._whole and all(call in node.meta["calls"] for node in nodes)
            if whole and not self._recomputes(first, place, recompute.depth):
                inside = _Place(call.path, recompute.depth + 1, place.entered)
                return [self._call(call, nodes, inside, around, recompute)]
        if first.op == "call_module" and not first.kwargs:
            if all(node is first or _index_of(node) is not None for node in nodes):
                return [Op(first, (), recompute), *map(Op, nodes[1:])]
        if any(self._readers[node] - set(nodes) for node in nodes):
            return [self._segment(recompute, nodes, place, around)]
        return self._items(nodes, place)

    def _is_chain(self, path: str, body: Body) -> bool:
        module = self._capture.model.get_submodule(path)
        if not isinstance(module, nn.Sequential) or len(body.items) != len(module):
            return False
        if type(module).forward is not nn.Sequential.forward:
            return False
        if len(body.inputs) != 1 or len(body.results) != 1 or body.symbols:
            return False
        value = body.inputs[0]
        for name, item in zip(module._modules, body.items, strict=True):
            child = f"{path}.{name}"
            match item:
                case Op(node) if (
                    node.op == "call_module"
                    and node.target == child
                    and node.args == (value,)
                    and not node.kwargs
                    and not item.items
                    and item.recompute is None
                    and not node.meta.get("regions", ())[len(body.regions) :]
                ):
                    value = node
                case SubmoduleCall(call, inner) if (
                    call.path == child
                    and item.recompute is None
                    and inner.inputs == (value,)
                    and len(inner.results) == 1
                    and not inner.symbols
                    and inner.regions == body.regions
                ):
                    value = inner.results[0]
                case _:
                    return False
        return True

    # --- loops ------------------------------------------------------------------------------

    def _loops(self, items: list[Item]) -> Iterator[Item]:
        run: list[SubmoduleCall] = []
        carried: tuple[tuple[int, int], ...] = ()
        for item in items:
            if isinstance(item, SubmoduleCall) and run:
                link = self._link(run[-1], item)
                if link and (len(run) == 1 or link == carried):
                    run.append(item)
                    carried = link
                    continue
            yield from _finished(run, carried)
            run, carried = [item] if isinstance(item, SubmoduleCall) else [], ()
            if not run:
                yield item
        yield from _finished(run, carried)

    def _link(self, last: SubmoduleCall, call: SubmoduleCall) -> tuple[tuple[int, int], ...]:
        """The positions of the results of the last call that are arguments of this one, if the two
        can form a loop: the next item of the same list, of the same class, with all other arguments
        equal for both. Empty if they cannot."""
        parent, _, index = call.call.path.rpartition(".")
        if not index.isdigit() or last.call.path != f"{parent}.{int(index) - 1}":
            return ()
        siblings = self._capture.model.get_submodule(parent)
        if not isinstance(siblings, (nn.ModuleList, nn.Sequential)):
            return ()
        before, after = last.body, call.body
        if last.chain or call.chain or before.regions != after.regions:
            return ()
        if last.call.index != call.call.index or not self._is_same(before, after):
            return ()
        if _options(last) != _options(call):
            return ()
        pairs = []
        for position, (old, new) in enumerate(zip(before.inputs, after.inputs, strict=True)):
            if new in before.results:
                pairs.append((position, before.results.index(new)))
            elif new is not old:
                return ()
        inside = set(call.nodes)
        if any(self._readers[result] - inside for result in before.results):
            return ()
        return tuple(pairs)


def _options(call: SubmoduleCall) -> object:
    return call.recompute and call.recompute.options


def _regions_around(members: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> int:
    """The number of regions of a call's nodes that begin outside the call: they also hold nodes
    around the call in the same function, or surround the whole function. A decision by mode around
    the call is made outside it; a call that decides itself runs in both modes."""

    def shared(left: tuple[Region, ...], right: tuple[Region, ...]) -> int:
        same = 0
        for region, other in zip(left, right, strict=False):
            if region != other:
                break
            same += 1
        return same

    first = members[0].meta.get("regions", ())
    inside = set(members)
    common = min(shared(first, node.meta.get("regions", ())) for node in members)
    outside = [node for node in nodes if node not in inside]
    around = max((shared(first, node.meta.get("regions", ())) for node in outside), default=0)
    decided: int = sum(region.is_decided for region in first[:common])
    return min(common, max(around, decided))


def _own_name(node: fx.Node) -> str:
    return hint_of(node) or node.name


def _tensors_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)


# --- unpacking ------------------------------------------------------------------------------

_LONGEST_UNPACKING = 4


def _unpacked(items: list[Item], readers: dict[fx.Node, set[fx.Node | None]]) -> list[Item]:
    """Merges an operation with several results and the nodes that extract them into one item."""
    position = {item.node: item for item in items if isinstance(item, Op)}
    done: set[fx.Node] = set()
    result: list[Item] = []
    for item in items:
        if not isinstance(item, Op):
            result.append(item)
            continue
        if item.node in done:
            continue
        value = item.node.meta.get("val")
        users = [reader for reader in readers[item.node] if reader is not None]
        if (
            isinstance(value, (tuple, list))
            and 1 < len(value) <= _LONGEST_UNPACKING
            and None not in readers[item.node]
            and users
            and all(user in position and _index_of(user) is not None for user in users)
        ):
            elements: list[fx.Node | None] = [None] * len(value)
            for user in sorted(users, key=lambda user: user.name):
                index = _index_of(user)
                assert index is not None
                if elements[index] is None:
                    elements[index] = user
            used = {element for element in elements if element is not None}
            if len(used) == len(users):
                done |= used
                result.append(Op(item.node, tuple(elements), item.recompute))
                continue
        result.append(item)
    return result


def _index_of(node: fx.Node) -> int | None:
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        index = node.args[1]
        return index if isinstance(index, int) and index >= 0 else None
    return None


def _finished(run: list[SubmoduleCall], carried: tuple[tuple[int, int], ...]) -> Iterator[Item]:
    if len(run) > 1:
        yield Loop(tuple(run), carried)
    else:
        yield from run
