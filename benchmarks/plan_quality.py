"""Quality of plans on published cost graphs: ours, each method, and two chain balancers.

    python benchmarks/plan_quality.py --graphs FOLDER [--only TEXT] [--methods auto,metis]

FOLDER holds `optima.json`, `dnn-partitioning/` (throughput inputs of Tarnawski et al., NeurIPS
2020) and `pipedream/` (profiles of Narayanan et al., SOSP 2019). `published` is the setting of the
former, k accelerators and a CPU anywhere; elsewhere all k devices are alike. The load of every plan
comes from the same evaluator. Two balancers are implemented here from their descriptions, without
using the code of others:

- "block partition", as torchgpipe balances: sizes move between neighboring blocks until the
  largest and the smallest differ by at most the largest layer; transfers are ignored
- "parameter count": minimizes the largest number of parameter bytes of a stage
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from machine import write_result

from asyncpipe.partitioner.graph.cost_graph import costs_of
from asyncpipe.partitioner.graph.costs import Link
from asyncpipe.partitioner.graph.formats import read_graph
from asyncpipe.partitioner.graph.problem import Placement, Problem, Rules, evaluate
from asyncpipe.partitioner.graph.rank_model import Device, RankConfig
from asyncpipe.partitioner.solvers import METHODS
from asyncpipe.partitioner.solvers.bounds import lower_bound_ms
from asyncpipe.partitioner.solvers.exact import place_unordered
from asyncpipe.runtime.errors import PlanError

INPUTS = "dnn-partitioning/throughput-inputs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--methods", default=",".join(name for name in METHODS if name != "exact"))
    parser.add_argument("--output", default="plan_quality")
    options = parser.parse_args()
    methods = options.methods.split(",")
    rows = []
    for name, setting, problem, optimum_ms in instances(options.graphs):
        if options.only in f"{setting}/{name}":
            rows.append(row(name, setting, problem, optimum_ms, methods))
            show(rows[-1])
    seconds = sum(found["cpu_s"] for found in rows if "pipedream" not in found["setting"])
    reached = sum(abs(found["above_optimum"]) <= 2e-4 for found in rows)
    proved = sum(found["gap"] <= 2e-4 for found in rows)
    print(
        f"{len(rows)} instances, optimum reached in {reached}, proved in {proved}; all of "
        f"dnn-partitioning in {seconds:.1f} s on one core"
    )
    summary = {
        "instances": len(rows),
        "reached": reached,
        "proved": proved,
        "dnn_partitioning_cpu_s": round(seconds, 1),
        "method_above_optimum": spread(rows),
    }
    write_result(options.output, {"summary": summary, "rows": rows})


def instances(folder: Path) -> Iterator[tuple[str, str, Problem, float]]:
    """Name, setting, problem and published optimum of every instance."""
    optima = json.loads((folder / "optima.json").read_text())
    for name, optimum_ms in optima["dnn_partitioning_published_setting"]["max_load"].items():
        graph = read_graph(folder / INPUTS / name)
        has = graph.graph["devices"]
        accelerators = (Device("accelerator", memory_bytes=has["memory_bytes"]),)
        cpus = (Device("cpu", kind="cpu", pays_transfers=False),)
        devices = accelerators * has["accelerators"] + cpus * has["cpus"]
        yield name, "published", problem_of(graph, devices), optimum_ms
    for name, of_stages in optima["dnn_partitioning_no_cpu"]["max_load"].items():
        graph = read_graph(folder / INPUTS / name)
        for stages, optimum_ms in of_stages.items():
            yield name, f"k={stages}", problem_of(graph, (Device(),) * int(stages)), optimum_ms
    for name, of_stages in optima["pipedream_straight_no_comm"]["max_load"].items():
        (path,) = folder.glob(f"pipedream/profiler/*/profiles/{name}/graph.txt")
        graph = read_graph(path)
        for stages, found in sorted(of_stages.items()):
            problem = problem_of(graph, (Device(),) * int(stages))
            yield name, f"pipedream k={stages}", problem, found["max_stage_ms"]


def problem_of(graph: Any, devices: tuple[Device, ...]) -> Problem:
    costs = costs_of(graph, Link())
    # Their memory is that of the nodes: nothing is in flight, and buffers of transports are not in
    # it. Their transfers are times already.
    values = tuple(replace(one, forward_bytes=0, backward_bytes=0) for one in costs.values)
    costs = replace(costs, values=values)
    setting = RankConfig(devices, schedule="seq", by_load=True)
    return Problem(costs, setting, Rules(np.ones(len(costs.groups) + 1, dtype=bool)))


def row(
    name: str, setting: str, problem: Problem, optimum_ms: float, methods: list[str]
) -> dict[str, Any]:
    """One instance: our result and bound, and the distance of each method from the optimum."""
    started, cpu_started = time.perf_counter(), time.process_time()
    if setting == "published":
        order, placement = place_unordered(problem)
        devices = tuple(problem.setting.devices[index] for index in order)
        setting_used = replace(problem.setting, devices=devices)
        found = evaluate(replace(problem, setting=setting_used), placement)
        bound_ms = placement.bound_ms or 0.0
    else:
        placement = METHODS["auto"](problem)
        found = evaluate(problem, placement)
        bound_ms = lower_bound_ms(problem, placement)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    others: dict[str, Any] = {}
    if setting != "published":
        others = {one: above(METHODS[one], problem, optimum_ms) for one in methods if one != "auto"}
        others["block partition"] = above(block_partition, problem, optimum_ms)
        others["parameter count"] = above(parameter_count, problem, optimum_ms)
    return {
        "instance": name,
        "setting": setting,
        "groups": len(problem.costs.groups),
        "optimum_ms": optimum_ms,
        "ours_ms": round(found.score_ms, 6),
        "above_optimum": round(found.score_ms / optimum_ms - 1, 7),
        "bound_ms": round(bound_ms, 6),
        "gap": round(found.score_ms / bound_ms - 1, 7),
        "seconds": round(seconds, 3),
        "cpu_s": round(cpu_seconds, 3),
        "others_above_optimum": others,
    }


def above(
    method: Callable[[Problem], Placement], problem: Problem, optimum_ms: float
) -> float | None:
    """The fraction by which a method's bottleneck exceeds the optimum; None if it finds no plan."""
    try:
        evaluation = evaluate(problem, method(problem))
    except PlanError:
        return None
    return round(evaluation.bottleneck_ms / optimum_ms - 1, 5)


