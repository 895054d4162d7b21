"""A placement -> the times of its transfers, as planned and as generated stages send.

A `Link` turns bytes into milliseconds; here these are given to stages, directions and edges. The
planner counts each value that leaves a stage (`communication_of`). Generated stages may send
something else (`communication_of_boundaries`): recomputation is chosen for all values of a stage
together, a stage that would send nothing passes on a received value, and each reader gets its own
message. These are the messages of a run (`runtime/executor/mailbox.py`), and a plan reports their
cost.

A step also exchanges the gradients of parameters that several ranks hold: `exchanges_ms` for the
planner's groups, `exchanges_of_stages_ms` for generated stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...runtime.plan.forecast import spec_bytes
from ...runtime.plan.plan import Boundary
from ..graph.costs import Value, both_ways_ms, slowest_link
from ..graph.problem import Placement, Problem

Edge = tuple[int, int]


@dataclass(frozen=True)
class Communication:
    """The transfer times of ranks in addition to computing, for one micro-batch and by stage.

    overlapped_ms: times of the edges whose transfers overlap with computing
    edges: all edges
    grad_edges: the edges over which gradients come back
    """

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    overlapped_ms: dict[Edge, float]
    edges: frozenset[Edge]
    grad_edges: frozenset[Edge]


class _Transfers:
    """The transfers of a placement's stages so far."""

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self.rank_of = _rank_of(placement)
        self._setting = problem.setting
        # By stage and end: what a stage receives and what it sends, with the gradients.
        self._forward_ms, self._backward_ms = (
            [[0.0, 0.0] for _ in range(placement.stages)] for _ in range(2)
        )
        self._duplex = [problem.seen[rank].duplex for rank in self.rank_of]
        self._overlapped_ms: dict[Edge, float] = defaultdict(float)
        self._edges: set[Edge] = set()
        self._grad_edges: set[Edge] = set()

    def join(self, edges: Iterable[Edge], *, returns: bool) -> None:
        """Adds edges; `returns`: gradients come back over them."""
        self._edges |= {*edges}
        if returns:
            self._grad_edges |= {*edges}

    def occupy(self, stage: int, forward_ms: float, backward_ms: float, *, is_sender: bool) -> None:
        """Adds the time in which one end of a transfer keeps the stage's rank busy."""
        if self._setting.waits_for_transfers(self.rank_of[stage]):
            self._forward_ms[stage][is_sender] += forward_ms
            self._backward_ms[stage][is_sender] += backward_ms

    def overlap(self, edge: Edge, time_ms: float) -> None:
        """Adds the time of a transfer that overlaps with computing."""
        if self._setting.overlap:
            self._overlapped_ms[edge] += time_ms

    def communication(self) -> Communication:
        return Communication(
            self._both_ways(self._forward_ms),
            self._both_ways(self._backward_ms),
            dict(self._overlapped_ms),
            frozenset(self._edges),
            frozenset(self._grad_edges),
        )

    def _both_ways(self, of_stages: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(
            float(both_ways_ms(sending_ms, receiving_ms, duplex))
            for (receiving_ms, sending_ms), duplex in zip(of_stages, self._duplex, strict=True)
        )


def communication_of(problem: Problem, placement: Placement) -> Communication:
    """The transfers of `stage_sums` by direction and by edge."""
    at, transfers = placement.stage_of, _Transfers(problem, placement)
    ranks = transfers.rank_of
    for index in problem.costs.leaving(placement.stage_of):
        value = problem.costs.values[index]
        if value.is_exchange:
            continue
        owner = at[value.owner]
        readers = sorted({at[reader] for reader in value.readers} - {owner}, reverse=True)
        share = forward_share(value, problem)
        pairs = {(min(owner, reader), max(owner, reader)) for reader in readers}
        transfers.join(pairs, returns=share < 1)
        first_on = {ranks[reader]: reader for reader in readers}
        first_on.pop(ranks[owner], None)
        if not first_on:
            continue
        sending_ms = float(problem.seen[ranks[owner]].send_ms[index])
        ends = [(owner, sending_ms, True)]
        ends += [
            (reader, float(problem.seen[rank].receive_ms[index]), False)
            for rank, reader in first_on.items()
        ]
        for stage, transfer_ms, is_sender in ends:
            there_ms, back_ms = share * transfer_ms, (1 - share) * transfer_ms
            transfers.occupy(stage, there_ms, back_ms, is_sender=is_sender)
        for edge in pairs:
            # The simulator assumes that gradients take as long as the forward tensors.
            transfers.overlap(edge, share * sending_ms)
    return transfers.communication()


def communication_of_boundaries(
    problem: Problem,
    placement: Placement,
    boundaries: Iterable[Boundary],
    sizes: Mapping[str, int],
) -> Communication:
    """The transfers of generated stages with these boundaries at these sizes."""
    setting, transfers = problem.setting, _Transfers(problem, placement)
    for boundary in boundaries:
        num_bytes = spec_bytes(boundary.tensor, sizes)
        returns = boundary.tensor.requires_grad
        for target in boundary.targets:
            edge = boundary.source, target
            transfers.join([edge], returns=returns)
            if transfers.rank_of[boundary.source] == transfers.rank_of[target]:
                continue
            for stage, is_sender in ((boundary.source, True), (target, False)):
                rank = transfers.rank_of[stage]
                link = setting.links_at(rank, problem.costs.link)[is_sender]
                once_ms = link.transfer_ms(num_bytes) / setting.shares_at(rank)
                transfers.occupy(stage, once_ms, once_ms * returns, is_sender=is_sender)
                if is_sender:
                    transfers.overlap(edge, once_ms)
    return transfers.communication()


def exchanges_ms(problem: Problem, placement: Placement) -> tuple[float, ...]:
    """Milliseconds of each stage's optimizer step for the gradients of parameters that other ranks
    hold.
    """
    at, rounds = placement.stage_of, problem.setting.micro_batches
    ranks = _rank_of(placement)
    total = [0.0] * placement.stages
    for index, value in problem.exchanges.items():
        owner, readers = at[value.owner], {at[reader] for reader in value.readers}
        first_on = {ranks[reader]: reader for reader in sorted(readers, reverse=True)}
        first_on.pop(ranks[owner], None)
        if first_on:
            total[owner] += rounds * float(problem.costs.send_ms[index])
        for reader in first_on.values():
            total[reader] += rounds * float(problem.costs.receive_ms[index])
    return tuple(total)


def exchanges_of_stages_ms(
    problem: Problem, placement: Placement, shared: Iterable[tuple[Sequence[int], int]]
) -> tuple[float, ...]:
    """The same for generated stages. `shared` gives the stages of each parameter and its bytes."""
    rank_of = _rank_of(placement)
    slowest = slowest_link(problem.setting.links or (problem.costs.link,))
    total = [0.0] * placement.stages
    for holders, num_bytes in shared:
        first_on = {rank_of[stage]: stage for stage in sorted(holders, reverse=True)}
        for stage in first_on.values() if len(first_on) > 1 else ():
            total[stage] += slowest.exchange_ms(num_bytes)
    return tuple(total)


def forward_share(value: Value, problem: Problem) -> float:
    """The forward part of a value's transfer time; 1 if no gradient comes back."""
    if value.owner > value.readers[0]:
        return 0.0
    if not value.backward_bytes:
        return 1.0
    link = problem.costs.link
    both_ms = link.transfer_ms(value.forward_bytes) + link.transfer_ms(value.backward_bytes)
    if value.known_ms is not None or not both_ms:
        return 0.5
    return link.transfer_ms(value.forward_bytes) / both_ms


def _rank_of(placement: Placement) -> list[int]:
    """The rank of each stage, the first one if the stage is replicated."""
    return [ranks[0] for ranks in placement.ranks_of_stage]
