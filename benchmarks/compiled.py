"""`--compile`: the time of a step with torch.compile of each stage, and what its start costs.

Runs of `asyncpipe.train` with and without `--compile` alternate, so that the load of the machine
affects both alike. A step's time is the median of a run without its first step, and the ratio the
median over the rounds of compiled to plain. Two more runs have float64, in which a difference of
the losses would be no rounding. The cache of compiled kernels is empty at the first
compiled run, and kept afterwards: its first step is listed for each round. The first step of
`torch.compile` of the whole model, with one micro-batch in one process and an empty cache, is
measured for comparison.

    python benchmarks/compiled.py --rounds 2              all; results/compiled.json
    python benchmarks/compiled.py --models llama.py:build
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from machine import RESULTS, write_result

import asyncpipe
from asyncpipe.partitioner.compile import partition_source
from asyncpipe.partitioner.models.load import ModelSource, load_model
from asyncpipe.partitioner.planning.options import PartitionOptions

HERE = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_args": {"n_layer": 4}, "micro_batch_size": 1, "seq": 128},
    "gpt.py:build": {},
    "llama.py:build": {},
    "t5.py:build": {},
    "images.py:resnet": {},
    "images.py:vit": {},
}
"""Four blocks of gpt2, and the models of the throughput benchmarks."""


def step_of(
    folder: Path, output: Path, steps: int, compiled: bool, dtype: str = "float32"
) -> dict[str, Any]:
    """One run: its milliseconds per step, its first step, and its losses."""
    made = asyncpipe.train(
        folder,
        schedule="1f1b",
        micro_batches=4,
        steps=steps,
        eval_batches=0,
        log_every=1,
        quiet=True,
        timeout_s=1200.0,
        output=str(output),
        compile=compiled,
        dtype=dtype,
    )
    return {
        "step_ms": round(float(made.records.end["step_ms"]), 2),
        "first_step_s": round(float(made.records.steps[0]["elapsed_s"]), 2),
        "losses": list(made.losses.values()),
    }


def difference_of(ours: Mapping[str, Any], its: Mapping[str, Any]) -> float:
    """The largest relative difference between the losses of two runs, to two digits."""
    pairs = zip(ours["losses"], its["losses"], strict=True)
    difference = max(abs(a - b) / abs(b) for a, b in pairs)
    assert math.isfinite(difference)
    return float(f"{difference:.2g}")


def first_step_of_model(source: ModelSource, kernels: Path) -> float:
    """The seconds of the first compiled forward and backward of the whole model, with an empty
    cache."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(kernels)
    torch._dynamo.reset()
    model = torch.compile(source.model.train())
    start_s = time.perf_counter()
    loss_of(model(**source.example_inputs)).backward()
    return time.perf_counter() - start_s


def loss_of(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def measure(model: str, rounds: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place / "kernels")
        source = load_model(str(HERE / model) if ":" in model else model, **CASES[model])
        start_s = time.perf_counter()
        partition_source(
            source, PartitionOptions(stages=2, output=place / "made", profile="analytic")
        )
        partition_s = time.perf_counter() - start_s
        runs: dict[str, list[dict[str, Any]]] = {"plain": [], "compiled": []}
        for number in range(rounds):
            for name in sorted(runs, reverse=bool(number % 2)):
                output = place / f"{name}-{number}"
                runs[name].append(step_of(place / "made", output, steps, name == "compiled"))
        exact = [
            step_of(place / "made", place / f"float64-{compiled}", steps, compiled, "float64")
            for compiled in (True, False)
        ]
        model_s = first_step_of_model(source, place / "kernels_of_the_model")
    pairs = list(zip(runs["compiled"], runs["plain"], strict=True))
    ratios = [ours["step_ms"] / its["step_ms"] for ours, its in pairs]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "largest_relative_difference_of_losses": max(
            difference_of(ours, its) for ours, its in pairs
        ),
        "in_float64": difference_of(*exact),
        **{name: statistics.median(run["step_ms"] for run in each) for name, each in runs.items()},
        "partition_s": round(partition_s, 2),
        "first_step_of_compiled_model_s": round(model_s, 2),
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    table = json.loads((RESULTS / "compiled.json").read_text())["table"]
    for name in arguments.models:
        row = table[name] = measure(name, arguments.rounds, arguments.steps)
        starts = [each["first_step_s"] for each in row["runs"]["compiled"]]
        print(
            f"{name:16} plain {row['plain']:8.1f} ms  compiled {row['compiled']:8.1f} ms  ratio "
            f"{row['ratio']:5.3f}  losses differ by {row['largest_relative_difference_of_losses']}"
            f" ({row['in_float64']} in float64)"
            f"  partition {row['partition_s']} s, first step of compiled runs {starts} s, of the "
            f"compiled model {row['first_step_of_compiled_model_s']} s",
            flush=True,
        )
    kept = {name: table[name] for name in CASES if name in table}
    write_result("compiled", {"rounds": arguments.rounds, "steps": arguments.steps, "table": kept})


if __name__ == "__main__":
    main()
