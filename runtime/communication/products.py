"""Matrix products C = A B whose work is divided among the ranks, in the two ways there are.

    matmul_row         rows of A scattered, B broadcast; each rank has rows of C, which are gathered
    matmul_reduction   columns of A and rows of B scattered; each rank has a summand of C, and a
                       ring all-reduce adds them

The first divides m, a size of A (m x k) and of C (m x n), so the ranks' results are pieces of C.
The second divides k, which C does not have, so they are summands. If m or k cannot be divided by
the number of ranks, the first ranks have one row or column more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .operation_facts import EndpointKind
from .ring import PointToPoint, chunk_lengths, ring_all_reduce


@dataclass(frozen=True)
class Factors:
    """The factors of a product.

    m, k, n: A has m rows and k columns, B has k rows and n columns.
    dtype: that of both.
    a, b: the matrices, on rank 0; the other ranks have none.
    """

    m: int
    k: int
    n: int
    dtype: torch.dtype
    a: Tensor | None = None
    b: Tensor | None = None


@dataclass(frozen=True)
class Product:
    """The result of a product on one rank.

    result: C; None on a rank without it.
    sent: the bytes that this rank sent of A, B and C.
    """

    result: Tensor | None
    sent: dict[str, int]


def matmul_row(
    links: PointToPoint, factors: Factors, *, endpoint: EndpointKind = "concurrent"
) -> Product:
    """C on rank 0, each rank having computed some of its rows. Collective.

    Messages go from rank 0 to one rank after the other and back, with any `endpoint`.
    """
    rows = chunk_lengths(factors.m, links.ranks)
    wires = _Wires(links)
    a = wires.scatter("A", factors.a, 0, (rows[links.rank], factors.k), factors.dtype)
    b = wires.broadcast("B", factors.b, (factors.k, factors.n), factors.dtype)
    return Product(wires.gather("C", a @ b, rows), wires.sent)


def matmul_reduction(
    links: PointToPoint, factors: Factors, *, endpoint: EndpointKind = "concurrent"
) -> Product:
    """C on all ranks, each having computed a summand of it. Collective."""
    own = chunk_lengths(factors.k, links.ranks)[links.rank]
    wires = _Wires(links)
    a = wires.scatter("A", factors.a, 1, (factors.m, own), factors.dtype)
    b = wires.scatter("B", factors.b, 0, (own, factors.n), factors.dtype)
    ring = ring_all_reduce(links, a @ b, endpoint=endpoint, checks_lengths=False)
    return Product(ring.tensor, {**wires.sent, "C": ring.sent_bytes})


PRODUCTS: dict[str, Callable[..., Product]] = {
    "matmul_row": matmul_row,
    "matmul_reduction": matmul_reduction,
}


def product_bytes(name: str, factors: Factors, ranks: int) -> dict[str, int]:
    """The bytes of A, B and C that all ranks of a product send together.

    If the number of ranks N divides m, those of a row product are m k (N-1)/N, k n (N-1) and
    m n (N-1)/N elements; if it divides k, those of a reduction are m k (N-1)/N, k n (N-1)/N and
    2 m n (N-1).

    >>> product_bytes("matmul_row", Factors(8, 6, 4, torch.float32), 2)
    {'A': 96, 'B': 96, 'C': 64}
    >>> product_bytes("matmul_reduction", Factors(8, 6, 4, torch.float32), 2)
    {'A': 96, 'B': 48, 'C': 256}
    """
    m, k, n = factors.m, factors.k, factors.n
    if name == "matmul_row":
        away = m - chunk_lengths(m, ranks)[0]
        elements = {"A": away * k, "B": k * n * (ranks - 1), "C": away * n}
    else:
        away = k - chunk_lengths(k, ranks)[0]
        elements = {"A": m * away, "B": away * n, "C": 2 * m * n * (ranks - 1)}
    return {matrix: count * factors.dtype.itemsize for matrix, count in elements.items()}


@dataclass
class _Wires:
    """Operations between rank 0 and the others, made of messages whose bytes are counted."""

    links: PointToPoint
    sent: dict[str, int] = field(default_factory=dict)

    def scatter(
        self,
        name: str,
        whole: Tensor | None,
        dimension: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> Tensor:
        """This rank's part, of the given shape, of the matrix that rank 0 has."""
        if whole is None:
            return self._received(name, torch.empty(shape, dtype=dtype))
        parts = torch.split(
            whole, chunk_lengths(whole.shape[dimension], self.links.ranks), dimension
        )
        return self._sent(name, parts)

    def broadcast(
        self, name: str, whole: Tensor | None, shape: tuple[int, int], dtype: torch.dtype
    ) -> Tensor:
        """The matrix that rank 0 has."""
        if whole is None:
            return self._received(name, torch.empty(shape, dtype=dtype))
        return self._sent(name, [whole] * self.links.ranks)

    def gather(self, name: str, own: Tensor, rows: Sequence[int]) -> Tensor | None:
        """On rank 0, the rows of all ranks."""
        self.sent[name] = 0
        if self.links.rank != 0:
            self._send(name, 0, own)
            return None
        whole = own.new_empty(sum(rows), own.shape[1])
        parts = torch.split(whole, list(rows))
        parts[0].copy_(own)
        for peer, part in enumerate(parts):
            if peer != 0 and part.numel():
                self.links.recv(peer, part)
        return whole

    def _sent(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        self.sent[name] = 0
        for peer, part in enumerate(parts):
            if peer != 0:
                self._send(name, peer, part.contiguous())
        return parts[0]

    def _send(self, name: str, peer: int, tensor: Tensor) -> None:
        if tensor.numel():
            self.links.send(peer, tensor)
            self.sent[name] += tensor.nbytes

    def _received(self, name: str, tensor: Tensor) -> Tensor:
        self.sent[name] = 0
        if tensor.numel():
            self.links.recv(0, tensor)
        return tensor
