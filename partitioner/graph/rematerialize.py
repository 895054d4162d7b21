"""Capture + profile -> the values that a stage recomputes instead of receiving them.

A value of an earlier stage is sent, or recomputed where it is read: from inputs of the model,
constants, small parameters, and values that are sent anyway or are smaller. Typical are masks,
positions, rotary tables, relative-position biases, casts and views; the lower cost decides, not the
kind. Never recomputed are random numbers, results of changed state, and values computed from a
buffer of the state_dict, or from a parameter together with sent values.

`Prices` compares the cost of recomputing a value with that of sending it. All times are
milliseconds of one micro-batch at the sizes of the profile, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import networkx as nx
from torch import Tensor, fx

from ..capture import Capture, Size, colocated, state_of
from ..capture.aliasing import families
from ..capture.graph import is_external, is_guard
from ..profile.profiler import Profile
from .costs import LOCALHOST, Link

_ENDS = 2  # a transfer takes its time at the sender and at the receiver
_SLOWER = 2  # and a plan also runs on slower links than that of the host that made it
_MICRO_BATCHES_A_STEP = 8
_CALL_MS, _BYTES_PER_MS = 0.005, 10e6


@dataclass(frozen=True, slots=True)
class Prices:
    """The costs of computing each node and of sending each value.

    work_ms: time of each node; a missing node costs the time of writing its result to memory
    link: the connection over which values would be sent
    """

    sizes: Mapping[str, int]
    work_ms: Mapping[str, float]
    link: Link

    @classmethod
    def of(cls, profile: Profile, link: Link = LOCALHOST) -> Prices:
        """The prices of a profiled model."""
        work_ms = {name: cost.forward_ms + cost.backward_ms for name, cost in profile.nodes.items()}
        return cls(profile.sizes, work_ms, link)

    @classmethod
    def guessed(cls, capture: Capture, link: Link = LOCALHOST) -> Prices:
        """Prices without a profile, at the captured sizes."""
        return cls(capture.sizes, {}, link)

    def making_ms(self, node: fx.Node) -> float:
        if node.name in self.work_ms:
            return self.work_ms[node.name]
        return _CALL_MS + num_bytes(node, self.sizes) / _BYTES_PER_MS

    def sending_ms(self, node: fx.Node) -> float:
        """The value forward and, if it has one, its gradient back; inf if it is not a tensor."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return math.inf
        once = self.link.transfer_ms(num_bytes(node, self.sizes))
        return _ENDS * _SLOWER * once * (2 if value.requires_grad else 1)

    def holding_ms(self, parameter: Tensor) -> float:
        """One more holder of a parameter: its gradient, if it has one, goes both ways once a
        step."""
        if not parameter.requires_grad:
            return 0.0
        exchange_ms = self.link.exchange_ms(parameter.nbytes)
        return _ENDS * _SLOWER * exchange_ms / _MICRO_BATCHES_A_STEP


