"""The boundaries of stages as they are written + where they run -> what their transfers take.

A search prices a cut value by value, as `costs_of` has them. Stages as they are written may send
something else: what is made again is chosen for all values of a stage together, a stage that would
send nothing is made to send what it was given, and each reader gets a message of its own. These
are the messages of a run (`runtime/channels.py`), and a plan tells what they take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..runtime.plan import Boundary
from ..runtime.traffic import spec_bytes
from .cost import Link
from .problem import Placement, Problem
from .step_time import Edge, Talk


@dataclass(frozen=True, slots=True)
class _Message:
    """A tensor that goes to another rank, and whether its gradient comes back."""

    source: int
    target: int
    num_bytes: int
    returns: bool


def written_talk(
    problem: Problem,
    placement: Placement,
    boundaries: Iterable[Boundary],
    sizes: Mapping[str, int],
) -> Talk:
    """`talk_of` for these boundaries at these sizes."""
    setting, stages = problem.setting, placement.stages
    rank_of = [ranks[0] for ranks in placement.ranks_of_stage]
    forward_ms, backward_ms = [0.0] * stages, [0.0] * stages
    on_edge_ms: dict[Edge, float] = defaultdict(float)
    edges: set[Edge] = set()
    returning: set[Edge] = set()
    for message in _messages(boundaries, sizes):
        edge = message.source, message.target
        edges.add(edge)
        if message.returns:
            returning.add(edge)
        if rank_of[message.source] == rank_of[message.target]:
            continue
        for stage, ahead in ((message.source, True), (message.target, False)):
            rank = rank_of[stage]
            once_ms = _link(problem, rank, ahead=ahead).transfer_ms(message.num_bytes)
            once_ms /= setting.shares_at(rank)
            if setting.talks_in_turn(rank):
                forward_ms[stage] += once_ms
                backward_ms[stage] += once_ms * message.returns
            if setting.overlap and ahead:
                on_edge_ms[edge] += once_ms
    return Talk(
        tuple(forward_ms),
        tuple(backward_ms),
        dict(on_edge_ms),
        frozenset(edges),
        frozenset(returning),
    )


def written_exchanges_ms(
    problem: Problem, placement: Placement, shared: Iterable[tuple[Sequence[int], int]]
) -> tuple[float, ...]:
    """What each stage's optimizer step needs for parameters that stages of other ranks hold too;
    `shared` are the stages of each and its bytes."""
    rank_of = [ranks[0] for ranks in placement.ranks_of_stage]
    links = problem.setting.links or (problem.costs.link,)
    slowest = max(links, key=lambda link: link.transfer_ms(1e6))
    total = [0.0] * placement.stages
    for holders, num_bytes in shared:
        first_on = {rank_of[stage]: stage for stage in sorted(holders, reverse=True)}
        for stage in first_on.values() if len(first_on) > 1 else ():
            total[stage] += 2 * slowest.transfer_ms(num_bytes)
    return tuple(total)


def _messages(boundaries: Iterable[Boundary], sizes: Mapping[str, int]) -> Iterable[_Message]:
    for boundary in boundaries:
        for target in boundary.targets:
            tensor = boundary.tensor
            num_bytes = spec_bytes(tensor, sizes)
            yield _Message(boundary.source, target, num_bytes, tensor.requires_grad)


def _link(problem: Problem, rank: int, *, ahead: bool) -> Link:
    """The link to the rank after, or before."""
    links = problem.setting.links
    if not links:
        return problem.costs.link
    return links[min(rank, len(links) - 1) if ahead else max(rank - 1, 0)]
