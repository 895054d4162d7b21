"""A model -> a folder of checked stages: load, capture, profile, plan, generate, verify and write.

`partition_source` calls the phases in a row. Each is a function of a `Compilation`, which holds
what all phases read, and of the results of the phases before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor, fx, nn

from ..runtime.errors import PlanError
from ..runtime.freezing.blocks import blocks_of
from ..runtime.plan.plan import NOT_STORED, ON_META, Plan
from ..runtime.plan.trust import remember
from ..runtime.plan.validate import contradiction
from ..runtime.tensor_parallel.ranks import TensorRanks, reading_loss_alone, using
from ..runtime.user_code import portable
from .assemble_plan import PlanFacts, assemble
from .capture import Capture, read_arguments
from .capture.graph import refused_sizes
from .capture.model_state import unchanged
from .codegen import extra_tensors, generate, header_of, render_readme
from .graph.build import with_copies
from .graph.constraints import Demands, find_demands, groups_to_cut_before
from .graph.costs import LOCALHOST
from .graph.rematerialize import Prices, Recomputation
from .graph.tensor_sums import TensorSums
from .load_and_capture import capture_source, load
from .models.load import ModelSource, given_source
from .output import (
    OnPhase,
    PhaseTimer,
    check_target,
    command_of,
    describe_capture,
    lines_of_python,
    snapshot,
    write_folder,
    write_weights_of,
)
from .planning.cluster import Cluster, make_setting
from .planning.cluster_file import cluster_of
from .planning.compare_methods import ALL
from .planning.explain import explain as explain_plan
from .planning.explain import explain_micro_batches
from .planning.infeasible import explained
from .planning.keywords import PartitionKeywords
from .planning.options import PartitionOptions
from .planning.planner import planner_for
from .planning.signatures import options_for, shows_options
from .planning.solve import solve
from .planning.tensor_groups import check_tensor_groups, link_of_sums
from .profile.cache import threads_set
from .profile.operation_costs import OnProgress
from .profile.profiler import Profile, update_ms_per_byte
from .profiling import (
    CostGraphs,
    Cut,
    check_profile,
    cut_and_time,
    own_failure_raised,
    profile_capture,
)
from .report import render_report
from .split.split import crossing_if_sent, homes_of
from .tensor_parallel import SplitModel, has_loss, split_over_ranks
from .tensor_parallel.sums import sums_of
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
    with unchanged(model):
        return partition_source(source, chosen, on_phase=on_phase, on_progress=on_progress)


def partition_spec(
    spec: str,
    options: PartitionOptions,
    *,
    command: str = "",
    on_phase: OnPhase | None = None,
    on_progress: OnProgress | None = None,
) -> Plan:
    """Loads the model that `spec` names, then `partition_source`."""
    stages = options.stages or options.ranks or 1
    make_setting(stages, **options.running)  # reports errors before the model is loaded
    source = load(spec, options, on_phase)
    return partition_source(
        source, options, command=command, on_phase=on_phase, on_progress=on_progress
    )


@dataclass(frozen=True)
class Compilation:
    """One partition of a model: what all of its phases read.

    source: the model and its example inputs
    options: the user's options
    cluster: the devices that the plan may use; None for equal ranks
    ranks: how many ranks the options name, at least one stage on each
    command: the command that the plan records; "" has it written from the options
    end_phase: reports the end of a phase
    on_progress: reports progress within a phase
    with_advice: the plan says what other numbers of stages and replicas would give
    """

    source: ModelSource
    options: PartitionOptions
    cluster: Cluster | None
    ranks: int
    command: str
    end_phase: PhaseTimer
    on_progress: OnProgress | None
    with_advice: bool = True

    @property
    def is_on_meta(self) -> bool:
        return any(parameter.is_meta for parameter in self.source.model.parameters())

    @property
    def model_facts(self) -> dict[str, Any]:
        """The model and its arguments, as the plan records them."""
        args = dict(self.options.model_args or {})
        return {"model": portable(self.source.spec), "model_args": args}

    def target(self, stages: int, graph_hash: str) -> Path:
        """The folder to write. Raises PlanError if it may not be written."""
        default = Path("generated_models") / f"{self.source.name}_{stages}p"
        folder = Path(self.options.output or default)
        if self.options.stop_after is None:
            facts = {**self.model_facts, "graph": graph_hash}
            check_target(folder, facts, force=self.options.force)
        return folder

    def own_failure_raised(self) -> Any:
        """A context that raises CaptureError instead if the model's own backward fails."""
        return own_failure_raised(self.source.model, self.source.example_inputs)


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
        zero=options.zero,
        method=options.method,
    )
    ranks = options.ranks or options.stages or len(cluster.devices if cluster else ())
    if options.stages or cluster:
        make_setting(options.stages or ranks, **options.running)  # reports errors before the work
    check_profile(options)
    job = Compilation(source, options, cluster, ranks, command, PhaseTimer(on_phase), on_progress)
    captured = capture_phase(job)
    tensor_ranks = TensorRanks(size=options.tensor_parallel)
    with using(tensor_ranks), reading_loss_alone(has_loss(captured.capture)):
        profile = profile_phase(job, captured)
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


# --- load, capture, profile -----------------------------------------------------------------


