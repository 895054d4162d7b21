"""A cost graph of networkx -> the arrays of `Costs`, and the bytes that its nodes hold.

`costs_of` reads and checks a graph.

`with_updates` and `with_exchanges` add the times of an optimizer step, and `with_rotations` the
memory of SOAP. Every other optimizer keeps copies of the parameters
(`optimizers/facts.py`). For a matrix of m rows and n columns SOAP keeps two moments and,
for either side, a covariance and a basis: 2 (m^2 + n^2) more elements, which depends on the shape.
A search sums them like buffers.

`live_bytes` counts the values without gradient that forward holds in variables while each node
runs. Autograd keeps the other values, which count as activations. A value is released with its
variable, which in generated code, as in the author's, is later than its last read:

- an argument of a module lives until the module returns
- a value that the author named lives until its function returns or the name gets another value
- a value without a name lives until it is read; in an expression too long for a line it lives
  until the value computed from it is read, because part of the expression gets a variable

A backward runs in reverse order and frees what it has read. When it comes to the gradient of an
embedding at the beginning of a model, the activations of the micro-batch are gone. So an operation
before which next to nothing is saved does not count beside them: its need is among `live_bytes`
(`_held`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import networkx as nx
import numpy as np
from torch import Tensor, fx

from ...runtime.errors import PlanError
from ...runtime.optimizers.facts import PLANNED
from ..capture import Capture, ModuleCall
from ..capture.graph import is_external
from ..profile.operation_costs import storage_makers
from .costs import Costs, Floats, Link, SharedBytes, Value, times_as_long
from .rematerialize import num_bytes


def costs_of(graph: nx.DiGraph, link: Link | None = None) -> Costs:
    """The arrays of a cost graph. Attributes of a node, zero where they are missing:

    forward_ms, backward_ms: times of one micro-batch
    weight_ms: the part of the backward for weight gradients; by default half of it if the node has
        parameters, or if no node of the graph names any
    times_on: {kind of device: (forward ms, backward ms)}
    sums_ms: (forward, backward) of sums over tensor ranks in its times
    output_bytes, buffer_bytes: sizes of its result and of its buffers
    parameters or param_bytes: {name: bytes} or their sum
    frozen: {name: bytes} of parameters without gradient
    saved or saved_bytes: {storage: bytes} kept for backward, or their sum
    saved_as: {tensor: storage that it is in}
    transient_bytes: additional need while it runs; by default `output_bytes`
    live_bytes: values without gradient that are held while it runs
    modules, block, label: enclosing modules from the block inwards; the block; a text for people
    rotation_bytes: additional memory of SOAP (`with_rotations`)

    Attribute of the graph: `update_ms_per_byte` of parameters in an optimizer step (`solve`).

    Attributes of an edge: `tensors` {name: bytes} forward, `grads` {name: bytes} back, and
    `transfer_ms` {name: ms} if times are known instead of bytes. Without `tensors` it carries its
    source's `output_bytes`; without `grads` as many bytes return if the graph has backward times.

    Raises PlanError if the graph is empty, has a cycle, or a cost is not a number >= 0.
    """
    link, groups = link or Link(), _program_order(graph)
    position, nodes = {group: n for n, group in enumerate(groups)}, [graph.nodes[n] for n in groups]
    forward, backward = _costs(graph, groups, "forward_ms"), _costs(graph, groups, "backward_ms")
    values = _values(graph, position, has_backward=bool(backward.any()))
    saved, transient_bytes, live_bytes = _held(nodes)
    transfer_ms = np.array([value.transfer_ms(link) for value in values], dtype=np.float64)
    return Costs(
        name=str(graph.graph.get("name", "the graph")),
        groups=tuple(map(str, groups)),
        labels=tuple(str(graph.nodes[group].get("label", group)) for group in groups),
        forward_ms=forward,
        backward_ms=backward,
        weight_ms=_weight_ms(graph, groups, backward),
        edges=tuple(sorted((position[source], position[target]) for source, target in graph.edges)),
        values=values,
        send_ms=transfer_ms,
        receive_ms=transfer_ms,
        duplex=link.duplex,
        parameters=_shared_bytes(map(_parameters_of, nodes)),
        saved=saved,
        frozen=_shared_bytes(map(_frozen, nodes)),
        buffer_bytes=_costs(graph, groups, "buffer_bytes"),
        transient_bytes=transient_bytes,
        live_bytes=live_bytes,
        modules=tuple(tuple(node.get("modules", ())) for node in nodes),
        blocks=tuple(node.get("block", "") for node in nodes),
        has_params=np.array([bool(_parameters_of(node) or _frozen(node)) for node in nodes]),
        link=link,
        times_on=_times_on(graph, groups),
        update_ms=np.zeros(len(groups)),
        sums_ms=np.array([node.get("sums_ms", (0.0, 0.0)) for node in nodes], np.float64).T,
        micro_batch_size=graph.graph.get("micro_batch_size"),
    )


def _program_order(graph: nx.DiGraph) -> list[Any]:
    """The nodes in a topological order that keeps to the order in which they were added."""
    if not len(graph):
        raise PlanError("the graph has no nodes.")
    added = {node: index for index, node in enumerate(graph)}
    if all(added[source] < added[target] for source, target in graph.edges):
        return list(graph)
    try:
        return list(nx.lexicographical_topological_sort(graph, key=added.__getitem__))
    except nx.NetworkXUnfeasible as error:
        cycle = " -> ".join(str(source) for source, *_ in nx.find_cycle(graph))
        raise PlanError(f"the graph has a cycle: {cycle} -> ... .") from error


def _parameters_of(node: Mapping[str, Any]) -> dict[str, int]:
    """A node's parameters and their bytes; one entry without a name if only the sum is known."""
    if "parameters" in node:
        return dict(node["parameters"])
    return {"": int(node["param_bytes"])} if node.get("param_bytes") else {}


