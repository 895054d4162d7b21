"""A model -> a folder of checked stages: load, capture, profile, plan, generate, verify."""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Unpack

from torch import nn

from .. import __version__
from ..runtime.errors import PlanError
from ..runtime.plan import Plan, portable
from ..runtime.plan_check import contradiction
from ..runtime.trust import remember
from .assemble import assemble
from .capture import Capture, Said
from .capture import capture as capture_model
from .capture.dimensions import write_said
from .capture.guards import refused_sizes
from .capture.restore import unchanged
from .capture.samples import sizes_text
from .cluster import Cluster
from .compare import ALL
from .cost import LOCALHOST
from .demands import find_demands, groups_to_cut_before
from .device_specs import device_spec
from .explain import explain as explain_plan
from .folder import check_target, write_folder
from .generate import (
    Header,
    StageCard,
    extra_tensors,
    generate,
    render_readme,
)
from .graph import build_graph, stage_of_nodes, with_copies
from .infeasible import explained
from .models import Source, load_model, name_inputs
from .options import checked
from .own_backward import own_failure_told
from .planner import cluster_of, planner_for, with_times_on
from .prices import Prices
from .profiler import Profile, profile_analytic
from .profiling import ProfileOptions, cut_and_time, profile_capture
from .recompute import Recomputation
from .report import render_report
from .running import Running, make_setting
from .settle import Cut
from .solve import PREFER_MODULES, solve
from .split import StageGraph, crossing_if_sent, homes_of, split
from .ssa import separated
from .update_cost import update_ms_per_byte
from .verify import verify
from .walk import OnProgress
from .weights import snapshot, write_weights_of
from .what_if import explain_micro_batches


class OnTick(Protocol):
    """Told at the end of each step of the work, and what follows."""

    def __call__(self, name: str, detail: str, seconds: float, following: str, /) -> None: ...


@checked
def partition(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | tuple[Any, ...],
    *,
    stages: int | None = None,
    output: str | Path | None = None,
    name: str | None = None,
    **options: Any,
) -> Plan:
    """Cuts `model` into stages and writes them to `output`; the model itself is left as it is.

    `example_inputs` are arguments of the model's forward by name (or a tuple of positional ones),
    at the size of one micro-batch: tensors, nested structures of them, constants.
    `options` are those of `partition_source`.
    Raises CaptureError when the model cannot be written down as a graph, PlanError when it
    cannot be cut so.
    """
    source = given_source(model, example_inputs, name)
    with unchanged(model):
        return partition_source(source, stages=stages, output=output, **options)


def given_source(
    model: nn.Module, example_inputs: Mapping[str, Any] | tuple[Any, ...], name: str | None = None
) -> Source:
    """A model that the caller holds, as `load_model` would have found it."""
    inputs = (
        dict(example_inputs)
        if isinstance(example_inputs, Mapping)
        else name_inputs(model, example_inputs)
    )
    kind = type(model)
    spec = f"{kind.__module__}:{kind.__name__}"
    return Source(name or kind.__name__.lower(), spec, model, inputs, "given")


@checked
def partition_spec(
    spec: str,
    *,
    stages: int | None = None,
    output: str | Path | None = None,
    model_args: Mapping[str, Any] | None = None,
    inputs: Mapping[str, str] | None = None,
    micro_batch_size: int | None = None,
    seq: int = 128,
    seed: int = 0,
    meta: bool = False,
    on_tick: OnTick | None = None,
    **options: Any,
) -> Plan:
    """`asyncpipe-partition`: finds the model that `spec` names, then `partition_source`."""
    running = {name: options[name] for name in Running.__annotations__ if name in options}
    make_setting(stages or running.get("ranks") or 1, **running)  # said before anything is loaded
    source = load_ticked(
        spec,
        on_tick,
        model_args=model_args,
        micro_batch_size=micro_batch_size,
        seq=seq,
        seed=seed,
        meta=meta,
        inputs=inputs,
    )
    return partition_source(
        source,
        stages=stages,
        output=output,
        model_args=model_args,
        on_tick=on_tick,
        **options,
    )


