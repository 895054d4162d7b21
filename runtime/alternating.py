"""Some forwards ahead, then a forward and a backward in turn: what gpipe, 1f1b, seq and all
asynchronous schedules are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .schedule import Action, Schedule, count_versions


def alternating(
    name: str, micro_batches: int, *, ahead: Sequence[int], step_every: int | None = None
) -> Schedule:
    """Stage j, on rank j, runs `ahead[j]` forwards, then a forward and a backward in turn, then
    the backwards that are left. It steps after each `step_every`-th backward, and then the
    schedule is asynchronous; or once, at the end, and then it is synchronous.
    """
    rows = (
        alternate(stage, micro_batches, forwards, step_every or micro_batches)
        for stage, forwards in enumerate(ahead)
    )
    return Schedule(
        name=name,
        stages=len(ahead),
        micro_batches=micro_batches,
        step_every=step_every or micro_batches,
        synchronous=step_every is None,
        ranks=tuple(tuple(count_versions(row)) for row in rows),
        rank_of_stage=tuple(range(len(ahead))),
        in_flight=tuple(forwards + 1 for forwards in ahead),
    )


def alternate(stage: int, micro_batches: int, ahead: int, step_every: int) -> Iterator[Action]:
    """One rank's actions of such a schedule."""
    for index in range(min(ahead, micro_batches)):
        yield Action(stage, "F", index)
    for index in range(micro_batches):
        if index + ahead < micro_batches:
            yield Action(stage, "F", index + ahead)
        yield Action(stage, "B", index)
        if (index + 1) % step_every == 0:
            yield Action(stage, "S", (index + 1) // step_every)
