"""Plans on unlike GPUs from the published profiles of Sailor, compared with a brute force.

Each case is a chain of layers with measured times on several kinds of GPU. The plan is compared
with the optimum of a brute force that shares no code with the planner (every order of the devices,
every cut, memory included), with the same number of layers on every device, and with the plan that
assumes all devices to equal the first one. Times are per micro-batch on the slowest device.

    python benchmarks/heterogeneous.py --graphs ../shared/graphs

The profiles (MIT, github eth-easl/sailor) give `{micro-batch: {tensor parallel: {layer: [forward,
backward, update]}}}` in seconds, and no sizes: those are computed from the published
configurations at 2,048 tokens, bfloat16, 34 bytes saved a token and hidden unit (Korthikanti et
al., 2022) and 16 bytes a parameter with AdamW. Where a case has a tensor parallel degree of t,
each device stands for t GPUs. One profile is known to be wrong and left out: GPT-Neo-2.7 on GH-96
repeats that of OPT-350. Layers of LLAMA-3-8 take longer on A100-40 than the GPU should need; the
case is kept, because the reason is irrelevant to the planner.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
from machine import write_result

from asyncpipe.partitioner.graph.costs import Link
from asyncpipe.partitioner.graph.problem import Placement
from asyncpipe.partitioner.graph.rank_model import Device
from asyncpipe.partitioner.planning.choose_devices import choose
from asyncpipe.partitioner.planning.cluster import Cluster
from asyncpipe.partitioner.planning.device_layouts import shape_name

TOKENS = 2048
GIB = 2**30
MEMORY_GIB = {
    "A100-40": 40, "A100-80": 80, "GH-96": 96, "V100-16": 16,
    "RTX-2080": 8, "RTX-3090": 24, "Titan-RTX": 24,
}  # fmt: skip
HIDDEN = {"OPT-350": 1024, "GPT-Neo-2.7": 2560, "LLAMA-3-8": 4096, "OPT-30": 7168}


@dataclass(frozen=True)
class Case:
    """A model, its micro-batch, tensor parallel degree, and number of devices of each kind."""

    model: str
    micro_batch: int
    tensor_parallel: int
    devices: dict[str, int]

    def __str__(self) -> str:
        return f"{self.model}: " + " + ".join(f"{n} {kind}" for kind, n in self.devices.items())


CASES = (
    Case("OPT-350", 2, 1, {"A100-40": 2, "V100-16": 2}),
    Case("OPT-350", 1, 1, {"A100-40": 2, "V100-16": 2, "RTX-2080": 1}),
    Case("OPT-350", 2, 1, {"RTX-3090": 2, "V100-16": 2}),
    Case("OPT-350", 2, 1, {"GH-96": 1, "A100-80": 1, "V100-16": 1, "Titan-RTX": 1}),
    Case("GPT-Neo-2.7", 1, 2, {"A100-80": 2, "V100-16": 2}),
    Case("GPT-Neo-2.7", 1, 2, {"A100-40": 2, "V100-16": 2}),
    Case("LLAMA-3-8", 1, 2, {"GH-96": 2, "A100-40": 2}),
    Case("OPT-30", 1, 4, {"GH-96": 2, "A100-40": 2}),
)


def graph_of(case: Case, folder: Path) -> nx.DiGraph:
    """The layers as a chain, with their times on every kind of device; the graph's own times are
    those of the first kind."""
    times = {kind: layer_times(case, kind, folder) for kind in case.devices}
    if len({len(layers) for layers in times.values()}) > 1:
        raise ValueError(f"{case}: the profiles have different numbers of layers")
    hidden, split = HIDDEN[case.model], case.tensor_parallel
    own = next(iter(times.values()))
    graph = nx.DiGraph(name=case.model)
    for index, (forward_ms, backward_ms) in enumerate(own):
        graph.add_node(
            index,
            forward_ms=forward_ms,
            backward_ms=backward_ms,
            times_on={kind: layers[index] for kind, layers in times.items()},
            output_bytes=case.micro_batch * TOKENS * hidden * 2,
            saved_bytes=34 * case.micro_batch * TOKENS * hidden // split,
            # Gradient and AdamW's two moments come to the parameters: four copies of 4 bytes.
            param_bytes=4 * 12 * hidden**2 // split,
            transient_bytes=0,
            block=str(index),
        )
        if index:
            graph.add_edge(index - 1, index)
    return graph


def layer_times(case: Case, kind: str, folder: Path) -> list[tuple[float, float]]:
    """Forward and backward milliseconds of every layer on one kind of device."""
    profile = json.loads((folder / "profiles" / case.model / kind / "profile.json").read_text())
    layers = profile[str(case.micro_batch)][str(case.tensor_parallel)]
    return [
        (1e3 * layers[str(index)][0], 1e3 * layers[str(index)][1]) for index in range(len(layers))
    ]


def cluster_of(case: Case, folder: Path) -> Cluster:
    """One host per kind, with the bandwidths that Sailor measured within and between hosts."""
    inside = json.loads((folder / "intra_node_bandwidths.json").read_text())
    between = json.loads((folder / "network_coeffs_all_homo.json").read_text())["inter"]
    outside = {kind: between[kind]["1"][1] for kind in case.devices}
    return Cluster(
        tuple(
            Device(kind, memory_bytes=MEMORY_GIB[kind] * GIB, host=kind, kind=kind)
            for kind, count in case.devices.items()
            for _ in range(count)
        ),
        {kind: Link(0.02, inside[kind]["2"][1]) for kind in case.devices},
        {
            (a, b): Link(0.1, min(outside[a], outside[b]))
            for a, b in combinations(sorted(case.devices), 2)
        },
    )


# ------------------------------------------------------------------------------- brute force


def loads_ms(
    graph: nx.DiGraph, cluster: Cluster, order: Sequence[int], cuts: Sequence[int]
) -> Iterator[float]:
    """The milliseconds of each stage, inf if it does not fit, directly from the formulas."""
    ends = [0, *cuts, len(graph)]
    for stage, device in enumerate(order):
        layers = [graph.nodes[node] for node in range(ends[stage], ends[stage + 1])]
        of_device = cluster.devices[device]
        work_ms = sum(sum(layer["times_on"][of_device.kind]) for layer in layers)
        talk_ms = 0.0
        for other in (stage - 1, stage + 1):
            if 0 <= other < len(order):
                link = cluster.link(device, order[other])
                num_bytes = graph.nodes[ends[max(stage, other)] - 1]["output_bytes"]
                talk_ms += 2 * (link.latency_ms + 1e3 * num_bytes / link.bytes_per_s)
        needed = sum(
            4 * layer["param_bytes"] + (len(order) - stage) * layer["saved_bytes"]
            for layer in layers
        )
        yield work_ms + talk_ms if needed <= of_device.memory_bytes else float("inf")


def brute_force_ms(graph: nx.DiGraph, cluster: Cluster) -> float:
    """The smallest bottleneck over all orders of the devices and all cuts."""
    number, layers = len(cluster.devices), len(graph)
    kinds = [device.kind for device in cluster.devices]
    distinct = {
        tuple(kinds[index] for index in order): order for order in permutations(range(number))
    }
    best = float("inf")
    for order in distinct.values():
        # A stage's load depends on its own two ends alone, so each is computed once.
        load = np.full((number, layers + 1, layers + 1), np.inf)
        for first in range(layers):
            for last in range(first + 1, layers + 1):
                for stage in range(number):
                    if first >= stage and layers - last >= number - 1 - stage:
                        load[stage, first, last] = _one(graph, cluster, order, stage, first, last)
        for cuts in combinations(range(1, layers), number - 1):
            ends = (0, *cuts, layers)
            slowest = max(load[stage, ends[stage], ends[stage + 1]] for stage in range(number))
            best = min(best, slowest)
    return float(best)


def _one(
    graph: nx.DiGraph, cluster: Cluster, order: Sequence[int], stage: int, first: int, last: int
) -> float:
    number, layers = len(order), len(graph)
    before = [*range(1, stage), first] if stage else []
    after = [last, *range(layers - (number - 2 - stage), layers)] if stage < number - 1 else []
    return list(loads_ms(graph, cluster, order, [*before, *after]))[stage]


# ---------------------------------------------------------------------------------- the table


def measure(case: Case, folder: Path) -> dict[str, Any]:
    graph, cluster = graph_of(case, folder), cluster_of(case, folder)
    number = len(cluster.devices)
    started = time.perf_counter()
    choice = choose(graph, cluster, stages=number, prefer_modules=0.0, recompute="none")
    seconds = time.perf_counter() - started
    pipeline = choice.by_shape[(1,) * number]
    free = choose(graph, cluster, prefer_modules=0.0, recompute="none")
    in_order = tuple(range(number))
    even = [round(len(graph) * stage / number) for stage in range(1, number)]
    alike = Cluster(
        tuple(Device(host=device.host) for device in cluster.devices),
        cluster.within,
        cluster.between,
    )
    blind = choose(graph, alike, stages=number, prefer_modules=0.0)
    cuts = np.flatnonzero(np.diff(blind.solution.placement.stage_of)) + 1
    return {
        "layers": len(graph),
        "optimum_ms": brute_force_ms(graph, cluster),
        "ours_ms": pipeline.solution.bottleneck_ms,
        "bound_ms": choice.solution.lower_bound_ms,
        "checked_ms": checked_ms(
            graph, cluster, pipeline.layout.devices, pipeline.solution.placement
        ),
        "order": [cluster.devices[device].name for device in pipeline.layout.devices],
        "layers_of_stage": np.bincount(pipeline.solution.placement.stage_of).tolist(),
        "even_ms": max(loads_ms(graph, cluster, in_order, even)),
        "blind_ms": max(loads_ms(graph, cluster, blind.layout.devices, cuts.tolist())),
        "free_shape": shape_name(free.layout.shape),
        "free_devices": [cluster.devices[device].name for device in free.layout.devices],
        "free_ms": free.solution.bottleneck_ms,
        "seconds": round(seconds, 2),
    }


def checked_ms(
    graph: nx.DiGraph, cluster: Cluster, order: Sequence[int], placement: Placement
) -> float:
    """The bottleneck of a plan by the brute force's formulas."""
    cuts = np.flatnonzero(np.diff(placement.stage_of)) + 1
    return max(loads_ms(graph, cluster, order, cuts.tolist()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--graphs", type=Path, required=True)
    folder = parser.parse_args().graphs / "sailor"
    table = {}
    print(f"{'':52} optimum     ours     even    blind  free choice")
    for case in CASES:
        row = measure(case, folder)
        name = f"{case} (micro-batch {case.micro_batch}, tp {case.tensor_parallel})"
        table[name] = row
        print(
            f"{name:52} {row['optimum_ms']:8.2f} {row['ours_ms']:8.2f} {row['even_ms']:8.2f} "
            f"{row['blind_ms']:8.2f}  {row['free_shape']}, {row['free_ms']:.2f}",
            flush=True,
        )
    write_result("heterogeneous", {"unit": "ms of one micro-batch", "table": table})


if __name__ == "__main__":
    main()
