"""The transports that keep the one protocol, and how a test starts ranks that talk over one.

A conversation is a generator function of a transport and more arguments: it stops where a tensor
is not there yet, so that it runs in one thread over `local` and in processes over the others.
A new transport is one entry of PROCESS_KINDS.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Generator
from dataclasses import dataclass
from inspect import getfile
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncpipe.runtime.transports import (
    GlooTransport,
    Handle,
    LocalHub,
    MpiTransport,
    NcclTransport,
    ShmTransport,
    Transport,
    run_together,
)
from asyncpipe.runtime.transports.protocol import DIRECTIONS
from asyncpipe.tests.support.processes.gloo_ranks import run_processes
from asyncpipe.tests.support.processes.mpi_ranks import run_mpi

Conversation = Callable[..., Generator[Handle, None, Any]]


@dataclass(frozen=True)
class Kind:
    """How a transport of processes is made on a rank, with `timeout_s` and `depth`, and how its
    ranks are started: as `run_processes` does."""

    make: Callable[..., Transport]
    run: Callable[..., list[Any]] = run_processes
    end_together: bool = False
    """True if the launcher ends all ranks when one ends early."""
    holds_back: bool = True
    """True if a send waits in its process once `depth` messages are under way."""


def _in_nccl_s_order(**options: Any) -> NcclTransport:
    """The transport over NCCL with gloo in its place, which waits nowhere but on the host."""
    ranks = range(dist.get_world_size())
    lanes = {(traffic, *pair) for traffic in DIRECTIONS.values() for pair in permutations(ranks, 2)}
    return NcclTransport(lanes, device="cpu", backend="gloo", **options)


PROCESS_KINDS: dict[str, Kind] = {
    "gloo": Kind(GlooTransport),
    "shm": Kind(ShmTransport),
    "mpi": Kind(MpiTransport, run_mpi, end_together=True),
    "nccl's order": Kind(_in_nccl_s_order, holds_back=False),
}
KINDS = ("local", *PROCESS_KINDS)


def open_transport(kind: str, **options: Any) -> Transport:
    """This rank's end; the ranks of a process group call it together."""
    return PROCESS_KINDS[kind].make(**{"timeout_s": 20.0, **options})


def run_ranks(
    kind: str, ranks: int, function: Callable[..., Any], *arguments: Any, limit_s: float = 60.0
) -> list[Any]:
    """`function(rank, kind, *arguments)` on every rank, which opens the transport itself."""
    return PROCESS_KINDS[kind].run(ranks, function, kind, *arguments, limit_s=limit_s)


def converse(
    kind: str,
    ranks: int,
    conversation: Conversation,
    *arguments: Any,
    depth: int = 4,
    limit_s: float = 60.0,
) -> list[Any]:
    """The results of the conversation by rank; a rank that raises fails the test."""
    if kind == "local":
        hub = LocalHub(ranks, depth=depth)
        transports = [hub.transport(rank) for rank in range(ranks)]
        results = run_together([conversation(t, *arguments) for t in transports])
        for transport in transports:
            transport.close()
        return results
    file, name = getfile(conversation), conversation.__name__
    results = run_ranks(kind, ranks, _converse, file, name, arguments, depth, limit_s=limit_s)
    for rank, result in enumerate(results):
        assert isinstance(result, tuple), f"rank {rank}: {result}"
    return [result[0] for result in results]


def _converse(
    rank: int, kind: str, file: str, name: str, arguments: tuple[Any, ...], depth: int
) -> tuple[Any]:
    transport = open_transport(kind, depth=depth)
    steps = runpy.run_path(file)[name](transport, *arguments)
    try:
        handle = next(steps)
    except StopIteration as end:
        transport.close()
        return (end.value,)
    raise AssertionError(f"{handle} of a transport of processes is not ready")


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """True if two tensors have the same dtype, the same shape and the same bytes."""
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and _bytes(found) == _bytes(expected)
    )


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
