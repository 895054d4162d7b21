"""Capture + Profile -> a cost graph of groups, and its stages -> the stages of the nodes.

A group holds nodes that no cut may separate, or need separate. Reductions, in this order:

- parameters, buffers and inputs belong to their readers and form no groups
- nodes that every stage computes for itself (`Recomputation.free`) have no group and cost nothing
- nodes that in-place changes of memory tie together, and several results of one call, are one group
- a view joins its base, unless the base is changed in place; a view of a parameter or input joins
  its first reader
- a value that is not a tensor joins its readers, a guard the values that it checks
- a node without readers (a counter that is incremented) joins the operation before it
- nodes that the user wants in one stage are one group; a view among them of an outside tensor does
  not join that tensor
- groups on a cycle that these reductions create are one

The order of the groups is topological and otherwise the program's. Additional edges preserve the
order of random numbers and of accesses to changed memory, and carry a copy of that memory.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import networkx as nx
from torch import Tensor, fx, nn

from ..capture import Capture, ModuleCall, colocated, draws_in_order, in_order
from ..capture.graph import is_guard
from ..profile.measure import dense_bytes
from ..profile.operation_costs import NodeCost, storage_makers, weight_ms
from ..profile.profiler import CPU_CORE, Profile
from .cost_graph import live_bytes, rotation_bytes
from .rematerialize import Prices, Recomputation, num_bytes

_EXTERNAL = ("placeholder", "get_attr")


def build_graph(
    capture: Capture,
    profile: Profile,
    name: str = "the model",
    *,
    again: Recomputation | None = None,
    together: Collection[Collection[fx.Node]] = (),
    update_ms_per_byte: float = 0.0,
    read_together: Sequence[fx.Node] = (),
) -> nx.DiGraph:
    """The cost graph of a captured model, with the attributes of `costs_of`.

    An edge carries the tensors that a cut through it sends: instead of a value that its reader
    recomputes (`again`), the sources of that value. `together` are sets of nodes that the user
    wants in one stage. One group reads all of `read_together`, the last one that makes any.

    Further attributes of a node: `names` (of its fx nodes), `flops`, `depth`.
    """
    order = [node for node in capture.graph.nodes if node.op not in (*_EXTERNAL, "output")]
    again = again or Recomputation(capture, Prices.of(profile))
    groups = _ordered_groups(_joined(capture, order, again, together))
    graph = nx.DiGraph(
        name=name,
        micro_batch_size=profile.sizes.get("batch"),
        update_ms_per_byte=update_ms_per_byte,
    )
    _add_groups(graph, groups, capture, profile)
    number_of = {node: number for number, members in enumerate(groups) for node in members}
    group_of = {node: groups[number][0].name for node, number in number_of.items()}
    together_at = sorted(number_of.keys() & {*read_together}, key=number_of.__getitem__)
    _add_values(graph, group_of, order, again, profile.sizes, together_at)
    _add_orders(graph, group_of, capture, profile.sizes)
    return graph


def _add_groups(
    graph: nx.DiGraph, groups: list[list[fx.Node]], capture: Capture, profile: Profile
) -> None:
    """Adds a node with the costs of each group, under the name of its first member."""
    blocks = _blocks(capture)
    owners = _TensorNames(capture.model)
    makers = storage_makers(capture.graph)
    live = live_bytes(capture, profile.sizes)
    for members in groups:
        graph.add_node(
            members[0].name,
            label=_called(members, profile),
            **_costs(members, profile, owners, live),
            weight_ms=sum(
                weight_ms(node, capture.model, profile.nodes[node.name]) for node in members
            ),
            saved_as=_saved_as(members, makers),
            **_place(members, blocks),
        )


def _add_values(
    graph: nx.DiGraph,
    group_of: Mapping[fx.Node, str],
    order: list[fx.Node],
    again: Recomputation,
    sizes: Mapping[str, int],
    read_together: Sequence[fx.Node],
) -> None:
    """Adds an edge from each group to the readers of its values, with what a cut through it sends,
    and the bytes of all that a group sends."""
    position = {node: index for index, node in enumerate(order)}
    for node in group_of:
        for reader in [*node.users, *(read_together[-1:] if node in read_together else ())]:
            if reader in group_of and group_of[reader] != group_of[node]:
                _carry(graph, group_of[node], group_of[reader], (), sizes)
                for source in sorted(again.sources(node), key=position.__getitem__):
                    if group_of.get(source, group_of[reader]) != group_of[reader]:
                        _carry(graph, group_of[source], group_of[reader], [source], sizes)
    for group, data in graph.nodes(data=True):
        sent = {
            tensor: size
            for _, _, edge in graph.out_edges(group, data=True)
            for tensor, size in edge["tensors"].items()
        }
        data["output_bytes"] = sum(sent.values())


def _add_orders(
    graph: nx.DiGraph,
    group_of: Mapping[fx.Node, str],
    capture: Capture,
    sizes: Mapping[str, int],
) -> None:
    """Adds edges that preserve the order of random numbers and of accesses to changed memory."""
    for first, second in draws_in_order(capture):
        if group_of[first] != group_of[second]:
            _carry(graph, group_of[first], group_of[second], (), sizes)
    for node, later in in_order(capture):
        maker, changer = group_of.get(node), group_of.get(later)
        if maker is not None and changer is not None and maker != changer:
            _carry(graph, maker, changer, (), sizes)
            if later.meta["mutates"]:
                # What is received is copied before it is changed: as much as one more transfer.
                tensors = graph.edges[maker, changer]["tensors"]
                tensors[f"copy of {node.name}"] = num_bytes(node, sizes)


def stage_of_nodes(
    capture: Capture, graph: nx.DiGraph, stage_of: Mapping[str, int], again: Recomputation
) -> dict[fx.Node, int]:
    """The stage of every computed node; a free node is in the stage of the first reader of all
    nodes that are computed with it."""
    stages = {
        member: stage_of[group]
        for group, members in graph.nodes(data="names")
        for member in members
    }
    last = max(stage_of.values())
    placed: dict[fx.Node, int] = {}
    for node in reversed(capture.graph.nodes):
        if node.op in (*_EXTERNAL, "output"):
            continue
        readers = [placed[reader] for reader in node.users if reader in placed]
        placed[node] = stages.get(node.name, min(readers, default=last))
    for node in again.free:
        placed[node] = min(placed[other] for other in again.together(node))
    return dict(reversed(placed.items()))


def with_copies(profile: Profile, capture: Capture) -> Profile:
    """The profile with the nodes that `separated` added: copies cost the time of moving their
    bytes, views nothing."""
    nodes = dict(profile.nodes)
    for node in capture.graph.nodes:
        if node.op in (*_EXTERNAL, "output") or node.name in nodes:
            continue
        moved = 2 * num_bytes(node, profile.sizes) if node.target == "clone" else 0
        copying_ms = 1e3 * moved / CPU_CORE.bytes_per_s
        nodes[node.name] = NodeCost(forward_ms=copying_ms, moved_bytes=moved)
    return replace(profile, nodes=nodes)


def _joined(
    capture: Capture,
    order: list[fx.Node],
    again: Recomputation,
    demanded: Collection[Collection[fx.Node]],
) -> nx.DiGraph:
    """A graph of the groups before they are ordered: acyclic, with `members` and `first`."""
    position = {node: index for index, node in enumerate(order)}
    together = nx.utils.UnionFind(order)
    for group in colocated(capture):
        together.union(*(node for node in group if node in position))
    by_name = {node.name: node for node in order if node not in again.free}
    computed = list(by_name.values())
    changed = {storage for node in order for storage in node.meta["mutates"]}
    wanted = nx.utils.UnionFind(node for nodes in demanded for node in nodes)
    for nodes in demanded:
        wanted.union(*nodes)
    home = {node: wanted[node] for nodes in demanded for node in nodes}
    for node in computed:
        readers = [reader for reader in node.users if reader.name in by_name]
        viewed = None if changed & node.meta["storages"] else _viewed(node)
        if viewed is not None and viewed.name in by_name:
            # Nodes that are kept together must not pull in tensors that they only view.
            if node not in home or home[node] == home.get(viewed):
                together.union(node, viewed)
        elif viewed is not None:
            together.union(node, *readers[:1])
        elif is_guard(node):
            together.union(*_guarded(node, by_name, computed))
        elif not isinstance(node.meta.get("val"), Tensor):
            together.union(node, *readers)
    for before, node in itertools.pairwise(computed):
        if not node.users and not is_guard(node):
            together.union(node, before)
    if computed and not computed[0].users and not is_guard(computed[0]):
        together.union(*computed[:2])
    for nodes in demanded:
        together.union(*(node for node in nodes if node.name in by_name))
    quotient = nx.DiGraph()
    quotient.add_nodes_from(together[node] for node in computed)
    quotient.add_edges_from(
        (together[source], together[node])
        for node in computed
        for source in node.all_input_nodes
        if source.name in by_name and together[source] != together[node]
    )
    quotient.add_edges_from(
        (together[node], together[later])
        for node, later in (*in_order(capture), *draws_in_order(capture))
        if {node.name, later.name} <= by_name.keys() and together[node] != together[later]
    )
    fused = nx.condensation(quotient)
    members: dict[int, list[fx.Node]] = {}
    for node in computed:
        members.setdefault(fused.graph["mapping"][together[node]], []).append(node)
    for label, nodes in members.items():
        fused.nodes[label].update(members=nodes, first=position[nodes[0]])
    return fused


def _guarded(
    guard: fx.Node, by_name: Mapping[str, fx.Node], computed: list[fx.Node]
) -> set[fx.Node]:
    """A guard, the nodes computed only for it, and the values that they read, so that no stage
    consists of a guard alone."""
    members, waiting = {guard}, [guard]
    looked_at = set()
    while waiting:
        for used in waiting.pop().all_input_nodes:
            if used.name in by_name and used not in members:
                if members.issuperset(used.users):
                    members.add(used)
                    waiting.append(used)
                else:
                    looked_at.add(used)
    following = (node for node in computed[computed.index(guard) :] if node.users)
    return members | (looked_at or set(itertools.islice(following, 1)))


def _viewed(node: fx.Node) -> fx.Node | None:
    """The argument that shares its memory with the node's value, if the node is a view."""
    own = node.meta.get("storages", frozenset())
    if not own:
        return None
    return next(
        (source for source in node.all_input_nodes if own <= source.meta.get("storages", set())),
        None,
    )


