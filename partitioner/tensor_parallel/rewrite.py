"""The derived splits -> a graph with split layers, sums and parts, and a model that holds them.

With one rank the new graph computes what the captured one does, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import sympy
from torch import Tensor, fx

from ...runtime.tensor_parallel.functions import (
    on_one_rank,
    parallel_input,
    part_of,
    split_dropout,
    sum_over_ranks,
    whole_of,
    whole_output,
)
from ...runtime.tensor_parallel.ranks import Split
from ..capture import Capture
from ..capture.sizes import BATCH
from ..capture.values import ModuleCall, Size
from ..models.torch_modules import is_torch_leaf
from .decisions import SPLIT_FUNCTIONS, Decision, Layer, layer_for, reading, split_alike
from .derive import Derivation
from .example_run import Samples
from .model_tensors import model_of_rank, names_of, tensors_of, with_modules
from .probe import Placement, is_split


@dataclass(frozen=True)
class SplitModel:
    """A captured model with layers that tensor ranks share out.

    capture: the graph, with a model that holds the whole tensors
    of_rank: the same with the parts of the first rank, which are profiled with as many ranks
    regions: nodes between which values are in parts, so that no boundary may lie there
    """

    capture: Capture
    of_rank: Capture
    regions: tuple[frozenset[fx.Node], ...] = ()


def rewrite(capture: Capture, derivation: Derivation) -> SplitModel:
    """The capture with split layers, in the same graph, which is changed, and with copies of the
    model that hold the same tensors or parts of them."""
    return _Rewriter(capture, derivation).result()


class _Rewriter:
    def __init__(self, capture: Capture, derivation: Derivation) -> None:
        self._capture, self._decisions = capture, dict(derivation.decisions)
        self._positions = derivation.positions
        self._in_positions = dict(derivation.positions.values)
        self._wholes: dict[tuple[ModuleCall, fx.Node], fx.Node] = {}
        self._graph = capture.graph
        self._layers: dict[str, Layer] = {}
        self._inputs: dict[Any, fx.Node] = {}
        self._changes = _changes_before(self._graph, derivation.decisions)
        self._storage = max(
            (storage for node in self._graph.nodes for storage in node.meta["storages"]), default=0
        )
        self._names = names_of(capture.model)
        self._read_modules: dict[str, Split] = {}
        self._split_parameters = self._found_parameters()
        self._summed: dict[fx.Node, fx.Node] = {}
        self._parts: dict[str, Split] = {}
        self._size, self._returned = derivation.size, derivation.returned

    def result(self) -> SplitModel:
        for node, split in self._positions.values.items():
            self._gather_positions(node, split)
        for node, decision in self._decisions.items():
            self._rewrite(node, decision)
        for node in self._returned:
            self._gather(node)
        modules = {path: layer.module for path, layer in self._layers.items()}
        splits = {path: layer.split for path, layer in self._layers.items() if layer.split}
        calls = {
            call: replace(
                record,
                arguments={
                    name: self._after(self._given(value, call))
                    for name, value in record.arguments.items()
                },
                result=self._after(record.result),
            )
            for call, record in self._capture.calls.items()
        }
        capture = replace(
            self._capture,
            model=with_modules(self._capture.model, modules),
            calls=calls,
            splits={**self._by_all_names(), **self._read_modules, **splits},
            shared=frozenset(path for path, layer in self._layers.items() if layer.is_shared),
        )
        of_rank = model_of_rank(capture.model, self._parts | self._by_all_names(), self._size)
        for node in self._positions.inputs:
            self._replace_input(node, node.all_input_nodes[0], Decision())
        for node, split in self._positions.values.items():
            self._summed.get(node, node).meta["part"] = split
        return SplitModel(capture, replace(capture, model=of_rank), self._regions())

    def _regions(self) -> tuple[frozenset[fx.Node], ...]:
        """The rewritten nodes, joined where one reads another's part or summand."""
        graph = nx.Graph()
        inserted = set(self._inputs.values())
        inserted |= self._positions.inputs
        for node in (*self._decisions, *self._positions.inputs):
            graph.add_node(node)
            for source in node.all_input_nodes:
                is_split = self._is_split(source) and source not in self._in_positions
                if source in inserted or is_split:
                    graph.add_edge(source, node)
            value = self._positions.sums.get(node, node)
            if value in self._summed:
                nx.add_path(graph, [*_between(node, value), self._summed[value]])
        return tuple(map(frozenset, nx.connected_components(graph)))

    # --- parameters -------------------------------------------------------------------------

    def _found_parameters(self) -> dict[fx.Node, Split]:
        """The parameters and buffers that all their readers split alike."""
        found: dict[fx.Node, Split] = {}
        whole: set[int] = set()
        tensors = tensors_of(self._capture.model)
        for node in self._graph.nodes:
            if node.op == "call_module":
                module = self._capture.model.get_submodule(str(node.target))
                whole.update(id(t) for t in (*module.parameters(), *module.buffers()))
        for node in self._graph.find_nodes(op="get_attr"):
            tensor = tensors.get(str(node.target))
            places = {self._place(user, node) for user in node.users}
            if tensor is None or id(tensor) in whole or len(places) != 1:
                continue
            place = places.pop()
            if isinstance(place, Split):
                found[node] = place
        return self._in_written_modules(found)

    def _in_written_modules(self, found: dict[fx.Node, Split]) -> dict[fx.Node, Split]:
        """Those of the parameters that generated code can divide: their own, and those of modules
        of torch of which all are divided alike. Parts are taken of the others."""
        by_name = {
            name: split for node, split in found.items() for name in self._names_of_parameter(node)
        }
        whole: set[str] = set()
        for path, module in self._capture.model.named_modules(remove_duplicate=False):
            if not is_torch_leaf(module):
                continue
            inside = {name: by_name.get(f"{path}.{name}") for name in module.state_dict()}
            if (split := split_alike(module, inside)) is not None:
                self._read_modules[path] = split
            else:
                whole.update(f"{path}.{name}" for name in inside)
        return {
            node: split
            for node, split in found.items()
            if whole.isdisjoint(self._names_of_parameter(node))
        }

    def _names_of_parameter(self, node: fx.Node) -> list[str]:
        return self._names.get(str(node.target), [str(node.target)])

    def _place(self, user: fx.Node, node: fx.Node) -> Split | None:
        decision = self._decisions.get(user)
        return None if decision is None else decision.places.get(node)

    def _by_all_names(self) -> dict[str, Split]:
        return {
            name: split
            for node, split in self._split_parameters.items()
            for name in self._names_of_parameter(node)
        }

    # --- nodes ------------------------------------------------------------------------------

    def _rewrite(self, node: fx.Node, decision: Decision) -> None:
        if decision.function is not None:
            node.op, node.target = "call_function", decision.function
        elif node.op == "call_module":
            self._replace_layer(node, decision)
        elif node.meta["random"] and is_split(decision.result):
            _replace_function(node, decision.result)
        if decision.function is not None and decision.arguments is not None:
            node.args, node.kwargs = decision.arguments
        elif decision.arguments is not None:
            node.args, node.kwargs = _merged(decision.arguments, node)
        for source in list(node.all_input_nodes):
            self._replace_input(node, source, decision)
        is_row = node.op == "call_module" and self._layers[str(node.target)].module is not (
            self._capture.model.get_submodule(str(node.target))
        )
        if decision.sums and not is_row:
            self._sum(self._positions.sums.get(node, node), decision.sequence)

    def _replace_layer(self, node: fx.Node, decision: Decision) -> None:
        path = str(node.target)
        layer = layer_for(self._capture.model.get_submodule(path), decision)
        assert layer is not None, path
        self._layers.setdefault(path, layer)
        for name, place in decision.state.items():
            if isinstance(place, Split):
                self._parts[f"{path}.{name}"] = place

    def _replace_input(self, node: fx.Node, source: fx.Node, decision: Decision) -> None:
        """Replaces a whole input of a node by the tensor that its decision reads."""
        if source in self._positions.inputs:
            return
        if source in self._in_positions:
            if node in self._positions.decisions:
                return
            dim = self._in_positions[source].dim
            new = self._inserted(parallel_input, source, (), node, sequence=dim)
        elif source in decision.once:
            new = self._inserted(on_one_rank, source, (), node)
        elif source in decision.places:
            if source in self._split_parameters:
                return
            split = decision.places[source]
            further = (split.dim, *_groups(split))
            options = {"uneven": True} if split.length is not None else {}
            new = self._inserted(part_of, source, further, node, **options)
            if node in self._positions.decisions:
                new.meta["part"] = split
        elif source.target is parallel_input or self._is_split(source):
            return
        elif _needs_gradient(source) and _needs_gradient(node):
            new = self._inserted(parallel_input, source, (), node)
        else:
            return
        node.replace_input_with(source, new)

    def _is_split(self, source: fx.Node) -> bool:
        decision = self._decisions.get(source)
        return decision is not None and is_split(decision.result)

    def _inserted(
        self,
        function: Callable[..., Any],
        source: fx.Node,
        further: tuple[Any, ...],
        node: fx.Node,
        **options: Any,
    ) -> fx.Node:
        """The call of a function of `source` in the module call around `node`, made once there as
        long as its memory is unchanged."""
        key = (function, source, further, *self._place_of(node, source))
        if key not in self._inputs:
            with self._graph.inserting_before(node):
                new = self._graph.call_function(function, (source, *further), options)
            fresh = function is not parallel_input
            new.meta = self._meta(source, node, fresh=fresh)
            self._inputs[key] = new
        return self._inputs[key]

    def _place_of(self, node: fx.Node, source: fx.Node) -> tuple[Any, ...]:
        """The module call and the regions around a node, and the state of its input there."""
        calls, regions = node.meta.get("calls", ()), node.meta.get("regions", ())
        return tuple(calls), tuple(regions), self._changes.get((node, source), 0)

    def _gather_positions(self, node: fx.Node, split: Split) -> None:
        """Makes a value whole, once, that is read otherwise than on parts of its positions and by
        the split layers of one module call."""
        readers = [user for user in node.users if user not in self._positions.decisions]
        split_layers = [
            user
            for user in readers
            if user in self._decisions
            and node not in self._decisions[user].places
            and _needs_gradient(user)
            or user in self._positions.inputs
        ]
        is_trained = _needs_gradient(node)
        if is_trained and len(split_layers) == len(readers):
            if len({self._place_of(user, node) for user in readers}) <= 1:
                return
        depth = _common_depth([node, *readers])
        with self._graph.inserting_before(_end_of_call(node, depth)):
            new = self._graph.create_node(
                "call_function", whole_of, (node,), {"dim": split.dim}, name=f"whole_{node.name}"
            )
        new.meta = self._meta(node, node, fresh=True)
        new.meta["calls"] = tuple(node.meta.get("calls", ())[:depth])
        on_parts = {
            call
            for user in node.users
            if user in self._positions.decisions
            for call in user.meta["calls"]
        }
        for user in readers:
            calls = user.meta.get("calls", ())[depth:]
            self._wholes |= {(call, node): new for call in calls if call not in on_parts}
            user.replace_input_with(node, new)
            if user in self._decisions:
                self._decisions[user] = reading(self._decisions[user], {node: new})
            self._changes[user, new] = 0

    def _sum(self, node: fx.Node, sequence: int | None) -> None:
        options: dict[str, Any] = {} if sequence is None else {"sequence": sequence}
        with self._graph.inserting_after(node):
            new = self._graph.call_function(sum_over_ranks, (node,), options)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        new.meta = self._meta(node, node, fresh=True)
        self._summed[node] = new
        if sequence is not None:
            self._in_positions[new] = self._in_positions.pop(node)

    def _gather(self, node: fx.Node) -> None:
        """Makes a result of the model whole that is in parts."""
        (output,) = self._graph.find_nodes(op="output")
        split = self._decisions[node].result
        assert isinstance(split, Split)
        arguments = (node, split.dim, self._returned[node], *_groups(split))
        with self._graph.inserting_before(_end_of_call(node)):
            new = self._graph.call_function(whole_output, arguments)
        output.replace_input_with(node, new)
        new.meta = self._meta(node, output, fresh=True)
        new.meta["hint"] = f"whole_{node.meta.get('hint') or 'output'}"
        self._summed[node] = new

    def _meta(self, value: fx.Node, place: fx.Node, *, fresh: bool) -> dict[str, Any]:
        """The facts about a new node with the value of one node at the place of another."""
        self._storage += 1
        storages = frozenset([self._storage]) if fresh else value.meta["storages"]
        meta = {key: value.meta[key] for key in _OF_VALUE if key in value.meta}
        meta |= {key: place.meta[key] for key in _OF_PLACE if key in place.meta}
        nothing: frozenset[int] = frozenset()
        return meta | {
            "storages": storages,
            "touches": nothing,
            "mutates": nothing,
            "random": False,
            "data_dependent": value.meta.get("data_dependent", False),
        }

    def _given(self, value: Any, call: ModuleCall) -> Any:
        """The value that a module call is passed, which is whole if it reads nothing but that."""
        return fx.node.map_arg(value, lambda node: self._wholes.get((call, node), node))

    def _after(self, value: Any) -> Any:
        """The value that a module call passes or returns, after the sum over the ranks."""
        return fx.node.map_arg(value, lambda node: self._summed.get(node, node))