def block_partition(problem: Problem) -> Placement:
    """Block partition of a sequence (Barany and Grinberg, 2013), as torchgpipe's balancer does."""
    sizes = problem.costs.work_ms
    count, stages = len(sizes), problem.stages
    done = np.concatenate([[0.0], np.cumsum(sizes)])
    shares = np.searchsorted(done, done[-1] * np.arange(1, stages) / stages)
    inner = np.clip(shares, np.arange(1, stages), count - stages + np.arange(1, stages))
    cuts = [0, *np.maximum.accumulate(inner - np.arange(stages - 1)) + np.arange(stages - 1), count]
    for _ in range(count * stages):
        blocks = np.diff(done[cuts])
        largest, smallest = int(blocks.argmax()), int(blocks.argmin())
        if blocks.max() - blocks.min() <= sizes.max():
            break
        # The smallest takes one layer from its neighbor on the side of the largest.
        towards = 1 if smallest < largest else -1
        giver = smallest + towards
        border = smallest + 1 if towards > 0 else smallest
        layer = cuts[border] if towards > 0 else cuts[border] - 1
        only_one = cuts[giver + 1] - cuts[giver] == 1
        if only_one or blocks[smallest] + sizes[layer] >= blocks[largest]:
            break
        cuts[border] += towards
    return Placement(tuple(np.searchsorted(cuts[1:-1], np.arange(count), side="right").tolist()))


def parameter_count(problem: Problem) -> Placement:
    """Cuts the chain so that the largest number of parameter bytes of a stage is minimal."""
    costs, stages = problem.costs, problem.stages
    sizes = costs.buffer_bytes.copy()
    for held in costs.parameters:
        sizes[held.groups[0]] += held.num_bytes
    low, high = float(max(sizes.max(), sizes.sum() / stages)), float(sizes.sum())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if max(filled(sizes, middle)) < stages else (middle, high)
    stage_of = filled(sizes, high)
    # A stage too few is made by cutting off the last groups.
    missing = stages - 1 - max(stage_of)
    for index in range(missing):
        stage_of[len(stage_of) - missing + index] = max(stage_of) + 1
    return Placement(tuple(stage_of))


def filled(sizes: np.ndarray, limit: float) -> list[int]:
    """Stages filled one after the other."""
    stage, room, found = 0, limit, []
    for size in sizes.tolist():
        if size > room:
            stage, room = stage + 1, limit
        room -= size
        found.append(stage)
    return found


def spread(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The median and the largest distance from the optimum, for each method."""
    names = {name: None for found in rows for name in found["others_above_optimum"]}
    values = {
        name: [
            value
            for found in rows
            if (value := found["others_above_optimum"].get(name)) is not None
        ]
        for name in names
    }
    return {
        name: {
            "median": round(float(np.median(found)), 4),
            "worst": round(max(found), 4),
            "instances": len(found),
        }
        for name, found in values.items()
        if found
    }


def show(found: dict[str, Any]) -> None:
    others = "  ".join(
        f"{name} {'-' if value is None else f'{value:+.1%}'}"
        for name, value in found["others_above_optimum"].items()
    )
    print(
        f"{found['instance']:38} {found['setting']:14} {found['optimum_ms']:10.4f} "
        f"{found['ours_ms']:10.4f} {found['above_optimum']:+8.3%} gap {found['gap']:7.4%} "
        f"{found['cpu_s']:6.2f} s  {others}",
        flush=True,
    )


if __name__ == "__main__":
    main()
