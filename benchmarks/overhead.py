"""The runtime's cost per action: pipelines whose stages do nothing.

Every F and B runs as in a real run, with its receives, sends and bookkeeping; the stages pass on a
tensor of one number. One process has no messages; between two processes, each F and B has one
message in each direction. The time of an action then has two parts: the CPU time of its process
(core), and the sleep until a message wakes it, which stages that compute would hide.

    python benchmarks/overhead.py
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machine import write_result
from torch import Tensor, nn

from asyncpipe.runtime.executor.executor import Executor
from asyncpipe.runtime.executor.mailbox import forward_edges, gradient_edges
from asyncpipe.runtime.plan.plan import (
    Plan,
    TensorSpec,
)
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.schedule.dependencies import lower
from asyncpipe.runtime.transports.choose import open_transport
from asyncpipe.runtime.transports.protocol import LocalHub, Transport
from asyncpipe.tests.support.models.plans import connected, plan_by_hand, stage_by_hand

MICRO_BATCHES, STAGES, ROUNDS = 64, 2, 21
TRANSPORTS, SCHEDULES = ("shm", "gloo"), ("1f1b", "gpipe")


class Empty(nn.Module):
    """Returns its input; at the first stage gradients end."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.requires_grad else x.detach().requires_grad_()


class Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


def empty_plan(stages: int) -> Plan:
    """A chain of stages that pass on one number."""
    names = ["x", *(f"h{j}" for j in range(1, stages)), "loss"]
    tensors = [TensorSpec(name, "float32", (1,), requires_grad=True) for name in names]
    made = [stage_by_hand(j, (names[j],), (names[j + 1],)) for j in range(stages)]
    return plan_by_hand(
        "empty",
        sizes={},
        inputs=(tensors[0],),
        values=tuple(tensors),
        outputs="loss",
        loss="loss",
        stages=connected(made, dict(zip(names, tensors, strict=True))),
    )


@dataclass(frozen=True)
class Overhead:
    """A rank's microseconds per F or B: wall-clock time and CPU time."""

    us: float
    core_us: float


def overhead(
    transport: Transport, schedule_name: str, meet: Callable[[], Any] = lambda: None
) -> Overhead:
    """The overhead of this rank; every rank calls it. Medians of several steps."""
    plan = empty_plan(STAGES)
    made = make_schedule(schedule_name, stages=STAGES, micro_batches=MICRO_BATCHES)
    schedule = lower(made, forward_edges(plan), grad_edges=gradient_edges(plan))
    own = [j for j, rank in enumerate(made.rank_of_stage) if rank == transport.rank]
    stages: dict[int, nn.Module] = {j: Last() if j == STAGES - 1 else Empty() for j in own}
    pipeline = Executor(plan, stages, transport, rank_of_stage=made.rank_of_stage)
    inputs, taken = {"x": torch.ones(1)}, []
    for _ in range(ROUNDS + 2):
        meet()
        start_s, start_core_s = time.perf_counter(), time.process_time()
        pipeline.run(schedule, lambda _: inputs)
        taken.append((time.perf_counter() - start_s, time.process_time() - start_core_s))
    pipeline.close()
    actions = 2 * len(own) * MICRO_BATCHES
    return Overhead(*(statistics.median(of) / actions * 1e6 for of in zip(*taken[2:], strict=True)))


def _rank(rank: int, rendezvous: str, result: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=STAGES)
    for transport in TRANSPORTS:
        for name in SCHEDULES:
            opened = open_transport(transport, dist.group.WORLD, timeout_s=60.0, device="cpu")
            result[transport, name, rank] = overhead(opened, name, dist.barrier)
    dist.destroy_process_group()


def measure() -> dict[str, Overhead]:
    """Measures one process, and the slower of two."""
    torch.set_num_threads(1)
    found = {"one process": overhead(LocalHub(1).transport(0), "single")}
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        result = manager.dict()
        mp.spawn(_rank, (f"file://{Path(folder) / 'store'}", result), nprocs=STAGES)
        for transport, name in product(TRANSPORTS, SCHEDULES):
            ranks = [result[transport, name, rank] for rank in range(STAGES)]
            slower = max(ranks, key=lambda rank: rank.us)
            found[f"two processes over {transport}, {name}"] = slower
    return found


if __name__ == "__main__":
    figures = measure()
    for name, taken in figures.items():
        print(f"{name:32} {taken.us:6.0f} us an action, {taken.core_us:4.0f} us of a core")
    write_result(
        "overhead",
        {
            "micro_batches": MICRO_BATCHES,
            "figures": {name: asdict(taken) for name, taken in figures.items()},
        },
    )
