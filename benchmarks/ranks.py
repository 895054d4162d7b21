"""A generated folder -> the costs of its ranks, with one process and thread per stage (1f1b, gloo).

The time of a stage is the CPU time of its process in forwards and backwards, that of a step is wall
time. Memory is the most that a process held beyond its memory before it loaded its stage.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machine import busy_core_seconds

from asyncpipe.runtime.executor.executor import Executor
from asyncpipe.runtime.executor.instrumented import StepOptimizers
from asyncpipe.runtime.executor.loading import load_stage
from asyncpipe.runtime.executor.mailbox import forward_edges, gradient_edges
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.schedule.dependencies import lower
from asyncpipe.runtime.transports.gloo import GlooTransport

CORES = os.cpu_count() or 1
GIVES_BACK = "MALLOC_MMAP_THRESHOLD_"
KEEPS_ALL = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62)}
TIMEOUT_S = 300


class TimedOptimizers(StepOptimizers):
    """Steps a stage's optimizer, and records its CPU seconds."""

    def __init__(self, stage: int, module: torch.nn.Module) -> None:
        super().__init__({stage: torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)})
        self.seconds: list[float] = []

    def on_step(self, stage: int, version: int) -> None:
        start = time.thread_time()
        super().on_step(stage, version)
        self.optimizers[stage].zero_grad(set_to_none=False)
        self.seconds.append(time.thread_time() - start)


def worker(
    rank: int,
    folder: Path,
    rendezvous: str,
    inputs: Any,
    micro_batches: int,
    warm_up: int,
    steps: int,
    turn: Any,
    measurements: Any,
) -> None:
    """One rank: warm-up steps, then `steps` that count, each when it is the turn of the ranks."""
    torch.set_num_threads(1)
    plan = read_plan(folder)
    ranks = len(plan.stages)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    torch.nn.Linear(64, 64)(torch.randn(8, 64)).sum().backward()
    before = resident_bytes()
    stage = load_stage(folder, plan, rank).train()
    made = make_schedule("1f1b", stages=ranks, micro_batches=micro_batches)
    schedule = lower(made, forward_edges(plan), grad_edges=gradient_edges(plan))
    pipe = Executor(plan, {rank: stage}, GlooTransport())
    observer = TimedOptimizers(rank, stage)
    samples = []
    for number in range(warm_up + steps):
        if number == warm_up:
            forget_peak()
        turn.wait()
        busy, own, start = busy_core_seconds(), sum(os.times()[:2]), time.perf_counter()
        report = pipe.run(schedule, lambda i: inputs, observer=observer)
        dist.barrier()
        wall_s = time.perf_counter() - start
        turn.wait()
        used = torch.tensor([sum(os.times()[:2]) - own], dtype=torch.float64)
        dist.all_reduce(used)
        samples.append(
            {
                "step_ms": 1e3 * wall_s,
                "stage_ms": 1e3 * (report.cpu_s - observer.seconds[-1]) / micro_batches,
                "optimizer_ms": 1e3 * observer.seconds[-1],
                "others_share": max(0.0, busy_core_seconds() - busy - used.item())
                / (CORES * wall_s),
            }
        )
    median = {
        key: statistics.median(sample[key] for sample in samples[warm_up:]) for key in samples[0]
    }
    all_ranks: list[Any] = [None] * ranks
    dist.all_gather_object(all_ranks, median | {"peak_bytes": peak_bytes() - before})
    if rank == 0:
        measurements.put(all_ranks)
    dist.barrier()
    dist.destroy_process_group()


def resident_bytes() -> int:
    return _status("RssAnon")


def peak_bytes() -> int:
    """The largest resident memory since `forget_peak`, without mapped files."""
    return _status("VmHWM") - _status("RssFile") - _status("RssShmem")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def run_for_memory(folder: Path, inputs: Any, micro_batches: int) -> list[dict[str, float]]:
    for name in KEEPS_ALL:
        del os.environ[name]
    os.environ[GIVES_BACK] = "65536"
    try:
        return run(folder, inputs, micro_batches, warm_up=1, steps=1)
    finally:
        del os.environ[GIVES_BACK]
        os.environ.update(KEEPS_ALL)


def run(
    folder: Path,
    inputs: Any,
    micro_batches: int,
    warm_up: int,
    steps: int,
    between: Callable[[], None] = lambda: None,
) -> list[dict[str, float]]:
    """The measurements of each rank of a generated folder; calls `between` before steps that
    count."""
    context = mp.get_context("spawn")
    measurements = context.SimpleQueue()
    ranks = len(read_plan(folder).stages)
    turn = context.Barrier(1 + ranks, timeout=TIMEOUT_S)
    with tempfile.TemporaryDirectory() as temporary:
        rendezvous = f"file://{temporary}/rendezvous"
        processes = [
            context.Process(
                target=worker,
                args=(
                    rank,
                    folder,
                    rendezvous,
                    inputs,
                    micro_batches,
                    warm_up,
                    steps,
                    turn,
                    measurements,
                ),
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for number in range(warm_up + steps):
            if number >= warm_up:
                between()
            turn.wait()  # They begin.
            turn.wait()  # They are done.
        measured: list[dict[str, float]] = measurements.get()
        for process in processes:
            process.join()
    return measured
