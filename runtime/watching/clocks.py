"""The clocks of all ranks -> how far each is behind that of rank 0.

`time.perf_counter` is one clock for all processes of a Linux host. Between hosts a rank asks rank 0
for its time again and again, as NTP does: of the answer that came back fastest it takes that rank 0
read its clock half way. The error is at most half of that round trip.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ..launching.world import World

_ROUNDS = 8


def clock_offset_s(world: World, clock: Callable[[], float] = time.perf_counter) -> float:
    """What this rank adds to its clock to have that of rank 0; every rank calls it."""
    hosts = world.gathered(_host())
    if world.control is None:
        return 0.0
    offset_s = 0.0
    for rank in range(1, world.ranks):
        if hosts[rank] != hosts[0]:
            if world.rank == 0:
                _answer(world, rank, clock)
            elif world.rank == rank:
                offset_s = _ask(world, clock)
    return offset_s


def _host() -> bytes:
    """What tells a running host from all others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text() if boot.is_file() else str(time.time())
    return hashlib.sha256(name.encode()).digest()


def _answer(world: World, rank: int, clock: Callable[[], float]) -> None:
    content = torch.zeros(1, dtype=torch.float64)
    for _ in range(_ROUNDS):
        dist.recv(content, src=rank, group=world.control)
        content[0] = clock()
        dist.send(content, dst=rank, group=world.control)


def _ask(world: World, clock: Callable[[], float]) -> float:
    content = torch.zeros(1, dtype=torch.float64)
    answers = []
    for _ in range(_ROUNDS):
        asked_s = clock()
        dist.send(content, dst=0, group=world.control)
        dist.recv(content, src=0, group=world.control)
        got_s = clock()
        answers.append((got_s - asked_s, float(content) - (asked_s + got_s) / 2))
    return min(answers)[1]
