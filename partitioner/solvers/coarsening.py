"""Groups -> about L blocks that belong together, by the five rules of Mixed-pipe in turn.

    blocks of the model     groups of one block of the model become one
    without work            a group that takes no time joins a predecessor, or else a successor
    dear to send            a block that takes less time than its results take to be sent joins
                            what it sends to or gets from, as long as that stays below a rank's
                            share of the work
    centres                 L blocks spread over the work absorb their neighbours in turn
    smallest                the smallest block joins its smallest neighbour

Each rule stops when L blocks are left. What may not be cut apart is one group before all this
(`coarse.by_pieces`). After Eliad et al. (USENIX ATC 2021, section 4), where the centres are drawn
among the blocks of the model.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import numpy as np

from ..problem import Problem
from .merging import Blocks


def blocks_of(problem: Problem, number: int, generator: random.Random) -> list[int]:
    """The block of every group, the blocks numbered topologically; more than `number` only where
    any further merge would make a cycle."""
    blocks, names = Blocks(problem.costs), problem.costs.blocks
    share_ms = float(problem.costs.work_ms.sum()) / problem.stages

    def same_block(one: int, other: int) -> bool:
        return bool(names[one]) and names[one] == names[other]

    def without_work(one: int, _: int) -> bool:
        return not blocks.work_ms[one]

    def dear_to_send(one: int, other: int) -> bool:
        both_ms = blocks.work_ms[one] + blocks.work_ms[other]
        return blocks.sends_ms(one) > blocks.work_ms[one] and both_ms <= share_ms

    for wanted in (same_block, without_work, dear_to_send):
        _merge_where(blocks, number, wanted)
    _grow(blocks, _centres(blocks, number, generator))
    _merge_smallest(blocks, number)
    return blocks.numbered()


def without_little_ones(problem: Problem, share: float) -> list[int]:
    """The block of every group if those below a share of a rank's work join a neighbour, of which
    as many are left as there are ranks."""
    blocks = Blocks(problem.costs)
    little_ms = share * float(problem.costs.work_ms.sum()) / problem.stages
    _merge_where(blocks, problem.stages, lambda one, _: blocks.work_ms[one] <= little_ms)
    return blocks.numbered()


def _merge_where(blocks: Blocks, number: int, wanted: Callable[[int, int], bool]) -> None:
    """Merges each block with neighbours for as long as that is wanted, what weighs most first."""
    for block in sorted(blocks.work_ms):
        merged = True
        while merged and block in blocks and len(blocks) > number:
            merged = False
            around = sorted(
                blocks.neighbours(block),
                key=lambda other, block=block: (-blocks.weight_of(block, other), other),  # type: ignore[misc]
            )
            for other in around:
                if wanted(block, other) and blocks.may_merge(block, other):
                    blocks.merge(block, other)
                    merged = True
                    break


def _centres(blocks: Blocks, number: int, generator: random.Random) -> list[int]:
    """Blocks at random places in equal shares of the work."""
    names = sorted(blocks.work_ms)
    done_ms = np.cumsum([blocks.work_ms[block] for block in names])
    places = [(index + generator.random()) / number * done_ms[-1] for index in range(number)]
    found = np.minimum(np.searchsorted(done_ms, places), len(names) - 1)
    return [names[index] for index in dict.fromkeys(found.tolist())]


def _grow(blocks: Blocks, centres: list[int]) -> None:
    """Each centre in turn absorbs a successor, or else a predecessor, that is none itself."""
    taken = set(centres)
    growing = list(centres)
    while growing:
        still = []
        for centre in growing:
            around = [*sorted(blocks.after[centre]), *sorted(blocks.before[centre])]
            for other in around:
                if other not in taken and blocks.may_merge(centre, other):
                    blocks.merge(centre, other)
                    still.append(centre)
                    break
        growing = still


def _merge_smallest(blocks: Blocks, number: int) -> None:
    """The smallest block joins the smallest neighbour that it may, until `number` are left."""
    smallest = [(work_ms, block) for block, work_ms in blocks.work_ms.items()]
    heapq.heapify(smallest)
    while smallest and len(blocks) > number:
        work_ms, block = heapq.heappop(smallest)
        if blocks.work_ms.get(block) != work_ms:
            continue  # it has been merged since
        around = sorted((blocks.work_ms[other], other) for other in blocks.neighbours(block))
        for _, other in around:
            if blocks.may_merge(block, other):
                blocks.merge(block, other)
                heapq.heappush(smallest, (blocks.work_ms[block], block))
                break
