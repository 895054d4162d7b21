"""The collectives of the tensor ranks of one host, through memory that all of them map.

    each rank                       copies its tensor into its own memory
    all meet                        each counts its arrival there, until all counts are as high
    each rank                       reads all tensors, and adds them in the order of the ranks

For large tensors on more than two ranks, each rank adds a share of the elements and writes it in
place, and all meet once more before they read the shares. Tensors pass in pieces of `PIECE_BYTES`,
which stay in the caches. A rank has room for two pieces: it writes the next one while others read
the previous one. It has met them in between, so no rank still reads the piece before that.

The memory is an unnamed file that was handed over a socket (`peers.py`): it goes with the
processes, however they end, and the socket reports a peer that is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError
from ..tensor_parallel.ranks import Reduction
from .naps import wait_until
from .peers import Peers, SharedMemory, create_memory, obstacle
from .reductions import MissingRanks, out_of_time, reduce_in_order, takes_shares

PIECE_BYTES = 2**20

_CALL_BYTES = 128
_CALLS_AT, _PIECES_AT = 64, 4096  # the count of arrivals is at 0

_ORDER = threading.Lock()


class ShmCollectives:
    """The ranks of a group, on one host. Making one is collective among them.

    `timeout_s` is the longest that any wait takes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 60.0) -> None:
        if reason := obstacle(group):
            raise TransportError(f"{reason}: they cannot share memory.", "Use --transport gloo.")
        descriptor = create_memory(_PIECES_AT + 2 * PIECE_BYTES)
        self._peers = Peers(group, descriptor, timeout_s)
        self._timeout_s = timeout_s
        self._rank = self._peers.rank
        by_rank = {**self._peers.memories, self._rank: SharedMemory(descriptor)}
        self._memories = [by_rank[rank] for rank in sorted(by_rank)]
        self._arrived = [memory.bytes_at(0, 8).view(np.int64) for memory in self._memories]
        self._others = [rank for rank in range(len(by_rank)) if rank != self._rank]
        self._pieces: dict[torch.dtype, list[list[Tensor]]] = {}
        self._meetings = 0
        self._turn = 0

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """As `Collectives`."""
        result = torch.empty(tensor.shape, dtype=tensor.dtype)
        flat = result.view(-1)
        for start, parts in self._exchanged(op, tensor):
            out = flat[start : start + len(parts[0])]
            if takes_shares(len(parts), out.nbytes):
                self._reduce_shares(parts, op, out)
            else:
                reduce_in_order(parts, op, out)
        return result.to(tensor.device)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """As `Collectives`."""
        results = [torch.empty(tensor.shape, dtype=tensor.dtype) for _ in self._memories]
        for start, parts in self._exchanged("gather", tensor):
            for result, part in zip(results, parts, strict=True):
                result.view(-1)[start : start + len(part)].copy_(part)
        return [result.to(tensor.device) for result in results]

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """As `Collectives`."""
        shape, device = parts[0].shape, parts[0].device
        flat = [part.detach().reshape(-1) for part in parts]
        result = torch.empty(shape, dtype=flat[0].dtype)
        out, most = result.view(-1), PIECE_BYTES // result.element_size() // len(flat)
        for start in range(0, len(out), most):
            own = torch.stack([part[start : start + most] for part in flat])
            for _, pieces in self._exchanged("reduce_scatter", own):
                shares = [piece.view(own.shape)[self._rank] for piece in pieces]
                reduce_in_order(shares, "sum", out[start : start + most])
        return result.to(device)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """As `Collectives`."""
        is_own = source == self._rank
        result = torch.empty(tensor.shape, dtype=tensor.dtype)
        for start, parts in self._exchanged("broadcast", tensor, gives=is_own):
            result.view(-1)[start : start + len(parts[source])].copy_(parts[source])
        return result.to(tensor.device)

    def close(self) -> None:
        """Ends the connections."""
        self._peers.close()

    def _exchanged(
        self, op: str, tensor: Tensor, *, gives: bool = True
    ) -> Iterator[tuple[int, list[Tensor]]]:
        """The pieces of the ranks' tensors in shared memory, with the place of their first
        element; of this one if it `gives` its own."""
        tensor, pieces = tensor.detach(), self._pieces_of(tensor.dtype)
        count, most = tensor.numel(), len(pieces[0][0])
        flat = tensor.reshape(-1) if gives and count > most else tensor
        for start in range(0, count, most):
            self._turn ^= 1
            own, stop = pieces[self._turn][self._rank], min(start + most, count)
            if gives and count <= most:
                own[:count].view(tensor.shape).copy_(tensor)
            elif gives:
                own[: stop - start].copy_(flat[start:stop])
            self._meet(f"{op} of {tensor.dtype} {list(tensor.shape)}" if start == 0 else "")
            yield start, [piece[: stop - start] for piece in pieces[self._turn]]

    def _reduce_shares(self, parts: list[Tensor], op: Reduction, out: Tensor) -> None:
        edges = [rank * len(out) // len(parts) for rank in range(len(parts) + 1)]
        shares = [slice(*edge) for edge in zip(edges, edges[1:], strict=False)]
        own = shares[self._rank]
        reduce_in_order([part[own] for part in parts], op, out[own])
        parts[self._rank][own].copy_(out[own])
        self._meet()
        for rank in self._others:
            out[shares[rank]].copy_(parts[rank][shares[rank]])

    def _meet(self, call: str = "") -> None:
        """Returns when all ranks are here; they make the same call."""
        content = call.encode()[:_CALL_BYTES].ljust(_CALL_BYTES)
        place = _CALLS_AT + self._turn * _CALL_BYTES
        if call:
            self._memories[self._rank].write(place, content)
        self._meetings += 1
        _order_memory()
        self._arrived[self._rank][0] = self._meetings
        try:
            wait_until(self._are_all_here, self._timeout_s)
        except TimeoutError as error:
            raise MissingRanks(self._missing(), out_of_time(self._timeout_s)) from error
        _order_memory()
        for rank in self._others if call else ():
            if (other := self._memories[rank].read(place, _CALL_BYTES)) != content:
                raise MissingRanks(
                    [rank], f"it makes another call, {other.decode().strip()}, and this rank {call}"
                )

    def _missing(self) -> list[int]:
        return [rank for rank in self._others if self._arrived[rank][0] < self._meetings]

    def _are_all_here(self) -> bool:
        if not self._missing():
            return True
        self._peers.receive(0.0)
        if gone := [rank for rank in self._missing() if rank in self._peers.gone]:
            raise MissingRanks(gone, f"the process{'es' * (len(gone) > 1)} ended")
        return False

    def _pieces_of(self, dtype: torch.dtype) -> list[list[Tensor]]:
        """The memory for both pieces of each rank, as elements of the dtype."""
        if dtype not in self._pieces:
            self._pieces[dtype] = [
                [
                    torch.from_numpy(memory.bytes_at(place, PIECE_BYTES)).view(dtype)
                    for memory in self._memories
                ]
                for place in (_PIECES_AT, _PIECES_AT + PIECE_BYTES)
            ]
        return self._pieces[dtype]


def _order_memory() -> None:
    """Completes the reads and writes before it ahead of those after it, as processors such as
    Arm's do at locks alone: nothing crosses the release of one and the acquisition of the next."""
    for _ in range(2):
        with _ORDER:
            pass
