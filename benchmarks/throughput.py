"""Samples a second of two stages on two processes of one thread, beside what the machine can do.

All configurations live in one pair of processes and take turns in shuffled rounds, so that what
else the machine does falls on all alike; a sample counts only if other processes used at most 4 %
of the cores meanwhile. Beside the pipelines: the plain model on one thread and on two, and the
ceiling of two independent copies. An asynchronous sample is a whole segment, its fill and drain
included.

    python benchmarks/throughput.py --rounds 9
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import gpt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machine import busy_core_seconds, write_result
from torch import nn

import asyncpipe
from asyncpipe.runtime.forecast import forecast_step
from asyncpipe.runtime.loading import load_stage
from asyncpipe.runtime.lowering import lower
from asyncpipe.runtime.pipeline import (
    Pipeline,
    StepOptimizers,
    forward_edges,
    gradient_edges,
)
from asyncpipe.runtime.plan import read_plan
from asyncpipe.runtime.schedules import make_schedule
from asyncpipe.runtime.transports.gloo import GlooTransport

MICRO_BATCHES, SIZE, QUIET = 8, 4, 0.04
ASYNC_STEPS = 6
PIPELINES = {
    "gpipe": ("gpipe", "none", 1),
    "1f1b": ("1f1b", "none", 1),
    "async-1f1b, no stash": ("async-1f1b", "none", ASYNC_STEPS),
    "async-1f1b, stash": ("async-1f1b", "stash", ASYNC_STEPS),
}


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class TimedOptimizers(StepOptimizers):
    """Steps a stage's optimizer, and adds up the core seconds that it takes."""

    seconds, steps = 0.0, 0

    def on_step(self, stage: int, version: int) -> None:
        start = time.process_time()
        super().on_step(stage, version)
        TimedOptimizers.seconds += time.process_time() - start
        TimedOptimizers.steps += 1


def plain(micro_batches: list[dict[str, torch.Tensor]]) -> Callable[[], None]:
    torch.manual_seed(0)
    model, _ = gpt.build()
    adamw = optimizer(model.parameters())

    def step() -> None:
        adamw.zero_grad(set_to_none=True)
        for inputs in micro_batches:
            (model(**inputs)["loss"] / len(micro_batches)).backward()
        adamw.step()

    return step


def pipeline(
    folder: Path, rank: int, name: str, micro_batches: list[dict[str, torch.Tensor]]
) -> Callable[[], None]:
    schedule_name, staleness, steps = PIPELINES[name]
    plan = read_plan(folder)
    stage: nn.Module = load_stage(folder, plan, rank).train()
    made = make_schedule(
        schedule_name,
        stages=2,
        micro_batches=MICRO_BATCHES * steps,
        step_every=MICRO_BATCHES,
    )
    schedule = lower(made, forward_edges(plan), grad_edges=gradient_edges(plan))
    pipe = Pipeline(plan, {rank: stage}, GlooTransport(), staleness=staleness)
    observer = TimedOptimizers({rank: optimizer(stage.parameters())})

    def step() -> None:
        pipe.run(schedule, lambda i: micro_batches[i % MICRO_BATCHES], observer=observer)

    return step


