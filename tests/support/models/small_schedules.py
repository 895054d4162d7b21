"""Every schedule at small sizes, for the tests that go through them all."""

from collections.abc import Iterator

from asyncpipe.runtime.schedule.asynchronous import ASYNCHRONOUS
from asyncpipe.runtime.schedule.builders import (
    SCHEDULES,
    SYNCHRONOUS,
    VIRTUAL,
    make_schedule,
    natural_ranks,
)
from asyncpipe.runtime.schedule.schedule import Schedule


def ranks_for(name: str, stages: int) -> list[int]:
    """The numbers of ranks that the schedule can have for so many stages, three a rank at most."""
    if name == "zb-v":
        return [stages // 2] if stages % 2 == 0 else []
    if name in VIRTUAL:
        return [p for p in range(1, stages + 1) if stages % p == 0 and stages <= 3 * p]
    return [natural_ranks(name, stages)]


def synchronous(stages: int, micro_batches: int) -> Iterator[Schedule]:
    """The synchronous schedules that there are for these stages, on every number of ranks."""
    for name in (*SYNCHRONOUS, *VIRTUAL):
        for ranks in ranks_for(name, stages):
            yield make_schedule(name, stages=stages, micro_batches=micro_batches, ranks=ranks)


def small_schedules(stages: int, *, most: int = 10) -> Iterator[Schedule]:
    """All names, up to `most` micro-batches, every number of micro-batches per step."""
    for micro_batches in range(1, most + 1):
        yield from synchronous(stages, micro_batches)
        for name in ASYNCHRONOUS:
            for step_every in range(1, micro_batches + 1):
                is_long = name != "2bw" or step_every >= stages
                if micro_batches % step_every == 0 and is_long:
                    yield make_schedule(
                        name, stages=stages, micro_batches=micro_batches, step_every=step_every
                    )


def names_for(stages: int) -> list[str]:
    return [name for name in SCHEDULES if ranks_for(name, stages)]
