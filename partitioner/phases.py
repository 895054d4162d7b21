"""A generated folder -> the phases of an elastic run, each with stages of its own.

For each number of frozen blocks the model is captured and profiled with these blocks frozen, and
planned at every length that may follow: the exact cut for what is left. A pipeline becomes shorter
where its fullest rank needs no more memory than the limit, by default that of the first phase, and
where a sample is predicted to take no longer. The ranks that it frees are replicas, which sum
gradients and share out the samples of a step or have as many each as before, or they are idle.

For runs with a cache, frozen blocks take no time: what they have computed is loaded. Their stages
hold their weights, send what they have loaded, and have the memory of the first pass over the data,
which computes it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from torch import fx, nn

from ..runtime.errors import PlanError
from ..runtime.formatting import counted, write_bytes, write_ms
from ..runtime.freezing.blocks import blocks_of
from ..runtime.freezing.elastic import (
    FILE,
    FOLDER,
    NO_CACHE,
    REPLICAS,
    Elastic,
    Phase,
    phase_folder,
    pipelines,
    reachable_depths,
)
from ..runtime.freezing.rules import in_full, parse_rule
from ..runtime.limits import bytes_of
from ..runtime.plan.forecast import forecast_step
from ..runtime.plan.plan import Plan
from .capture import Capture
from .capture_and_profile import (
    Compilation,
    capture_phase,
    profile_phase,
)
from .compile import (
    Planned,
    generate_phase,
    plan_phase,
    write_phase,
)
from .graph.constraints import find_demands
from .graph.cost_graph import needs_gradient
from .graph.costs import LOCALHOST
from .output import PhaseTimer
from .planning.options import DEFAULTS, PartitionOptions


def write_phases(job: Compilation, plan: Plan, folder: Path) -> Elastic:
    """Writes the phases into a generated folder, whose plan is the first one, or none of them."""
    options = job.options
    blocks, length = blocks_of(plan), options.lengths[0]
    rule = parse_rule(in_full(options.freeze)) if options.freeze else None
    limit = bytes_of(options.memory_limit) if options.memory_limit else None
    elastic = Elastic(
        length,
        options.micro_batches,
        phases=(),
        grow=options.grow,
        cached=options.cache != NO_CACHE,
    )
    first = _phase(elastic, plan, 0, "")
    elastic = replace(elastic, phases=(first,))
    quiet = replace(job, end_phase=PhaseTimer(None), on_progress=None, with_advice=False)
    try:
        for depth in reachable_depths(rule, len(blocks), blocks.most)[1:]:
            with frozen(job.source.model, blocks.frozen(depth)):
                most = limit or first.peak_bytes
                phase, own, planned = _best(quiet, elastic, depth, folder, most, plan)
                write_phase(own, planned, generate_phase(own, planned))
            elastic = replace(elastic, phases=(*elastic.phases, phase))
            job.end_phase("phase", _described(elastic, phase, plan), "")
        (folder / FILE).write_text(elastic.to_json(), encoding="utf-8")
    except BaseException:
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        raise
    return elastic


def _best(
    job: Compilation, elastic: Elastic, depth: int, folder: Path, limit: int, plan: Plan
) -> tuple[Phase, Compilation, Planned]:
    """The model at a depth planned at every length that may follow: the fastest plan."""
    options = job.options
    has_constants = bool(plan.constants)  # which are stored with weights
    captured = profile = None
    best: tuple[Phase, Compilation, Planned] | None = None
    failure: PlanError | None = None
    for length, cuts, most in _pipelines_after(elastic, options, limit):
        if best is not None and most is None:
            break  # one fits
        name = phase_folder(depth, length)
        own = replace(
            job,
            ranks=length,
            options=replace(
                options,
                stages=length,
                cut_at=cuts,
                micro_batches=elastic.own_micro_batches(length),
                output=str(folder / name),
                memory_limit=most,
                save_weights=has_constants,
                explain=False,
                **_NOT_ELASTIC,
            ),
        )
        if captured is None or profile is None:
            captured = capture_phase(own)
            profile = profile_phase(own, captured)
            cached = frozen_nodes(captured.capture) if elastic.cached else frozenset[str]()
        demands = find_demands(captured.capture, cuts, options.keep_together, length)
        try:
            planned = plan_phase(own, replace(captured, demands=demands, cached=cached), profile)
        except PlanError as error:
            failure = failure or error
            continue  # no plan of this length fits
        if elastic.cached:
            explanation = (*planned.plan.explanation, _CACHED)
            planned = replace(planned, plan=replace(planned.plan, explanation=explanation))
        phase = _phase(elastic, planned.plan, depth, name)
        if best is None or elastic.sample_ms(phase) <= elastic.sample_ms(best[0]):
            best = phase, own, planned
    if best is None:
        raise failure or PlanError("no pipeline fits.")
    return best


_CACHED = "planned for runs with --cache: the forward of frozen blocks takes no time"
_NOT_ELASTIC: dict[str, Any] = {
    name: DEFAULTS[name] for name in ("elastic", "freeze", "grow", "cache")
}


def _described(elastic: Elastic, phase: Phase, plan: Plan) -> str:
    """A phase in words."""
    stages, samples = phase.stages, elastic.micro_batches * plan.sizes.get("batch", 0)
    growth = elastic.growth(stages)
    grown = f" of {growth * samples:,} samples" if growth > 1 and samples else ""
    return (
        f"{counted(phase.depth, 'block')} frozen: "
        f"{pipelines(stages, elastic.replicas(stages), elastic.processes)}, "
        f"{write_ms(phase.step_ms)} per step{grown}, {write_bytes(phase.peak_bytes)} on the "
        "fullest rank"
    )


def _pipelines_after(
    elastic: Elastic, options: PartitionOptions, limit: int
) -> Iterator[tuple[int, tuple[str, ...], int | None]]:
    """The lengths that may follow the last phase, each with named cuts and a limit of memory: a
    shorter one has as many of the given cuts as it can. If none fits, the length stays."""
    before = elastic.phases[-1].stages
    for length in options.lengths:
        parts = elastic.replicas(length) if elastic.grow == REPLICAS else 1
        if length <= before and elastic.micro_batches % parts == 0:
            named = min(len(options.cut_at), length - 1)
            yield from ((length, cuts, limit) for cuts in combinations(options.cut_at, named))
    if options.memory_limit is None:
        named = min(len(options.cut_at), before - 1)
        yield from ((before, cuts, None) for cuts in combinations(options.cut_at, named))


def _phase(elastic: Elastic, plan: Plan, depth: int, name: str) -> Phase:
    """A phase with the predicted time of a step, with the sum of the gradients over replicas, and
    the memory of the fullest rank."""
    stages = len(plan.stages)
    replicas = elastic.replicas(stages)
    step = forecast_step(plan, plan.setting.schedule, elastic.own_micro_batches(stages))
    summed = max(stage.gradient_bytes for stage in plan.stages) * 2 * (replicas - 1) / replicas
    peak = max(stage.peak_bytes for stage in plan.stages)
    step_ms = round(step.step_ms + LOCALHOST.transfer_ms(summed), 4)
    return Phase(depth, name, stages, step_ms, peak)


def frozen_nodes(capture: Capture) -> frozenset[str]:
    """The nodes that a cache computes once: what frozen parameters and inputs make, without any
    parameter that trains."""
    by_name = dict(capture.model.named_parameters(remove_duplicate=False))
    trained, frozen = set[fx.Node](), set[fx.Node]()
    for node in capture.graph.nodes:
        own: Iterable[nn.Parameter] = ()
        if node.op == "call_module":
            own = capture.model.get_submodule(node.target).parameters()
        elif node.op == "get_attr" and node.target in by_name:
            own = (by_name[node.target],)
        trains = [parameter.requires_grad for parameter in own]
        if any(trains) or needs_gradient(node) or not trained.isdisjoint(node.all_input_nodes):
            trained.add(node)
        elif trains or not frozen.isdisjoint(node.all_input_nodes):
            frozen.add(node)
    return frozenset(node.name for node in frozen)


@contextmanager
def frozen(model: nn.Module, names: frozenset[str]) -> Iterator[None]:
    """Within, these parameters of the model need no gradient."""
    parameters = model.named_parameters(remove_duplicate=False)
    changed = [own for name, own in parameters if name in names and own.requires_grad]
    for parameter in changed:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(True)
