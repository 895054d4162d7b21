"""The derived splits -> a graph with split layers, sums and parts, and a model that holds them.

With one rank the new graph computes what the captured one does, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import sympy
from torch import Tensor, fx, nn

from ...runtime.tensor_parallel.functions import (
    on_one_rank,
    parallel_input,
    part_of,
    split_dropout,
    sum_over_ranks,
    whole_output,
)
from ...runtime.tensor_parallel.ranks import Split
from ..capture import Capture
from ..capture.leaf_modules import is_torch_leaf
from ..capture.sizes import BATCH
from ..capture.values import Size
from .decisions import SPLIT_FUNCTIONS, Decision, Layer, layer_for, split_alike
from .derive import Derivation
from .example_run import Samples
from .probe import Placement, is_split


@dataclass(frozen=True)
class SplitModel:
    """A captured model with layers that tensor ranks share out.

    capture: the graph, with a model that holds the whole tensors
    of_rank: the same with the parts of the first rank: what is profiled, with as many ranks
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
        self._capture, self._decisions = capture, derivation.decisions
        self._graph = capture.graph
        self._layers: dict[str, Layer] = {}
        self._inputs: dict[Any, fx.Node] = {}
        self._changes = _changes_before(self._graph, derivation.decisions)
        self._storage = max(
            (storage for node in self._graph.nodes for storage in node.meta["storages"]), default=0
        )
        self._names = _names_of(capture.model)
        self._read_modules: dict[str, Split] = {}
        self._split_parameters = self._found_parameters()
        self._summed: dict[fx.Node, fx.Node] = {}
        self._parts: dict[str, Split] = {}
        self._size, self._returned = derivation.size, derivation.returned

    def result(self) -> SplitModel:
        for node, decision in self._decisions.items():
            self._rewrite(node, decision)
        for node in self._returned:
            self._gather(node)
        modules = {path: layer.module for path, layer in self._layers.items()}
        splits = {path: layer.split for path, layer in self._layers.items() if layer.split}
        calls = {
            call: replace(
                record,
                arguments={name: self._after(value) for name, value in record.arguments.items()},
                result=self._after(record.result),
            )
            for call, record in self._capture.calls.items()
        }
        capture = replace(
            self._capture,
            model=_with_modules(self._capture.model, modules),
            calls=calls,
            splits={**self._by_all_names(), **self._read_modules, **splits},
            shared=frozenset(path for path, layer in self._layers.items() if layer.is_shared),
        )
        of_rank = _model_of_rank(capture.model, self._parts | self._by_all_names(), self._size)
        return SplitModel(capture, replace(capture, model=of_rank), self._regions())

    def _regions(self) -> tuple[frozenset[fx.Node], ...]:
        """The rewritten nodes, joined where one reads another's part or summand."""
        graph = nx.Graph()
        inserted = set(self._inputs.values())
        for node in self._decisions:
            graph.add_node(node)
            for source in node.all_input_nodes:
                if source in inserted or self._is_split(source):
                    graph.add_edge(source, node)
            if node in self._summed:
                graph.add_edge(node, self._summed[node])
        return tuple(map(frozenset, nx.connected_components(graph)))

    # --- parameters -------------------------------------------------------------------------

    def _found_parameters(self) -> dict[fx.Node, Split]:
        """The parameters and buffers that all their readers split alike."""
        found: dict[fx.Node, Split] = {}
        whole: set[int] = set()
        tensors = _tensors_of(self._capture.model)
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
            self._sum(node)

    def _replace_layer(self, node: fx.Node, decision: Decision) -> None:
        path = str(node.target)
        layer = layer_for(self._capture.model.get_submodule(path), decision)
        assert layer is not None, path
        self._layers.setdefault(path, layer)
        for name, place in decision.state.items():
            if isinstance(place, Split):
                self._parts[f"{path}.{name}"] = place

    def _replace_input(self, node: fx.Node, source: fx.Node, decision: Decision) -> None:
        """What a node reads instead of a whole value."""
        if source in decision.once:
            new = self._inserted(on_one_rank, source, (), node)
        elif source in decision.places:
            if source in self._split_parameters:
                return
            split = decision.places[source]
            further = (split.dim, *_groups(split))
            new = self._inserted(part_of, source, further, node, uneven=split.length is not None)
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
        *,
        uneven: bool = False,
    ) -> fx.Node:
        """The call of a function of `source` in the module call around `node`, made once there as
        long as its memory is unchanged."""
        calls, regions = node.meta.get("calls", ()), node.meta.get("regions", ())
        changes = self._changes[node, source]
        key = (function, source, further, tuple(calls), tuple(regions), changes)
        if key not in self._inputs:
            with self._graph.inserting_before(node):
                new = self._graph.call_function(function, (source, *further))
                if uneven:
                    new.kwargs = {"uneven": True}
            fresh = function is not parallel_input
            new.meta = self._meta(source, node, fresh=fresh)
            self._inputs[key] = new
        return self._inputs[key]

    def _sum(self, node: fx.Node) -> None:
        with self._graph.inserting_after(node):
            new = self._graph.call_function(sum_over_ranks, (node,))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        new.meta = self._meta(node, node, fresh=True)
        self._summed[node] = new

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

    def _after(self, value: Any) -> Any:
        """The value that a module call passes or returns, after the sum over the ranks."""
        return fx.node.map_arg(value, lambda node: self._summed.get(node, node))


