"""The first phases of a partition: options -> a model, its graph and the costs of its operations.

A partition captures and profiles one model. To choose the number of tensor ranks, it splits and
profiles the model for each number, because the parts of a rank are another graph, measured at their
real shapes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import networkx as nx
from torch import fx, nn

from ..runtime.errors import ModelError, PlanError
from ..runtime.formatting import write_large_count
from ..runtime.tensor_parallel.ranks import TensorRanks, reading_loss_alone, using
from ..runtime.user_code import portable
from .capture import Capture, find_dimensions, read_arguments
from .capture import capture as capture_model
from .capture.arguments import describe_arguments, verify_arguments, verify_shapes
from .capture.model_state import verify_strided
from .capture.sizes import BATCH, SEQUENCE, resized, sizes_in
from .graph.constraints import Demands, find_demands, groups_to_cut_before
from .graph.costs import LOCALHOST
from .graph.rematerialize import Prices, Recomputation
from .graph.tensor_sums import TensorSums
from .model_loss import criterion_inputs
from .models.load import ModelSource, load_model
from .output import OnPhase, PhaseTimer, check_target, describe_capture
from .planning.cluster import Cluster, check_number
from .planning.options import PartitionOptions
from .planning.tensor_groups import link_of_sums
from .profile.operation_costs import OnProgress
from .profile.profiler import Profile, update_ms_per_byte
from .profiling import CostGraphs, own_failure_raised, profile_capture
from .tensor_parallel import SplitModel, has_loss, split_over_ranks
from .tensor_parallel.sums import sums_of


@dataclass(frozen=True)
class Compilation:
    """The facts of one partition that all of its phases read.

    source: the model and its example inputs
    options: the user's options
    cluster: the devices that the plan may use; None for equal ranks
    ranks: the number of ranks in the options, with at least one stage on each
    command: the command that the plan records; "" to write it from the options
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


def in_tensor_groups(job: Compilation) -> Compilation:
    """The job on devices each of which stands for the tensor ranks of a stage, if hosts have as
    many.
    """
    size = job.options.tensor_ranks
    if job.cluster is None or not job.cluster.groups(size):
        return job
    cluster = job.cluster.in_groups(size)
    check_number(cluster, job.options.stages)
    return replace(job, cluster=cluster)


def profiled_parts(job: Compilation, known: Capture | None = None) -> tuple[Captured, Profile]:
    """The captured model with the parts of one tensor rank, and their costs; `known` is the capture
    if there is one."""
    captured = capture_phase(job, known)
    with as_one_rank(job, captured):
        return captured, profile_phase(job, captured)


@contextmanager
def as_one_rank(job: Compilation, captured: Captured) -> Iterator[None]:
    """Runs split layers as one of the tensor ranks of a training run does."""
    ranks = TensorRanks(size=job.options.tensor_ranks)
    with using(ranks), reading_loss_alone(has_loss(captured.capture)):
        yield


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


def capture_phase(job: Compilation, known: Capture | None = None) -> Captured:
    """Captures the model, if its capture is not `known`, splits it over the tensor ranks, and finds
    the nodes that `cut_at` and `keep_together` name."""
    options = job.options
    capture = known or capture_source(job.source, options)
    split = SplitModel(capture, capture)
    ranks = options.tensor_ranks
    if ranks > 1:
        given = read_arguments(job.source.model, job.source.example_inputs)
        stages = options.stages or job.ranks
        split = split_over_ranks(
            capture, given.tensors, ranks, stages, sequence=options.sequence_parallel
        )
    if options.loss is not None and has_loss(split.capture):
        kind = type(job.source.model).__name__
        raise PlanError(
            f"a loss is given ({options.loss}), but {kind} makes its own.",
            "Leave --loss out, or partition the model without its labels input.",
        )
    digest = split.capture.sha256
    if options.stages or options.output:
        job.target(options.stages or job.ranks, digest)
    demands = find_demands(
        split.capture, options.cut_at, options.keep_together, options.stages or job.ranks
    )
    parts = f" · parts of {ranks} tensor ranks" if ranks > 1 else ""
    job.end_phase("capture", describe_capture(split.capture) + parts, "profile")
    whole = split.capture.model
    return Captured(split.of_rank, whole, digest, demands, regions=split.regions)