def load_ticked(spec: str, on_tick: OnTick | None, **options: Any) -> Source:
    """`load_model`, told as the first step of the work."""
    start = time.perf_counter()
    source = load_model(spec, **options)
    if on_tick:
        number = sum(parameter.numel() for parameter in source.model.parameters())
        detail = f"{spec} · {number / 1e6:.1f} M parameters · weights {source.weights}"
        on_tick("load", detail, time.perf_counter() - start, "capture")
    return source


@checked
def partition_source(
    source: Source,
    *,
    stages: int | None = None,
    devices: Cluster | str | Path | None = None,
    output: str | Path | None = None,
    model_args: Mapping[str, Any] | None = None,
    loss: str | None = None,
    method: str = "auto",
    granularity: str = "op",
    prefer_modules: float = PREFER_MODULES,
    profile: str | None = None,
    threads: int | None = None,
    device: str | None = None,
    dtype: str = "float32",
    calibrate: bool = False,
    no_cache: bool = False,
    leaves: Collection[str] = (),
    batch_dim: Said = "auto",
    sequence_dim: Said = "auto",
    cut_at: Sequence[str] = (),
    keep_together: Sequence[str] = (),
    capture: str = "auto",
    mode: str = "both",
    code: str = "structured",
    explain: bool = False,
    stop_after: str | None = None,
    save_weights: bool = True,
    force: bool = False,
    command: str = "",
    on_tick: OnTick | None = None,
    on_progress: OnProgress | None = None,
    **running: Unpack[Running],
) -> Plan:
    """Captures, profiles, plans, generates and verifies; writes `output` whole or not at all.

    `devices`, or a file of them, are what the plan may use; without `stages` their number is
    chosen too. `prefer_modules` is the share of the slowest stage's time that may be given up so
    that cuts fall between blocks. `output` defaults to `generated_models/<name>_<stages>p`. A
    boundary is before each module or operation that `cut_at` names; the operations of each module
    that `keep_together` names are in one stage. `batch_dim` and `sequence_dim` say which dimension
    of the inputs counts samples and tokens: one number for all, None where none does, or a number
    or None by input. `code` is "structured" or "flat". With `explain`
    the plan tells what other numbers of stages, faster links and recomputation would give. With
    `stop_after="plan"` the plan is returned and nothing is written. `profile`, `threads`, `device`,
    `dtype`, `calibrate` and `no_cache` are those of `ProfileOptions`, `running` says how the plan
    is meant to run.
    Raises CaptureError, PlanError or ModelError, each with a cure.
    """
    cluster = cluster_of(devices, stages, running.get("ranks"))
    # Each has one core of this machine, and there is at least a stage on each.
    ranks = running.get("ranks") or stages or len(cluster.devices if cluster else ())
    if stages or cluster:
        make_setting(stages or ranks, **running)  # what is wrong is said before the work
    how = ProfileOptions(profile, device, dtype, threads, calibrate, no_cache, on_progress)
    tick = Clock(on_tick)
    on_meta = any(parameter.is_meta for parameter in source.model.parameters())

    captured = capture_model(
        source.model,
        source.example_inputs,
        batch_dim=batch_dim,
        sequence_dim=sequence_dim,
        leaves=leaves,
        check=False,  # verify below compares more
        method=capture,
        mode=mode,
    )
    digest = graph_hash(captured)
    model_facts = {"model": portable(source.spec), "model_args": dict(model_args or {})}

    def target(stages: int) -> Path:
        """The folder to write, of which it is known that it may be written."""
        folder = Path(output or Path("generated_models") / f"{source.name}_{stages}p")
        if stop_after is None:
            check_target(folder, {**model_facts, "graph": digest}, force=force)
        return folder

    if stages or output:
        target(stages or ranks)
    demands = find_demands(captured, cut_at, keep_together, stages or ranks)
    tick("capture", describe_capture(captured), "profile")

    own = own_failure_told(source.model, source.example_inputs)
    measured = own(profile_capture)(captured, how, ranks, whole=False)
    tick("profile", measured.summary, "plan")

    prices = Prices.of(measured, LOCALHOST)
    again = Recomputation(captured, prices)
    together = [nodes for _, nodes in demands.together]
    optimizer = running.get("optimizer", "adamw")
    graph_of = partial(
        build_graph,
        captured,
        name=source.name,
        again=again,
        together=together,
        update_ms_per_byte=update_ms_per_byte(measured, optimizer, cached=not no_cache),
    )
    options: dict[str, Any] = {
        "method": method,
        "granularity": granularity,
        "prefer_modules": prefer_modules,
        "cut_before": groups_to_cut_before(demands, graph_of(measured)),
        **running,
    }
    kinds = sorted({one.kind for one in cluster.devices if one.kind} if cluster else ())
    predicted = {
        kind: graph_of(profile_analytic(captured, captured.arguments.tensors, spec, dtype=dtype))
        for kind, spec in zip(kinds, map(device_spec, kinds), strict=True)
    }
    graph = with_times_on(graph_of(measured), predicted)
    with explained():
        planner = planner_for(graph, cluster, stages, options)

    def cut(costs: Profile) -> Cut:
        graph = with_times_on(graph_of(costs), predicted)
        with explained():
            solution = planner.plan(graph)
        placed = stage_of_nodes(captured, graph, solution.stage_of, again)
        divided, placed = separated(captured, placed)
        stage_graphs = split(divided, placed, Recomputation(divided, prices))
        return Cut(divided, stage_graphs, placed, graph, solution)

    measured, chosen = own(cut_and_time)(captured, cut, measured, how)
    captured, stage_graphs = chosen.captured, chosen.stages
    solution = planner.advised(chosen.graph, chosen.solution)
    folder = target(stages or len(stage_graphs))
    plan = assemble(
        captured,
        stage_graphs,
        with_copies(measured, captured),
        solution,
        name=source.name,
        model=portable(source.spec),
        model_args=dict(model_args or {}),
        command=command
        or _command(
            source.spec,
            stages or len(stage_graphs),
            method,
            prefer_modules,
            {"--batch-dim": batch_dim, "--sequence-dim": sequence_dim},
            cut_at,
            keep_together,
            code,
            mode,
            running,
        ),
        criterion=loss or source.criterion,
        weights=source.weights if save_weights else "not stored",
        if_sent=crossing_if_sent(homes_of(captured.graph, chosen.placed)),
    )
    if wrong := contradiction(plan):
        raise PlanError(f"nobody could read this plan again: {wrong}.", "Give it another name.")
    # What else there could be is told of plans by one method: all would take as long each time.
    options |= {"method": "auto" if method == ALL else method}
    tick("plan", solution.summary, "explain" if explain else "generate")
    resolve = partial(solve, **options) if explain else None
    findings = explain_plan(chosen.graph, solution, planner.link, resolve)
    plan = replace(plan, findings=(*findings, *explain_micro_batches(plan)))
    if explain:
        tick("explain", f"{len(plan.findings)} findings, each evaluated or solved", "generate")
    if stop_after is not None:
        return plan

    constants = extra_tensors(captured, stage_graphs)
    plan = replace(plan, constants=tuple(constants))
    plan, files = _texts(captured, stage_graphs, plan, digest, source, code)
    tick("generate", f"{len(plan.stages)} stages, {_lines(files)} lines of Python", "verify")

    def check(aside: Path) -> None:
        verified = own(verify)(
            source.model,
            plan,
            aside,
            source.example_inputs,
            constants=constants,
            changing=captured.changed,
            refused=partial(refused_sizes, captured.graph),
        )
        tick("verify", verified.summary, "write")

    write_weights = None
    if save_weights and not on_meta:
        state = snapshot(source.model)
        write_weights = partial(write_weights_of, state=state, plan=plan, constants=constants)
    write_folder(folder, files, write_weights, check)
    remember(folder)
    tick("write", str(folder), "")
    return plan


