"""The user's profile options -> the profile, measured here or predicted for a device.

This module also refines a cut: it times the stages of a plan and makes the plan again from these
times. A plan is made from the costs of operations; its stages are timed as wholes; the costs of
each stage are scaled to its time; and the planner runs again with these costs. If no cut moves,
costs and plan agree. If cuts move for a gain, the new stages are timed too. The plan is always the
best for the profile that is returned with it.

Two cuts of one model do the same work, so different sums of their stage times mean that the machine
was faster during one timing: each timing counts relative to its own sum. A profile that agrees with
several timings is found by scaling to each of them repeatedly, which is iterative proportional
fitting (Deming, Stephan: "On a least squares adjustment of a sampled frequency table when the
expected marginal totals are known", 1940).

After an exception in profiling or verification, `backward_failure` finds out whether the model's
own backward is the cause.
"""

from __future__ import annotations

import os
import re
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..runtime.errors import AsyncPipeError, CaptureError, PlanError
from ..runtime.process import keep_freed_memory
from ..runtime.user_code import is_own_file, own_line
from .capture import Capture, read_arguments
from .capture.arguments import plain_structure
from .capture.model_state import device_of, is_on_meta, without_cache
from .graph.build import build_graph, stage_of_nodes, with_copies
from .graph.problem import Problem
from .graph.rematerialize import Prices, Recomputation
from .graph.tensor_sums import TensorSums
from .planning.cluster import Cluster
from .planning.infeasible import explained
from .planning.options import PartitionOptions
from .planning.planner import Planner, with_times_on
from .planning.solve import Solution
from .planning.step_time import step_of
from .profile.cache import ProfileCache
from .profile.operation_costs import OnProgress
from .profile.profiler import (
    CPU_CORE,
    TIMED_UP_TO_MS,
    Profile,
    WholeTimes,
    profile,
    profile_analytic,
)
from .profile.roofline import DeviceSpec, calibrated, device_spec, this_cpu
from .split.last_outputs import with_last_outputs
from .split.split import StageGraph, split
from .split.ssa import separated
from .split.whole_boundaries import with_whole_boundaries
from .stage_timing import StageTiming, rescaled, time_stages

_WORTH = 0.02
"""The gain, as a share of the objective, that a new plan must promise before it is timed."""
_SWEEPS = 10
_LONG_S, _LONG_TIMING_S = 15.0, 4.0
"""Seconds in all, and of timing: no further plan is timed after the former, or if its timing would
end after the latter."""
_PER_CORE = 2
"""Stages timed at once on each core, at most: two stages displace each other's data from the core's
caches, as ranks that share a core do. The limit bounds the memory of the timing."""


@dataclass(frozen=True)
class Cut:
    """A captured model cut into stages.

    captured: the capture
    stages: the graphs of the stages
    placed: the stage of every node
    graph: the cost graph that was planned on
    solution: the result of the planner
    """

    captured: Capture
    stages: tuple[StageGraph, ...]
    placed: Mapping[fx.Node, int]
    graph: nx.DiGraph
    solution: Solution


