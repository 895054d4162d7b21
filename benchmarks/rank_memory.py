"""A generated folder -> the memory of each rank of its training, planned and measured.

Ranks are fresh processes of one thread. Memory is the most that a rank holds after its first step,
beyond what it held before it loaded its stages. In tight processes, which give back blocks of more
than 1 MiB, it is what is allocated; ordinary ones keep most of what they free
(`runtime/process.py`).
"""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import forget_peak, peak_bytes, resident_bytes

import asyncpipe
from asyncpipe.runtime.plan.trust import code_hashes
from asyncpipe.runtime.process import keep_freed_memory
from asyncpipe.runtime.sharding.planned import with_shares
from asyncpipe.runtime.training.run_summary import together


def worker(
    rank: int,
    ranks: int,
    folder: str,
    options: Mapping[str, Any],
    batch: Mapping[str, torch.Tensor],
    steps: int,
    is_tight: bool,
    rendezvous: str,
    answers: Any,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    small = torch.nn.Linear(64, 64)  # loads what every training process needs
    small(torch.randn(8, 64)).sum().backward()
    torch.optim.AdamW(small.parameters()).step()
    dist.all_reduce(torch.zeros(1 << 20))
    before = resident_bytes()
    pipe = asyncpipe.Pipeline(folder, lr=1e-4, trust=True, **options)
    if is_tight:
        keep_freed_memory(few=True)
    times, loss = [], 0.0
    for number in range(1 + steps):
        if number == 1:
            forget_peak()
        start = time.perf_counter()
        loss = pipe.step(dict(batch)).loss
        times.append(1e3 * (time.perf_counter() - start))
    own = tuple(pipe.modules)
    plan, _ = with_shares(pipe.plan, pipe.config, [own], code_hashes(folder))
    answer = {
        "planned_mib": round(together([plan.stages[j].memory for j in own]) / 2**20, 1),
        "measured_mib": round((peak_bytes() - before) / 2**20, 1),
        "step_ms": [round(ms, 1) for ms in times[1:]],
        "loss": loss,
    }
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, answer)
    if rank == 0:
        answers.put(gathered)
    pipe.close()
    dist.destroy_process_group()


def of_ranks(
    folder: Path,
    ranks: int,
    options: Mapping[str, Any],
    batch: Mapping[str, torch.Tensor],
    *,
    steps: int,
    is_tight: bool,
) -> list[dict[str, Any]]:
    """The memory and the times of each rank; `options` are those of `asyncpipe.Pipeline`."""
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as place:
        given = (ranks, str(folder), options, batch, steps, is_tight, f"file://{place}/r", answers)
        processes = [context.Process(target=worker, args=(rank, *given)) for rank in range(ranks)]
        for process in processes:
            process.start()
        measured: list[dict[str, Any]] = answers.get()
        for process in processes:
            process.join()
    return measured