class Clock:
    """Tells each finished step with the seconds since the one before."""

    def __init__(self, on_tick: OnTick | None) -> None:
        self._on_tick = on_tick
        self._last = time.perf_counter()

    def __call__(self, name: str, detail: str, following: str) -> None:
        now = time.perf_counter()
        if self._on_tick:
            self._on_tick(name, detail, now - self._last, following)
        self._last = now


def graph_hash(captured: Capture) -> str:
    """SHA-256 of the graph's text and of the names and shapes of its tensors."""
    state = captured.model.state_dict()
    shapes = "".join(f"{name}{tuple(tensor.shape)}" for name, tensor in state.items())
    return hashlib.sha256(f"{captured.graph}{shapes}".encode()).hexdigest()


def _texts(
    captured: Capture,
    stage_graphs: Sequence[StageGraph],
    plan: Plan,
    digest: str,
    source: Source,
    code: str,
) -> tuple[Plan, dict[str, str]]:
    """The texts of the folder, and the plan completed with their hashes."""
    total_ms = sum(stage.forward_ms + stage.backward_ms for stage in plan.stages) or 1.0
    header = Header(
        model=plan.model,
        command=plan.command,
        version=__version__,
        graph_sha256=digest,
        costs_are=f"{plan.profile['kind']} on {plan.profile['device']}",
        stages=tuple(
            StageCard(
                modules=stage.modules,
                forward_ms=stage.forward_ms,
                backward_ms=stage.backward_ms,
                share=(stage.forward_ms + stage.backward_ms) / total_ms,
                param_bytes=stage.param_bytes,
                activation_bytes=stage.activation_bytes,
                peak_bytes=stage.peak_bytes,
            )
            for stage in plan.stages
        ),
    )
    files = generate(captured, stage_graphs, header, code=code)
    plan = replace(
        plan,
        hashes={"graph": digest},
        stages=tuple(
            replace(stage, sha256=hashlib.sha256(files[stage.file].encode()).hexdigest())
            for stage in plan.stages
        ),
    )
    files |= {"README.md": render_readme(plan), "report.html": render_report(plan, files)}
    files |= {f"hf/{name}": text for name, text in source.files.items()}
    return plan, files | {"plan.json": plan.to_json()}


