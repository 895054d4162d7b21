"""What tensor ranks exchange: the same bits on all of them, over every transport."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial, reduce

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from asyncpipe.runtime.tensor_parallel.ranks import Collectives
from asyncpipe.runtime.transports.mpi import load_mpi
from asyncpipe.runtime.transports.reductions import (
    DIRECT_BYTES,
    GroupCollectives,
    MissingRanks,
    MpiCollectives,
)
from asyncpipe.runtime.transports.shm_collectives import PIECE_BYTES, ShmCollectives
from asyncpipe.tests.support.processes.gloo_ranks import run_processes
from asyncpipe.tests.support.processes.mpi_ranks import run_mpi
from asyncpipe.tests.support.processes.transports import same_bits

RUN = {"gloo": run_processes, "shm": run_processes, "mpi": run_mpi}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LIMIT_S = 0.5


def connected(kind: str, timeout_s: float = 20.0) -> Collectives:
    if kind == "gloo":
        return GroupCollectives()
    if kind == "mpi":
        return MpiCollectives(load_mpi().COMM_WORLD.Dup(), timeout_s=timeout_s)
    return ShmCollectives(timeout_s=timeout_s)


def tensors(rank: int) -> Iterator[Tensor]:
    """Random tensors of a rank: from none to several pieces of numbers, of all dtypes and
    layouts."""
    generator = torch.Generator().manual_seed(rank)
    piece, direct = PIECE_BYTES // 4, DIRECT_BYTES // 4
    for count in (0, 1, 3, 64, direct, direct + 1, piece, piece + 3, 2 * piece + 5):
        yield torch.randn(count, generator=generator)
    for dtype in FLOATS:
        yield torch.randn(40, 1003, generator=generator).to(dtype)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        yield torch.randint(50, (5, 7), generator=generator, dtype=dtype)
    for shape in ((6, 4), (600, 700)):
        yield torch.randn(shape, generator=generator).T
        yield torch.randn(shape, generator=generator)[:, ::2]
        yield torch.randn(shape[0], 1, generator=generator).expand(shape)
    yield torch.randn((), generator=generator)


def wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def faults(rank: int, kind: str, ranks: int) -> list[str]:
    """The cases that are not the sums of the ranks in order, their maxima, or their tensors."""
    group, wrong = connected(kind), []
    for number, of_ranks in enumerate(zip(*map(tensors, range(ranks)), strict=True)):
        own, before = of_ranks[rank], of_ranks[rank].clone()
        summed = reduce(torch.add, map(wide, of_ranks)).to(own.dtype)
        found = group.all_reduce(own)
        agrees = same_bits if kind != "gloo" else partial(torch.allclose, rtol=1e-2, atol=1e-2)
        if not agrees(found, summed):
            wrong.append(f"sum of case {number}")
        share = reduce(torch.add, [wide(each + rank) for each in of_ranks]).to(own.dtype)
        if not agrees(group.reduce_scatter([own + place for place in range(ranks)]), share):
            wrong.append(f"share of case {number}")
        if not same_bits(group.all_reduce(own, "max"), reduce(torch.maximum, of_ranks)):
            wrong.append(f"maximum of case {number}")
        gathered = zip(group.all_gather(own), of_ranks, strict=True)
        if not all(same_bits(each, expected) for each, expected in gathered):
            wrong.append(f"tensors of case {number}")
        source = number % ranks
        if not same_bits(group.broadcast(own, source), of_ranks[source]):
            wrong.append(f"broadcast of case {number}")
        if not (own.equal(before) and found.is_contiguous()):
            wrong.append(f"layout of case {number}")
    group.close()
    return wrong


@pytest.mark.parametrize(("kind", "ranks"), [("gloo", 2), ("shm", 2), ("shm", 3), ("mpi", 3)])
def test_sums_are_those_of_the_ranks_in_order_on_all_of_them(kind: str, ranks: int) -> None:
    assert RUN[kind](ranks, faults, kind, ranks) == [[]] * ranks


def sum_in_two_groups(rank: int) -> tuple[float, float]:
    every = ShmCollectives(timeout_s=20.0)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = ShmCollectives(halves[rank // 2], timeout_s=20.0)
    of_half = of_all = 0.0
    for step in range(20):
        value = torch.full((1000 + step,), float(10**rank))
        of_half += float(half.all_reduce(value)[-1])
        if step % 3 == 0:
            of_all += float(every.all_reduce(value)[-1])
    return of_half, of_all


def test_groups_of_the_same_ranks_do_not_mix() -> None:
    results = run_processes(4, sum_in_two_groups)
    assert results == [(220.0, 7777.0)] * 2 + [(22000.0, 7777.0)] * 2


def miss(rank: int, kind: str, fault: str) -> tuple[tuple[int, ...], str]:
    """The error on rank 1 if rank 0 misses the second sum."""
    group = connected(kind, LIMIT_S)
    group.all_reduce(torch.ones(3))
    if rank == 0:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "another":
            with pytest.raises(MissingRanks):
                group.all_reduce(torch.ones(4))
        time.sleep(3 * LIMIT_S)
        return (), ""
    with pytest.raises(MissingRanks) as raised:
        group.all_reduce(torch.ones(2))
    return raised.value.ranks, str(raised.value)


@pytest.mark.parametrize(
    ("kind", "fault", "message"),
    [
        ("shm", "late", "0.5 s are over"),
        ("mpi", "late", "0.5 s are over"),
        ("shm", "killed", "the process ended"),
        (
            "shm",
            "another",
            "it makes another call, sum of torch.float32 [4], and this rank sum of torch.float32 "
            "[2]",
        ),
    ],
)
def test_a_rank_that_is_missing_is_named(kind: str, fault: str, message: str) -> None:
    assert RUN[kind](2, miss, kind, fault, limit_s=20.0)[1] == ((0,), message)
