"""Predicted and measured times of stages and steps, and memory, rank by rank.

Every plan is run with one process per stage, each with one thread, under 1f1b over gloo. The time
of a stage is the CPU time of its process in forwards and backwards; the time of a step is wall
time. With `--other-cuts` five plans of two stages are made for each model: the planner's own, and
four with other cuts; the plan that is predicted to be fastest should be fastest. Simulated steps
have the measured optimizers. On a shared machine some minutes are a tenth slower than others:
before every step that counts, the planner's timing of the stages is repeated, and medians are
compared. Three steps count at least, and up to twelve of short ones, until they take 24 s.

Times come from processes that keep all memory: a virtual machine may return freed memory to its
host, and get it back at 3 us a page, ten times the usual cost of a page. Memory is the most that a
process held beyond its memory before it loaded its stage, in a separate short run whose allocator
immediately returns freed memory: otherwise glibc keeps an extra tenth.

    python benchmarks/prediction.py                        all; results/prediction.json
    python benchmarks/prediction.py --models gpt2 --stages 2 --other-cuts
    python benchmarks/prediction.py --models gpt2 --stages 2 --quick
    python benchmarks/prediction.py --stages 4 --at-once 2    results/prediction_at_once_2.json
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from machine import RESULTS, write_result
from ranks import CORES, KEEPS_ALL, run, run_for_memory

from asyncpipe.partitioner import profiling
from asyncpipe.partitioner.capture import Capture, capture
from asyncpipe.partitioner.compile import partition_source
from asyncpipe.partitioner.models.load import ModelSource, load_model
from asyncpipe.partitioner.planning.options import PartitionOptions
from asyncpipe.partitioner.profile.profiler import Profile, WholeTimes, profile
from asyncpipe.partitioner.stage_timing import StageTiming
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.plan.forecast import forecast_step
from asyncpipe.runtime.plan.plan import Plan

HERE = Path(__file__).parent
SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"micro_batch_size": 1, "seq": 128},
    "bert-base-uncased": {"micro_batch_size": 1, "seq": 128},
    "t5-small": {"micro_batch_size": 2, "seq": 128},
    "resnet50": {"micro_batch_size": 2},
    "wide-resnet50": {"micro_batch_size": 1},
    "gpt.py:build": {},
    "llama.py:build": {},
    "t5.py:build": {},
    "images.py:resnet": {},
    "images.py:vit": {},
}
"""The published models, and those of the throughput benchmarks."""
COUNTED_MS = 24e3
"""The time of the steps that count, where a step is short."""
SHIFTS = (-0.2, -0.1, 0.1, 0.2)
"""Distances of the other plans' cuts from the middle of the model's time."""


class Retiming:
    """Repeats the planner's timing of the stages of the latest plan, also of one that the planner
    chose without another timing."""

    def __init__(self) -> None:
        self._refined, self._time = profiling.refined, profiling.time_stages
        self._again: Callable[[], Sequence[WholeTimes]] = tuple
        self._times: list[Sequence[WholeTimes]] = []
        profiling.refined, profiling.time_stages = self._chosen, self._timed

    def _timed(
        self,
        captured: Capture,
        stages: Any,
        in_flight: Sequence[int],
        timing: StageTiming,
        **rest: Any,
    ) -> Sequence[WholeTimes]:
        self._timing = timing
        return self._time(captured, stages, in_flight, timing, **rest)

    def _chosen(self, *arguments: Any) -> tuple[Profile, profiling.Cut]:
        costs, chosen = self._refined(*arguments)
        self._again = partial(
            self._time,
            chosen.captured,
            chosen.stages,
            [1 if load.recomputes else load.in_flight for load in chosen.solution.loads],
            replace(self._timing, cache=None),
        )
        self._times = []
        return costs, chosen

    def once(self) -> None:
        self._times.append(self._again())

    def on(self, plan: Plan) -> Plan:
        """The plan with the medians of the repeated timings."""
        stages = [
            replace(
                stage,
                forward_ms=statistics.median(times[index].forward_ms for times in self._times),
                backward_ms=statistics.median(times[index].backward_ms for times in self._times),
            )
            for index, stage in enumerate(plan.stages)
        ]
        return replace(plan, stages=tuple(stages))


RETIMING = Retiming()


def compare(
    source: ModelSource,
    folder: Path,
    stages: int,
    arguments: argparse.Namespace,
    *,
    cut_at: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Plans, runs, and compares both; memory only for the planner's own plans."""
    micro_batches = arguments.micro_batches
    options = PartitionOptions(
        stages=stages,
        output=folder,
        threads=1,
        cut_at=cut_at,
        schedule="1f1b",
        micro_batches=micro_batches,
    )
    plan = partition_source(source, options)
    inputs = read_inputs(source, plan)
    once_ms = forecast_step(plan, "1f1b", micro_batches, processors=CORES).step_ms
    steps = arguments.steps or max(3, min(12, math.ceil(COUNTED_MS / once_ms)))
    ranks = run(folder, inputs, micro_batches, arguments.warm_up, steps, RETIMING.once)
    plan = RETIMING.on(plan)
    simulated = forecast_step(
        plan,
        "1f1b",
        micro_batches,
        processors=CORES,
        step_ms=[rank["optimizer_ms"] for rank in ranks],
    ).step_ms
    row: dict[str, Any] = {
        "cuts": [" ".join(stage.modules) for stage in plan.stages],
        "stage_scales": plan.profile["stage_scales"],
        "step_ms": pair(simulated, statistics.median(rank["step_ms"] for rank in ranks)),
        "stage_ms": [
            pair(stage.forward_ms + stage.backward_ms, rank["stage_ms"])
            for stage, rank in zip(plan.stages, ranks, strict=True)
        ],
        "steps": steps,
        "optimizer_ms": [round(rank["optimizer_ms"], 2) for rank in ranks],
        "others_share": round(max(rank["others_share"] for rank in ranks), 3),
    }
    if not cut_at:
        row["peak_mib"] = [
            pair(stage.peak_bytes / 2**20, rank["peak_bytes"] / 2**20)
            for stage, rank in zip(
                plan.stages, run_for_memory(folder, inputs, micro_batches), strict=True
            )
        ]
    return row