def _command(
    spec: str,
    stages: int,
    method: str,
    prefer_modules: float,
    dimensions: Mapping[str, Said],
    cut_at: Sequence[str],
    keep_together: Sequence[str],
    code: str,
    mode: str,
    running: Running,
) -> str:
    """The command that would have made a plan that was made from Python."""
    tokens = ["asyncpipe-partition", "--model", portable(spec), "--stages", str(stages)]
    tokens += ["--method", method] if method != "auto" else []
    tokens += ["--mode", mode] if mode != "both" else []
    if prefer_modules != PREFER_MODULES:
        tokens += ["--prefer-modules", f"{prefer_modules:g}"]
    for flag, said in dimensions.items():
        tokens += [token for text in write_said(said) for token in (flag, text)]
    tokens += [token for name in cut_at for token in ("--cut-at", name)]
    tokens += [token for name in keep_together for token in ("--keep-together", name)]
    for name, value in running.items():
        if value is not None:
            tokens += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(tokens + (["--code", code] if code != "structured" else []))


def describe_capture(captured: Capture) -> str:
    nodes = sum(1 for node in captured.graph.nodes if node.op.startswith("call"))
    where = sizes_text(captured.sizes, " at ")
    return f"{nodes} operations{where}, {'sizes stay symbolic' if where else 'all sizes fixed'}"


def _lines(files: Mapping[str, str]) -> int:
    return sum(text.count("\n") for name, text in files.items() if name.endswith(".py"))