def _between(node: fx.Node, view: fx.Node) -> list[fx.Node]:
    """A node, and the views of it up to one of them."""
    nodes = [view]
    while nodes[0] is not node:
        nodes.insert(0, nodes[0].all_input_nodes[0])
    return nodes


def _common_depth(nodes: Sequence[fx.Node]) -> int:
    """The number of module calls that all nodes are in."""
    calls = [tuple(node.meta.get("calls", ())) for node in nodes]
    depth = 0
    while all(len(own) > depth and own[depth] == calls[0][depth] for own in calls):
        depth += 1
    return depth


_OF_VALUE = ("val", "shape", "hint", "from_sizes", "example")
_OF_PLACE = ("calls", "regions", "source", "recomputes", "stack_trace")


def _end_of_call(node: fx.Node, depth: int = 0) -> fx.Node:
    """The first node after the module call that a node is in, within so many others."""
    calls, after = tuple(node.meta.get("calls", ()))[: depth + 1], node.next
    while len(calls) > depth and after.op != "output":
        if tuple(after.meta.get("calls", ()))[: depth + 1] != calls:
            break
        after = after.next
    return after


def _groups(split: Split) -> tuple[Any, ...]:
    """The argument for the blocks of a split, if it has several."""
    if isinstance(split.groups, Samples):
        return (Size(sympy.Symbol(BATCH, integer=True, positive=True)),)
    return () if split.groups == 1 else (split.groups,)