@dataclass(frozen=True)
class CostGraphs:
    """The cost graphs of one captured model, for any profile of it.

    recomputation: the values that stages may recompute instead of receiving
    together: nodes that must be in one stage
    cached: nodes whose results a cache has, so that their forward takes no time. A timed stage runs
        them: its time is shared out among all of its nodes.
    read_together: the outputs that a criterion outside the model reads, in the program's order
    predicted: the graphs of other kinds of devices
    sums: the sums over tensor ranks
    """

    capture: Capture
    name: str
    recomputation: Recomputation
    together: Collection[Collection[fx.Node]]
    update_ms_per_byte: float
    cached: Collection[str] = ()
    read_together: Sequence[fx.Node] = ()
    predicted: Mapping[str, nx.DiGraph] = field(default_factory=dict)
    sums: TensorSums = field(default_factory=TensorSums)

    def predicted_for(self, cluster: Cluster | None, dtype: str) -> CostGraphs:
        """A copy with a predicted graph for each kind of device of the cluster."""
        kinds = {device.kind for device in (cluster.devices if cluster else ()) if device.kind}
        inputs = self.capture.arguments.tensors
        predicted = {
            kind: self._of(profile_analytic(self.capture, inputs, device_spec(kind), dtype=dtype))
            for kind in sorted(kinds)
        }
        return replace(self, predicted=predicted)

    def of(self, profile: Profile) -> nx.DiGraph:
        """The graph that is planned on: with all devices, and the sums over tensor ranks."""
        return self.sums.added(with_times_on(self._of(profile), self.predicted))

    def _of(self, profile: Profile) -> nx.DiGraph:
        return build_graph(
            self.capture,
            profile.without_forward(self.cached),
            self.name,
            again=self.recomputation,
            together=self.together,
            update_ms_per_byte=self.update_ms_per_byte,
            read_together=self.read_together,
        )

    def cut(self, planner: Planner, prices: Prices, profile: Profile) -> Cut:
        """The stages of the best plan for a profile."""
        graph = self.of(profile)
        with explained():
            solution = planner.plan(graph)
        placed = stage_of_nodes(self.capture, graph, solution.stage_of, self.recomputation)
        divided, placed = separated(self.capture, placed)
        if self.read_together:
            divided, placed = with_last_outputs(divided, placed)
        divided, placed = with_whole_boundaries(divided, placed)
        stage_graphs = split(divided, placed, Recomputation(divided, prices))
        return Cut(divided, stage_graphs, placed, graph, solution)


def refined(
    cut: Callable[[Profile], Cut],
    profile: Profile,
    time: Callable[[Cut, float], Sequence[WholeTimes]],
    *,
    rounds: int = 3,
) -> tuple[Profile, Cut]:
    """Cuts and times the stages repeatedly, `rounds` times at most, and until it has taken long:
    `time` also gets the seconds that are left for it.

    The groups that `cut` places are the same for every profile.
    """
    current = cut(profile)
    timed: list[tuple[Cut, Sequence[WholeTimes]]] = []
    started_s, left_s = monotonic(), _LONG_TIMING_S
    for _ in range(rounds):
        begun_s = monotonic()
        timed.append((current, time(current, left_s)))
        took_s = monotonic() - begun_s
        left_s -= took_s
        fitted = _fitted(profile, timed)
        after = cut(fitted)
        if any(_same(after, one) for one, _ in timed):
            break
        if left_s < took_s or monotonic() - started_s > _LONG_S:
            break
        stays_ms = _objective_ms(current.solution, after.solution.problem)
        if after.solution.objective_ms > (1 - _WORTH) * stays_ms:
            break
        current = after
    return fitted, after


def _fitted(profile: Profile, timed: Sequence[tuple[Cut, Sequence[WholeTimes]]]) -> Profile:
    """The profile whose parts add up to all timings as closely as possible, and to the last timing
    exactly."""
    usual_ms = statistics.median(_sum_ms(times) for _, times in timed)
    scaled = [
        (cut, [time.scaled(usual_ms / (_sum_ms(times) or 1.0)) for time in times])
        for cut, times in timed
    ]
    fitted = profile
    for cut, _ in scaled:
        fitted = with_copies(fitted, cut.captured)
    parts = fitted
    for _ in range(_SWEEPS if len(scaled) > 1 else 1):
        for cut, times in scaled:
            fitted = rescaled(fitted, cut.stages, times)
    last, times = scaled[-1]
    return replace(
        fitted,
        stage_scales=rescaled(parts, last.stages, times).stage_scales,
        spread=statistics.fmean(time.spread for time in times),
    )


def _sum_ms(times: Sequence[WholeTimes]) -> float:
    return sum(time.forward_ms + time.backward_ms for time in times)


def _same(cut: Cut, other: Cut) -> bool:
    first, second = cut.solution.placement, other.solution.placement
    return (first.stage_of, first.ranks_of_stage) == (second.stage_of, second.ranks_of_stage)


def _objective_ms(solution: Solution, problem: Problem) -> float:
    """The objective of the placement of `solution` under the costs of `problem`."""
    step = step_of(problem, replace(solution.placement, bound_ms=None, order_optimum_ms=None))
    is_asynchronous = problem.setting.is_asynchronous
    return step.evaluation.bottleneck_ms if is_asynchronous else step.step_ms


