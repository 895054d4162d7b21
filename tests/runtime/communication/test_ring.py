"""The ring all-reduce: its results, its bytes and its events."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncpipe.runtime.communication import operation_facts
from asyncpipe.runtime.communication.endpoints import GroupLinks, TransportLinks
from asyncpipe.runtime.communication.operation_facts import ENDPOINTS, EndpointKind, applies
from asyncpipe.runtime.communication.ring import (
    REDUCTIONS,
    PointToPoint,
    ring_all_reduce,
    ring_elements,
)
from asyncpipe.runtime.errors import TransportError
from asyncpipe.runtime.transports import ShmTransport
from asyncpipe.tests.support.processes.gloo_ranks import run_processes
from asyncpipe.tests.support.processes.rings import run_threads

DTYPES = {name: getattr(torch, full) for name, full in operation_facts.DTYPES.items()}
SIZES = (0, 1, 2, 7, 17, 2**16 + 1)


def share(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers, so that the order of additions makes no difference."""
    generator = torch.Generator().manual_seed(31 * rank + length)
    return torch.randint(0, 4, (length,), generator=generator).to(dtype)


def expected(shares: list[Tensor], reduce: str) -> Tensor:
    result = shares[0].clone()
    for other in shares[1:]:
        result = REDUCTIONS[reduce](result, other)
    return result / len(shares) if reduce == "avg" else result


@settings(max_examples=60)
@given(
    ranks=st.integers(1, 5),
    length=st.integers(0, 17),
    dtype_name=st.sampled_from(sorted(DTYPES)),
    reduce=st.sampled_from(sorted(REDUCTIONS)),
    endpoint=st.sampled_from(ENDPOINTS),
)
def test_all_ranks_have_the_reduction_of_all_and_sent_as_many_bytes_as_the_formula_says(
    ranks: int, length: int, dtype_name: str, reduce: str, endpoint: EndpointKind
) -> None:
    if not applies(reduce, dtype_name):
        return
    dtype = DTYPES[dtype_name]
    shares = [share(rank, length, dtype) for rank in range(ranks)]
    before = [tensor.clone() for tensor in shares]
    results = run_threads(
        ranks,
        lambda links: ring_all_reduce(links, shares[links.rank], reduce=reduce, endpoint=endpoint),
    )
    for rank, result in enumerate(results):
        torch.testing.assert_close(result.tensor, expected(shares, reduce))
        assert torch.equal(shares[rank], before[rank])
        assert result.sent_bytes == ring_elements(length, ranks, rank) * dtype.itemsize
        if length % ranks == 0:
            assert result.sent_bytes == 2 * shares[rank].nbytes * (ranks - 1) // ranks
    assert sum(result.sent_bytes for result in results) == 2 * shares[0].nbytes * (ranks - 1)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_events_are_the_steps_of_the_two_phases(endpoint: EndpointKind) -> None:
    shares = torch.ones(6, 12)
    results = run_threads(
        6, lambda links: ring_all_reduce(links, shares[links.rank], endpoint=endpoint)
    )
    for result in results:
        first = [event for event in result.events if event.phase == "scatter-reduce"]
        assert {(event.step, event.op) for event in first} == {
            (step, op) for step in range(5) for op in ("send", "wait", "reduce")
        }
        assert len(result.events) == 5 * 3 + 5 * 2 + 1
        ends = [event.end_s for event in result.events]
        assert ends == sorted(ends) and all(e.start_s <= e.end_s for e in result.events)
        assert result.events[-1].op == "done" and result.events[-1].start_s == 0


def test_lengths_that_differ_are_refused_on_every_rank() -> None:
    def fails(links: PointToPoint) -> str:
        with pytest.raises(TransportError) as raised:
            ring_all_reduce(links, torch.ones(5 + (links.rank == 2)))
        return raised.value.what

    (message,) = set(run_threads(4, fails))
    assert message == (
        "an all-reduce needs as many elements on every rank (ranks 0, 1, 3: 5; rank 2: 6)."
    )


def test_any_shape_is_kept_and_the_gradient_does_not_follow() -> None:
    shares = torch.arange(24.0).view(2, 4, 3).requires_grad_()
    results = run_threads(2, lambda links: ring_all_reduce(links, shares[links.rank].T))
    assert torch.equal(results[1].tensor, shares.detach().sum(0).T)
    assert not results[1].tensor.requires_grad


def compared(rank: int) -> tuple[float, float]:
    """The largest difference from torch's all_reduce, over gloo and over shared memory."""
    shared = TransportLinks(ShmTransport(timeout_s=20), dist.get_world_size())
    differences = []
    for links in (GroupLinks(timeout_s=20), shared):
        worst = 0.0
        for dtype in DTYPES.values():
            for length, endpoint in ((n, e) for n in SIZES for e in ENDPOINTS):
                own = share(rank, length, dtype)
                if dtype in (torch.float32, torch.float64):
                    own = own / 3
                ring = ring_all_reduce(links, own, endpoint=endpoint).tensor
                dist.all_reduce(own)
                if length:
                    worst = max(worst, (ring.double() - own.double()).abs().max().item())
        differences.append(worst)
    return differences[0], differences[1]


def test_it_equals_the_all_reduce_of_torch_over_gloo_and_over_shared_memory() -> None:
    for differences in run_processes(3, compared):
        assert max(differences) < 1e-6, differences


def without_an_answer(rank: int) -> str:
    message = ""
    if rank == 0:
        with pytest.raises(TransportError) as raised:
            ring_all_reduce(GroupLinks(timeout_s=0.2), torch.ones(4))
        message = raised.value.what
    dist.barrier(group=dist.new_group([0, 1]))
    return message


def test_a_neighbor_that_does_not_answer_is_named_after_the_time_out() -> None:
    message, _ = run_processes(2, without_an_answer)
    assert message == "rank 0 waits for rank 1 to take a tensor (0.2 s)."
