"""Capture and the stage of every node -> the graph of each stage, its inputs and its outputs.

A value that a later stage reads crosses the boundary once, from the stage that computes it, unless
recomputing it costs less than sending it (see `recompute`). Only tensors cross: the elements of a
tuple are extracted in the stage that computes the tuple.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from ...runtime.errors import PlanError
from ..capture import Capture, Local, LocalDevice, Size, state_of
from ..capture.graph import LocalNames, is_external
from ..graph.rematerialize import Recomputation
from ..models.torch_modules import is_torch_leaf


@dataclass(frozen=True, slots=True)
class StageGraph:
    """The part of a captured graph that one stage computes.

    index: the number of the stage
    nodes: in program order, without placeholders and attributes; several stages can hold the same
        recomputed node
    inputs: the positional arguments of the stage's forward: model inputs, then values of earlier
        stages
    outputs: the results of forward: values that later stages read, then outputs of the model in
        the model's order
    """

    index: int
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class StageTensors:
    """The state of a stage, by the names in the original model.

    modules: paths of leaf modules
    parameters: names of parameters
    buffers: names of buffers
    """

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


def split(
    capture: Capture, stage_of: Mapping[fx.Node, int], again: Recomputation | None = None
) -> tuple[StageGraph, ...]:
    """Cuts the graph into stages.

    `stage_of` gives the stage of every node except placeholders, attributes and the output; `again`
    names the values that stages recompute instead of receiving. Raises PlanError when a stage would
    be empty, when a value would flow to an earlier stage, when a value that is not a tensor would
    cross a boundary, and when several stages would use memory that changes (`separated` prevents
    that).
    """
    again = again or Recomputation(capture)
    homes = homes_of(capture.graph, stage_of)
    _verify_changes(capture.graph, homes)
    count = max(homes.values(), default=0) + 1
    for stage in range(count):
        if stage not in homes.values():
            raise PlanError(
                f"stage {stage} of {count} would compute nothing.", f"Use --stages {count - 1}."
            )
    fixed: set[fx.Node] = set()
    while True:
        stages = _stages(capture, homes, again, fixed)
        idle = {stage.index for stage in stages if not stage.outputs}
        own = {node for node, home in homes.items() if home in idle} - fixed
        if not own:
            return stages
        fixed |= own  # no other stage recomputes the fixed nodes


@dataclass(frozen=True, slots=True)
class _Members:
    """The nodes that each stage computes, and the values that it receives."""

    computed: list[set[fx.Node]]
    received: list[set[fx.Node]]


def _stages(
    capture: Capture,
    homes: Mapping[fx.Node, int],
    again: Recomputation,
    fixed: Collection[fx.Node],
) -> tuple[StageGraph, ...]:
    count = max(homes.values(), default=0) + 1
    order = {node: position for position, node in enumerate(capture.graph.nodes)}
    outputs = tuple(dict.fromkeys(model_outputs(capture.graph)))
    returned_from = {node: homes.get(node, count - 1) for node in outputs}
    returned_from |= _homes_of_tensors(outputs, homes)
    members = _members(capture, homes, again, fixed, returned_from)
    received = members.received
    crossing = {node for values in received for node in values if node.op != "placeholder"}
    _verify_boundaries(crossing, homes, received)
    stages = []
    for stage in range(count):
        sent_here = sorted(
            (node for node in crossing if homes[node] == stage), key=order.__getitem__
        )
        returned = [
            node for node in outputs if returned_from[node] == stage and node not in sent_here
        ]
        placeholders = [node for node in received[stage] if node.op == "placeholder"]
        values = [node for node in received[stage] if node.op != "placeholder"]
        stages.append(
            StageGraph(
                index=stage,
                nodes=tuple(sorted(members.computed[stage], key=order.__getitem__)),
                inputs=(
                    *sorted(placeholders, key=order.__getitem__),
                    *sorted(values, key=order.__getitem__),
                ),
                outputs=(*sent_here, *returned),
            )
        )
    return tuple(stages)


def _members(
    capture: Capture,
    homes: Mapping[fx.Node, int],
    again: Recomputation,
    fixed: Collection[fx.Node],
    returned_from: Mapping[fx.Node, int],
) -> _Members:
    """The members of the stages, the last stage first: a stage computes what its own results and
    the later stages need. `returned_from` is the stage that returns each output of the model."""
    count = max(homes.values(), default=0) + 1
    computed: list[set[fx.Node]] = [set() for _ in range(count)]
    received: list[set[fx.Node]] = [set() for _ in range(count)]
    for stage in reversed(range(count)):
        sent = {node for values in received for node in values if homes.get(node) == stage}
        sent_or_fixed = sent.union(returned_from, fixed)
        needed = [
            node
            for node, home in homes.items()
            if home == stage and (node in sent_or_fixed or not again.is_makeable(node))
        ]
        needed += [
            node for node, home in returned_from.items() if home == stage and is_external(node)
        ]
        outside: dict[fx.Node, None] = {}
        while needed:
            node = needed.pop()
            if node in computed[stage]:
                continue
            if homes.get(node) != stage or (node in again.free and node not in sent_or_fixed):
                outside[node] = None
                continue
            together = again.together(node)
            computed[stage].update(together)
            needed += [source for other in together for source in other.all_input_nodes]
        wanted = [node for node in outside if node not in computed[stage]]
        own = {node for node, home in homes.items() if home == stage} - {*fixed}
        received[stage], recomputed = again.choose(wanted, computed[stage], fixed, own)
        computed[stage] |= recomputed
        if (missing := _input_for_sizes(capture, computed[stage], received[stage])) is not None:
            received[stage].add(missing)
    return _Members(computed, received)


def crossing_if_sent(homes: Mapping[fx.Node, int]) -> dict[fx.Node, tuple[int, ...]]:
    """The tensors that would cross without recomputation, with the stages that receive them."""
    crossing: dict[fx.Node, tuple[int, ...]] = {}
    for node, home in homes.items():
        targets = {homes[reader] for reader in node.users if homes.get(reader, home) > home}
        if targets and _is_tensor(node):
            crossing[node] = tuple(sorted(targets))
    return crossing


def model_outputs(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes in the structure that the model returns, in the order of the model."""
    (output,) = (node for node in graph.nodes if node.op == "output")

    def walk(value: Any) -> Iterator[fx.Node]:
        if isinstance(value, fx.Node):
            yield value
        elif isinstance(value, (tuple, list)):
            for item in value:
                yield from walk(item)
        elif isinstance(value, dict):
            for item in value.values():
                yield from walk(item)

    yield from walk(output.args[0])


