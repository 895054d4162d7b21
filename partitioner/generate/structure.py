"""The nodes of one stage -> a tree of function bodies: operations, module calls, loops.

A module call whose nodes all lie in the stage is a `Call` with a body of its own, which becomes
a method again; calls of siblings that hand one result on become a `Loop`. The nodes of a call
that a boundary cuts stand in the body around it, in program order. What goes in and out of a
body is read off the data flow; the call's record gives only names and order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import groupby
from typing import Any

from torch import fx, nn

from ..capture import Capture, ModuleCall, Region
from ..split import StageGraph
from .items import Body, Call, Item, Loop, Op, hint_of, own_name, symbols_of
from .sizes import find_sources


def build(
    capture: Capture,
    stage: StageGraph,
    is_same: Callable[[Body, Body], bool],
    flat: Set[str] = frozenset(),
    names: Mapping[fx.Node, str] | None = None,
) -> Body:
    """The body of a stage's forward.

    `names` are what earlier stages call the values that this one receives. `is_same` says
    whether two bodies would be one class; only such are one loop. Modules whose path is in
    `flat` are never calls.
    """
    return _Builder(capture, stage, is_same, flat).stage_body(names or {})


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
        for node in capture.graph.nodes:
            if node.op not in ("placeholder", "get_attr", "output"):
                for call in node.meta.get("calls", ()):
                    nodes_of[call].add(node)
        self._whole = {
            call
            for call, nodes in nodes_of.items()
            if nodes <= self._inside
            and call.path not in flat
            and call in capture.calls
            and _is_contiguous(nodes, stage.nodes)
        }
        # Who reads a value: nodes of this stage, and None for what is outside of it.
        self._readers: dict[fx.Node, set[fx.Node | None]] = defaultdict(set)
        for node in stage.nodes:
            for source in node.all_input_nodes:
                self._readers[source].add(node)
        for node in stage.outputs:
            self._readers[node].add(None)

    def stage_body(self, names: Mapping[fx.Node, str]) -> Body:
        stage = self._stage
        items = tuple(self._loops(self._items(stage.nodes, 0)))
        return Body(
            path="",
            type_name=f"Stage{stage.index}",
            inputs=stage.inputs,
            input_names=tuple(names.get(node) or _own_name(node) for node in stage.inputs),
            symbols=(),
            items=items,
            results=stage.outputs,
        )

    def _call(self, call: ModuleCall, nodes: Sequence[fx.Node], depth: int, around: int) -> Call:
        record = self._capture.calls[call]
        members = set(nodes)
        read = dict.fromkeys(
            source
            for node in nodes
            for source in node.all_input_nodes
            if source not in members and not self._is_own(source, call.path)
        )
        names: dict[fx.Node, str] = {}
        for name, value in record.arguments.items():
            for node in _tensors_in(value):
                if node in read:
                    names.setdefault(node, name if isinstance(value, fx.Node) else "")
        for node in read:
            names[node] = names.get(node) or _own_name(node)
        made = [node for node in nodes if self._readers[node] - members]
        wanted = [node for node in _tensors_in(record.result) if node in made]
        results = tuple(dict.fromkeys([*wanted, *made]))
        items = self._items(nodes, depth)
        body = Body(
            path=call.path,
            type_name=record.type_name.rpartition(".")[2],
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
            return Call(call, body, chain=True)
        return Call(call, replace(body, items=tuple(self._loops(items))))

    def _is_own(self, node: fx.Node, path: str) -> bool:
        return node.op == "get_attr" and own_name(node, path) is not None

    def _items(self, nodes: Sequence[fx.Node], depth: int) -> list[Item]:
        """The items of a body `depth` calls deep: whole calls as one, the rest node by node."""

        def outermost(node: fx.Node) -> tuple[ModuleCall, int] | None:
            for level, call in enumerate(node.meta.get("calls", ())[depth:], depth):
                if call in self._whole:
                    return call, level
            return None

        items: list[Item] = []
        for found, group in groupby(nodes, outermost):
            members = list(group)
            if found is None:
                items += map(Op, members)
            else:
                call, level = found
                around = _regions_around(members, nodes)
                items.append(self._call(call, members, level + 1, around))
        return _unpacked(items, self._readers)

    def _is_chain(self, path: str, body: Body) -> bool:
        module = self._capture.model.get_submodule(path)
        if not isinstance(module, nn.Sequential) or len(body.items) != len(module):
            return False
        if type(module).forward is not nn.Sequential.forward:
            return False
        if len(body.inputs) != 1 or len(body.results) != 1 or body.symbols:
            return False
        value = body.inputs[0]
        for name, item in zip(dict(module.named_children()), body.items, strict=True):
            child = f"{path}.{name}"
            match item:
                case Op(node) if (
                    node.op == "call_module"
                    and node.target == child
                    and node.args == (value,)
                    and not node.kwargs
                    and not item.items
                    and not node.meta.get("regions", ())[len(body.regions) :]
                ):
                    value = node
                case Call(call, inner) if (
                    call.path == child
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
        run: list[Call] = []
        carried: tuple[tuple[int, int], ...] = ()
        for item in items:
            if isinstance(item, Call) and run:
                link = self._link(run[-1], item)
                if link and (len(run) == 1 or link == carried):
                    run.append(item)
                    carried = link
                    continue
            yield from _finished(run, carried)
            run, carried = [item] if isinstance(item, Call) else [], ()
            if not run:
                yield item
        yield from _finished(run, carried)

    def _link(self, last: Call, call: Call) -> tuple[tuple[int, int], ...]:
        """Which results of the call before are which arguments of this one, if the two can be
        one loop: the next item of the same list, of the same class, and all other arguments the
        same for both. Empty if they cannot."""
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


def _is_contiguous(nodes: Set[fx.Node], order: Sequence[fx.Node]) -> bool:
    positions = [position for position, node in enumerate(order) if node in nodes]
    return positions[-1] - positions[0] + 1 == len(positions)


def _regions_around(members: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> int:
    """How many of the regions of a call's nodes are not of its own making: the nodes around it
    in the same function are in them too, or they are around the whole function. What is done in
    one mode only is decided outside: a call that decides itself goes on in both."""

    def shared(left: tuple[Region, ...], right: tuple[Region, ...]) -> int:
        same = 0
        for one, other in zip(left, right, strict=False):
            if one != other:
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
    """Items where an operation with several results and the nodes that take them are one."""
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
            taken = {element for element in elements if element is not None}
            if len(taken) == len(users):
                done |= taken
                result.append(Op(item.node, tuple(elements)))
                continue
        result.append(item)
    return result


def _index_of(node: fx.Node) -> int | None:
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        index = node.args[1]
        return index if isinstance(index, int) and index >= 0 else None
    return None


def _finished(run: list[Call], carried: tuple[tuple[int, int], ...]) -> Iterator[Item]:
    if len(run) > 1:
        yield Loop(tuple(run), carried)
    else:
        yield from run
