"""The operations that asyncpipe-comm bench times, with their names and facts. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EndpointKind = Literal["concurrent", "serial"]

ENDPOINTS: tuple[EndpointKind, ...] = ("concurrent", "serial")

DTYPES = {
    "f32": "float32",
    "f64": "float64",
    "bf16": "bfloat16",
    "f16": "float16",
    "i64": "int64",
    "u8": "uint8",
    "bool": "bool",
}
"""The dtypes by their short names, with torch's."""

REDUCERS = {
    "sum": "add",
    "product": "mul",
    "min": "minimum",
    "max": "maximum",
    "band": "bitwise_and",
    "bor": "bitwise_or",
    "bxor": "bitwise_xor",
    "avg": "add",
}
"""The reductions by name, each with torch's function of two tensors; an average divides the sum."""


def applies(reduce: str, dtype: str) -> bool:
    """True if a reduction is defined for a dtype: bits of integers, averages of floats.

    >>> applies("bxor", "i64"), applies("avg", "i64"), applies("", "bool")
    (True, False, True)
    """
    is_float = "float" in DTYPES[dtype]
    return is_float if reduce == "avg" else not (is_float and reduce in ("band", "bor", "bxor"))


def _once(ranks: int) -> float:
    return 1.0


def _to_others(ranks: int) -> float:
    return (ranks - 1) / ranks


def _there_and_back(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


@dataclass(frozen=True)
class OperationFacts:
    """The facts of an operation.

    kind: messages and asyncpipe's own operations run over the transport of the ranks; messages of
        threads, tensors and objects over torch.distributed's backend.
    bus_factor: busbw / algbw for a number of ranks, as nccl-tests has it; None for products.
    has_parts: a size is that of a message for each rank together.
    reduces: it needs a reduction.
    root: the rank that sends to all or receives from all; -1 if there is none.
    """

    kind: Literal["message", "threads", "tensor", "object", "own"]
    bus_factor: Callable[[int], float] | None
    has_parts: bool = False
    reduces: bool = False
    root: int = -1

    @property
    def over_links(self) -> bool:
        return self.kind in ("message", "own")


OPERATIONS = {
    "send_recv": OperationFacts("message", _once),
    "sendrecv": OperationFacts("message", _once),
    "send_recv_threads": OperationFacts("threads", _once),
    "sendrecv_threads": OperationFacts("threads", _once),
    "broadcast": OperationFacts("tensor", _once, root=0),
    "scatter": OperationFacts("tensor", _to_others, has_parts=True, root=0),
    "gather": OperationFacts("tensor", _to_others, has_parts=True, root=0),
    "reduce": OperationFacts("tensor", _once, reduces=True, root=0),
    "reduce_scatter": OperationFacts("tensor", _to_others, has_parts=True, reduces=True),
    "all_gather": OperationFacts("tensor", _to_others, has_parts=True),
    "all_reduce": OperationFacts("tensor", _there_and_back, reduces=True),
    "all_to_all": OperationFacts("tensor", _to_others, has_parts=True),
    "send_object": OperationFacts("object", _once),
    "broadcast_object": OperationFacts("object", _once, root=0),
    "scatter_object": OperationFacts("object", _to_others, has_parts=True, root=0),
    "gather_object": OperationFacts("object", _to_others, has_parts=True, root=0),
    "all_gather_object": OperationFacts("object", _to_others, has_parts=True),
    "ring_all_reduce": OperationFacts("own", _there_and_back, reduces=True),
    "matmul_row": OperationFacts("own", None, root=0),
    "matmul_reduction": OperationFacts("own", None),
}
"""The operations by name."""

OBJECT = "object"
"""The dtype of operations on objects."""

NEED_TWO = ("send_recv", "sendrecv", "send_recv_threads", "sendrecv_threads", "send_object")
"""The operations that need two ranks."""

NOT_DEFINED = "not defined for this dtype"
"""Why a reduction and a dtype are not tried together."""

MOST_THREADS = 64
"""The threads of a rank that may send messages."""