def _ordered_groups(fused: nx.DiGraph) -> list[list[fx.Node]]:
    order = nx.lexicographical_topological_sort(
        fused, key=lambda group: fused.nodes[group]["first"]
    )
    return [fused.nodes[group]["members"] for group in order]


def _costs(
    members: list[fx.Node], profile: Profile, owners: _TensorNames, live: Mapping[str, int]
) -> dict[str, Any]:
    costs = [profile.nodes[node.name] for node in members]
    saved: dict[str, int] = {}
    for cost in costs:
        saved |= cost.saved
    parameters = dict(owners.parameters_of(members))
    frozen = {name: parameters.pop(name) for name in owners.frozen_of(parameters)}
    buffers = dict(owners.buffers_of(members))
    return {
        "forward_ms": sum(cost.forward_ms for cost in costs),
        "backward_ms": sum(cost.backward_ms for cost in costs),
        "flops": sum(cost.flops for cost in costs),
        "names": [node.name for node in members],
        "saved": saved,
        "saved_bytes": sum(saved.values()),
        "transient_bytes": max(cost.transient_bytes for cost in costs),
        "live_bytes": max(live.get(node.name, 0) for node in members),
        "parameters": parameters,
        "param_bytes": sum(parameters.values()),
        "frozen": frozen,
        "buffer_bytes": sum(buffers.values()),
        "rotation_bytes": rotation_bytes(owners.linear_maps_of(members)),
    }