def num_bytes(node: fx.Node, sizes: Mapping[str, int]) -> int:
    """Bytes of a node's tensor at the given sizes; 0 if its value is not a tensor."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0
    shape: Iterable[Any] = node.meta.get("example") or (
        size.evaluate(sizes) if isinstance(size, Size) else size for size in node.meta["shape"]
    )
    return int(math.prod(shape)) * value.element_size()


_LIBRARIES = ("torch", "_operator", "builtins", "math")
_LONGEST_RECOMPUTATION = 64
_NEVER = 10**15  # capacity of an edge that is never cut: more than any time in nanoseconds


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """Nodes that are computed together or not at all: one, or those that share changed memory."""

    nodes: tuple[fx.Node, ...]
    sources: tuple[fx.Node, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Way:
    """How to obtain a value: received values, computed units, and parameters that are held."""

    received: frozenset[fx.Node] = frozenset()
    units: frozenset[_Unit] = frozenset()
    parameters: frozenset[str] = frozenset()

    def __or__(self, other: _Way) -> _Way:
        return _Way(
            self.received | other.received,
            self.units | other.units,
            self.parameters | other.parameters,
        )


class Recomputation:
    """The values of a captured model that can be recomputed, and whether that pays.

    free: nodes that every reader computes for itself from inputs, sizes and constants
    """

    def __init__(self, capture: Capture, prices: Prices | None = None) -> None:
        self.prices = prices or Prices.guessed(capture)
        self._capture = capture
        self._tensors: dict[str, Tensor] = dict(
            capture.model.named_parameters(remove_duplicate=False)
        )
        self._unit_of = _units(capture)
        self._ways: dict[fx.Node, _Way] = {}
        self._makeable: set[_Unit] = set()
        self._find_ways()
        self.free = {
            node
            for unit in self._makeable
            if all(map(self._is_free, unit.nodes))
            for node in unit.nodes
        }

    def together(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The node and those that are always computed with it."""
        return self._unit_of[node].nodes

    def is_makeable(self, node: fx.Node) -> bool:
        """Another stage can recompute the node's value."""
        return self._unit_of[node] in self._makeable

    def sources(self, node: fx.Node) -> frozenset[fx.Node]:
        """The values sent to a stage that reads only `node`: often the node itself."""
        return self._ways[node].received

    def choose(
        self,
        wanted: Iterable[fx.Node],
        at_hand: Collection[fx.Node],
        fixed: Collection[fx.Node],
        own: Collection[fx.Node],
    ) -> tuple[set[fx.Node], set[fx.Node]]:
        """The values that a stage receives and those that it recomputes, to have the `wanted` ones.

        The stage has the values `at_hand`; those of `fixed` can only be sent, and its `own` can
        only be computed. A minimum cut gives the best choice for all values together.
        """
        pending = [node for node in wanted if node.op != "get_attr" and node not in at_hand]
        received, computed = set[fx.Node](), set[fx.Node]()
        recomputed = self._cut(pending, at_hand, fixed, own)
        while pending:
            node = pending.pop()
            if node in received or node in computed:
                continue
            if node.op == "placeholder" or node in fixed or self._unit_of[node] not in recomputed:
                received.add(node)
                continue
            computed.update(self.together(node))
            pending += self._read_by(self._unit_of[node], at_hand)
        return received, computed

    def _cut(
        self,
        wanted: Iterable[fx.Node],
        at_hand: Collection[fx.Node],
        fixed: Collection[fx.Node],
        own: Collection[fx.Node],
    ) -> set[_Unit]:
        """The units to recompute at the lowest cost.

        The capacity between a value and its unit is the time of sending the value, that between a
        unit or a parameter and the end is the time of computing or holding it.
        """
        cut = nx.DiGraph()
        cut.add_nodes_from(("stage", "end"))
        pending = [node for node in wanted if node.op != "placeholder"]
        for node in pending:
            cut.add_edge("stage", node)
        seen: set[fx.Node | _Unit] = set()
        while pending:
            node = pending.pop()
            if node in seen or node.op == "placeholder":
                continue
            unit = self._unit_of[node]
            can_make = unit in self._makeable and node not in fixed
            sending = _NEVER if node in own else _whole(self.prices.sending_ms(node))
            cut.add_edge(node, unit if can_make else "end", capacity=sending)
            if can_make and unit not in seen:
                # One more than its time: at equal cost the value is sent.
                cut.add_edge(unit, "end", capacity=_whole(self._work_ms(unit)) + 1)
                for name in unit.parameters:
                    holding = _whole(self.prices.holding_ms(self._tensors[name]))
                    cut.add_edge(unit, name)
                    cut.add_edge(name, "end", capacity=holding)
                for source in self._read_by(unit, at_hand):
                    if source.op != "placeholder":
                        cut.add_edge(unit, source)
                        pending.append(source)
            seen |= {node, unit}
        _, (near, _) = nx.minimum_cut(cut, "stage", "end")
        return {unit for unit in near if isinstance(unit, _Unit)}

    def _read_by(self, unit: _Unit, at_hand: Collection[fx.Node]) -> list[fx.Node]:
        return [
            source for source in unit.sources if source.op != "get_attr" and source not in at_hand
        ]

    # --- which units can be recomputed, and at what cost ---------------------------------------

    def _find_ways(self) -> None:
        pure: set[fx.Node] = set()
        changed = _changed_state(self._capture)
        free = _free_tensors(self._capture)
        for node in self._capture.graph.nodes:
            if node.op == "placeholder" and not node.meta["storages"] & changed:
                value = node.meta["val"]
                if not value.is_floating_point() and not value.is_complex():
                    self._ways[node] = _Way()
                    pure.add(node)
            elif node.op == "get_attr" and not node.meta["storages"] & changed:
                if node.target in free or node.target in self._tensors:
                    self._ways[node] = _Way()
                    pure.add(node)
        position = {node: index for index, node in enumerate(self._capture.graph.nodes)}
        units = sorted(
            dict.fromkeys(self._unit_of.values()), key=lambda unit: position[unit.nodes[-1]]
        )
        for unit in units:
            is_pure = all(source in pure for source in unit.sources)
            if self._may_be_made(unit, is_pure, changed):
                self._makeable.add(unit)
                if is_pure:
                    pure.update(unit.nodes)
            for node in unit.nodes:
                self._ways[node] = self._best_way(node, unit)

    def _is_free(self, node: fx.Node) -> bool:
        way = self._ways[node]
        return bool(way.units) and not way.received and not way.parameters

    def _best_way(self, node: fx.Node, unit: _Unit) -> _Way:
        sent = _Way(received=frozenset({node}))
        if unit not in self._makeable:
            return sent
        recomputed = _Way(units=frozenset({unit}), parameters=frozenset(unit.parameters))
        for source in unit.sources:
            recomputed |= self._ways[source]
        if len(recomputed.units) > _LONGEST_RECOMPUTATION or recomputed.received & {*unit.nodes}:
            return sent
        return recomputed if self._ms(recomputed) <= self._ms(sent) else sent

    def _ms(self, way: _Way) -> float:
        return (
            sum(self.prices.sending_ms(node) for node in way.received)
            + sum(self._work_ms(unit) for unit in way.units)
            + sum(self.prices.holding_ms(self._tensors[name]) for name in way.parameters)
        )

    def _work_ms(self, unit: _Unit) -> float:
        return sum(self.prices.making_ms(node) for node in unit.nodes)

    def _may_be_made(self, unit: _Unit, is_pure: bool, changed: Set[int]) -> bool:
        if not all(source in self._ways for source in unit.sources):
            return False
        if not all(self._is_repeatable(node, changed) for node in unit.nodes):
            return False
        if not unit.parameters:
            return True
        # Another stage holds a parameter only if it is smaller than the result, and only if no
        # stage has to send anything for it: its holders also have to exchange its gradient.
        param_bytes = sum(self._tensors[name].nbytes for name in unit.parameters)
        result_bytes = max(num_bytes(node, self.prices.sizes) for node in unit.nodes)
        return is_pure and param_bytes <= result_bytes

    def _is_repeatable(self, node: fx.Node, changed: Set[int]) -> bool:
        meta = node.meta
        if meta.get("random") or "part" in meta or is_guard(node):
            return False
        if not changed.isdisjoint(meta["mutates"] | meta["storages"] | meta["touches"]):
            return False
        if node.op == "call_module":
            leaf = self._capture.model.get_submodule(str(node.target))
            is_torch = type(leaf).__module__.startswith("torch.nn.")
            return is_torch and next(leaf.buffers(), None) is None
        if node.op == "call_function":
            module = getattr(node.target, "__module__", None) or "torch"
            return module.partition(".")[0] in _LIBRARIES
        return node.op == "call_method"


