"""A generated folder -> the phases of an elastic run, each with stages of its own.

For each number of frozen blocks the model is captured and profiled with these blocks frozen, and
planned at every length that may follow: the exact cut for what is left. A pipeline becomes shorter
where its fullest rank needs no more memory than the limit, by default that of the first phase, and
where a step is predicted to be no slower; the ranks that it frees are replicas, which sum
gradients.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from torch import nn

from ..runtime.errors import PlanError
from ..runtime.formatting import counted, write_bytes, write_ms
from ..runtime.freezing.blocks import blocks_of
from ..runtime.freezing.elastic import (
    FILE,
    FOLDER,
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
from .compile import (
    Compilation,
    Planned,
    capture_phase,
    generate_phase,
    plan_phase,
    profile_phase,
    write_phase,
)
from .graph.constraints import find_demands
from .graph.costs import LOCALHOST
from .output import PhaseTimer
from .planning.options import PartitionOptions


def write_phases(job: Compilation, plan: Plan, folder: Path) -> Elastic:
    """Writes the phases into a generated folder, whose plan is the first one, or none of them."""
    options = job.options
    blocks, lengths = blocks_of(plan), options.lengths
    rule = parse_rule(in_full(options.freeze)) if options.freeze else None
    limit = bytes_of(options.memory_limit) if options.memory_limit else None
    first = Phase(0, "", lengths[0], *_figures(plan, lengths[0], options.micro_batches))
    phases = [first]
    try:
        for depth in reachable_depths(rule, len(blocks), blocks.most)[1:]:
            with frozen(job.source.model, blocks.frozen(depth)):
                most = limit or first.peak_bytes
                phases.append(_write_phase(job, plan, depth, phases[-1], folder, most))
        elastic = Elastic(lengths[0], options.micro_batches, tuple(phases))
        (folder / FILE).write_text(elastic.to_json(), encoding="utf-8")
    except BaseException:
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        raise
    return elastic


def _write_phase(
    job: Compilation, plan: Plan, depth: int, before: Phase, folder: Path, limit: int
) -> Phase:
    """Plans the model at a depth at every length that may follow, and writes the fastest plan."""
    has_constants = bool(plan.constants)  # which are stored with weights
    options, processes = job.options, job.options.lengths[0]
    quiet = replace(job, end_phase=PhaseTimer(None), on_progress=None)
    captured = profile = None
    best: tuple[Phase, Compilation, Planned] | None = None
    failure: PlanError | None = None
    for length, cuts in _pipelines_after(options, before.stages):
        replicas = processes // length
        name = phase_folder(depth, length)
        own = replace(
            quiet,
            ranks=length,
            options=replace(
                options,
                stages=length,
                cut_at=cuts,
                micro_batches=options.micro_batches // replicas,
                output=str(folder / name),
                memory_limit=options.memory_limit if length == before.stages else limit,
                save_weights=has_constants,
                explain=False,
                elastic=None,
                freeze=None,
            ),
        )
        if captured is None or profile is None:
            captured = capture_phase(own)
            profile = profile_phase(own, captured)
        demands = find_demands(captured.capture, cuts, options.keep_together, length)
        try:
            planned = plan_phase(own, replace(captured, demands=demands), profile)
        except PlanError as error:
            failure = failure or error
            continue  # no plan of this length fits
        figures = _figures(planned.plan, processes, options.micro_batches)
        phase = Phase(depth, name, length, *figures)
        if best is None or _is_better(phase, best[0], limit):
            best = phase, own, planned
    if best is None:
        raise failure or PlanError("no pipeline fits.")
    phase, own, planned = best
    write_phase(own, planned, generate_phase(own, planned))
    job.end_phase(
        "phase",
        f"{counted(depth, 'block')} frozen: {pipelines(phase.stages, processes)}, "
        f"{write_ms(phase.step_ms)} per step, {write_bytes(phase.peak_bytes)} on the fullest rank",
        "",
    )
    return phase


def _pipelines_after(
    options: PartitionOptions, stages: int
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The lengths that may follow a pipeline, each with named cuts: a shorter one has as many of
    the given ones as it can."""
    for length in options.lengths:
        if length <= stages and not options.micro_batches % (options.lengths[0] // length):
            named = min(len(options.cut_at), length - 1)
            yield from ((length, cuts) for cuts in combinations(options.cut_at, named))


def _is_better(phase: Phase, best: Phase, limit: int) -> bool:
    """True if a phase fits into the limit, and is as fast as the best one so far, or that does not
    fit."""
    return phase.peak_bytes <= limit and (phase.step_ms <= best.step_ms or best.peak_bytes > limit)


def _figures(plan: Plan, processes: int, micro_batches: int) -> tuple[float, int]:
    """The predicted time of a step on so many processes, with the sum of the gradients over
    replicas, and the memory of the fullest rank."""
    stages = len(plan.stages)
    replicas = processes // stages
    step = forecast_step(plan, plan.setting.schedule, micro_batches // replicas)
    summed = max(stage.memory.gradients for stage in plan.stages) * 2 * (replicas - 1) / replicas
    peak = max(stage.peak_bytes for stage in plan.stages)
    return round(step.step_ms + LOCALHOST.transfer_ms(summed), 4), peak


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
