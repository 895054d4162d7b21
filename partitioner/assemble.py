"""Capture, stage graphs, profile and solution -> the plan that the runtime reads."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..runtime.errors import PlanError
from ..runtime.forecast import forecast_step
from ..runtime.hidden_text import visible
from ..runtime.plan import (
    Boundary,
    Part,
    Plan,
    RankSpec,
    Setting,
    SharedParameter,
    StageSpec,
    TensorSpec,
)
from ..runtime.structure import described, names_in
from .capture import Capture, IfTraining, ModuleCall, Size
from .evaluate import StageLoad
from .profiler import Profile
from .solve import Solution
from .split import StageGraph, StageTensors, stage_tensors, unused_tensors
from .step_time import Talk, has_replicas, is_simulated
from .walk import NodeCost
from .weight_part import weight_ms
from .written_talk import written_exchanges_ms, written_talk

_NO_MODULE = "other operations"


def assemble(
    capture: Capture,
    stage_graphs: Sequence[StageGraph],
    profile: Profile,
    solution: Solution,
    *,
    name: str,
    model: str,
    model_args: Mapping[str, Any] | None = None,
    command: str = "",
    criterion: str | None = None,
    weights: str = "random",
    if_sent: Mapping[fx.Node, tuple[int, ...]] | None = None,
) -> Plan:
    """The plan of a captured model that was split as `solution` says; hashes are left empty.

    `model`, `model_args`, `command`, `criterion` and `weights` are written into it as given.
    `if_sent` are the values that would cross if no stage made any again, with their readers.
    """
    tensors = [stage_tensors(capture, stage) for stage in stage_graphs]
    boundaries = _boundaries(capture, stage_graphs)
    all_sent = _if_sent(capture, stage_graphs, if_sent or {})
    outputs = _output_structure(capture.graph)
    shared = _shared_parameters(capture, tensors)
    talk, exchanges_ms = _transfers(capture, solution, boundaries, shared, profile.sizes)
    crossing = [boundary.tensor for boundary in boundaries]
    returned = [spec for spec in _returned(capture, stage_graphs) if spec not in crossing]
    plan = Plan(
        name=name,
        model=model,
        model_args=dict(model_args or {}),
        command=command,
        sizes=dict(profile.sizes),
        inputs=capture.inputs,
        values=(*crossing, *returned),
        arguments=capture.arguments.structure,
        outputs=outputs,
        loss=_loss(outputs, (*crossing, *returned)),
        criterion=criterion,
        stages=tuple(
            replace(
                _stage(capture, stage, held, profile, solution, boundaries, labels),
                forward_talk_ms=talk.forward_ms[stage.index],
                backward_talk_ms=talk.backward_ms[stage.index],
                exchange_ms=exchanges_ms[stage.index],
            )
            for stage, held, labels in zip(
                stage_graphs, tensors, _node_labels(stage_graphs), strict=True
            )
        ),
        shared=shared,
        method=solution.method,
        bottleneck_ms=solution.bottleneck_ms,
        lower_bound_ms=solution.lower_bound_ms,
        even_split_ms=solution.even_split_ms,
        optimal=solution.optimal,
        setting=_setting(solution, talk),
        profile=profile.facts,
        hashes={},
        weights=weights,
        state_keys=tuple(capture.model.state_dict()),
        unused=unused_tensors(capture, stage_graphs),
        notes=tuple(
            map(
                visible,
                (*capture.notes, *_notes_of_loss(criterion, outputs, (*crossing, *returned))),
            )
        ),
        mode="both" if False in capture.modes else "train",
        explanation=solution.explanation,
        candidates=solution.candidates,
        even_split=tuple(
            (load.forward_ms, load.backward_ms) for load in solution.even_split.stages
        ),
        if_sent=all_sent if set(all_sent) != set(boundaries) else (),
    )
    return plan if solution.setting.is_asynchronous else _with_written_step(plan, solution)


def _with_written_step(plan: Plan, solution: Solution) -> Plan:
    """The plan with the step of its stages as they are written: some compute again what others
    have made, and send something else, which the planner does not count."""
    placement = solution.placement
    is_trained = not placement.is_replicated or has_replicas(solution.problem, placement)
    if not is_simulated(solution.problem, placement) or not is_trained:
        return plan
    micro_batches = solution.setting.shared_micro_batches
    step_ms = forecast_step(plan, plan.setting.schedule, micro_batches).step_ms
    return replace(
        plan,
        setting=replace(plan.setting, step_ms=step_ms),
        optimal=plan.optimal and step_ms <= solution.step_ms * (1 + 1e-9),
    )


def _stage(
    capture: Capture,
    stage: StageGraph,
    held: StageTensors,
    profile: Profile,
    solution: Solution,
    boundaries: Sequence[Boundary],
    labels: Sequence[str | None],
) -> StageSpec:
    load = solution.loads[stage.index]
    costs = [profile.nodes[node.name] for node in stage.nodes]
    if not solution.setting.is_of_profile:
        costs = _on_device(costs, load)
    forward_ms = sum(cost.forward_ms for cost in costs)
    return StageSpec(
        index=stage.index,
        file=f"stage_{stage.index}.py",
        class_name=f"Stage{stage.index}",
        modules=_in_rows(dict.fromkeys(label for label in labels if label)),
        inputs=tuple(node.name for node in stage.inputs),
        outputs=tuple(node.name for node in stage.outputs),
        parameters=held.parameters,
        buffers=held.buffers,
        draws_random=any(node.meta.get("random", False) for node in stage.nodes),
        draws_numbers=any(node.meta.get("draws_numbers", False) for node in stage.nodes),
        forward_ms=forward_ms,
        backward_ms=sum(cost.backward_ms for cost in costs) + forward_ms * load.recomputes,
        param_bytes=load.param_bytes,
        activation_bytes=load.activation_bytes,
        peak_bytes=load.peak_bytes,
        sends=tuple(boundary for boundary in boundaries if boundary.source == stage.index),
        receives=tuple(boundary for boundary in boundaries if stage.index in boundary.targets),
        memory=load.memory,
        in_flight=load.in_flight,
        load_ms=load.load_ms,
        weight_ms=sum(
            weight_ms(node, capture.model, cost)
            for node, cost in zip(stage.nodes, costs, strict=True)
        ),
        update_ms=load.update_ms * solution.setting.micro_batches,
        recompute=load.recomputes,
        ranks=solution.ranks_of_stage[stage.index],
        parts=_parts(labels, costs, again=load.recomputes),
    )


def _on_device(costs: Sequence[NodeCost], load: StageLoad) -> list[NodeCost]:
    """The costs of a stage's nodes, made to add up to what they take on the stage's device."""
    forward_ms = sum(cost.forward_ms for cost in costs)
    backward_ms = sum(cost.backward_ms for cost in costs)
    again_ms = load.forward_ms if load.recomputes else 0.0
    forward = load.forward_ms / forward_ms if forward_ms else 1.0
    backward = (load.backward_ms - again_ms) / backward_ms if backward_ms else 1.0
    return [
        replace(cost, forward_ms=forward * cost.forward_ms, backward_ms=backward * cost.backward_ms)
        for cost in costs
    ]


def _parts(
    labels: Iterable[str | None], costs: Iterable[NodeCost], *, again: bool
) -> tuple[Part, ...]:
    """The costs of nodes by their labels; `again`: backward runs forward once more."""
    times: dict[str, tuple[float, float]] = {}
    for label, cost in zip(labels, costs, strict=True):
        forward_ms, backward_ms = times.get(label or _NO_MODULE, (0.0, 0.0))
        times[label or _NO_MODULE] = (
            forward_ms + cost.forward_ms,
            backward_ms + cost.backward_ms + cost.forward_ms * again,
        )
    return tuple(Part(name, *both) for name, both in times.items())


def _transfers(
    capture: Capture,
    solution: Solution,
    boundaries: Sequence[Boundary],
    shared: Iterable[SharedParameter],
    sizes: Mapping[str, int],
) -> tuple[Talk, tuple[float, ...]]:
    """What the stages as they are written send for a micro-batch, and exchange once a step."""
    problem, placement = solution.problem, solution.placement
    parameters = dict(capture.model.named_parameters(remove_duplicate=False))
    held = (
        (each.stages, parameters[name].numel() * parameters[name].element_size())
        for each in shared
        if len(each.stages) > 1
        for name in each.names[:1]
    )
    return (
        written_talk(problem, placement, boundaries, sizes),
        written_exchanges_ms(problem, placement, held),
    )


def _setting(solution: Solution, talk: Talk) -> Setting:
    setting = solution.setting
    limits = [None if math.isinf(d.memory_bytes) else int(d.memory_bytes) for d in setting.devices]
    return Setting(
        schedule=setting.schedule,
        micro_batches=setting.micro_batches,
        recompute=setting.recompute,
        staleness=setting.staleness,
        optimizer=setting.optimizer,
        memory_limit=min((limit for limit in limits if limit is not None), default=None),
        ranks=solution.rank_specs
        or tuple(
            RankSpec(device.name, limit, device.host)
            for device, limit in zip(setting.devices, limits, strict=True)
        ),
        transfer_ms=tuple(
            (*edge, transfer_ms) for edge, transfer_ms in sorted(talk.overlapped_ms.items())
        ),
        latency_ms=solution.problem.costs.link.latency_ms,
        step_ms=solution.step_ms,
        step_bound_ms=solution.step_bound_ms,
    )


def _boundaries(capture: Capture, stages: Sequence[StageGraph]) -> list[Boundary]:
    """Every value that crosses, in the order of the stages that make them."""
    found = []
    for stage in stages:
        for node in stage.outputs:
            targets = tuple(
                other.index
                for other in stages
                if other.index > stage.index and node in other.inputs
            )
            if targets and node.op != "placeholder":
                found.append(Boundary(capture.tensor_spec(node), stage.index, targets))
    return found


def _if_sent(
    capture: Capture, stages: Sequence[StageGraph], crossing: Mapping[fx.Node, tuple[int, ...]]
) -> tuple[Boundary, ...]:
    """The boundaries if nothing were made again; each from the first stage that makes it."""
    maker: dict[fx.Node, int] = {}
    for stage in reversed(stages):
        maker |= dict.fromkeys(stage.nodes, stage.index)
    return tuple(
        Boundary(capture.tensor_spec(node), maker[node], readers)
        for node, targets in crossing.items()
        if node in maker and (readers := tuple(stage for stage in targets if stage > maker[node]))
    )


# --- outputs and the loss -------------------------------------------------------------------


def _notes_of_loss(
    criterion: str | None, outputs: Any, values: Iterable[TensorSpec]
) -> Iterator[str]:
    """What cross_entropy makes of an output that has more than samples and classes: torch's own
    would take the second dimension as the classes."""
    names = list(names_in(outputs))
    name = "logits" if "logits" in names else next(iter(names), None)
    for spec in values:
        if criterion == "cross_entropy" and spec.name == name and len(spec.shape) > 2:
            shape = " x ".join(map(str, spec.shape))
            yield (
                f"cross_entropy takes the last dimension of {spec.name} ({shape}) as its "
                f"{spec.shape[-1]} classes"
            )


def _output_structure(graph: fx.Graph) -> Any:
    """The original's output with names for tensors."""
    (output,) = graph.find_nodes(op="output")

    def named(leaf: Any) -> str | dict[str, str] | None:
        if isinstance(leaf, fx.Node):
            return leaf.name
        if isinstance(leaf, Size):
            return {"$size": str(leaf)}
        if isinstance(leaf, IfTraining):
            raise PlanError(
                f"forward returns {leaf.train!r} in training and {leaf.eval!r} in evaluation.",
                "Return tensors only.",
            )
        return None

    return described(output.args[0], named)


