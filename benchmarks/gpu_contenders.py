"""One model and batch on several ranks: our schedules, torch's, DDP and the plain model.

Each contender has its own processes, so that memory and failures are its own. All get the same
micro-batches and optimizer; a step ends when the device has finished it.
"""

import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
from gpu_setting import Setting
from gpu_work import Work

import asyncpipe

BLOCKS = 3
WARM_UP = 3
OURS = {
    # name: schedule, stages per rank
    "1f1b": ("1f1b", 1),
    "gpipe": ("gpipe", 1),
    "interleaved, 2 a rank": ("interleaved", 2),
    "zb-v": ("zb-v", 2),
}
TORCH = ("torch 1F1B", "torch GPipe", "torch Interleaved1F1B", "torch ZBVZeroBubble")


@dataclass(frozen=True)
class Contender:
    """What one group of processes runs.

    name: plain model, DDP, or a key of OURS or of peers.TORCH.
    folder: the generated folder of one of ours.
    """

    name: str
    model: str
    setting: Setting
    ranks: int
    gpus: int
    work: Path
    folder: Path | None = None


def run(contender: Contender) -> dict[str, Any]:
    """A rank's figures: milliseconds of a step, and peak memory."""
    setting, rank = contender.setting, int(os.environ["RANK"])
    device = torch.device(setting.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank * contender.gpus // contender.ranks)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    step = _step_of(contender, rank, device)
    for _ in range(WARM_UP):
        step()
    taken = []
    for _ in range(BLOCKS):
        peers.finish(device)
        start_s = time.perf_counter()
        for _ in range(setting.steps):
            step()
        peers.finish(device)
        taken.append(1e3 * (time.perf_counter() - start_s) / setting.steps)
    if dist.is_initialized():
        dist.barrier()  # a process that ends takes its last messages with it
        dist.destroy_process_group()
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    return {"step_ms": statistics.median(taken), "peak_bytes": peak}


def _step_of(contender: Contender, rank: int, device: torch.device) -> Callable[[], Any]:
    setting, ranks = contender.setting, contender.ranks
    work = Work(setting, contender.work, contender.work, 0.0)
    model, inputs = work.model(contender.model)
    count = setting.micro_batches
    if contender.folder is not None:
        pipe = asyncpipe.Pipeline(
            contender.folder,
            schedule=OURS[contender.name][0],
            micro_batches=count,
            ranks=ranks,
            **setting.places(ranks, contender.gpus),
        )
        optimizer = peers.optimizer_of(pipe.parameters())
        whole = {name: value.repeat(count, 1) for name, value in inputs.items()}
        return lambda: pipe.step(whole, optimizer=optimizer)
    batch = [{name: value.to(device) for name, value in inputs.items()}] * count
    own_gpus = device.type == "cuda" and contender.gpus >= ranks
    if own_gpus:
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    model = model.to(device)
    if contender.name == "DDP":
        return peers.data_parallel(model, batch, rank, ranks)
    if contender.name in peers.TORCH:
        costs = [peers.unit_costs(model, batch[0])]
        dist.broadcast_object_list(costs, src=0, device=device if own_gpus else None)
        return peers.pipelined(model, batch, rank, ranks, contender.name, costs[0])
    return peers.plain(model, batch)


def compare(work: Work, model: str) -> None:
    """A row for each contender. On one GPU torch's schedules have no transport: its two ranks
    would share the GPU, which NCCL refuses, and gloo sends no tensors of GPUs."""
    setting = work.setting
    gpus = 1 if setting.is_dry else min(2, setting.gpus)
    rows = [("plain model", 1), ("DDP", 2), *((name, 2) for name in (*OURS, *TORCH))]
    for name, ranks in rows:
        if name in TORCH and not setting.is_dry and gpus < 2:
            work.skip(name, "it needs two GPUs")
            continue
        with work.row(name) as row:
            folder = None
            if name in OURS:
                schedule, each = OURS[name]
                folder = work.plan(
                    model,
                    2 * each,
                    measured=True,
                    schedule=schedule if each > 1 else "1f1b",
                    ranks=2 if each > 1 else None,
                    micro_batches=setting.micro_batches,
                )
            contender = Contender(name, model, setting, ranks, gpus, work.folder, folder)
            ranks_figures = asyncpipe.launch(run, contender, ranks=ranks)
            row["step_ms"] = round(max(figures["step_ms"] for figures in ranks_figures), 2)
            row["peak_mib"] = [round(figures["peak_bytes"] / 2**20, 1) for figures in ranks_figures]
            samples = setting.micro_batches * setting.scale.micro_batch_size
            row["samples_per_s"] = round(1e3 * samples / row["step_ms"], 2)