def names_of_outputs(capture: Capture) -> dict[fx.Node, str]:
    """The names that the model gives its outputs, where it returns them by name."""
    (output,) = (node for node in capture.graph.nodes if node.op == "output")
    structure = output.args[0]
    if not isinstance(structure, dict):
        return {}
    return {
        node: name
        for name, node in structure.items()
        if isinstance(node, fx.Node) and isinstance(name, str)
    }


def homes_of(graph: fx.Graph, stage_of: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """The stage of every computed node; an element of a tuple belongs to the stage of the tuple.
    Raises PlanError for a node without a stage."""
    homes: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and source in homes and not _is_tensor(source):
            homes[node] = homes[source]
        elif node in stage_of:
            homes[node] = stage_of[node]
        else:
            raise PlanError(f"the plan gives no stage for {node.name}.")
    return homes


def _homes_of_tensors(
    outputs: Iterable[fx.Node], homes: Mapping[fx.Node, int]
) -> dict[fx.Node, int]:
    """For a parameter or buffer that the model returns, the last stage that holds it anyway."""
    homes_of_tensors: dict[fx.Node, int] = {}
    for node in outputs:
        if node.op == "get_attr":
            for user, home in homes.items():
                is_owner = user.op == "call_module" and str(node.target).startswith(
                    f"{user.target}."
                )
                if is_owner or node in user.all_input_nodes:
                    homes_of_tensors[node] = max(home, homes_of_tensors.get(node, 0))
    return homes_of_tensors


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _input_for_sizes(
    capture: Capture, members: Iterable[fx.Node], received: Iterable[fx.Node]
) -> fx.Node | None:
    """A model input that gives a stage the sizes that it uses and cannot read off its inputs."""
    used = {symbol for node in members for symbol in sizes_in((node.args, node.kwargs))}
    known = {symbol for node in received for symbol in sizes_of(node)}
    uses_device = any(_uses_device((node.args, node.kwargs)) for node in members)
    if used <= known and (received or not uses_device):
        return None
    wanted = used - known
    nodes: Iterable[fx.Node] = capture.graph.find_nodes(op="placeholder")
    for node in nodes:
        if wanted <= sizes_of(node):
            return node
    raise PlanError(f"no model input has the sizes {', '.join(sorted(wanted))}.")


def sizes_in(argument: Any) -> Iterator[str]:
    """The symbols of all sizes in a node's arguments."""
    if isinstance(argument, Size):
        yield from sorted(symbol.name for symbol in argument.expr.free_symbols)
    elif isinstance(argument, Local):
        yield from sizes_in(argument.number)
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            yield from sizes_in(item)
    elif isinstance(argument, dict):
        for item in argument.values():
            yield from sizes_in(item)
    elif isinstance(argument, slice):
        yield from sizes_in((argument.start, argument.stop, argument.step))


def sizes_of(node: fx.Node) -> set[str]:
    """The symbols that are, alone, a dimension of a node's value, of which a rank has not only a
    part."""
    shape, part = node.meta.get("shape") or (), node.meta.get("part")
    return {
        size.expr.name
        for dim, size in enumerate(shape)
        if isinstance(size, Size) and size.expr.is_Symbol and (part is None or part.dim != dim)
    }


def _uses_device(argument: Any) -> bool:
    if isinstance(argument, (tuple, list)):
        return any(map(_uses_device, argument))
    if isinstance(argument, dict):
        return any(map(_uses_device, argument.values()))
    return isinstance(argument, LocalDevice)


def _verify_boundaries(
    crossing: Iterable[fx.Node], homes: Mapping[fx.Node, int], received: list[set[fx.Node]]
) -> None:
    for node in crossing:
        if not _is_tensor(node):
            raise PlanError(
                f"{node.name} is {type(node.meta.get('val')).__name__}, not a tensor, and cannot "
                f"cross from stage {homes[node]}.",
                "Keep what makes and what reads it in one stage.",
            )
        for stage, values in enumerate(received):
            if node in values and stage < homes[node]:
                raise PlanError(
                    f"{node.name} is made in stage {homes[node]} and read in stage {stage}."
                )


def _verify_changes(graph: fx.Graph, homes: Mapping[fx.Node, int]) -> None:
    """Checks that all uses of a memory are in one stage until its last change, and that only
    copies cross. State belongs to the stage that changes it."""
    state = {
        storage
        for node in graph.nodes
        if node.op in ("placeholder", "get_attr")
        for storage in node.meta["storages"]
    }
    last = {storage: node for node in homes for storage in node.meta["mutates"]}
    done: set[int] = set()
    for node, home in homes.items():
        touched = node.meta["storages"] | node.meta["mutates"] | node.meta["touches"]
        for storage in touched.union(*(used.meta["storages"] for used in node.all_input_nodes)):
            if storage in last and homes[last[storage]] != home and storage not in done:
                raise PlanError(
                    f"{node.name} is in stage {home} and shares memory with {last[storage].name}, "
                    f"which changes it in stage {homes[last[storage]]}.",
                    "Keep them in one stage, or give the later stage a copy (`separated`).",
                )
        done |= {storage for storage in node.meta["mutates"] - state if last[storage] is node}


# --- the state of a stage -------------------------------------------------------------------


def stage_tensors(capture: Capture, stage: StageGraph) -> StageTensors:
    """The modules, parameters and buffers of one stage, by the names that the stage uses, in the
    order of the model. Buffers are those of the state_dict."""
    modules, attributes = used_names(capture, stage)
    model = capture.model
    names = set(attributes)
    # A stage holds a torch.nn module as a whole, also where it reads only one of its parameters.
    for name in attributes:
        path = name.rpartition(".")[0]
        if path and is_torch_leaf(model.get_submodule(path)):
            names |= {f"{path}.{own}" for own, _ in model.get_submodule(path).named_parameters()}
    for path in modules:
        leaf = model.get_submodule(path)
        names |= {f"{path}.{name}" for name in state_of(leaf)}
        names |= {f"{path}.{name}" for name, _ in leaf.named_parameters()}
    saved = state_of(model)
    return StageTensors(
        modules=tuple(modules),
        parameters=tuple(
            name
            for name, value in saved.items()
            if name in names and isinstance(value, nn.Parameter)
        ),
        buffers=tuple(
            name
            for name, value in saved.items()
            if name in names and not isinstance(value, nn.Parameter)
        ),
    )


def used_names(capture: Capture, stage: StageGraph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The paths of the leaf modules that a stage calls and the names of the tensors that it reads,
    as the code of the stage names them."""
    names = LocalNames(capture)
    modules = dict.fromkeys(names.module(node) for node in stage.nodes if node.op == "call_module")
    attributes = dict.fromkeys(
        names.tensor(node, source)
        for node in stage.nodes
        for source in node.all_input_nodes
        if source.op == "get_attr"
    )
    attributes |= dict.fromkeys(str(node.target) for node in stage.outputs if node.op == "get_attr")
    return tuple(modules), tuple(attributes)


def unused_tensors(capture: Capture, stages: Iterable[StageGraph]) -> tuple[str, ...]:
    """Names in the model's state_dict whose tensor no stage holds under any name."""
    saved = state_of(capture.model)
    used_ids: set[int] = set()
    for stage in stages:
        tensors = stage_tensors(capture, stage)
        used_ids |= {id(saved[name]) for name in (*tensors.parameters, *tensors.buffers)}
    return tuple(name for name, value in saved.items() if id(value) not in used_ids)