def read_inputs(source: ModelSource, plan: Plan) -> dict[str, torch.Tensor]:
    """The model inputs by the plan's names; the examples have the size of a micro-batch."""
    captured = captured_of(source)
    return {spec.name: captured.arguments.tensors[spec.name] for spec in plan.inputs}


_CAPTURED: dict[int, Capture] = {}


def captured_of(source: ModelSource) -> Capture:
    if id(source) not in _CAPTURED:
        _CAPTURED.clear()
        _CAPTURED[id(source)] = capture(source.model, source.example_inputs, check=False)
    return _CAPTURED[id(source)]


def pair(predicted: float, measured: float) -> dict[str, float]:
    return {
        "predicted": round(predicted, 2),
        "measured": round(measured, 2),
        "error": round(predicted / measured - 1, 4),
    }


def other_cuts(source: ModelSource) -> list[str]:
    """Blocks before which the model's time is nearest to the shifted middles."""
    captured = captured_of(source)
    costs = profile(
        captured, captured.arguments.tensors, threads=1, cached=True, whole_up_to_ms=0.0
    )
    before = starts_of_blocks(captured, costs)
    found: list[str] = []
    for shift in SHIFTS:
        free = {name: share for name, share in before.items() if name not in found}
        found.append(min(free, key=lambda name: abs(free[name] - 0.5 - shift)))
    return found


def starts_of_blocks(captured: Capture, costs: Profile) -> dict[str, float]:
    """Each module of a list, and the fraction of the time before it."""
    total = costs.forward_ms + costs.backward_ms
    shares: dict[str, float] = {}
    spent = 0.0
    for node in captured.graph.nodes:
        for call in node.meta.get("calls", ()):
            if call.path.rpartition(".")[2].isdigit() and spent:
                shares.setdefault(call.path, spent / total)
        if node.name in costs.nodes:
            spent += costs.nodes[node.name].forward_ms + costs.nodes[node.name].backward_ms
    return shares


