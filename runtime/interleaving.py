"""Several stages a rank, dealt out in turn -> schedules whose bubble is that many times smaller.

Stage j is on rank j mod p, so a micro-batch goes round the ranks v times and the pipeline fills in
1/v of the time. Both take micro-batches in groups, and a group through the v stages of a rank
before the next group begins:

    interleaved    groups of about p, the backwards of one amid the forwards of the next
    looped-bfs     one group: all forwards, then all backwards

Sources: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
Megatron-LM", SC 2021, section 2.2.2; Lamy-Poirier, "Breadth-first pipeline parallelism", MLSys
2023. With equal stages, m at least p and, for the first, a multiple of p, a rank is idle for
(p-1) (T_f + T_b) / v of a step, where T_f + T_b is the work of one rank on one micro-batch.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from .schedule import Action, Kind, Schedule, one_step


def interleaved(stages: int, micro_batches: int, ranks: int) -> Schedule:
    """Rank r runs (v-1) g + 2 (p-1-r) forwards ahead, then a forward and a backward in turn, then
    drains; groups have g = p micro-batches.

    Where m is no multiple of p, there are m // p groups of nearly the same size, or one.

    >>> print(interleaved(4, 2, ranks=2))
    rank 0: 0F0@v0 0F1@v0 2F0@v0 2F1@v0 2B0@v0 2B1@v0 0B0@v0 0B1@v0 0S1 2S1
    rank 1: 1F0@v0 1F1@v0 3F0@v0 3B0@v0 3F1@v0 3B1@v0 1B0@v0 1B1@v0 1S1 3S1
    """
    groups = _groups(micro_batches, max(1, micro_batches // ranks))
    chunks, largest = stages // ranks, max(map(len, groups))
    rows = []
    for rank in range(ranks):
        own = range(rank, stages, ranks)
        forwards = _in_groups("F", own, groups)
        backwards = _in_groups("B", own[::-1], groups)
        ahead = min((chunks - 1) * largest + 2 * (ranks - 1 - rank), len(forwards))
        row = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            row += forward, backward
        rows.append(row + backwards[len(forwards) - ahead :])
    return one_step("interleaved", rows, [stage % ranks for stage in range(stages)])


def looped_bfs(stages: int, micro_batches: int, ranks: int) -> Schedule:
    """All micro-batches through one stage of the rank, then through its next; and so back.

    >>> print(looped_bfs(4, 2, ranks=2))
    rank 0: 0F0@v0 0F1@v0 2F0@v0 2F1@v0 2B0@v0 2B1@v0 0B0@v0 0B1@v0 0S1 2S1
    rank 1: 1F0@v0 1F1@v0 3F0@v0 3F1@v0 3B0@v0 3B1@v0 1B0@v0 1B1@v0 1S1 3S1
    """
    groups = _groups(micro_batches, 1)
    own_of = [range(rank, stages, ranks) for rank in range(ranks)]
    rows = [_in_groups("F", own, groups) + _in_groups("B", own[::-1], groups) for own in own_of]
    return one_step("looped-bfs", rows, [stage % ranks for stage in range(stages)])


def _groups(micro_batches: int, count: int) -> list[range]:
    """All micro-batches, in groups whose sizes differ by one at most.

    >>> _groups(7, 2)
    [range(0, 4), range(4, 7)]
    """
    small, larger = divmod(micro_batches, count)
    sizes = [small + (group < larger) for group in range(count)]
    return [range(begin, end) for begin, end in pairwise(accumulate(sizes, initial=0))]


def _in_groups(kind: Kind, stages: range, groups: list[range]) -> list[Action]:
    return [Action(stage, kind, i) for group in groups for stage in stages for i in group]
