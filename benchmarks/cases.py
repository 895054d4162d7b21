"""The models of the throughput benchmarks, and samples of what runs them."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpt
import images
import llama
import t5
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machine import busy_core_seconds
from pipelines import ASYNC_MICRO_BATCHES, Planned, build_plans
from torch import nn

FAMILIES: Mapping[str, Callable[..., tuple[nn.Module, dict[str, torch.Tensor]]]] = {
    "gpt": gpt.build,
    "llama": llama.build,
    "t5": t5.build,
    "resnet": images.resnet,
    "vit": images.vit,
}
QUIET = 0.04


@dataclass(frozen=True)
class Case:
    """A model, a batch and a number of processes."""

    ranks: int
    micro_batches: int
    micro_batch_size: int = 4
    model: Mapping[str, int] = field(default_factory=dict)
    family: str = "gpt"
    only: tuple[str, ...] = ()
    """The configurations that are measured; empty for all."""


def build_model(case: Case, *, compiled: bool = False) -> Any:
    torch.manual_seed(0)
    model, _ = FAMILIES[case.family](**case.model)
    if compiled:
        model.compile()
    return model


def batch_of(case: Case) -> list[dict[str, torch.Tensor]]:
    size = case.micro_batch_size
    samples = size * case.micro_batches
    _, whole = FAMILIES[case.family](**case.model, micro_batch_size=samples)
    return [
        {name: values[start : start + size].contiguous() for name, values in whole.items()}
        for start in range(0, samples, size)
    ]


@dataclass(frozen=True)
class Turn:
    """One configuration: a call, the number of samples it processes in all ranks together, its
    threads."""

    step: Callable[[], Any]
    samples: int
    threads: int = 1


def measure(name: str, turn: Turn, ranks: int) -> dict[str, Any]:
    """One turn of all ranks together."""
    torch.set_num_threads(turn.threads)
    dist.barrier()
    before, own_before, start = busy_core_seconds(), sum(os.times()[:2]), time.perf_counter()
    steady = turn.step()
    dist.barrier()
    seconds = time.perf_counter() - start
    own = torch.tensor([sum(os.times()[:2]) - own_before], dtype=torch.float64)
    dist.all_reduce(own)
    rate = turn.samples / seconds
    if steady is not None:
        rate = _steady_rate(steady, turn.samples / ASYNC_MICRO_BATCHES)
    others = max(0.0, busy_core_seconds() - before - own.item()) / ((os.cpu_count() or 1) * seconds)
    return {
        "configuration": name,
        "samples_per_s": round(rate, 3),
        "core_s_per_sample": round(own.item() / turn.samples, 5),
        "others_share": round(others, 4),
    }


def _steady_rate(steady: tuple[float, int], micro_batch_size: float) -> float:
    """Samples a second of the slowest rank between its first step and its last."""
    seconds, done = steady
    slowest = torch.tensor([seconds / done], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return micro_batch_size / slowest.item()


def plans_of(
    case: Case, names: Sequence[str], folder: str, cut_at: Sequence[str] = ()
) -> dict[Planned, Path]:
    inputs = batch_of(case)[0]
    model = build_model(case)
    return build_plans(model, inputs, case.ranks, case.micro_batches, names, Path(folder), cut_at)


def together(
    function: Callable[..., None], case: Case, arguments: Sequence[Any], *, answers: int
) -> list[Any]:
    """The results that the ranks of a case, each a new process, put into their queue."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=function, args=(rank, case, *arguments, results), daemon=True)
        for rank in range(case.ranks)
    ]
    for process in processes:
        process.start()
    given = [results.get() for _ in range(answers)]
    for process in processes:
        process.join()
    return given