def candidates(
    source: ModelSource, folder: Path, best: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    """The planner's own plan of two stages, and four with other cuts."""
    plans = {"auto": best}
    for name in other_cuts(source):
        try:
            plans[name] = compare(source, folder / name, 2, arguments, cut_at=(name,))
        except AsyncPipeError as error:
            print(f"  no cut before {name}: {error.what}")
    steps = {name: plan["step_ms"] for name, plan in plans.items()}
    predicted = min(steps, key=lambda name: steps[name]["predicted"])
    measured = min(steps, key=lambda name: steps[name]["measured"])
    behind = steps[predicted]["measured"] / steps[measured]["measured"] - 1
    print(
        f"  best of {len(steps)}: predicted {predicted}, measured {measured}"
        + (f" ({behind:.1%} faster)" if behind else "")
    )
    return {
        "steps": steps,
        "predicted_best": predicted,
        "measured_best": measured,
        "behind": round(behind, 4),
        "plans": {name: plan for name, plan in plans.items() if name != "auto"},
    }


def worst(row: dict[str, Any], what: str) -> float:
    figures = row[what] if isinstance(row[what], list) else [row[what]]
    return max((figure["error"] for figure in figures), key=abs)


def show(model: str, stages: int, row: dict[str, Any]) -> None:
    times = ", ".join(f"{s['predicted']:.0f}/{s['measured']:.0f}" for s in row["stage_ms"])
    memory = ", ".join(f"{p['predicted']:.0f}/{p['measured']:.0f}" for p in row["peak_mib"])
    step = row["step_ms"]
    print(
        f"{model:18} {stages}  stages {times} ms ({worst(row, 'stage_ms'):+.1%})  "
        f"step {step['predicted']:.0f}/{step['measured']:.0f} ms ({step['error']:+.1%})  "
        f"peak {memory} MiB ({worst(row, 'peak_mib'):+.1%})  others {row['others_share']:.0%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, help="steps that count; default: 3 to 12")
    parser.add_argument("--other-cuts", action="store_true", help="four more plans of each model")
    parser.add_argument("--at-once", type=int, help="stages timed at once; default: the planner's")
    parser.add_argument("--quick", action="store_true", help="a quarter of the steps")
    arguments = parser.parse_args()
    if not KEEPS_ALL.items() <= os.environ.items():
        os.environ.update(KEEPS_ALL)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    if arguments.quick:
        arguments.micro_batches, arguments.warm_up, arguments.steps = 4, 1, 1
    name = "prediction"
    if arguments.at_once:
        profiling._at_once = lambda cut, measured: min(arguments.at_once, len(cut.stages))
        name += f"_at_once_{arguments.at_once}"
    print("predicted/measured (worst error)")
    rows = []
    for model in arguments.models:
        spec = str(HERE / model) if ":" in model else model
        source = load_model(spec, **SIZES[model])
        for stages in arguments.stages:
            with tempfile.TemporaryDirectory() as temporary:
                row = compare(source, Path(temporary) / "auto", stages, arguments)
                show(model, stages, row)
                if stages == 2 and arguments.other_cuts:
                    row["candidates"] = candidates(source, Path(temporary), row, arguments)
            rows.append({"model": model, "stages": stages, **SIZES[model], **row})
    summary = {
        what: max(abs(worst(row, what)) for row in rows)
        for what in ("stage_ms", "step_ms", "peak_mib")
    }
    print("largest error:  " + "  ".join(f"{what} {error:.1%}" for what, error in summary.items()))
    if not arguments.quick:
        file = RESULTS / f"{name}.json"
        kept = json.loads(file.read_text())["rows"] if file.exists() else []
        earlier = {(row["model"], row["stages"]): row for row in kept}
        for row in rows:
            before = earlier.pop((row["model"], row["stages"]), {})
            if "candidates" in before:
                row.setdefault("candidates", before["candidates"])
        rows += earlier.values()
        order = list(SIZES)
        rows.sort(key=lambda row: (order.index(row["model"]), row["stages"]))
        figures = {"micro_batches": arguments.micro_batches, "schedule": "1f1b", "rows": rows}
        write_result(name, figures)


if __name__ == "__main__":
    main()