def _returned(capture: Capture, stages: Sequence[StageGraph]) -> Iterable[TensorSpec]:
    """The model outputs, once each."""
    names = set(names_in(_output_structure(capture.graph)))
    nodes = dict.fromkeys(node for stage in stages for node in stage.outputs)
    return [capture.tensor_spec(node) for node in nodes if node.name in names]


def _loss(outputs: Any, values: Iterable[TensorSpec]) -> str | None:
    """The value under "loss" if it is one number."""
    name = outputs.get("loss") if isinstance(outputs, Mapping) else None
    scalars = {value.name for value in values if not value.shape}
    return name if name in scalars else None


# --- parameters of several names or stages --------------------------------------------------


def _shared_parameters(
    capture: Capture, tensors: Sequence[StageTensors]
) -> tuple[SharedParameter, ...]:
    """Parameters that have several names or that several stages hold; the first stage owns. Buffers
    that have several names, as those of a module that is registered twice, belong to one stage."""
    names: dict[int, list[str]] = {}
    for name, parameter in capture.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = []
    for aliases in names.values():
        holders = tuple(
            (index, next(name for name in aliases if name in held.parameters))
            for index, held in enumerate(tensors)
            if not set(aliases).isdisjoint(held.parameters)
        )
        if holders and (len(aliases) > 1 or len(holders) > 1):
            owner = holders[0][1]
            others = tuple(name for name in aliases if name != owner)
            found.append(SharedParameter((owner, *others), holders))
    saved = capture.model.state_dict(keep_vars=True)
    of_buffer: dict[int, list[str]] = {}
    for name, buffer in capture.model.named_buffers(remove_duplicate=False):
        if name in saved:
            of_buffer.setdefault(id(buffer), []).append(name)
    for aliases in of_buffer.values():
        held = [(at, name) for at, stage in enumerate(tensors) for name in stage.buffers]
        own = next((each for each in held if each[1] in aliases), None)
        if own is not None and len(aliases) > 1:
            others = tuple(name for name in aliases if name != own[1])
            found.append(SharedParameter((own[1], *others), (own,)))
    return tuple(found)


