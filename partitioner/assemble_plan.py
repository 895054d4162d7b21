"""Capture, stage graphs, profile and solution -> the plan that the runtime reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..runtime.errors import PlanError
from ..runtime.formatting import visible, write_ms, write_share
from ..runtime.plan.forecast import forecast_step
from ..runtime.plan.plan import (
    Boundary,
    Plan,
    SharedParameter,
    StageSpec,
    TensorSpec,
)
from ..runtime.plan.setting import PlanSetting, RankSpec
from ..runtime.plan.structure import described, names_in
from .capture import Capture, IfTraining, Size, state_of
from .graph.problem import StageLoad
from .graph.tensor_sums import TensorSums
from .model_loss import counted_targets, is_sum, loss_output, notes_of_sums
from .planning.solve import Solution
from .planning.step_time import has_replicas, is_simulated
from .planning.transfers import (
    Communication,
    communication_of_boundaries,
    exchanges_of_stages_ms,
)
from .profile.operation_costs import NodeCost, weight_ms
from .profile.profiler import Profile
from .split.split import StageGraph, StageTensors, stage_tensors, unused_tensors
from .stage_parts import in_rows, node_labels, stage_parts


@dataclass(frozen=True, slots=True)
class _Transfers:
    """The tensors that cross, their times, those of each stage's exchanges in a step, and the sums
    over tensor ranks."""

    boundaries: Sequence[Boundary]
    communication: Communication
    exchange_ms: tuple[float, ...]
    sums: TensorSums


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """The fields of a plan that are recorded as given: see `Plan`."""

    name: str
    model: str
    model_args: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    criterion: str | None = None
    weights: str = "random"
    next_labels: str | None = None


def assemble(
    capture: Capture,
    stage_graphs: Sequence[StageGraph],
    profile: Profile,
    solution: Solution,
    facts: PlanFacts,
    *,
    sums: TensorSums | None = None,
    if_sent: Mapping[fx.Node, tuple[int, ...]] | None = None,
) -> Plan:
    """The plan of a captured model that was split according to `solution`, without hashes.

    `sums` are those over tensor ranks, whose times the profile has. `if_sent` are the values that
    would cross without recomputation, with the stages that read them.
    """
    tensors = [stage_tensors(capture, stage) for stage in stage_graphs]
    outputs, boundaries = _output_structure(capture.graph), _boundaries(capture, stage_graphs)
    all_sent = _if_sent(capture, stage_graphs, if_sent or {})
    shared = _shared_parameters(capture, tensors)
    transfers = _transfers(capture, solution, boundaries, shared, profile.sizes, sums)
    values, even = _values(capture, stage_graphs, boundaries), solution.even_split
    loss = loss_output(capture, facts.criterion)
    plan = Plan(
        name=facts.name,
        model=facts.model,
        model_args=dict(facts.model_args),
        command=facts.command,
        sizes=dict(profile.sizes),
        inputs=capture.inputs,
        values=values,
        arguments=capture.arguments.structure,
        left_out=capture.arguments.left_out,
        next_labels=facts.next_labels,
        outputs=outputs,
        loss=loss,
        targets=counted_targets(capture, loss),
        loss_is_sum=is_sum(capture, loss),
        criterion=facts.criterion,
        stages=_stages(capture, stage_graphs, tensors, profile, solution, transfers),
        shared=shared,
        method=solution.method,
        bottleneck_ms=solution.bottleneck_ms,
        lower_bound_ms=solution.lower_bound_ms,
        even_split_ms=solution.even_split_ms,
        optimal=solution.optimal,
        setting=_setting(solution, transfers, profile.spread),
        profile=profile.facts,
        hashes={},
        weights=facts.weights,
        state_keys=tuple(state_of(capture.model)),
        unused=unused_tensors(capture, stage_graphs),
        notes=_notes(capture, facts.criterion, outputs, values, loss),
        default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
        mode="both" if False in capture.modes else "train",
        explanation=solution.explanation,
        candidates=solution.candidates,
        even_split=tuple((load.forward_ms, load.backward_ms) for load in even.stages),
        if_sent=all_sent if set(all_sent) != set(boundaries) else (),
    )
    return _with_written_step(_with_share_of_sums(plan, transfers.sums), solution)


def _with_share_of_sums(plan: Plan, sums: TensorSums) -> Plan:
    """The plan with a sentence on the time of the slowest stage in which tensor ranks sum."""
    stage = max(plan.stages, key=lambda stage: stage.load_ms)
    work_ms = stage.forward_ms + stage.backward_ms
    if not stage.tensor_sums_ms:
        return plan
    sentence = (
        f"sums over {sums.ranks} tensor ranks take {write_ms(stage.tensor_sums_ms)} of the "
        f"{write_ms(work_ms)} in which stage {stage.index} computes a micro-batch "
        f"({write_share(stage.tensor_sums_ms / work_ms)})"
    )
    return replace(plan, explanation=(*plan.explanation, sentence))


def _with_written_step(plan: Plan, solution: Solution) -> Plan:
    """The plan with the simulated step of its stages as generated: some stages recompute values
    instead of receiving them; the planner counts them as received."""
    placement = solution.placement
    if solution.setting.is_asynchronous:
        return plan
    is_trained = not placement.is_replicated or has_replicas(solution.problem, placement)
    if not is_simulated(solution.problem, placement) or not is_trained:
        return plan
    setting = solution.setting
    # The schedule of replicas of single stages has their sums.
    sums_ms = None if plan.stage_replicas else [stage.summing_ms for stage in plan.stages]
    step_ms = forecast_step(
        plan, setting.schedule, setting.shared_micro_batches, step_ms=sums_ms
    ).step_ms
    return replace(
        plan,
        setting=replace(plan.setting, step_ms=step_ms),
        optimal=plan.optimal and step_ms <= solution.step_ms * (1 + 1e-9),
    )


def _stages(
    capture: Capture,
    stage_graphs: Sequence[StageGraph],
    tensors: Sequence[StageTensors],
    profile: Profile,
    solution: Solution,
    transfers: _Transfers,
) -> tuple[StageSpec, ...]:
    labels = node_labels(stage_graphs)
    return tuple(
        _stage(capture, stage, own, profile, solution, transfers, label)
        for stage, own, label in zip(stage_graphs, tensors, labels, strict=True)
    )


def _stage(
    capture: Capture,
    stage: StageGraph,
    tensors: StageTensors,
    profile: Profile,
    solution: Solution,
    transfers: _Transfers,
    labels: Sequence[str | None],
) -> StageSpec:
    boundaries, communication = transfers.boundaries, transfers.communication
    load = solution.loads[stage.index]
    costs = [profile.nodes[node.name] for node in stage.nodes]
    if not solution.setting.is_of_profile:
        costs = _on_device(costs, load)
    forward_ms = sum(cost.forward_ms for cost in costs)
    sums_ms = [transfers.sums.times_ms(node.name) for node in stage.nodes]
    again_ms = sum(ms for ms, _ in sums_ms) if load.recomputes else 0.0
    changes, changes_trained = _changes(capture, tensors)
    return StageSpec(
        index=stage.index,
        file=f"stage_{stage.index}.py",
        class_name=f"Stage{stage.index}",
        modules=in_rows(dict.fromkeys(label for label in labels if label)),
        inputs=tuple(node.name for node in stage.inputs),
        outputs=tuple(node.name for node in stage.outputs),
        parameters=tensors.parameters,
        buffers=tensors.buffers,
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
        summing_ms=load.summing_ms,
        tensor_sums_ms=sum(map(sum, sums_ms)) + again_ms,
        unshared=load.unshared,
        in_flight=load.in_flight,
        load_ms=load.load_ms,
        weight_ms=sum(
            weight_ms(node, capture.model, cost)
            for node, cost in zip(stage.nodes, costs, strict=True)
        ),
        update_ms=load.update_ms * solution.setting.micro_batches,
        forward_talk_ms=communication.forward_ms[stage.index],
        backward_talk_ms=communication.backward_ms[stage.index],
        exchange_ms=transfers.exchange_ms[stage.index],
        recompute=load.recomputes,
        ranks=solution.ranks_of_stage[stage.index],
        parts=stage_parts(capture, stage.nodes, labels, costs, again=load.recomputes),
        changes=changes,
        changes_trained=changes_trained,
    )


def _changes(capture: Capture, tensors: StageTensors) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The parameters and buffers of a stage that forward changes, and the parameters among them
    with a gradient."""
    parameters = tuple(name for name in tensors.parameters if name in capture.changed)
    buffers = (name for name in tensors.buffers if name in capture.changed_buffers)
    trained = (name for name in parameters if capture.model.get_parameter(name).requires_grad)
    return (*parameters, *buffers), tuple(trained)