def _saved_as(members: list[fx.Node], makers: Mapping[fx.Node, str | None]) -> dict[str, str]:
    """Names in `saved` of values in the memory of another node."""
    maker_of = ((node.name, makers[node]) for node in members)
    return {name: maker for name, maker in maker_of if maker and maker != name}


class _TensorNames:
    """Finds parameters and buffers of nodes, under one name each however many they have."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        tensors = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        self.by_name = dict(tensors)
        self.first_name: dict[int, str] = {}
        for name, tensor in tensors:
            self.first_name.setdefault(id(tensor), name)
        self._tables = {
            id(parameter)
            for module in model.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
            for parameter in module.parameters(recurse=False)
        }

    def parameters_of(self, nodes: Iterable[fx.Node]) -> Iterator[tuple[str, int]]:
        return self._named_sizes(nodes, parameters=True)

    def frozen_of(self, names: Iterable[str]) -> list[str]:
        """The names of the parameters that are frozen (`requires_grad` is False)."""
        return [name for name in names if not self.by_name[name].requires_grad]

    def buffers_of(self, nodes: Iterable[fx.Node]) -> Iterator[tuple[str, int]]:
        return self._named_sizes(nodes, parameters=False)

    def linear_maps_of(self, nodes: Iterable[fx.Node]) -> Collection[Tensor]:
        """The parameters outside embeddings, each once."""
        tensors = {id(tensor): tensor for node in nodes for tensor in self._read(node)}
        return [
            tensor
            for name, tensor in tensors.items()
            if isinstance(tensor, nn.Parameter)
            and tensor.requires_grad
            and name not in self._tables
        ]

    def _named_sizes(
        self, nodes: Iterable[fx.Node], *, parameters: bool
    ) -> Iterator[tuple[str, int]]:
        for node in nodes:
            for tensor in self._read(node):
                if isinstance(tensor, nn.Parameter) == parameters:
                    yield self.first_name[id(tensor)], dense_bytes(tensor)

    def _read(self, node: fx.Node) -> Iterator[Tensor]:
        if node.op == "call_module":
            leaf = self.model.get_submodule(str(node.target))
            yield from leaf.parameters()
            yield from leaf.buffers()
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source.target in self.by_name:
                yield self.by_name[str(source.target)]


def _carry(
    graph: nx.DiGraph, source: str, target: str, sent: Iterable[fx.Node], sizes: Mapping[str, int]
) -> None:
    if not graph.has_edge(source, target):
        graph.add_edge(source, target, tensors={}, grads={})
    edge = graph.edges[source, target]
    for node in sent:
        edge["tensors"][node.name] = num_bytes(node, sizes)
        if isinstance(node.meta.get("val"), Tensor) and node.meta["val"].requires_grad:
            edge["grads"][node.name] = edge["tensors"][node.name]


def _called(members: list[fx.Node], profile: Profile) -> str:
    """A name of the group for people: its largest leaf module, or operation and module."""

    def work_ms(node: fx.Node) -> float:
        return profile.nodes[node.name].forward_ms + profile.nodes[node.name].backward_ms

    modules = [node for node in members if node.op == "call_module"]
    largest = max(modules or members, key=work_ms)
    if modules:
        return str(largest.target)
    calls = largest.meta.get("calls", ())
    operation = getattr(largest.target, "__name__", str(largest.target))
    return f"{operation} in {calls[-1].path}" if calls else operation


# --- where in the model's structure a group lies --------------------------------------------


def _place(members: list[fx.Node], blocks: set[ModuleCall]) -> dict[str, Any]:
    """The module calls around all members, from the block inwards."""
    paths = [node.meta.get("calls", ()) for node in members]
    levels = zip(*paths, strict=False)
    common = [calls[0] for calls in itertools.takewhile(lambda calls: len({*calls}) == 1, levels)]
    for level, call in enumerate(common):
        if call in blocks:
            inside = [_label(inner) for inner in common[level:]]
            return {"modules": inside, "block": inside[0], "depth": len(inside)}
    return {"modules": [], "block": "", "depth": 0}


def _label(call: ModuleCall) -> str:
    return f"{call.path}#{call.index}" if call.index else call.path


def _blocks(capture: Capture) -> set[ModuleCall]:
    """Calls of the items of lists of like modules.

    A container of torch is like another one only if their parameters have the same shapes: a
    model written as one `nn.Sequential` of different parts has no blocks.
    """
    kinds = {call: _kind(capture, call) for call in capture.calls}
    number = Counter(kind for kind in kinds.values() if kind)
    return {call for call, kind in kinds.items() if kind and number[kind] > 1}


def _kind(capture: Capture, call: ModuleCall) -> Any:
    if not call.path.rpartition(".")[2].isdigit():
        return None
    module = capture.model.get_submodule(call.path)
    if type(module).__module__.startswith("torch."):
        return tuple(tuple(parameter.shape) for parameter in module.parameters())
    return type(module)