# --- what a stage is called by --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Whole:
    """Which module calls lie in one stage entirely, and in which."""

    stage_of_call: Mapping[ModuleCall, int]

    def label(self, node: fx.Node, stage: int) -> str | None:
        """The outermost whole module around a node, or the node's own leaf module."""
        for call in node.meta.get("calls", ()):
            if self.stage_of_call.get(call) == stage:
                return str(call.path)
        return str(node.target) if node.op == "call_module" else None


def _node_labels(stages: Sequence[StageGraph]) -> list[list[str | None]]:
    """For every node of every stage the module it is counted under, None for no whole one."""
    stages_of: dict[fx.Node, list[int]] = {}
    for stage in stages:
        for node in stage.nodes:
            stages_of.setdefault(node, []).append(stage.index)
    homes: dict[ModuleCall, set[int]] = {}
    for node, indices in stages_of.items():
        # What several stages compute for themselves tears no module.
        if len(indices) == 1:
            for call in node.meta.get("calls", ()):
                homes.setdefault(call, set()).update(indices)
    whole = _Whole({call: min(found) for call, found in homes.items() if len(found) == 1})
    return [
        [
            whole.label(node, stage.index) if len(stages_of[node]) == 1 else None
            for node in stage.nodes
        ]
        for stage in stages
    ]


def _in_rows(labels: Iterable[str]) -> tuple[str, ...]:
    """`a.0, a.1, a.2, b` as `a.0-2, b`."""
    rows: list[tuple[str, int, int] | str] = []
    for label in labels:
        match = re.fullmatch(r"(.*\.)?(\d+)", label)
        if not match:
            rows.append(label)
            continue
        prefix, number = match[1] or "", int(match[2])
        if rows and isinstance(rows[-1], tuple) and rows[-1][0] == prefix:
            if rows[-1][2] == number - 1:
                rows[-1] = prefix, rows[-1][1], number
                continue
        rows.append((prefix, number, number))
    return tuple(
        row if isinstance(row, str) else f"{row[0]}{row[1]}" + f"-{row[2]}" * (row[2] > row[1])
        for row in rows
    )