def _frozen(node: Mapping[str, Any]) -> Mapping[str, int]:
    return node.get("frozen") or {}


def _weight_ms(graph: nx.DiGraph, groups: Sequence[Any], backward_ms: Floats) -> Floats:
    """The part of each backward that makes gradients of weights."""
    has_params = [bool(_parameters_of(graph.nodes[group])) for group in groups]
    unknown = not any(has_params)
    weight_ms = np.zeros(len(groups))
    for index, (group, owns) in enumerate(zip(groups, has_params, strict=True)):
        node, whole_ms = graph.nodes[group], float(backward_ms[index])
        weight_ms[index] = whole_ms / 2 if owns or unknown else 0.0
        if "weight_ms" in node:
            weight_ms[index] = _cost(group, node, "weight_ms")
            if weight_ms[index] > whole_ms * (1 + 1e-9):
                raise PlanError(
                    f"node {group} has weight_ms = {weight_ms[index]:g}, which is a part of its "
                    f"backward_ms = {whole_ms:g} and cannot be more."
                )
    return weight_ms


def _shared_bytes(named: Iterable[Mapping[str, int]]) -> tuple[SharedBytes, ...]:
    """The named sizes of the groups, once for each name; a size without a name is its group's."""
    groups: dict[str, list[int]] = {}
    sizes: dict[str, float] = {}
    for position, sizes_of_group in enumerate(named):
        for name, size in sizes_of_group.items():
            key = name or f"#{position}"
            groups.setdefault(key, []).append(position)
            sizes[key] = max(size, sizes.get(key, 0))
    return tuple(SharedBytes(tuple(groups[key]), size) for key, size in sizes.items() if size)


def _saved(node: Mapping[str, Any]) -> Mapping[str, int]:
    saved: Mapping[str, int] = node.get("saved", {"": node.get("saved_bytes", 0)})
    return saved


def _transient(node: Mapping[str, Any]) -> float:
    return float(node.get("transient_bytes", node.get("output_bytes", 0)))


_NEXT_TO_NOTHING = 1 / 8
"""The share of its need that a model may save up to an opening operation, itself included."""


def _held(nodes: Sequence[Mapping[str, Any]]) -> tuple[tuple[SharedBytes, ...], Floats, Floats]:
    """`saved`, `transient_bytes` and `live_bytes` of the groups. The need of an opening operation
    is moved to the live bytes, together with all that groups up to it save."""
    saved = _shared_bytes(map(_saved, nodes))
    transient = np.array([*map(_transient, nodes)], dtype=np.float64)
    live = np.array([node.get("live_bytes", 0) for node in nodes], dtype=np.float64)
    first_saved = np.zeros(len(nodes))
    for shared in saved:
        first_saved[shared.groups[0]] += shared.num_bytes
    before = np.cumsum(first_saved)
    is_opening = before <= _NEXT_TO_NOTHING * transient
    held = np.maximum(live, transient + before)
    return saved, np.where(is_opening, 0.0, transient), np.where(is_opening, held, live)


def _times_on(graph: nx.DiGraph, groups: Sequence[Any]) -> dict[str, tuple[Floats, Floats]]:
    kinds = sorted(
        {kind for _, times in graph.nodes(data="times_on", default={}) for kind in times}
    )
    times_on = {}
    for kind in kinds:
        missing = [group for group in groups if kind not in graph.nodes[group].get("times_on", {})]
        if missing:
            raise PlanError(f"node {missing[0]} has no times on {kind}, other nodes have.")
        pairs = np.array([graph.nodes[group]["times_on"][kind] for group in groups], np.float64)
        times_on[kind] = (pairs[:, 0], pairs[:, 1])
    return times_on