_OF_VALUE = ("val", "shape", "hint", "from_sizes", "example")
_OF_PLACE = ("calls", "regions", "source", "recomputes", "stack_trace")


def _end_of_call(node: fx.Node) -> fx.Node:
    """The first node after the outermost module call that a node is in."""
    calls, after = node.meta.get("calls", ()), node.next
    while calls and after.op != "output" and after.meta.get("calls", ())[:1] == calls[:1]:
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


# --- the model ------------------------------------------------------------------------------


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(
        (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    )


def _names_of(model: nn.Module) -> dict[str, list[str]]:
    """All names of each tensor, by each of them."""
    names: dict[int, list[str]] = {}
    tensors = _tensors_of(model)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {name: names[id(tensor)] for name, tensor in tensors.items()}


def _with_modules(model: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of the module tree with other modules at some paths; it shares the tensors."""
    by_id = {id(model.get_submodule(path)): module for path, module in modules.items()}
    copies: dict[int, nn.Module] = {}

    def copied(module: nn.Module) -> nn.Module:
        if id(module) not in copies:
            new = copies[id(module)] = by_id.get(id(module)) or _shallow_copy(module)
            if new is not module:
                new.__dict__["_parameters"] = dict(new._parameters)
                new.__dict__["_buffers"] = dict(new._buffers)
                new.__dict__["_modules"] = {
                    name: child and copied(child) for name, child in new._modules.items()
                }
        return copies[id(module)]

    return copied(model)


def _shallow_copy(module: nn.Module) -> nn.Module:
    """A copy as `copy.copy` makes it, also of modules with parametrizations, which refuse that."""
    new = module.__new__(type(module))
    new.__dict__.update(module.__dict__)
    return new


def _model_of_rank(model: nn.Module, parts: Mapping[str, Split], size: int) -> nn.Module:
    """A copy of the module tree in which split tensors are the parts of the first rank."""
    copied = _with_modules(model, {})
    tensors = _tensors_of(model)
    made: dict[tuple[int, Split], Tensor] = {}
    for name, split in parts.items():
        whole = tensors[name]
        path, _, last = name.rpartition(".")
        owner = copied.get_submodule(path)
        part = made.setdefault((id(whole), split), _part(whole, split, size))
        setattr(owner, last, part)
    return copied


def _part(whole: Tensor, split: Split, size: int) -> Tensor:
    part = split.part(whole.detach(), 0, size).contiguous()
    return nn.Parameter(part, whole.requires_grad) if isinstance(whole, nn.Parameter) else part
