"""The operations between ranks, each with its buffers, its expected result and its bytes.

A case is one operation with a size, a dtype and a reduction. Values are small whole numbers, so
that sums are exact in every dtype and equal in every order of additions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .operation_facts import DTYPES, MOST_THREADS, OBJECT, OPERATIONS, EndpointKind
from .products import PRODUCTS, Factors, Product
from .ring import REDUCTIONS, PointToPoint, RingResult, chunk_lengths, ring_all_reduce

_EXACT_PRODUCT = 7
"""A product of as many twos is exact in every dtype."""


@dataclass(frozen=True)
class Case:
    """An operation on some ranks.

    op: a name of OPERATIONS.
    dtype: a name of DTYPES; OBJECT for operations on objects.
    reduce: a name of REDUCTIONS; "" for operations without a reduction.
    count: the elements of a message; the bytes, for objects; those of C, for products.
    rank, ranks: this rank and the number of ranks.
    device: the device of the tensors.
    """

    op: str
    dtype: str
    reduce: str
    count: int
    rank: int
    ranks: int
    device: torch.device = torch.device("cpu")

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, DTYPES[self.dtype])
        return dtype

    @property
    def item_bytes(self) -> int:
        return 1 if self.dtype == OBJECT else self.torch_dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """The bytes of the tensor, or of the parts for all ranks where each has one."""
        parts = self.ranks if OPERATIONS[self.op].has_parts else 1
        return self.count * self.item_bytes * parts

    def values(self, rank: int, parts: int = 1) -> Tensor:
        """The values that a rank contributes: `parts` messages in a row."""
        generator = torch.Generator().manual_seed(rank)
        first = 0
        if self.op in PRODUCTS:
            below = 2
        elif self.reduce in ("sum", "avg"):
            below = 4
        elif self.reduce == "product":
            first, below = 1, 3 if rank < _EXACT_PRODUCT else 2
        else:
            below = 2 if self.dtype == "bool" else 128
        whole = torch.randint(first, below, (self.count * parts,), generator=generator)
        return whole.to(self.torch_dtype).to(self.device)

    def part(self, rank: int, of: int) -> Tensor:
        """Part `of` of the values of a rank, which have a part for each rank."""
        return self.values(rank, self.ranks).view(self.ranks, self.count)[of]

    def empty(self, parts: int = 1) -> Tensor:
        return torch.zeros(self.count * parts, dtype=self.torch_dtype, device=self.device)

    def reduced(self, values: Callable[[int], Tensor]) -> Tensor:
        """The reduction of the values of all ranks."""
        result = values(0)
        for rank in range(1, self.ranks):
            result = REDUCTIONS[self.reduce](result, values(rank))
        return result / self.ranks if self.reduce == "avg" else result

    def object_of(self, rank: int) -> dict[str, Any]:
        """The object that a rank contributes."""
        return {"rank": rank, "content": bytes([rank % 256]) * self.count}


@dataclass(frozen=True)
class Wires:
    """The groups and links that carry the messages of a rank.

    group: for operations of torch.distributed.
    links: for point-to-point messages, and operations that consist of them.
    lanes: for messages of several threads, two or more; each has a process group of its own.
    endpoint: how a ring sends and receives.
    pool: runs the threads.
    """

    group: dist.ProcessGroup | None
    links: PointToPoint
    lanes: Sequence[PointToPoint] = ()
    endpoint: EndpointKind = "concurrent"
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(MOST_THREADS))


@dataclass(frozen=True)
class Prepared:
    """An operation with its buffers.

    call: runs it once; returns a RingResult or Product if it is one of asyncpipe's own.
    result: this rank's result of the last call; None if this rank has none.
    expected: the right result.
    reset: fills the buffers that a call overwrites.
    """

    call: Callable[[], Any]
    result: Callable[[], Any]
    expected: Callable[[], Any]
    reset: Callable[[], Any] = lambda: None


def _op(case: Case) -> Any:
    return getattr(dist.ReduceOp, case.reduce.upper())


def _send_recv(case: Case, wires: Wires) -> Prepared:
    buffer = case.values(0) if case.rank == 0 else case.empty()

    def call() -> None:
        if case.rank == 0:
            wires.links.send(1, buffer)
        elif case.rank == 1:
            wires.links.recv(0, buffer)

    return Prepared(call, lambda: buffer if case.rank == 1 else None, lambda: case.values(0))


def _sendrecv(case: Case, wires: Wires) -> Prepared:
    own, arrived = case.values(case.rank), case.empty()
    after, before = (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks
    return Prepared(
        lambda: wires.links.exchange(after, own, before, arrived),
        lambda: arrived,
        lambda: case.values(before),
    )


def _send_recv_threads(case: Case, wires: Wires) -> Prepared:
    buffer = case.values(0) if case.rank == 0 else case.empty()
    pieces = torch.split(buffer, chunk_lengths(case.count, len(wires.lanes)))

    def move(links: PointToPoint, piece: Tensor) -> None:
        if case.rank == 0 and piece.numel():
            links.send(1, piece)
        elif case.rank == 1 and piece.numel():
            links.recv(0, piece)

    return Prepared(
        lambda: list(wires.pool.map(move, wires.lanes, pieces)),
        lambda: buffer if case.rank == 1 else None,
        lambda: case.values(0),
    )


def _sendrecv_threads(case: Case, wires: Wires) -> Prepared:
    own, arrived = case.values(case.rank), case.empty()
    after, before = (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks

    def call() -> None:
        # Even and odd ranks send in different groups: two ranks have one for each direction.
        sending = wires.pool.submit(wires.lanes[case.rank % 2].send, after, own)
        receiving = wires.pool.submit(wires.lanes[before % 2].recv, before, arrived)
        sending.result()
        receiving.result()

    return Prepared(call, lambda: arrived, lambda: case.values(before))


def _broadcast(case: Case, wires: Wires) -> Prepared:
    buffer = case.values(0) if case.rank == 0 else case.empty()
    return Prepared(
        lambda: dist.broadcast(buffer, src=0, group=wires.group),
        lambda: buffer,
        lambda: case.values(0),
    )


def _scatter(case: Case, wires: Wires) -> Prepared:
    arrived = case.empty()
    parts = [case.part(0, rank) for rank in range(case.ranks)] if case.rank == 0 else None
    return Prepared(
        lambda: dist.scatter(arrived, parts, src=0, group=wires.group),
        lambda: arrived,
        lambda: case.part(0, case.rank),
    )


def _gather(case: Case, wires: Wires) -> Prepared:
    own = case.values(case.rank)
    parts = [case.empty() for _ in range(case.ranks)] if case.rank == 0 else None
    return Prepared(
        lambda: dist.gather(own, parts, dst=0, group=wires.group),
        lambda: None if parts is None else torch.cat(parts),
        lambda: torch.cat([case.values(rank) for rank in range(case.ranks)]),
    )


def _reduce(case: Case, wires: Wires) -> Prepared:
    own = case.values(case.rank)
    buffer = case.empty()
    return Prepared(
        lambda: dist.reduce(buffer, dst=0, op=_op(case), group=wires.group),
        lambda: buffer if case.rank == 0 else None,
        lambda: case.reduced(case.values),
        lambda: buffer.copy_(own),
    )


def _reduce_scatter(case: Case, wires: Wires) -> Prepared:
    parts = [case.part(case.rank, rank) for rank in range(case.ranks)]
    arrived = case.empty()
    return Prepared(
        lambda: dist.reduce_scatter(arrived, parts, op=_op(case), group=wires.group),
        lambda: arrived,
        lambda: case.reduced(lambda rank: case.part(rank, case.rank)),
    )


def _all_gather(case: Case, wires: Wires) -> Prepared:
    own, parts = case.values(case.rank), [case.empty() for _ in range(case.ranks)]
    return Prepared(
        lambda: dist.all_gather(parts, own, group=wires.group),
        lambda: torch.cat(parts),
        lambda: torch.cat([case.values(rank) for rank in range(case.ranks)]),
    )


def _all_reduce(case: Case, wires: Wires) -> Prepared:
    own = case.values(case.rank)
    buffer = case.empty()
    return Prepared(
        lambda: dist.all_reduce(buffer, op=_op(case), group=wires.group),
        lambda: buffer,
        lambda: case.reduced(case.values),
        lambda: buffer.copy_(own),
    )


def _all_to_all(case: Case, wires: Wires) -> Prepared:
    own, arrived = case.values(case.rank, case.ranks), case.empty(case.ranks)
    return Prepared(
        lambda: dist.all_to_all_single(arrived, own, group=wires.group),
        lambda: arrived,
        lambda: torch.cat([case.part(rank, case.rank) for rank in range(case.ranks)]),
    )


def _send_object(case: Case, wires: Wires) -> Prepared:
    objects = [case.object_of(0) if case.rank == 0 else None]

    def call() -> None:
        if case.rank == 0:
            dist.send_object_list(objects, dst=1, group=wires.group)
        elif case.rank == 1:
            dist.recv_object_list(objects, src=0, group=wires.group)

    return Prepared(call, lambda: objects if case.rank == 1 else None, lambda: [case.object_of(0)])


def _broadcast_object(case: Case, wires: Wires) -> Prepared:
    objects = [case.object_of(0) if case.rank == 0 else None]
    return Prepared(
        lambda: dist.broadcast_object_list(objects, src=0, group=wires.group),
        lambda: objects,
        lambda: [case.object_of(0)],
    )


def _scatter_object(case: Case, wires: Wires) -> Prepared:
    arrived: list[Any] = [None]
    objects = [case.object_of(rank) for rank in range(case.ranks)] if case.rank == 0 else None
    return Prepared(
        lambda: dist.scatter_object_list(arrived, objects, src=0, group=wires.group),
        lambda: arrived,
        lambda: [case.object_of(case.rank)],
    )


def _gather_object(case: Case, wires: Wires) -> Prepared:
    arrived = [None] * case.ranks if case.rank == 0 else None
    return Prepared(
        lambda: dist.gather_object(case.object_of(case.rank), arrived, dst=0, group=wires.group),
        lambda: arrived,
        lambda: [case.object_of(rank) for rank in range(case.ranks)],
    )


def _all_gather_object(case: Case, wires: Wires) -> Prepared:
    arrived = [None] * case.ranks
    return Prepared(
        lambda: dist.all_gather_object(arrived, case.object_of(case.rank), group=wires.group),
        lambda: arrived,
        lambda: [case.object_of(rank) for rank in range(case.ranks)],
    )


def _ring(case: Case, wires: Wires) -> Prepared:
    own = case.values(case.rank)
    results: list[Tensor] = []

    def call() -> RingResult:
        ring = ring_all_reduce(
            wires.links, own, reduce=case.reduce, endpoint=wires.endpoint, checks_lengths=False
        )
        results[:] = [ring.tensor]
        return ring

    return Prepared(call, lambda: results[0], lambda: case.reduced(case.values))


def _product(case: Case, wires: Wires) -> Prepared:
    side = isqrt(case.count)
    a, b = (case.values(factor).view(side, side) for factor in (0, 1))
    matrices = (a, b) if case.rank == 0 else (None, None)
    factors = Factors(side, side, side, case.torch_dtype, *matrices)
    results: list[Tensor | None] = []

    def call() -> Product:
        product = PRODUCTS[case.op](wires.links, factors, endpoint=wires.endpoint)
        results[:] = [product.result]
        return product

    return Prepared(call, lambda: results[0], lambda: a @ b)


_PREPARED: dict[str, Callable[[Case, Wires], Prepared]] = {
    "send_recv": _send_recv,
    "sendrecv": _sendrecv,
    "send_recv_threads": _send_recv_threads,
    "sendrecv_threads": _sendrecv_threads,
    "broadcast": _broadcast,
    "scatter": _scatter,
    "gather": _gather,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "send_object": _send_object,
    "broadcast_object": _broadcast_object,
    "scatter_object": _scatter_object,
    "gather_object": _gather_object,
    "all_gather_object": _all_gather_object,
    "ring_all_reduce": _ring,
    "matmul_row": _product,
    "matmul_reduction": _product,
}


def prepare(case: Case, wires: Wires) -> Prepared:
    """The operation of a case with its buffers."""
    return _PREPARED[case.op](case, wires)


def wrong_elements(result: Any, expected: Any) -> int:
    """The number of elements, or of objects, that differ by more than rounding.

    >>> wrong_elements(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 3.0]))
    1
    """
    if isinstance(expected, list):
        return sum(one != other for one, other in zip(result, expected, strict=True))
    if result.dtype.is_floating_point:
        allowed = max(1e-6, 4 * torch.finfo(result.dtype).eps)
        difference = (result.double() - expected.double()).abs()
        # Not a number is not within any bound.
        is_right = difference <= allowed * expected.double().abs().clamp(min=1)
        return int((~is_right).sum())
    return int((result != expected).sum())


def wrong_in(prepared: Prepared) -> int:
    """The wrong elements of this rank's last result; 0 if it has none."""
    result = prepared.result()
    return 0 if result is None else wrong_elements(result, prepared.expected())