def _costs(graph: nx.DiGraph, groups: Sequence[Any], key: str) -> Floats:
    return np.array([_cost(group, graph.nodes[group], key) for group in groups], dtype=np.float64)


def _cost(group: object, node: Mapping[str, Any], key: str) -> float:
    cost = node.get(key, 0.0)
    if not isinstance(cost, int | float) or not 0 <= cost < math.inf:
        raise PlanError(f"node {group} has {key} = {cost!r}, which is not a valid time.")
    return float(cost)


def _values(
    graph: nx.DiGraph, position: Mapping[Any, int], *, has_backward: bool
) -> tuple[Value, ...]:
    """One value a tensor, however many edges carry it."""
    forward_bytes: dict[tuple[int, str], float] = {}
    backward_bytes: dict[tuple[int, str], float] = {}
    known_ms: dict[tuple[int, str], float] = {}
    nodes = {position[node]: data for node, data in graph.nodes(data=True)}
    readers: dict[tuple[int, str], set[int]] = {}
    for source, target, edge in graph.edges(data=True):
        given = edge.get("bytes", graph.nodes[source].get("output_bytes", 0))
        tensors = edge.get("tensors", {str(source): given})
        grads = edge.get("grads", tensors if has_backward else {})
        for name, size in tensors.items():
            key = position[source], name
            forward_bytes[key] = max(size, forward_bytes.get(key, 0))
            readers.setdefault(key, set()).add(position[target])
        for name, size in grads.items():
            # The gradient of an activation goes where that came from, summed on the way out.
            paired = name in tensors
            key = position[source if paired else target], name
            backward_bytes[key] = max(size, backward_bytes.get(key, 0))
            readers.setdefault(key, set()).add(position[target if paired else source])
        for name, time_ms in edge.get("transfer_ms", {}).items():
            known_ms[position[source if name in tensors else target], name] = time_ms
    return tuple(
        Value(
            name=key[1],
            owner=key[0],
            readers=tuple(sorted(readers[key])),
            forward_bytes=forward_bytes.get(key, 0),
            backward_bytes=backward_bytes.get(key, 0),
            known_ms=known_ms.get(key),
            is_saved=nodes[key[0]].get("saved_as", {}).get(key[1], key[1]) in _saved(nodes[key[0]]),
        )
        for key in sorted(readers)
    )


LARGEST = 8192
"""SOAP leaves larger sides without a preconditioner (`runtime/optimizers/soap.py`)."""


def rotation_bytes(matrices: Iterable[Tensor]) -> int:
    """Bytes of the covariances and bases of these tensors; only matrices have them."""
    return sum(
        2 * matrix.element_size() * sum(size**2 for size in matrix.shape if size <= LARGEST)
        for matrix in matrices
        if matrix.ndim == 2
    )


def with_updates(costs: Costs, ms_per_byte: float, micro_batches: int) -> Costs:
    """The costs with the optimizer's step of `ms_per_byte` of parameters once in `micro_batches`.

    An m-th of it counts in the backwards of the groups that name a parameter, in equal parts. The
    additional time of stages that share a parameter is part of their exchange (`with_exchanges`).
    """
    update_ms = np.zeros(len(costs.groups))
    for shared in costs.parameters:
        whole_ms = shared.num_bytes * ms_per_byte / micro_batches
        update_ms[list(shared.groups)] += whole_ms / len(shared.groups)
    times_on = {
        kind: (
            forward_ms,
            backward_ms + update_ms * times_as_long(forward_ms + backward_ms, costs.work_ms),
        )
        for kind, (forward_ms, backward_ms) in costs.times_on.items()
    }
    backward_ms = costs.backward_ms + update_ms
    return replace(costs, backward_ms=backward_ms, times_on=times_on, update_ms=update_ms)


def with_exchanges(
    costs: Costs, micro_batches: int, link: Link, update_ms_per_byte: float = 0.0
) -> Costs:
    """The costs with an exchange over `link` for every parameter that several groups name.

    Once a step each holder sends its gradient and receives the other's, which costs every
    micro-batch an m-th of two transfers. If the optimizer's step counts, each of two stages has
    half of it in its group, and the other half, for its own copy, in the exchange. With three or
    more holders each pays as with two.
    """
    exchanges = tuple(
        Value(
            name=f"gradient of a parameter of {costs.groups[shared.groups[0]]}",
            owner=shared.groups[0],
            readers=shared.groups[1:],
            forward_bytes=0,
            backward_bytes=0,
            known_ms=(
                link.exchange_ms(shared.num_bytes) + update_ms_per_byte * shared.num_bytes / 2
            )
            / micro_batches,
            is_exchange=True,
            tied_bytes=shared.num_bytes,
        )
        for shared in costs.parameters
        if len(shared.groups) > 1
    )
    times_ms = np.array([value.known_ms for value in exchanges], dtype=np.float64)
    return replace(
        costs,
        values=costs.values + exchanges,
        send_ms=np.concatenate([costs.send_ms, times_ms]),
        receive_ms=np.concatenate([costs.receive_ms, times_ms]),
    )


