"""The processes that other tests run in end, whatever happens in them."""

import time

from asyncpipe.tests.support.processes.gloo_ranks import run_processes


def sleep_or_raise(rank: int) -> None:
    if rank == 1:
        raise ValueError("no such luck")
    time.sleep(60)


def test_a_rank_that_hangs_is_killed_and_one_that_raises_gives_its_traceback() -> None:
    start_s = time.monotonic()
    hung, raised = run_processes(2, sleep_or_raise, limit_s=3)
    assert hung is None and "ValueError: no such luck" in raised
    assert time.monotonic() - start_s < 15