def _replace_function(node: fx.Node, place: Placement) -> None:
    assert isinstance(place, Split)
    node.target = SPLIT_FUNCTIONS[node.target]
    options: dict[str, Any] = {"dim": place.dim}
    options |= dict(zip(("groups",), _groups(place), strict=False))
    if node.target is split_dropout:
        given = dict(zip(("p", "training"), node.args[1:], strict=False)) | node.kwargs
        node.args = (node.args[0], given.get("p", 0.5), given.get("training", True))
        node.kwargs = options
    else:
        node.kwargs = {**node.kwargs, **options}


def _merged(arguments: tuple[Any, Any], node: fx.Node) -> tuple[Any, Any]:
    args, kwargs = arguments
    return args, {**kwargs, **{key: node.kwargs[key] for key in node.kwargs if key not in kwargs}}


def _needs_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(item, Tensor) and item.requires_grad for item in values)


def _changes_before(
    graph: fx.Graph, nodes: Collection[fx.Node]
) -> dict[tuple[fx.Node, fx.Node], int]:
    """How often the memory of each input of the nodes was changed before."""
    of_storage: Counter[int] = Counter()
    found: dict[tuple[fx.Node, fx.Node], int] = {}
    for node in graph.nodes:
        if node in nodes:
            for source in node.all_input_nodes:
                found[node, source] = sum(of_storage[each] for each in source.meta["storages"])
        of_storage.update(node.meta["mutates"])
    return found