def _on_device(costs: Sequence[NodeCost], load: StageLoad) -> list[NodeCost]:
    """The costs of a stage's nodes, scaled to add up to the stage's time on its device."""
    forward_ms = sum(cost.forward_ms for cost in costs)
    backward_ms = sum(cost.backward_ms for cost in costs)
    again_ms = load.forward_ms if load.recomputes else 0.0
    forward = load.forward_ms / forward_ms if forward_ms else 1.0
    backward = (load.backward_ms - again_ms) / backward_ms if backward_ms else 1.0
    return [
        replace(cost, forward_ms=forward * cost.forward_ms, backward_ms=backward * cost.backward_ms)
        for cost in costs
    ]


def _transfers(
    capture: Capture,
    solution: Solution,
    boundaries: Sequence[Boundary],
    shared: Iterable[SharedParameter],
    sizes: Mapping[str, int],
    sums: TensorSums | None,
) -> _Transfers:
    problem, placement = solution.problem, solution.placement
    parameters = dict(capture.model.named_parameters(remove_duplicate=False))
    exchanged = (
        (parameter.stages, parameters[name].nbytes)
        for parameter in shared
        if len(parameter.stages) > 1 and parameter.trains
        for name in parameter.names[:1]
    )
    return _Transfers(
        boundaries,
        communication_of_boundaries(problem, placement, boundaries, sizes),
        exchanges_of_stages_ms(problem, placement, exchanged),
        sums or TensorSums(),
    )


