"""One rank's actions -> what the executor knows of them before it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from .schedule import Action
from .staleness import Passage

Program = tuple[Action, ...]


def forward_only(program: Program) -> Program:
    """The forwards and their messages: what an evaluation carries out."""
    return tuple(action for action in program if action.kind in ("F", "SEND_F", "RECV_F"))


def without_steps(program: Program) -> Program:
    """All but the optimizer steps."""
    return tuple(action for action in program if action.kind != "S")


def passages(
    program: Program, versions: Mapping[int, int], first_micro_batch: int
) -> dict[tuple[int, int], Passage]:
    """The passage of each micro-batch through each stage, by stage and the schedule's index.

    `versions` are those that the stages have when the program begins.
    """
    met: dict[tuple[int, int], list[int]] = {}
    for action in program:
        if action.kind in ("F", "B", "W"):
            assert action.version is not None
            version = versions[action.stage] + action.version
            met.setdefault((action.stage, action.index), []).append(version)
    return {
        (stage, index): Passage(first_micro_batch + index, seen[0], seen[-1])
        for (stage, index), seen in met.items()
    }


def turning(program: Program) -> frozenset[tuple[int, int]]:
    """Stage and index of the micro-batches that go backward at once: the stage does nothing after
    their forward but their backward. Recomputation would spare them nothing."""
    last: dict[int, Action] = {}
    found: set[tuple[int, int]] = set()
    for action in program:
        if action.kind in ("F", "B", "W"):
            before = last.get(action.stage)
            if action.kind == "B" and before and (before.kind, before.index) == ("F", action.index):
                found.add((action.stage, action.index))
            last[action.stage] = action
    return frozenset(found)


def loss_divisors(
    batches: Sequence[int], step_every: int, step_samples: int | None = None
) -> tuple[int | Fraction, ...]:
    """What the mean loss of each micro-batch is divided by, so that the sum over one step is the
    mean over all its samples; `batches` are the micro-batches' samples, `step_samples` those of a
    step, if it has more than these.

    >>> loss_divisors([4, 4], 2), loss_divisors([3, 1], 2), loss_divisors([4, 4], 2, 16)
    ((2, 2), (Fraction(4, 3), 4), (4, 4))
    """
    divisors: list[int | Fraction] = []
    for first in range(0, len(batches), step_every):
        of_step = batches[first : first + step_every]
        total = step_samples or sum(of_step)
        for samples in of_step:
            divisors.append(Fraction(total, samples) if total % samples else total // samples)
    return tuple(divisors)


def window_ends(program: Sequence[Action]) -> dict[int, list[int]]:
    """Position of the last backward before each step -> the stages that it belongs to; where a
    backward is split, of the last of either part."""
    last_backward: dict[int, int] = {}
    ends: dict[int, list[int]] = {}
    for position, action in enumerate(program):
        if action.kind in ("B", "W"):
            last_backward[action.stage] = position
        elif action.kind == "S":
            ends.setdefault(last_backward[action.stage], []).append(action.stage)
    return ends
