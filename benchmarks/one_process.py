"""A generated pipeline in one process, compared with the model that it was generated from.

Forward, loss and backward of one micro-batch. The two alternate, so that the load of the machine
affects both alike; the ratio is the median over the turns of pipeline to model. The operators that
each runs are counted too: other processes cannot disturb that comparison. With `--compile`,
`torch.compile` of each stage is compared with `torch.compile` of the whole model.

    python benchmarks/one_process.py --rounds 15
    python benchmarks/one_process.py --rounds 15 --compile
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import write_result
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import asyncpipe
from asyncpipe.partitioner.compile import partition_source
from asyncpipe.partitioner.models.load import load_model
from asyncpipe.partitioner.planning.options import PartitionOptions

LIMIT = 1.02


@dataclass(frozen=True)
class Case:
    spec: str
    stages: int
    micro_batch_size: int
    seq: int = 128
    model_args: Mapping[str, Any] | None = None


CASES = {
    "gpt2, 4 blocks": Case("gpt2", 4, 2, model_args={"n_layer": 4}),
    "gpt2": Case("gpt2", 4, 1),
    "resnet50": Case("resnet50", 4, 2),
    "wide-resnet50": Case("wide-resnet50", 2, 1),
}


def loss_of(output: Any, labels: Tensor) -> Tensor:
    """The model's own loss, or the cross entropy of its output."""
    if isinstance(output, Mapping) or hasattr(output, "loss"):
        loss: Tensor = output["loss"]
        return loss
    return F.cross_entropy(output, labels)


def turn(call: Callable[..., Any], parameters: list[nn.Parameter], inputs: Any) -> float:
    """Milliseconds of one forward, loss and backward; gradients start from None."""
    for parameter in parameters:
        parameter.grad = None
    labels = torch.zeros(len(next(iter(inputs.values()))), dtype=torch.int64)
    torch.manual_seed(0)
    started = time.perf_counter()
    loss_of(call(**inputs), labels).backward()
    return 1e3 * (time.perf_counter() - started)


class Counted(TorchDispatchMode):
    """Counts the operators that run, including views."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def operators(call: Callable[..., Any], parameters: list[nn.Parameter], inputs: Any) -> int:
    """The number of operators that one turn runs."""
    with Counted() as counted:
        turn(call, parameters, inputs)
    return counted.number


def measure(case: Case, rounds: int, compiled: bool, folder: Path) -> dict[str, Any]:
    source = load_model(
        case.spec,
        model_args=case.model_args,
        micro_batch_size=case.micro_batch_size,
        seq=case.seq,
    )
    options = PartitionOptions(stages=case.stages, output=folder, profile="analytic")
    partition_source(source, options)
    model, pipe = source.model.train(), asyncpipe.load(folder).train()
    parameters = {"model": list(model.parameters()), "pipeline": list(pipe.parameters())}
    calls: dict[str, Callable[..., Any]] = {"model": model, "pipeline": pipe}
    counts = {
        name: operators(call, parameters[name], source.example_inputs)
        for name, call in calls.items()
    }
    if compiled:
        calls["model"] = torch.compile(model)
        pipe.stages = torch.nn.ModuleList(torch.compile(stage) for stage in pipe.stages)
    times: dict[str, list[float]] = {"model": [], "pipeline": []}
    for number in range(rounds + 2):
        names = list(calls) if number % 2 else list(calls)[::-1]
        for name in names:
            took = turn(calls[name], parameters[name], source.example_inputs)
            if number >= 2:  # two to warm up, or to compile
                times[name].append(round(took, 3))
    ratios = [ours / its for ours, its in zip(times["pipeline"], times["model"], strict=True)]
    return {
        "stages": case.stages,
        "compiled": compiled,
        "model_ms": round(statistics.median(times["model"]), 2),
        "pipeline_ms": round(statistics.median(times["pipeline"]), 2),
        "ratio": round(statistics.median(ratios), 4),
        "least_ratio": round(min(times["pipeline"]) / min(times["model"]), 4),
        "operators": counts,
        "times_ms": times,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table: dict[str, dict[str, Any]] = {}
    print(f"{'model':18} stages  model ms  pipeline ms  ratio  limit  fastest to fastest")
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as temporary:
            row = measure(
                CASES[name], arguments.rounds, arguments.compile, Path(temporary) / "made"
            )
        table[name] = row
        print(
            f"{name:18} {row['stages']:6} {row['model_ms']:9.1f} {row['pipeline_ms']:12.1f} "
            f"{row['ratio']:6.3f} {LIMIT:6.2f} {row['least_ratio']:8.3f}  "
            f"{row['operators']['pipeline']} to {row['operators']['model']} operators",
            flush=True,
        )
    figures = {"rounds": arguments.rounds, "threads": arguments.threads, "limit": LIMIT}
    write_result(
        "one_process_compiled" if arguments.compile else "one_process", figures | {"table": table}
    )


if __name__ == "__main__":
    main()