def with_rotations(costs: Costs, graph: nx.DiGraph, optimizer: str) -> Costs:
    """The costs of the graph, with its `rotation_bytes` among the buffers if it is for SOAP."""
    if not PLANNED[optimizer].rotates:
        return costs
    bytes_of_group = {
        str(group): node.get("rotation_bytes", 0) for group, node in graph.nodes.items()
    }
    rotation_bytes = np.array([bytes_of_group[group] for group in costs.groups], dtype=np.float64)
    return replace(costs, buffer_bytes=costs.buffer_bytes + rotation_bytes)


Calls = tuple[ModuleCall, ...]
_Expression = tuple[tuple[str, int] | None, Calls]
_MANY_OPERATIONS = 6
"""Generated code writes more operations than these on a line as several statements."""


def live_bytes(capture: Capture, sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of values without gradient that live while a node runs that makes one, its result
    included; by the node's name."""
    order = [
        node
        for node in capture.graph.nodes
        if node.op != "output" and not is_external(node) and not needs_gradient(node)
    ]
    ends = _Lives(capture.graph).ends(order)
    makers = storage_makers(capture.graph)
    born: dict[str, int] = {}
    dies: dict[str, int] = {}
    size: dict[str, int] = {}
    position = {node: index for index, node in enumerate(capture.graph.nodes)}
    inputs = {node.name for node in capture.graph.nodes if is_external(node)}
    for node in order:
        maker = makers[node]
        if maker is not None and maker not in inputs:
            born.setdefault(maker, position[node])
            dies[maker] = max(dies.get(maker, 0), ends[node])
            size[maker] = max(size.get(maker, 0), num_bytes(node, sizes))
    change = [0] * (len(position) + 1)
    for maker, count in size.items():
        change[born[maker]] += count
        change[dies[maker] + 1] -= count
    live = list(accumulate(change))
    return {node.name: live[position[node]] for node in order}


def needs_gradient(node: fx.Node) -> bool:
    """True if a tensor that the node makes has a gradient."""
    value = node.meta.get("val")
    values: Iterable[object] = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


class _Lives:
    """Positions of the nodes of a graph and where each module call ends."""

    def __init__(self, graph: fx.Graph) -> None:
        self._position = {node: index for index, node in enumerate(graph.nodes)}
        self._end_of: dict[Calls, int] = {}
        for node, index in self._position.items():
            calls = _calls(node)
            self._end_of |= {calls[:depth]: index for depth in range(len(calls) + 1)}

    def ends(self, order: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """The position of the last node that runs while each value lives."""
        last_read = {node: self._last_read(node) for node in order}
        ends = dict(last_read)
        expressions: dict[_Expression, set[fx.Node]] = defaultdict(set)
        for node in order:
            expressions[_expression(node)].add(node)
        of_name: dict[tuple[Calls, str], list[fx.Node]] = defaultdict(list)
        for node in order:
            if hint := node.meta.get("hint"):
                of_name[self._function(node), hint].append(node)
            else:
                parts = expressions[_expression(node)]
                if len(parts) > _MANY_OPERATIONS:
                    ends[node] = max(last_read[part] for part in (node, *parts & node.users.keys()))
        for (calls, _), nodes in of_name.items():
            for node, following in pairwise(nodes):
                ends[node] = max(ends[node], self._position[following])
            ends[nodes[-1]] = max(ends[nodes[-1]], self._end_of[calls])
        return ends

    def _last_read(self, node: fx.Node) -> int:
        """Where the last reader ends: a module that is given the value, when it returns."""
        last = self._position[node]
        for reader in node.users:
            if reader.op != "output":
                depth = len(_shared(_calls(node), _calls(reader)))
                inside = _calls(reader)[: depth + 1]
                is_given = len(inside) > depth
                last = max(last, self._end_of[inside] if is_given else self._position[reader])
        return last

    def _function(self, node: fx.Node) -> Calls:
        """The innermost module call whose function has the value in a variable."""
        calls = _calls(node)
        for reader in node.users:
            if reader.op != "output":
                calls = _shared(calls, _calls(reader))
        return calls


def _expression(node: fx.Node) -> _Expression:
    """The key of an expression: the author's line and the module calls around it."""
    return node.meta.get("source"), _calls(node)


def _calls(node: fx.Node) -> Calls:
    return tuple(node.meta.get("calls", ()))


def _shared(calls: Calls, others: Calls) -> Calls:
    """The calls around both."""
    depth = 0
    while depth < min(len(calls), len(others)) and calls[depth] == others[depth]:
        depth += 1
    return calls[:depth]