def _units(capture: Capture) -> Mapping[fx.Node, _Unit]:
    order = [node for node in capture.graph.nodes if not is_external(node) and node.op != "output"]
    together = nx.utils.UnionFind(order)
    for group in colocated(capture):
        together.union(*group)
    for family in families(capture):
        together.union(*(node for node in family.until_settled if node.op != "output"))
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in order:
        members.setdefault(together[node], []).append(node)
    parameters = {name for name, _ in capture.model.named_parameters(remove_duplicate=False)}
    units: dict[fx.Node, _Unit] = {}
    for nodes in members.values():
        inside = set(nodes)
        sources = dict.fromkeys(
            source for node in nodes for source in node.all_input_nodes if source not in inside
        )
        names = [str(source.target) for source in sources if source.op == "get_attr"]
        for node in nodes:
            if node.op == "call_module":
                leaf = capture.model.get_submodule(str(node.target))
                names += [f"{node.target}.{name}" for name, _ in leaf.named_parameters()]
        unit = _Unit(
            tuple(nodes), tuple(sources), tuple(name for name in names if name in parameters)
        )
        units |= dict.fromkeys(nodes, unit)
    return units


def _changed_state(capture: Capture) -> set[int]:
    """The memory of inputs, parameters, buffers and constants that the model changes."""
    nodes = [node for node in capture.graph.nodes if node.op != "output"]
    given = set().union(
        *(node.meta["storages"] for node in nodes if is_external(node)),
        *(node.meta["touches"] for node in nodes),
    )
    return given & set().union(*(node.meta["mutates"] for node in nodes))


def _free_tensors(capture: Capture) -> set[str]:
    """Constants and non-persistent buffers: outside the state_dict, so any stage may have them."""
    saved = set(state_of(capture.model))
    buffers = {name for name, _ in capture.model.named_buffers(remove_duplicate=False)}
    return (buffers - saved) | set(capture.constants)


def _whole(time_ms: float) -> int:
    """Nanoseconds: cuts are exact in whole numbers."""
    return min(round(min(time_ms, 1e9) * 1e6), _NEVER)
