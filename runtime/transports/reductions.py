"""The collectives of tensor ranks, over a process group of torch or over MPI.

Over MPI and in shared memory, asyncpipe itself adds the tensors of the ranks, in rank order, so all
ranks get the same bits. MPI's own Allreduce leaves the order to the library, and MPI has no
half-precision numbers. So the ranks exchange bytes: two ranks, or small tensors, in one all-gather;
otherwise each rank reduces its share of the elements, and an all-gather collects the shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..tensor_files import dense
from ..tensor_parallel.ranks import Reduction
from .mpi import load_mpi
from .naps import EAGER_S, wait_until

DIRECT_BYTES = 64 * 1024
"""Up to this size each of more than two ranks reads all tensors as a whole."""

_EAGER_BYTES_PER_S = 250e6
"""MPI moves a message only while it is asked: the slowest link for which a rank takes no naps."""

_HALVES = (torch.float16, torch.bfloat16)


class MissingRanks(RuntimeError):
    """Some ranks of a group, by their numbers in it, did not take part."""

    def __init__(self, ranks: Sequence[int], why: str) -> None:
        super().__init__(why)
        self.ranks = tuple(ranks)


def out_of_time(timeout_s: float) -> str:
    """Why ranks are missing after a wait of that length."""
    return f"{timeout_s:g} s are over"


def reduce_in_order(parts: Sequence[Tensor], op: Reduction, out: Tensor) -> None:
    """Writes the sum or maximum of at least two tensors, taken in their order, to `out`. Halves are
    added in float32 and rounded once."""
    if op == "max":
        torch.maximum(parts[0], parts[1], out=out)
        for part in parts[2:]:
            torch.maximum(out, part, out=out)
        return
    is_wide = len(parts) > 2 and out.dtype in _HALVES
    if is_wide:
        total = parts[0].float().add_(parts[1])
    else:
        total = torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        total.add_(part)
    if is_wide:
        out.copy_(total)


def takes_shares(ranks: int, size_bytes: int) -> bool:
    """True if each rank reduces only its share of such a tensor."""
    return ranks > 2 and size_bytes > DIRECT_BYTES


def _empty_like(tensor: Tensor, device: str | None = None) -> Tensor:
    """Contiguous memory for as many numbers."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device or tensor.device)


class GroupCollectives:
    """The ranks of a group of torch, over gloo or NCCL."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """As `Collectives`."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        of_torch = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        dist.all_reduce(result, of_torch, self._group)
        return result

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """As `Collectives`."""
        own = dense(tensor)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, own, self._group)
        return parts

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """As `Collectives`."""
        given = [dense(part) for part in parts]
        result = _empty_like(given[0])
        dist.reduce_scatter(result, given, group=self._group)
        return result

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """As `Collectives`."""
        is_own = dist.get_rank(self._group) == source
        result = dense(tensor) if is_own else _empty_like(tensor)
        dist.broadcast(result, group=self._group, group_src=source)
        return result

    def close(self) -> None:
        """Does nothing: the group belongs to the run."""


class MpiCollectives:
    """The ranks of a communicator of mpi4py, which no one else uses.

    The messages are in host memory. Requests are tested instead of waited for, so that every wait
    has a time-out and other threads run meanwhile.
    """

    def __init__(self, world: Any, *, timeout_s: float) -> None:
        self._world, self._timeout_s = world, timeout_s
        self._mpi = load_mpi()
        self._ranks: int = world.Get_size()
        self._rank: int = world.Get_rank()

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """As `Collectives`."""
        own = dense(tensor.cpu()).reshape(-1)
        if takes_shares(self._ranks, own.nbytes):
            share = -(-len(own) // self._ranks)
            own = torch.nn.functional.pad(own, (0, share * self._ranks - len(own)))
            whole = torch.cat(self._gathered(self._reduced_share(own, op)))[: tensor.numel()]
        else:
            whole = torch.empty_like(own)
            reduce_in_order(self._gathered(own), op, whole)
        return whole.view(tensor.shape).to(tensor.device)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """As `Collectives`."""
        parts = self._gathered(dense(tensor.cpu()).reshape(-1))
        return [part.view(tensor.shape).to(tensor.device) for part in parts]

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """As `Collectives`."""
        own = torch.stack([part.detach().cpu() for part in parts])
        reduced = self._reduced_share(own.view(-1), "sum")
        return reduced.view(parts[0].shape).to(parts[0].device)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """As `Collectives`."""
        is_own = self._rank == source
        result = dense(tensor.cpu()) if is_own else _empty_like(tensor, "cpu")
        self._finish(self._world.Ibcast(self._bytes(result), source), result.nbytes)
        return result.to(tensor.device)

    def close(self) -> None:
        """Lets go of the communicator. Collective."""
        self._world.Free()

    def _reduced_share(self, own: Tensor, op: Reduction) -> Tensor:
        """The reduction of this rank's share of the elements, which are as many for each rank."""
        received = torch.empty_like(own)
        self._finish(self._world.Ialltoall(self._bytes(own), self._bytes(received)), own.nbytes)
        reduced = own.new_empty(len(own) // self._ranks)
        reduce_in_order(received.chunk(self._ranks), op, reduced)
        return reduced

    def _gathered(self, own: Tensor) -> list[Tensor]:
        own = own.contiguous()
        parts = own.new_empty(self._ranks, len(own))
        self._finish(self._world.Iallgather(self._bytes(own), self._bytes(parts)), parts.nbytes)
        return list(parts)

    def _bytes(self, tensor: Tensor) -> list[Any]:
        content = self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        return [content, self._mpi.BYTE]

    def _finish(self, request: Any, size: int) -> None:
        try:
            wait_until(request.Test, self._timeout_s, EAGER_S + size / _EAGER_BYTES_PER_S)
        except TimeoutError as error:
            others = [rank for rank in range(self._ranks) if rank != self._rank]
            raise MissingRanks(others, out_of_time(self._timeout_s)) from error
