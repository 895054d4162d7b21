"""A model -> a folder of checked stages: load, capture, profile, plan, generate, verify and write.

`partition_source` calls the phases in a row. Each is a function of a `Compilation`, which holds
what all phases read, and of the results of the phases before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ..runtime.errors import GpuStoppedError, PlanError
from ..runtime.freezing.blocks import blocks_of
from ..runtime.plan.plan import NOT_STORED, ON_META, Plan
from ..runtime.plan.trust import remember
from ..runtime.plan.validate import contradiction
from ..runtime.process import rare_collections
from ..runtime.schedule.builders import AUTO
from .assemble_plan import PlanFacts, assemble
from .capture.graph import refused_sizes
from .capture.model_state import device_of, unchanged
from .capture_and_profile import (
    Captured,
    Compilation,
    as_one_rank,
    cost_graphs,
    in_tensor_groups,
    load,
    profiled_parts,
    solve_options,
)
from .codegen import extra_tensors, generate, header_of, render_readme
from .graph.build import with_copies
from .kept_results import KeptResults, Result
from .lay_out import laid_out
from .model_loss import next_labels
from .models.load import ModelSource, given_source
from .output import (
    OnPhase,
    PhaseTimer,
    command_of,
    lines_of_python,
    snapshot,
    write_folder,
    write_weights_of,
)
from .planning.choose_devices import DeviceChoice
from .planning.cluster import make_setting
from .planning.cluster_file import cluster_of
from .planning.explain import explain as explain_plan
from .planning.explain import explain_micro_batches
from .planning.infeasible import explained
from .planning.keywords import PartitionKeywords
from .planning.options import PartitionOptions
from .planning.planner import Planner, planner_for
from .planning.signatures import options_for, shows_options
from .planning.solve import solve
from .planning.tensor_groups import check_tensor_groups
from .profile.cache import threads_set
from .profile.operation_costs import OnProgress
from .profile.profiler import Profile
from .profiling import (
    Cut,
    check_profile,
    cut_and_time,
)
from .report import render_report
from .split.split import crossing_if_sent, homes_of
from .verify import verify
from .verify_parts import compared_text, verify_parts


@shows_options("model")
def partition(
    model: nn.Module,
    example_inputs: Tensor | Mapping[str, Any] | tuple[Any, ...],
    *,
    name: str | None = None,
    on_phase: OnPhase | None = None,
    on_progress: OnProgress | None = None,
    **options: Unpack[PartitionKeywords],
) -> Plan:
    """Cuts `model` into stages and writes them to a folder; the model itself is left as it is.

    - `model`: a module with its weights, or on meta for a folder without weights.
    - `example_inputs`: the arguments of the model's forward by name, a tuple of positional ones, or
      the tensor of a forward that takes one: tensors, nested structures of them, constants.
      Tensors have the size of one micro-batch, `[batch, ...]` unless `batch_dim` says otherwise.
    - `name`: the name of the plan, by default the model's class.
    - `on_phase`: called after each phase with its name, a summary, its seconds and the next phase.
    - `on_progress`: called within the long phases.
    - `options`: those of `PartitionOptions`, which are also those of `asyncpipe-partition --help`.

    Returns the plan; the folder is `output`, by default `generated_models/NAME_STAGESp`. With
    `stop_after="plan"` nothing is written. Raises CaptureError when the model cannot be captured as
    a graph, ModelError when `example_inputs` do not fit its forward, PlanError when no plan
    satisfies the options, TypeError for an unknown option.
    """
    chosen = options_for("model", options)
    source = given_source(model, example_inputs, name)
    own = device_of(model)
    try:
        # "cuda" is the model's GPU there, which need not be the first one.
        with torch.cuda.device(own.index if own.type == "cuda" else -1), unchanged(model):
            return partition_source(source, chosen, on_phase=on_phase, on_progress=on_progress)
    except torch.AcceleratorError as error:
        raise GpuStoppedError(error) from error


def partition_spec(
    spec: str,
    options: PartitionOptions,
    *,
    command: str = "",
    on_phase: OnPhase | None = None,
    on_progress: OnProgress | None = None,
) -> Plan:
    """Loads the model that `spec` names, then `partition_source`."""
    source = _loaded(spec, options, on_phase)
    return partition_source(
        source, options, command=command, on_phase=on_phase, on_progress=on_progress
    )


def partition_or_reuse(
    spec: str,
    options: PartitionOptions,
    *,
    command: str = "",
    on_phase: OnPhase | None = None,
    on_progress: OnProgress | None = None,
) -> Plan:
    """As `partition_spec`, but uses the result of an earlier call where all that it depends on is
    known and the same (`kept_results.py`), and keeps a new result.

    Only for a process in which no other program has replaced functions.
    """
    source = _loaded(spec, options, on_phase)
    summaries: dict[str, str] = {}

    def end_phase(name: str, detail: str, seconds: float, following: str) -> None:
        summaries[name] = detail
        if on_phase:
            on_phase(name, detail, seconds, following)

    timer = PhaseTimer(end_phase)
    kept = KeptResults.of(source, options, command)
    if kept and not options.no_cache and (result := kept.find()):
        write_result(Compilation(source, options, None, 0, command, timer, None), result)
        return result.plan
    plan = partition_source(
        source, options, command=command, on_phase=end_phase, on_progress=on_progress
    )
    if kept:
        kept.keep(Path(summaries["write"]), summaries["verify"])
    return plan


def _loaded(spec: str, options: PartitionOptions, on_phase: OnPhase | None) -> ModelSource:
    """The model that `spec` names; reports errors of the setting before it is loaded."""
    make_setting(options.stages or options.ranks or 1, **options.running)
    return load(spec, options, on_phase)


@rare_collections()
def partition_source(
    source: ModelSource,
    options: PartitionOptions,
    *,
    command: str = "",
    on_phase: OnPhase | None = None,
    on_progress: OnProgress | None = None,
) -> Plan:
    """Captures, profiles, plans, generates and verifies; writes the folder whole or not at all.

    `command` is recorded in the plan, by default the one that the options make. Raises
    CaptureError, PlanError or ModelError, each with a cure.
    """
    cluster = cluster_of(
        options.devices,
        options.stages,
        ranks=options.ranks,
        zero=0 if options.tensor_parallel == AUTO else options.zero,
        method=options.method,
    )
    ranks = options.ranks or options.stages or len(cluster.devices if cluster else ())
    if options.stages or cluster:
        make_setting(options.stages or ranks, **options.running)  # reports errors before the work
    check_profile(options)
    job = Compilation(source, options, cluster, ranks, command, PhaseTimer(on_phase), on_progress)
    if options.tensor_parallel == AUTO:
        layout = laid_out(job)
        job = layout.job
        with as_one_rank(job, layout.profiled[0]):
            planned = plan_phase(job, *layout.profiled, layout.devices)
        candidates = (*planned.plan.candidates, *layout.candidates)
        plan = replace(planned.plan, layouts=layout.rows, candidates=candidates)
        planned = replace(planned, plan=plan)
    else:
        job = in_tensor_groups(job)
        captured, profile = profiled_parts(job)
        with as_one_rank(job, captured):
            planned = plan_phase(job, captured, profile)
    if options.stop_after is not None:
        return planned.plan
    if options.elastic is not None:
        blocks_of(planned.plan)  # raises an error before anything is written
    generated = generate_phase(job, planned)
    write_phase(job, planned, generated)
    if options.elastic is not None:
        from .phases import write_phases  # which calls the functions of this module again

        write_phases(job, generated.plan, planned.folder)
    return generated.plan


# --- plan -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """The result of the planner.

    plan: the plan, without the hashes of its stages
    cut: the captured model as it is cut into stages
    whole: the model with all of its parameters, for the code
    folder: the folder to write
    graph_hash: see `Captured`
    """

    plan: Plan
    cut: Cut
    whole: nn.Module
    folder: Path
    graph_hash: str


def plan_phase(
    job: Compilation, captured: Captured, profile: Profile, devices: DeviceChoice | None = None
) -> Planned:
    """Chooses the cuts, and the devices unless they are known; times the stages, cuts again, and
    records the plan with its findings."""
    options = job.options
    graphs = cost_graphs(job, captured, profile)
    graph = graphs.of(profile)
    if job.cluster is not None and not job.cluster.members:
        check_tensor_groups(graph, job.cluster, options.tensor_ranks)
    solving = solve_options(job, captured, graph)
    with explained():
        planner = (
            Planner(options.stages, solving, devices)
            if devices
            else planner_for(graph, job.cluster, options.stages, solving)
        )
    cut = partial(graphs.cut, planner, graphs.recomputation.prices)
    with job.own_failure_raised():
        profile, chosen = cut_and_time(
            captured.capture, cut, profile, options, on_progress=job.on_progress
        )
    profile, solution = profile.without_forward(captured.cached), chosen.solution
    if job.with_advice:
        solution = planner.advised(chosen.graph, solution)
    folder = job.target(options.stages or len(chosen.stages), captured.graph_hash)
    plan = assemble(
        chosen.captured,
        chosen.stages,
        with_copies(graphs.sums.in_profile(profile), chosen.captured),
        solution,
        _facts(job, len(chosen.stages), captured),
        sums=graphs.sums,
        if_sent=crossing_if_sent(homes_of(chosen.captured.graph, chosen.placed)),
    )
    if wrong := contradiction(plan):
        raise PlanError(f"the plan could not be read again: {wrong}.", "Give it another name.")
    job.end_phase("plan", solution.summary, "explain" if options.explain else "generate")
    resolve = partial(solve, **solving) if options.explain else None
    findings = explain_plan(chosen.graph, solution, planner.link, resolve)
    plan = replace(plan, findings=(*findings, *explain_micro_batches(plan)))
    if options.explain:
        job.end_phase("explain", f"{len(plan.findings)} findings", "generate")
    return Planned(plan, chosen, captured.whole, folder, captured.graph_hash)


def _facts(job: Compilation, stages: int, captured: Captured) -> PlanFacts:
    """The facts about the model and the command that the plan records."""
    source, options = job.source, job.options
    stored = source.weights if options.save_weights else NOT_STORED
    return PlanFacts(
        name=source.name,
        **job.model_facts,
        command=job.command or command_of(source.spec, options, options.stages or stages),
        criterion=str(options.loss) if options.loss else source.criterion,
        weights=ON_META if job.is_on_meta else stored,
        next_labels=next_labels(source, captured.capture),
    )


# --- generate, verify, write ----------------------------------------------------------------


@dataclass(frozen=True)
class Generated:
    """The generated folder, before it is written.

    plan: the plan with the hashes of its stages
    files: the files of the folder by name
    constants: the tensors that only the captured graph has
    """

    plan: Plan
    files: Mapping[str, str]
    constants: Mapping[str, Any]


def generate_phase(job: Compilation, planned: Planned) -> Generated:
    """The texts of the folder, and the plan completed with their hashes."""
    captured = replace(planned.cut.captured, model=planned.whole)
    constants = extra_tensors(captured, planned.cut.stages)
    ranks = job.options.tensor_ranks
    plan = replace(planned.plan, constants=tuple(constants), tensor_parallel=ranks)
    header = header_of(plan, planned.graph_hash)
    files = generate(captured, planned.cut.stages, header, code=job.options.code)
    plan = replace(
        plan,
        hashes={"graph": planned.graph_hash},
        stages=tuple(
            replace(stage, sha256=hashlib.sha256(files[stage.file].encode()).hexdigest())
            for stage in plan.stages
        ),
    )
    files |= {"README.md": render_readme(plan), "report.html": render_report(plan, files)}
    files |= {f"hf/{name}": text for name, text in job.source.files.items()}
    files["plan.json"] = plan.to_json()
    detail = f"{len(plan.stages)} stages, {lines_of_python(files)} lines of Python"
    job.end_phase("generate", detail, "verify")
    return Generated(plan, files, constants)


_MANY_FLOPS = 1e11


def _threads_to_verify(plan: Plan) -> int | None:
    """One thread for a forward of less than 100 GFLOP: with more, each of its operations waits for
    threads that other processes may keep from a core. The verification of gpt2 took 37 s with two
    threads and 10 with one where a process held one of two cores; 6 and 7 s where none did. None
    leaves torch's own number."""
    return 1 if plan.profile["flops"] < _MANY_FLOPS else None


