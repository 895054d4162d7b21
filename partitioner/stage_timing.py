"""Stages of a captured model -> the time of each one's forward and backward, as a rank runs it.

The time of a stage is not the sum of its operations: it includes the gaps between them and their
effects on each other's memory and caches. The timing therefore runs the generated code of the
stage: received values are leaves, gradients arrive at the tensors that it sends, gradients of
weights accumulate, and as many micro-batches are in flight as in the schedule. Ranks of one machine
share its memory and caches, so as many stages as there are cores run at the same time, in threads,
and all of them are timed. Other load only ever adds to a time, and rarely to all cores alike:
unless all stages take about the time of their parts, which were measured apart, they are timed
again on other cores, and the median of the times of each counts, or a time that lies a little above
the first quartile, where they vary more than those of a calm machine do.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..runtime.executor.loading import CONSTRUCTED_IN, SkipRandomInit, default_dtype
from ..runtime.executor.recompute import ChangedTensors, WrittenArguments
from ..runtime.user_code import hashed_name, import_file
from .capture import Capture
from .capture.model_state import device_of
from .codegen import Header, extra_tensors, generate
from .profile.cache import (
    ProfileCache,
    content_key,
    is_lasting,
    mixed_precision,
    threads_set,
)
from .profile.measure import Clock, clock_of
from .profile.operation_costs import NodeCost, OnProgress
from .profile.profiler import Profile, WholeTimes, state_kept
from .profile.together import CALM, together, usual_times
from .split.split import StageGraph, names_of_outputs

_LEAST_LAPS, _LAPS = 2, 4
_APART, _TOGETHER = 0.06, 0.10  # of the times of parts: of one stage, and of all


@dataclass(frozen=True)
class StageTiming:
    """The conditions under which stages are timed.

    device: where the stages compute; None for the model's device
    at_once: the number of stages that compute at the same time on this machine's cores
    threads: threads of each stage; None for torch's own number
    dtype: the dtype of a rank's computations
    enough_ms: a stage is timed for so many milliseconds, or until its times hardly vary
    long_s: after two laps over all stages, none begins that would end after so many seconds
    cache: stages in it are not timed again
    content: identifies the computation of each node in the cache
    costs: measured costs of the nodes; stages that take as long are timed no more. None: not known
    """

    device: torch.device | None = None
    at_once: int = 1
    threads: int | None = None
    dtype: str = "float32"
    enough_ms: float = 2000.0
    long_s: float = 4.0
    cache: ProfileCache | None = None
    content: Mapping[str, str] = field(default_factory=dict)
    costs: Mapping[str, NodeCost] | None = None

    def sums_ms(self, stages: Sequence[StageGraph]) -> list[float]:
        """The time of each stage by the costs of its nodes; 0 where they are not known."""
        costs = self.costs or {}
        return [
            sum(_work_ms(costs[node.name]) for node in stage.nodes if node.name in costs)
            for stage in stages
        ]


def time_stages(
    captured: Capture,
    stages: Sequence[StageGraph],
    in_flight: Sequence[int],
    timing: StageTiming | None = None,
    *,
    on_progress: OnProgress | None = None,
) -> tuple[WholeTimes, ...]:
    """Runs each stage on the device, and returns its usual times.

    The inputs are those of the capture, at the size of one micro-batch. `in_flight` is the number
    of micro-batches that each stage holds between forward and backward. The model is unchanged
    afterwards.
    """
    timing = timing or StageTiming()
    cache = timing.cache
    keys = [
        _key(stage, count, timing) if cache else None
        for stage, count in zip(stages, in_flight, strict=True)
    ]
    known = [_known(cache, key) for key in keys]
    if None not in known:
        return tuple(times for times in known if times)
    sums_ms = timing.sums_ms(stages)
    with threads_set(timing.threads), state_kept(captured):
        benches = _benches(captured, stages, timing)
        begin = [partial(bench.run, count) for bench, count in zip(benches, in_flight, strict=True)]
        try:
            times = _timed(begin, known, sums_ms, timing, on_progress)
        except Exception:
            if timing.at_once == 1:
                raise
            # Ranks are processes; in threads, code of the model that is not thread-safe may fail.
            times = _timed(begin, known, sums_ms, replace(timing, at_once=1), on_progress)
    for key, whole in zip(keys, times, strict=True):
        if cache and key:
            cache.put(key, [whole.forward_ms, whole.backward_ms, whole.spread])
    return times


def _benches(captured: Capture, stages: Sequence[StageGraph], timing: StageTiming) -> list[_Bench]:
    """The stages, each with the inputs that it receives."""
    device = timing.device or device_of(captured.model)
    values = {
        name: value.to(device, copy=True) for name, value in captured.arguments.tensors.items()
    }
    benches = []
    for stage, module in zip(stages, _modules(captured, stages, device), strict=True):
        benches.append(_Bench(captured, stage, module, values, device, timing.dtype))
        values |= benches[-1].sent()
    return benches


def _timed(
    begin: Sequence[Callable[[], Iterator[WholeTimes]]],
    known: Sequence[WholeTimes | None],
    sums_ms: Sequence[float],
    timing: StageTiming,
    on_progress: OnProgress | None,
) -> tuple[WholeTimes, ...]:
    """The known or usual times of each stage, groups of `at_once` stages by turns; `begin` begins
    the runs of each stage with a warm-up round. Groups without a new stage, or timed for long
    enough, are left out; times close to `sums_ms` are enough for all."""
    is_new = [stored is None for stored in known]
    samples: list[list[WholeTimes]] = [[] for _ in begin]
    times: tuple[WholeTimes, ...] = ()
    begun_s = monotonic()
    for lap in range(_LAPS):
        for first in range(0, len(begin), timing.at_once):
            group = _shared_out(
                [(first + ahead) % len(begin) for ahead in range(timing.at_once)], sums_ms
            )
            if any(
                is_new[index]
                and (lap < _LEAST_LAPS or not _is_enough(samples[index], timing.enough_ms))
                for index in group
            ):
                runs = [begin[index]() for index in group]
                of_group = together(runs, timing.enough_ms / _LAPS, timing.threads, turn=lap)
                for index, times_of_one in zip(group, of_group, strict=True):
                    samples[index] += times_of_one
            if on_progress and lap == 0:
                on_progress(min(first + timing.at_once, len(begin)), len(begin))
        times = tuple(
            stored or usual_times(of_stage) for stored, of_stage in zip(known, samples, strict=True)
        )
        laps = lap + 1
        next_s = (monotonic() - begun_s) * (laps + 1) / laps
        if _agree(times, sums_ms) or (laps >= _LEAST_LAPS and next_s > timing.long_s):
            break
    return times


def _shared_out(group: Sequence[int], sums_ms: Sequence[float]) -> list[int]:
    """The stages of a group in an order in which `together` gives each core about as much work: by
    their times, forth over the cores and back."""
    cores = os.cpu_count() or 1
    ordered = sorted(group, key=lambda index: -sums_ms[index])
    rows = [ordered[first : first + cores] for first in range(0, len(ordered), cores)]
    return [index for turn, row in enumerate(rows) for index in row[:: -1 if turn % 2 else 1]]


def _agree(times: Sequence[WholeTimes], sums_ms: Sequence[float]) -> bool:
    """True if the stages take as long as their parts, and as long as one another relative to them:
    load that one of the two measurements met would show."""
    if not all(sums_ms):
        return False
    scales = [
        (time.forward_ms + time.backward_ms) / sum_ms
        for time, sum_ms in zip(times, sums_ms, strict=True)
    ]
    usual = statistics.fmean(scales)
    return abs(usual - 1) <= _TOGETHER and all(
        abs(scale - usual) <= _APART * usual for scale in scales
    )


def _is_enough(times: Sequence[WholeTimes], enough_ms: float) -> bool:
    """True if a stage has been timed for `enough_ms`, or if its times hardly vary."""
    spent_ms = sum(time.forward_ms + time.backward_ms for time in times)
    return spent_ms >= enough_ms or usual_times(times).spread <= CALM


def rescaled(
    profile: Profile, stages: Sequence[StageGraph], times: Sequence[WholeTimes]
) -> Profile:
    """The profile whose parts add up to the time of each stage.

    A node that several stages compute counts in each of them, and is scaled with the first.
    """
    nodes = dict(profile.nodes)
    done: set[str] = set()
    scales = []
    for stage, time in zip(stages, times, strict=True):
        own = [node.name for node in stage.nodes if node.name in nodes and node.name not in done]
        again = [nodes[node.name] for node in stage.nodes if node.name in done]
        parts_ms = sum(_work_ms(nodes[name]) for name in own) + sum(map(_work_ms, again))
        scales.append((time.forward_ms + time.backward_ms) / parts_ms if parts_ms else 1.0)
        done.update(own)
        forward = _ratio(
            time.forward_ms - sum(cost.forward_ms for cost in again),
            sum(nodes[name].forward_ms for name in own),
        )
        backward = _ratio(
            time.backward_ms - sum(cost.backward_ms for cost in again),
            sum(nodes[name].backward_ms for name in own),
        )
        for name in own:
            cost = nodes[name]
            nodes[name] = replace(
                cost,
                forward_ms=cost.forward_ms * forward,
                backward_ms=cost.backward_ms * backward,
            )
    return replace(profile, nodes=MappingProxyType(nodes), stage_scales=tuple(scales))


def _known(cache: ProfileCache | None, key: str | None) -> WholeTimes | None:
    stored = cache.get(key) if cache and key else None
    return None if stored is None else WholeTimes(*stored)


def _key(stage: StageGraph, in_flight: int, timing: StageTiming) -> str | None:
    """A stable cache key for the times of the stage, if all of its operations have one."""
    outputs = [node.name for node in stage.outputs]
    lines = [f"one of {timing.at_once} stages at once, with {in_flight} in flight of {outputs}"]
    lines += [f"{node.format_node()} {timing.content.get(node.name, '')}" for node in stage.nodes]
    text = "\n".join(lines)
    return content_key(text) if is_lasting(text) else None


def _work_ms(cost: NodeCost) -> float:
    return cost.forward_ms + cost.backward_ms


def _ratio(whole_ms: float, parts_ms: float) -> float:
    return max(0.0, whole_ms) / parts_ms if parts_ms else 1.0


def _modules(
    captured: Capture, stages: Sequence[StageGraph], device: torch.device
) -> list[nn.Module]:
    """The stages as they are generated, on the model's own parameters if those are on the device,
    otherwise on copies."""
    files = generate(captured, stages, Header(model="", command="", version=""))
    constants = extra_tensors(captured, stages)
    modules: list[nn.Module] = []
    with tempfile.TemporaryDirectory() as folder, SkipRandomInit(), default_dtype(CONSTRUCTED_IN):
        for stage in stages:
            path = Path(folder) / f"stage_{stage.index}.py"
            path.write_text(files[path.name], encoding="utf-8")
            code = import_file(path, hashed_name("asyncpipe_timed", path))
            modules.append(getattr(code, f"Stage{stage.index}")())
    for module in modules:
        adopt(module, captured.model, constants, device)
    return modules


class _Bench:
    """One stage with its inputs."""

    def __init__(
        self,
        captured: Capture,
        stage: StageGraph,
        module: nn.Module,
        values: Mapping[str, Any],
        device: torch.device,
        dtype: str,
    ) -> None:
        self.stage, self.module = stage, module.train()
        self.device, self.dtype = device, dtype
        self.clock: Clock = clock_of(device)
        self.received = [values[_name(node)] for node in stage.inputs]
        self.takes_gradient = [node.op != "placeholder" and _learns(node) for node in stage.inputs]
        self.roots = _roots(captured, stage)
        changed = {*captured.changed, *captured.changed_buffers}
        own = (*module.named_parameters(), *module.named_buffers())
        self.changed = ChangedTensors(module, [name for name, _ in own if name in changed])
        self.written = WrittenArguments(list(map(_name, stage.inputs)))

    def sent(self) -> dict[str, Tensor]:
        """The tensors that the stage sends for a micro-batch."""
        return {name: value.detach() for name, value in self._outputs().items()}

    def run(self, in_flight: int) -> Iterator[WholeTimes]:
        """Runs forward and backward endlessly; yields the times of both. Gradients are there before
        the first run: they accumulate, as over the micro-batches of a step."""
        for module in self.module.modules():
            for parameter in module.parameters(recurse=False):
                is_dense = parameter.requires_grad and not getattr(module, "sparse", False)
                if is_dense and parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter).zero_()  # takes the memory now
        waiting: deque[list[Tensor]] = deque()
        while True:
            start = self.clock.mark()
            waiting.append(self._forward())
            forward_ms = self.clock.ms(start, self.clock.mark())
            if len(waiting) == in_flight:
                yield WholeTimes(forward_ms, self._backward(waiting))

    def _leaves(self) -> tuple[Tensor, ...]:
        wanted = zip(self.received, self.takes_gradient, strict=True)
        return tuple(value.detach().requires_grad_(learns) for value, learns in wanted)

    def _outputs(self) -> dict[str, Tensor]:
        with (
            mixed_precision(self.dtype, self.device.type),
            self.written.guarded(self._leaves()) as arguments,
        ):
            result = self.module(*arguments)
        outputs = [result] if len(self.stage.outputs) == 1 else list(result or ())
        return dict(zip(map(_name, self.stage.outputs), outputs, strict=True))

    def _forward(self) -> list[Tensor]:
        """The tensors of a micro-batch at which its backward starts."""
        with self.changed.saved_apart():
            named = self._outputs()
        return [named[name] for name in self.roots if named[name].requires_grad]

    def _backward(self, waiting: deque[list[Tensor]]) -> float:
        roots = waiting.popleft()
        seeds = [torch.ones_like(root) for root in roots]
        start = self.clock.mark()
        if roots:
            torch.autograd.backward(roots, seeds)
        del roots
        return self.clock.ms(start, self.clock.mark())


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "placeholder" else node.name


def _learns(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.requires_grad


def _roots(captured: Capture, stage: StageGraph) -> list[str]:
    """The outputs at which backward starts: the sent tensors that have a gradient, and the loss, or
    without a loss all outputs of the model."""
    returned = names_of_outputs(captured)
    (output,) = captured.graph.find_nodes(op="output")
    losses = {node for node, name in returned.items() if name == "loss"}
    later = {
        node for node in stage.outputs if set(node.users) - {*stage.nodes, output} and _learns(node)
    }
    ends = losses or set(output.all_input_nodes)
    return [_name(node) for node in stage.outputs if node in later | ends and _learns(node)]


def adopt(
    stage: nn.Module,
    model: nn.Module,
    constants: Mapping[str, Tensor],
    device: torch.device | None = None,
) -> None:
    """Gives the stage the model's own parameters and copies of its buffers and constants, on the
    device, by default the model's. Parameters that are elsewhere are copied there."""
    device = device or device_of(model)
    own = dict(model.named_parameters(remove_duplicate=False))
    given = {**dict(model.named_buffers(remove_duplicate=False)), **constants}
    moved: dict[int, Tensor] = {}
    for name, _ in list(stage.named_parameters(remove_duplicate=False)):
        there = own[name].to(device)
        if there is not own[name]:
            there = moved.setdefault(
                id(own[name]), nn.Parameter(there.detach(), own[name].requires_grad)
            )
        _put(stage, name, there)
    with torch.no_grad():
        for name, buffer in list(stage.named_buffers()):
            if name not in given:  # the stage's constructor makes it
                _put(stage, name, buffer.to(device))
            elif buffer.shape != given[name].shape or buffer.device != device:
                # A forward has replaced it, or the constructor has made it on the CPU.
                _put(stage, name, given[name].to(device, copy=True))
            else:
                buffer.copy_(given[name])


def _put(stage: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(stage.get_submodule(path), leaf, tensor)