def profile_phase(job: Compilation, captured: Captured) -> Profile:
    """The costs of each operation."""
    with job.own_failure_raised():
        profile = profile_capture(
            captured.capture,
            job.options,
            job.ranks * job.options.tensor_ranks,
            whole=False,
            on_progress=job.on_progress,
        )
    job.end_phase("profile", profile.summary, "plan")
    return profile


def cost_graphs(job: Compilation, captured: Captured, profile: Profile) -> CostGraphs:
    """The cost graphs of the captured model on the devices of the job."""
    options = job.options
    return CostGraphs(
        captured.capture,
        job.source.name,
        Recomputation(captured.capture, Prices.of(profile, LOCALHOST)),
        [*(nodes for _, nodes in captured.demands.together), *captured.regions],
        update_ms_per_byte(profile, options.optimizer, cached=not options.no_cache),
        captured.cached,
        criterion_inputs(captured.capture, options.loss or job.source.criterion),
        sums=_sums(job, captured),
    ).predicted_for(job.cluster, options.dtype)


def _sums(job: Compilation, captured: Captured) -> TensorSums:
    """The sums over the tensor ranks of a stage, on the devices of the plan."""
    ranks, capture = job.options.tensor_ranks, captured.capture
    if ranks == 1:
        return TensorSums()
    sums = sums_of(capture, capture.arguments.tensors, ranks)
    cluster = job.cluster
    link = cluster.inside if cluster and cluster.members else link_of_sums(cluster, ranks)
    return TensorSums(ranks, link, sums)


def solve_options(job: Compilation, captured: Captured, graph: nx.DiGraph) -> dict[str, Any]:
    """The options of `solve` for a cost graph of the job."""
    options = job.options
    return {
        "method": options.method,
        "granularity": options.granularity,
        "prefer_modules": options.prefer_modules,
        "cut_before": groups_to_cut_before(captured.demands, graph),
        **options.running,
    }


def load(spec: str, options: PartitionOptions, on_phase: OnPhase | None) -> ModelSource:
    """Builds the model that `spec` names, the first phase."""
    start = time.perf_counter()
    source = load_model(
        spec,
        model_args=options.model_args,
        micro_batch_size=options.micro_batch_size,
        seq=options.seq,
        seed=options.seed,
        meta=options.meta,
        pretrained=options.pretrained,
        inputs=options.inputs,
    )
    verify_shapes(source.model)
    source = _of_sizes(source, options)
    if on_phase:
        number = sum(parameter.numel() for parameter in source.model.parameters())
        detail = f"{spec} · {write_large_count(number)} parameters · weights: {source.weights}"
        on_phase("load", detail, time.perf_counter() - start, "capture")
    return source


def _of_sizes(source: ModelSource, options: PartitionOptions) -> ModelSource:
    """The model with example inputs of the sizes that the options name.

    The inputs that are made for a model by name have them, but not all have a length. Raises
    ModelError if no dimension of the inputs has a named size.
    """
    wanted = {SEQUENCE: options.seq}
    if ":" in source.spec:
        wanted[BATCH] = options.micro_batch_size
    named = {symbol: size for symbol, size in wanted.items() if size is not None}
    if not named:
        return source
    given = read_arguments(source.model, source.example_inputs)
    verify_strided(given.tensors, "input")
    verify_arguments(source.model, source.example_inputs)
    lengths = "auto" if options.sequence_dim is None else options.sequence_dim
    dims = find_dimensions(source.model, given, options.batch_dim, lengths).dims
    sizes = sizes_in(given.tensors, dims)
    for symbol, size in named.items():
        if symbol not in sizes:
            flag, dimension = _FLAGS[symbol]
            raise ModelError(
                f"{flag} {size}, but no input of {type(source.model).__name__} has a {symbol} "
                f"dimension: {describe_arguments(given.tensors)}.",
                f"Leave {flag} out, or name the dimension: {dimension} INPUT=DIMENSION",
            )
    inputs = resized(given.tensors, dims, {**sizes, **named})
    return replace(source, example_inputs=given.filled(inputs))


_FLAGS = {BATCH: ("--micro-batch-size", "--batch-dim"), SEQUENCE: ("--seq", "--sequence-dim")}


def capture_source(source: ModelSource, options: PartitionOptions) -> Capture:
    """The graph of the model, not yet compared with it: `verify` compares more."""
    return capture_model(
        source.model,
        source.example_inputs,
        batch_dim=options.batch_dim,
        sequence_dim=options.sequence_dim,
        leaves=options.leaves,
        check=False,
        method=options.capture,
        mode=options.mode,
    )