def write_phase(job: Compilation, planned: Planned, generated: Generated) -> None:
    """Verifies the stages in a temporary folder, while the weights are written, and moves it."""
    source, plan, constants = job.source, generated.plan, generated.constants
    captured = planned.cut.captured

    def check(aside: Path) -> None:
        with job.own_failure_raised(), threads_set(_threads_to_verify(plan)):
            verified = verify(
                source.model,
                plan,
                aside,
                source.example_inputs,
                constants=constants,
                changing=captured.changed,
                refused=partial(refused_sizes, captured.graph),
            )
            size = job.options.tensor_ranks
            if size > 1:
                verify_parts(
                    source.model, plan, aside, source.example_inputs, size, constants=constants
                )
        on_ranks = f"; {compared_text(source.model, size)}" if size > 1 else ""
        job.end_phase("verify", verified.summary + on_ranks, "write")

    write_weights = _writer_of_weights(job, plan, constants)
    write_folder(planned.folder, generated.files, write_weights, check)
    remember(planned.folder)
    job.end_phase("write", str(planned.folder), "")


def write_result(job: Compilation, result: Result) -> None:
    """Writes the texts of an earlier result, which was verified then, and the weights of the
    model."""
    plan = result.plan
    folder = job.target(len(plan.stages), plan.hashes["graph"])
    job.end_phase("reuse", result.summary, "write")
    write_folder(folder, result.files, _writer_of_weights(job, plan, {}), lambda aside: None)
    remember(folder)
    job.end_phase("write", str(folder), "")


def _writer_of_weights(
    job: Compilation, plan: Plan, constants: Mapping[str, Tensor]
) -> Callable[[Path], None] | None:
    """A function that writes the weights of the stages to a folder; None if there are none to
    write."""
    if not job.options.save_weights or job.is_on_meta:
        return None
    state = snapshot(job.source.model)
    return partial(write_weights_of, state=state, plan=plan, constants=constants)