@dataclass(frozen=True)
class Captured:
    """The result of the capture.

    capture: the graph and its inputs, with the parameters that one tensor rank has
    whole: the model with all of its parameters, for the code
    graph_hash: SHA-256 of the graph, which identifies the model of a folder
    demands: the cuts and groupings that the user demands
    cached: the nodes that a run with a cache computes once, so that they take no time
    regions: nodes that must be in one stage because tensor ranks have parts of their values
    """

    capture: Capture
    whole: nn.Module
    graph_hash: str
    demands: Demands
    cached: frozenset[str] = frozenset()
    regions: tuple[Collection[fx.Node], ...] = ()


def capture_phase(job: Compilation) -> Captured:
    """Captures the model and finds the nodes that `cut_at` and `keep_together` name."""
    options = job.options
    capture = capture_source(job.source, options)
    split = SplitModel(capture, capture)
    if options.tensor_parallel > 1:
        given = read_arguments(job.source.model, job.source.example_inputs)
        stages = options.stages or job.ranks
        split = split_over_ranks(capture, given.tensors, options.tensor_parallel, stages)
    digest = split.capture.sha256
    if options.stages or options.output:
        job.target(options.stages or job.ranks, digest)
    demands = find_demands(
        split.capture, options.cut_at, options.keep_together, options.stages or job.ranks
    )
    job.end_phase("capture", describe_capture(split.capture), "profile")
    whole = split.capture.model
    return Captured(split.of_rank, whole, digest, demands, regions=split.regions)


def profile_phase(job: Compilation, captured: Captured) -> Profile:
    """The costs of each operation."""
    with job.own_failure_raised():
        profile = profile_capture(
            captured.capture, job.options, job.ranks, whole=False, on_progress=job.on_progress
        )
    job.end_phase("profile", profile.summary, "plan")
    return profile


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


def plan_phase(job: Compilation, captured: Captured, profile: Profile) -> Planned:
    """Chooses the cuts, times the stages, cuts again, and records the plan with its findings."""
    options = job.options
    prices = Prices.of(profile, LOCALHOST)
    graphs = CostGraphs(
        captured.capture,
        job.source.name,
        Recomputation(captured.capture, prices),
        [*(nodes for _, nodes in captured.demands.together), *captured.regions],
        update_ms_per_byte(profile, options.optimizer, cached=not options.no_cache),
        captured.cached,
        sums=_sums(job, captured),
    ).predicted_for(job.cluster, options.dtype)
    graph = graphs.of(profile)
    check_tensor_groups(graph, job.cluster, options.tensor_parallel)
    solving: dict[str, Any] = {
        "method": options.method,
        "granularity": options.granularity,
        "prefer_modules": options.prefer_modules,
        "cut_before": groups_to_cut_before(captured.demands, graph),
        **options.running,
    }
    with explained():
        planner = planner_for(graph, job.cluster, options.stages, solving)
    cut = partial(graphs.cut, planner, prices)
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
        _facts(job, len(chosen.stages)),
        sums=graphs.sums,
        if_sent=crossing_if_sent(homes_of(chosen.captured.graph, chosen.placed)),
    )
    if wrong := contradiction(plan):
        raise PlanError(f"the plan could not be read again: {wrong}.", "Give it another name.")
    job.end_phase("plan", solution.summary, "explain" if options.explain else "generate")
    # Alternatives use a single method: with all methods each would take as long as the plan.
    solving["method"] = "auto" if options.method == ALL else options.method
    resolve = partial(solve, **solving) if options.explain else None
    findings = explain_plan(chosen.graph, solution, planner.link, resolve)
    plan = replace(plan, findings=(*findings, *explain_micro_batches(plan)))
    if options.explain:
        job.end_phase("explain", f"{len(plan.findings)} findings", "generate")
    return Planned(plan, chosen, captured.whole, folder, captured.graph_hash)


def _sums(job: Compilation, captured: Captured) -> TensorSums:
    """The sums over the tensor ranks of a stage, on the devices of the plan."""
    ranks, capture = job.options.tensor_parallel, captured.capture
    if ranks == 1:
        return TensorSums()
    sums = sums_of(capture, capture.arguments.tensors, ranks)
    return TensorSums(ranks, link_of_sums(job.cluster, ranks), sums)


def _facts(job: Compilation, stages: int) -> PlanFacts:
    """The facts about the model and the command that the plan records."""
    source, options = job.source, job.options
    stored = source.weights if options.save_weights else NOT_STORED
    return PlanFacts(
        name=source.name,
        **job.model_facts,
        command=job.command or command_of(source.spec, options, options.stages or stages),
        criterion=str(options.loss) if options.loss else source.criterion,
        weights=ON_META if job.is_on_meta else stored,
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
    ranks = job.options.tensor_parallel
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


_MANY_FLOPS = 1e9


def _threads_to_verify(plan: Plan) -> int | None:
    """One thread for a forward of less than a GFLOP: with more, each of its small operations waits
    for threads that other processes may keep from a core. None leaves torch's own number."""
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
            size = job.options.tensor_parallel
            if size > 1:
                verify_parts(
                    source.model, plan, aside, source.example_inputs, size, constants=constants
                )
        on_ranks = f"; {compared_text(source.model, size)}" if size > 1 else ""
        job.end_phase("verify", verified.summary + on_ranks, "write")

    write_weights = None
    if job.options.save_weights and not job.is_on_meta:
        state = snapshot(source.model)
        write_weights = partial(write_weights_of, state=state, plan=plan, constants=constants)
    write_folder(planned.folder, generated.files, write_weights, check)
    remember(planned.folder)
    job.end_phase("write", str(planned.folder), "")