_HERE = ("cpu", "cuda")


def check_profile(options: PartitionOptions) -> None:
    """Raises PlanError if the device is unknown or cannot compute in the dtype."""
    if options.device not in (None, *_HERE):
        device_spec(options.device).flops(options.dtype)


def profile_capture(
    captured: Capture,
    options: PartitionOptions,
    stages: int,
    *,
    whole: bool = True,
    on_progress: OnProgress | None = None,
) -> Profile:
    """The costs of a captured model, for ranks of one stage each; with `whole` they add up to the
    time of the whole model.

    Without `options.profile` costs are measured, except for a model on meta and for a device that
    this machine does not have. Raises PlanError for options that do not fit each other or the
    machine.
    """
    check_profile(options)
    inputs = captured.arguments.tensors
    cores = os.cpu_count() or 1
    threads = options.threads or max(1, cores // stages)
    if _kind(captured, options) == "analytic":
        spec = _spec(options, threads)
        return profile_analytic(
            captured, inputs, spec, dtype=options.dtype, on_progress=on_progress
        )
    if options.calibrate:
        raise PlanError(
            "--calibrate fits a predicted profile to this machine, and this one is measured.",
            "Add --profile analytic, or leave --calibrate out.",
        )
    own = device_of(captured.model).type
    device = options.device or (own if own in _HERE else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise PlanError(
            "--device cuda: torch finds no CUDA device here to measure on.",
            "Predict for one: --profile analytic --device a100-80g",
        )
    keep_freed_memory()  # as ranks do
    return profile(
        captured,
        inputs,
        threads=threads,
        device=device,
        dtype=options.dtype,
        whole_up_to_ms=TIMED_UP_TO_MS if whole else 0.0,
        cached=not options.no_cache,
        on_progress=on_progress,
    )


def cut_and_time(
    captured: Capture,
    cut: Callable[[Profile], Cut],
    measured: Profile,
    options: PartitionOptions,
    *,
    on_progress: OnProgress | None = None,
) -> tuple[Profile, Cut]:
    """The cut for a profile, and the profile that agrees with the times of its stages.

    The stages are timed as wholes where that is possible: the model takes at most `TIMED_UP_TO_MS`
    a micro-batch, its stages can be written as code, and the device has memory for them.
    """
    is_quick = measured.forward_ms + measured.backward_ms <= TIMED_UP_TO_MS
    if measured.kind != "measured" or not is_quick or is_on_meta(captured.model):
        return measured, cut(measured)
    device = torch.device(measured.device)
    cache = ProfileCache.of(
        device,
        measured.threads,
        measured.dtype,
        read=not options.no_cache,
    )

    def time(timed_cut: Cut, left_s: float) -> Sequence[WholeTimes]:
        timing = StageTiming(
            device=device,
            at_once=_at_once(timed_cut, measured),
            threads=measured.threads,
            dtype=measured.dtype,
            long_s=left_s,
            cache=cache,
            content=measured.content,
            costs=with_copies(measured, timed_cut.captured).nodes,
        )
        # A stage that recomputes keeps the activations of one micro-batch.
        in_flight = [1 if load.recomputes else load.in_flight for load in timed_cut.solution.loads]
        return time_stages(
            timed_cut.captured, timed_cut.stages, in_flight, timing, on_progress=on_progress
        )

    try:
        costs, chosen = refined(cut, measured, time)
    # The code generator reports code that it cannot write; a GPU may have no room for a stage.
    except (PlanError, torch.OutOfMemoryError):
        return measured, cut(measured)
    cache.save()
    return costs, chosen


def _at_once(cut: Cut, measured: Profile) -> int:
    """The number of stages that compute at the same time on this machine: the ranks of a host, and
    no more than `_PER_CORE` for each core here. A rank on a GPU uses the GPU alone. With several
    threads a rank the clock is wall time, in which stages would wait for the Python of other
    stages."""
    if measured.device != "cpu" or measured.threads > 1:
        return 1
    hosts = Counter(device.host for device in cut.solution.problem.setting.devices)
    return min(_PER_CORE * (os.cpu_count() or 1), len(cut.stages), max(hosts.values()))


def _kind(captured: Capture, options: PartitionOptions) -> str:
    is_elsewhere = options.device is not None and options.device not in _HERE
    if options.profile == "measured" and is_elsewhere:
        raise PlanError(
            f"{options.device} is not here to be measured.", "Predict it: --profile analytic"
        )
    by_default = "analytic" if is_elsewhere or is_on_meta(captured.model) else "measured"
    return options.profile or by_default


def _spec(options: PartitionOptions, threads: int) -> DeviceSpec:
    """The device to predict for."""
    match options.device:
        case None if not options.calibrate:
            return CPU_CORE
        case None | "cpu":
            return calibrated(this_cpu(), torch.device("cpu"), options.dtype, threads)
        case "cuda":
            raise PlanError(
                "a prediction needs the name of a device; --device cuda could be any GPU.",
                "Name it: --device a100-80g",
            )
    spec = device_spec(options.device)
    if not options.calibrate:
        return spec
    if not torch.cuda.is_available():
        raise PlanError(
            f"--calibrate measures {spec.name}, and torch finds no CUDA device here.",
            "Leave --calibrate out.",
        )
    return calibrated(spec, torch.device("cuda"), options.dtype, threads)


_FRAME = re.compile(r'File "(.+?)", line (\d+)')


@contextmanager
def own_failure_raised(model: nn.Module, example_inputs: Mapping[str, Any]) -> Iterator[None]:
    """A context that turns an exception into a CaptureError if the model's own backward fails too,
    with the line of the author's forward that autograd cannot differentiate."""
    try:
        yield
    except Exception as error:
        is_refusal = isinstance(error, AsyncPipeError) and error.__cause__ is None
        if is_refusal or any(parameter.is_meta for parameter in model.parameters()):
            raise
        if (failure := backward_failure(model, example_inputs)) is None:
            raise
        raise CaptureError(*failure) from error


def backward_failure(model: nn.Module, example_inputs: Mapping[str, Any]) -> tuple[str, str] | None:
    """The reason why the model as its author wrote it cannot run backward on its example inputs,
    and a cure; None if it can, or if already its forward fails. Sets its gradients to None."""
    name = type(model).__name__
    given = read_arguments(model, example_inputs)
    inputs = {key: tensor.clone() for key, tensor in given.tensors.items()}
    with warnings.catch_warnings(record=True) as caught, torch.enable_grad():
        warnings.simplefilter("always")
        with torch.autograd.set_detect_anomaly(True, check_nan=False), without_cache(model):
            try:
                outputs = pytree.tree_leaves(plain_structure(given.call(model.train(), inputs)))
            except Exception:
                return None
            roots = [
                output for output in outputs if isinstance(output, Tensor) and output.requires_grad
            ]
            if not roots:
                return (
                    f"{name} cannot be trained: none of its outputs has a gradient, because each "
                    "is detached, is not a floating-point number, or depends on no parameter that "
                    "requires one.",
                    "Return a loss or logits that are computed from the parameters without "
                    "detach(), no_grad() or argmax().",
                )
            try:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            except Exception as error:
                message = str(error).split("Hint:")[0].strip().split("\n")[0]
                place = own_line(error) or _place([str(warning.message) for warning in caught])
                at = f" at {place}" if place else ""
                return (
                    f"the backward of {name} itself fails{at}: {type(error).__name__}: {message}",
                    "Make loss.backward() of the model run. An operation in place (add_, relu_, "
                    "x += 1) may not change a tensor that the backward reads: use add, relu or "
                    "x = x + 1.",
                )
            finally:
                model.zero_grad(set_to_none=True)
    return None


def _place(messages: list[str]) -> str:
    """The author's last line in the message of anomaly detection about the forward."""
    frames = [frame for message in messages for frame in _FRAME.findall(message)]
    own = [f"{file}:{line}" for file, line in frames if is_own_file(file)]
    return own[-1] if own else ""
