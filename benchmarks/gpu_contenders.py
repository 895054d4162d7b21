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
from gpu_work import PATIENCE_S, Work, seem_to_be_on_own_hosts

import asyncpipe

BLOCKS = 3
WARM_UP = 3
OURS = {
    # name: schedule, stages per rank, transport
    "1f1b": ("1f1b", 1, "auto"),
    "1f1b, shm": ("1f1b", 1, "shm"),
    "gpipe": ("gpipe", 1, "auto"),
    "interleaved, 2 a rank": ("interleaved", 2, "auto"),
    "zb-v": ("zb-v", 2, "auto"),
}
TORCH = ("torch 1F1B", "torch GPipe", "torch Interleaved1F1B", "torch ZBVZeroBubble")
NAMES = ("plain model", "DDP", *OURS, *TORCH)


@dataclass(frozen=True)
class Contender:
    """What one group of processes runs.

    name: one of NAMES.
    has_nccl: whether NCCL connects the ranks; on one GPU they seem to be on hosts of their own.
    folder: the generated folder of one of ours.
    """

    name: str
    model: str
    setting: Setting
    ranks: int
    gpus: int
    has_nccl: bool
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
    taken, steps = [], setting.steps // 2
    for _ in range(BLOCKS):
        peers.finish(device)
        start_s = time.perf_counter()
        for _ in range(steps):
            step()
        peers.finish(device)
        taken.append(1e3 * (time.perf_counter() - start_s) / steps)
    if dist.is_initialized():
        dist.barrier()  # a process that ends takes its last messages with it
        dist.destroy_process_group()
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    return {"step_ms": statistics.median(taken), "peak_bytes": peak}


def _step_of(contender: Contender, rank: int, device: torch.device) -> Callable[[], Any]:
    setting, ranks = contender.setting, contender.ranks
    if contender.has_nccl and contender.gpus < ranks:
        seem_to_be_on_own_hosts()
    work = Work(setting, contender.work, contender.work, 0.0)
    model, inputs = work.model(contender.model)
    count = setting.micro_batches
    if contender.folder is not None:
        schedule, _, transport = OURS[contender.name]
        pipe = asyncpipe.Pipeline(
            contender.folder,
            schedule=schedule,
            transport=transport,
            micro_batches=count,
            ranks=ranks,
            timeout_s=PATIENCE_S,
            **setting.places(ranks, contender.gpus),
        )
        optimizer = peers.optimizer_of(pipe.parameters())
        whole = {name: value.repeat(count, 1) for name, value in inputs.items()}
        return lambda: pipe.step(whole, optimizer=optimizer)
    batch = [{name: value.to(device) for name, value in inputs.items()}] * count
    if contender.has_nccl:
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    model = model.to(device)
    if contender.name == "DDP":
        return peers.data_parallel(model, batch, rank, ranks)
    if contender.name in peers.TORCH:
        costs = [peers.unit_costs(model, batch[0])]
        dist.broadcast_object_list(costs, src=0, device=device if contender.has_nccl else None)
        return peers.pipelined(model, batch, rank, ranks, contender.name, costs[0])
    return peers.plain(model, batch)


def compare(work: Work, model: str) -> None:
    """A row for each contender. Where NCCL does not connect two ranks, torch's schedules have no
    transport on GPUs, because gloo does not send their tensors."""
    setting = work.setting
    refusal = work.refusal_of_nccl()
    for name in NAMES:
        ranks = 1 if name == "plain model" else 2
        if name in TORCH and refusal and not setting.is_dry:
            work.skip(name, refusal)
            continue
        with work.row(name) as row:
            folder = None
            if name in OURS:
                schedule, each, _ = OURS[name]
                folder = work.plan(
                    model,
                    2 * each,
                    measured=True,
                    schedule=schedule if each > 1 else "1f1b",
                    ranks=2 if each > 1 else None,
                    micro_batches=setting.micro_batches,
                )
            contender = Contender(
                name,
                model,
                setting,
                ranks,
                gpus=1 if setting.is_dry else min(2, setting.gpus),
                has_nccl=not refusal and ranks > 1,
                work=work.folder,
                folder=folder,
            )
            ranks_figures = asyncpipe.launch(run, contender, ranks=ranks)
            row["step_ms"] = round(max(figures["step_ms"] for figures in ranks_figures), 2)
            row["peak_mib"] = [round(figures["peak_bytes"] / 2**20, 1) for figures in ranks_figures]
            samples = setting.micro_batches * setting.scale.micro_batch_size
            row["samples_per_s"] = round(1e3 * samples / row["step_ms"], 2)
