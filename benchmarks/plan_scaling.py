"""Planning time on graphs of real models of up to 20,000 nodes.

    python benchmarks/plan_scaling.py [--only TEXT] [--stages 4,8,16]

Models are captured on the meta device and profiled analytically, so no weights are needed; their
depth determines the number of nodes. `seconds` covers the whole of planning, from the cost graph to
the stages with their bound: costs, upper bound, reductions, search or mixed-integer program, and
the final adjustment of cuts. Capture and profiling are excluded and shown separately.
"""

import argparse
import time
from dataclasses import dataclass
from typing import Any

from machine import write_result

from asyncpipe.partitioner.capture import capture
from asyncpipe.partitioner.graph.build import build_graph
from asyncpipe.partitioner.graph.costs import LOCALHOST
from asyncpipe.partitioner.graph.rematerialize import Prices, Recomputation
from asyncpipe.partitioner.models.load import load_model
from asyncpipe.partitioner.planning.solve import solve
from asyncpipe.partitioner.profile.profiler import profile_analytic


@dataclass(frozen=True)
class Model:
    """A known model, and the configuration fields that set its depth."""

    name: str
    depths: tuple[str, ...]
    depth: int
    limit_s: float


MODELS = (
    Model("gpt2", ("n_layer",), 12, 5.0),
    Model("gpt2", ("n_layer",), 49, 5.0),
    Model("llama-7b", ("num_hidden_layers",), 43, 5.0),
    Model("gpt2", ("n_layer",), 100, 15.0),
    Model("llama-7b", ("num_hidden_layers",), 87, 15.0),
    Model("t5-large", ("num_layers", "num_decoder_layers"), 4, 60.0),
    Model("t5-large", ("num_layers", "num_decoder_layers"), 12, 60.0),
    Model("t5-large", ("num_layers", "num_decoder_layers"), 24, 60.0),
    Model("gpt2", ("n_layer",), 200, 20.0),
    Model("gpt2", ("n_layer",), 400, 20.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--stages", default="4,8,16")
    options = parser.parse_args()
    rows = []
    for model in MODELS:
        if options.only in f"{model.name}-{model.depth}":
            graph, nodes, capture_s = captured(model)
            for stages in map(int, options.stages.split(",")):
                rows.append(planned(model, graph, nodes, capture_s, stages))
                show(rows[-1])
    write_result("plan_scaling", {"rows": rows})


def captured(model: Model) -> tuple[Any, int, float]:
    """The cost graph of a model, the nodes of its capture, and the time of both."""
    started = time.perf_counter()
    depths = dict.fromkeys(model.depths, model.depth)
    source = load_model(model.name, model_args=depths, meta=True, seq=128)
    found = capture(source.model, source.example_inputs, check=False)
    profile = profile_analytic(found, source.example_inputs)
    again = Recomputation(found, Prices.of(profile, LOCALHOST))
    graph = build_graph(found, profile, model.name, again=again)
    return graph, len(found.graph.nodes), time.perf_counter() - started


def planned(model: Model, graph: Any, nodes: int, capture_s: float, stages: int) -> dict[str, Any]:
    """Result and time of planning; `optimum_ms` is the best value before the final adjustment of
    cuts."""
    started, cpu_started = time.perf_counter(), time.process_time()
    solution = solve(graph, stages=stages, link=LOCALHOST)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    best_ms = solution.placement.order_optimum_ms or solution.bottleneck_ms
    return {
        "model": f"{model.name}, {model.depth} layers",
        "nodes": nodes,
        "groups": len(graph),
        "stages": stages,
        "seconds": round(seconds, 3),
        "cpu_s": round(cpu_seconds, 3),
        "limit_s": model.limit_s,
        "best_ms": round(best_ms, 4),
        "bound_ms": round(solution.lower_bound_ms, 4),
        "gap": round(best_ms / solution.lower_bound_ms - 1, 7),
        "plan_ms": round(solution.bottleneck_ms, 4),
        "capture_and_profile_s": round(capture_s, 1),
    }


def show(found: dict[str, Any]) -> None:
    print(
        f"{found['model']:24} {found['nodes']:6} nodes {found['groups']:5} groups "
        f"k={found['stages']:<3} {found['seconds']:7.2f} s (CPU {found['cpu_s']:.2f} s, limit "
        f"{found['limit_s']:.0f} s)  best {found['best_ms']:.2f} ms, gap {found['gap']:.4%}, "
        f"tidied {found['plan_ms']:.2f} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