def _setting(solution: Solution, transfers: _Transfers, spread: float) -> PlanSetting:
    setting = solution.setting
    limits = [None if math.isinf(d.memory_bytes) else int(d.memory_bytes) for d in setting.devices]
    return PlanSetting(
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
            (*edge, transfer_ms)
            for edge, transfer_ms in sorted(transfers.communication.overlapped_ms.items())
        ),
        latency_ms=solution.problem.costs.link.latency_ms,
        step_ms=solution.step_ms,
        step_bound_ms=solution.step_bound_ms,
        zero=setting.zero,
        spread=round(spread, 4),
    )


def _boundaries(capture: Capture, stages: Sequence[StageGraph]) -> list[Boundary]:
    """Every value that crosses, in the order of the stages that compute them."""
    boundaries = []
    for stage in stages:
        for node in stage.outputs:
            targets = tuple(
                other.index
                for other in stages
                if other.index > stage.index and node in other.inputs
            )
            if targets and node.op != "placeholder":
                boundaries.append(Boundary(capture.tensor_spec(node), stage.index, targets))
    return boundaries


def _if_sent(
    capture: Capture, stages: Sequence[StageGraph], crossing: Mapping[fx.Node, tuple[int, ...]]
) -> tuple[Boundary, ...]:
    """The boundaries without recomputation; each from the first stage that computes the value."""
    maker: dict[fx.Node, int] = {}
    for stage in reversed(stages):
        maker |= dict.fromkeys(stage.nodes, stage.index)
    return tuple(
        Boundary(capture.tensor_spec(node), maker[node], readers)
        for node, targets in crossing.items()
        if node in maker and (readers := tuple(stage for stage in targets if stage > maker[node]))
    )


# --- outputs and the loss -------------------------------------------------------------------


def _notes(
    capture: Capture,
    criterion: str | None,
    outputs: Any,
    values: Iterable[TensorSpec],
    loss: str | None,
) -> tuple[str, ...]:
    """The remarks of the capture and about the loss."""
    of_loss = (*_notes_of_loss(criterion, outputs, values), *notes_of_sums(capture, loss))
    return tuple(map(visible, (*capture.notes, *of_loss)))


def _notes_of_loss(
    criterion: str | None, outputs: Any, values: Iterable[TensorSpec]
) -> Iterator[str]:
    """Notes on cross_entropy for an output with more dimensions than samples and classes: torch's
    own cross_entropy would take the second dimension as the classes."""
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
    """The output of the original with names in place of tensors."""
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


def _values(
    capture: Capture, stages: Sequence[StageGraph], boundaries: Iterable[Boundary]
) -> tuple[TensorSpec, ...]:
    """The tensors that cross and the outputs of the model, each once."""
    names = set(names_in(_output_structure(capture.graph)))
    nodes = dict.fromkeys(node for stage in stages for node in stage.outputs)
    crossing = [boundary.tensor for boundary in boundaries]
    returned = [capture.tensor_spec(node) for node in nodes if node.name in names]
    return (*crossing, *(spec for spec in returned if spec not in crossing))


# --- parameters with several names or in several stages -------------------------------------


def _shared_parameters(
    capture: Capture, tensors: Sequence[StageTensors]
) -> tuple[SharedParameter, ...]:
    """Parameters that have several names or that several stages hold; the first stage owns them.
    Buffers with several names, as in a module that is registered twice, belong to one stage."""
    names: dict[int, list[str]] = {}
    for name, parameter in capture.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shared = []
    for aliases in names.values():
        holders = tuple(
            (index, next(name for name in aliases if name in stage.parameters))
            for index, stage in enumerate(tensors)
            if not set(aliases).isdisjoint(stage.parameters)
        )
        if holders and (len(aliases) > 1 or len(holders) > 1):
            owner = holders[0][1]
            others = tuple(name for name in aliases if name != owner)
            trains = capture.model.get_parameter(owner).requires_grad
            shared.append(SharedParameter((owner, *others), holders, trains))
    saved = state_of(capture.model)
    of_buffer: dict[int, list[str]] = {}
    for name, buffer in capture.model.named_buffers(remove_duplicate=False):
        if name in saved:
            of_buffer.setdefault(id(buffer), []).append(name)
    for aliases in of_buffer.values():
        buffers = [(at, name) for at, stage in enumerate(tensors) for name in stage.buffers]
        own = next((holder for holder in buffers if holder[1] in aliases), None)
        if own is not None and len(aliases) > 1:
            others = tuple(name for name in aliases if name != own[1])
            shared.append(SharedParameter((own[1], *others), (own,)))
    return tuple(shared)