def worker(rank: int, folder: Path, rendezvous: str, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    micro_batches = [
        {name: value[i * SIZE : (i + 1) * SIZE] for name, value in batch.items()}
        for batch in [gpt.tokens_of(SIZE * MICRO_BATCHES)]
        for i in range(MICRO_BATCHES)
    ]
    samples = SIZE * MICRO_BATCHES
    alone = plain(micro_batches)
    idle: Callable[[], None] = lambda: None  # noqa: E731
    turns: dict[str, tuple[Callable[[], None], int, int]] = {
        "plain model, 1 thread": (alone if rank == 0 else idle, samples, 1),
        "plain model, 2 threads": (alone if rank == 0 else idle, samples, 2),
        "ceiling: 2 independent copies": (alone, 2 * samples, 1),
    }
    for name, (_, _, steps) in PIPELINES.items():
        turns[name] = (pipeline(folder, rank, name, micro_batches), samples * steps, 1)
    order = random.Random(0)
    rows = []
    for number in range(rounds + 1):
        names = list(turns)
        order.shuffle(names)
        for name in names:
            step, count, threads = turns[name]
            torch.set_num_threads(threads)
            dist.barrier()
            before, own_before, start = (
                busy_core_seconds(),
                sum(os.times()[:2]),
                time.perf_counter(),
            )
            step()
            dist.barrier()
            seconds = time.perf_counter() - start
            own = torch.tensor([sum(os.times()[:2]) - own_before], dtype=torch.float64)
            dist.all_reduce(own)
            others = max(0.0, busy_core_seconds() - before - own.item()) / (2 * seconds)
            if rank == 0 and number > 0:
                rows.append(
                    {
                        "round": number,
                        "configuration": name,
                        "samples_per_s": round(count / seconds, 3),
                        "others_share": round(others, 4),
                    }
                )
    optimizer_ms: list[Any] = [None, None]
    dist.all_gather_object(optimizer_ms, 1e3 * TimedOptimizers.seconds / TimedOptimizers.steps)
    if rank == 0:
        results.put((rows, optimizer_ms))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "gpt_2p"
        torch.manual_seed(0)
        model, inputs = gpt.build()
        plan = asyncpipe.partition(model, inputs, stages=2, output=folder, threads=1, name="gpt")
        context = mp.get_context("spawn")
        results = context.SimpleQueue()
        rendezvous = f"file://{temporary}/rendezvous"
        processes = [
            context.Process(
                target=worker, args=(rank, folder, rendezvous, arguments.rounds, results)
            )
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        rows, optimizer_ms = results.get()
        for process in processes:
            process.join()
    report(plan, rows, optimizer_ms)


def report(plan: asyncpipe.Plan, rows: list[dict[str, Any]], optimizer_ms: list[float]) -> None:
    table = []
    for name in dict.fromkeys(row["configuration"] for row in rows):
        mine = [row for row in rows if row["configuration"] == name]
        quiet = [row["samples_per_s"] for row in mine if row["others_share"] <= QUIET]
        rates = quiet or [row["samples_per_s"] for row in mine]
        entry = {
            "configuration": name,
            "samples_per_s": statistics.median(rates),
            "least": min(rates),
            "most": max(rates),
            "quiet": len(quiet),
            "of": len(mine),
        }
        if name in PIPELINES:
            schedule, _, steps = PIPELINES[name]
            simulated = forecast_step(
                plan, schedule, MICRO_BATCHES, processors=2, steps=steps, step_ms=optimizer_ms
            ).step_ms
            measured = SIZE * MICRO_BATCHES / statistics.median(rates) * 1e3
            entry |= {"step_ms": round(measured, 1), "simulated_step_ms": round(simulated, 1)}
        table.append(entry)
    rate = {entry["configuration"]: entry["samples_per_s"] for entry in table}
    ceiling = rate["ceiling: 2 independent copies"]
    print(f"{'configuration':32} samples/s   least    most  of ceiling   step ms  simulated")
    for entry in sorted(table, key=lambda entry: -entry["samples_per_s"]):
        entry["of_ceiling"] = round(entry["samples_per_s"] / ceiling, 3)
        steps_text = (
            f"{entry['step_ms']:9.0f} {entry['simulated_step_ms']:10.0f}"
            if "step_ms" in entry
            else ""
        )
        print(
            f"{entry['configuration']:32} {entry['samples_per_s']:9.2f} {entry['least']:7.2f} "
            f"{entry['most']:7.2f} {entry['of_ceiling']:11.0%} {steps_text}"
        )
    write_result(
        "throughput_2x1",
        {
            "micro_batches": MICRO_BATCHES,
            "micro_batch_size": SIZE,
            "async_steps_a_segment": ASYNC_STEPS,
            "stages_ms": [[stage.forward_ms, stage.backward_ms] for stage in plan.stages],
            "optimizer_ms": [round(ms, 2) for ms in optimizer_ms],
            "table": table,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
