"""The rendezvous of ranks, and the error when a rank is missing."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from asyncpipe.runtime.distributed.ranks import RankInfo
from asyncpipe.runtime.distributed.rendezvous import open_store, wait_for_all
from asyncpipe.runtime.errors import TransportError

RANKS = 4


def rank_info(rank: int, port: int = 26914) -> RankInfo:
    return RankInfo(rank, RANKS, rank, RANKS, "127.0.0.1", port)


def told(store: dist.Store, there: Collection[int]) -> dict[int, str]:
    """What each of the ranks that come says of the others."""

    def wait(rank: int) -> str:
        with pytest.raises(TransportError) as missing:
            wait_for_all(store, rank_info(rank), 0.3)
        assert "--timeout-s" in missing.value.cure
        return missing.value.what

    with ThreadPoolExecutor(RANKS) as threads:
        return dict(zip(there, threads.map(wait, there), strict=True))


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ((0, 1, 3), "0.3 s waiting for rank 2; present: ranks 0, 1, 3 on h1."),
        ((0,), "0.3 s waiting for ranks 1-3; present: rank 0 on h1."),
        ((1, 2), "0.3 s waiting for rank 0."),
    ],
)
def test_ranks_that_do_not_come_are_named_by_all_that_do(
    there: tuple[int, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "h1")
    assert told(dist.HashStore(), there) == {
        rank: f"rank {rank} timed out at 127.0.0.1:26914 after {words}" for rank in there
    }


def test_every_attempt_has_a_part_of_the_store_of_its_own() -> None:
    store, chance = dist.HashStore(), random.Random(1)
    told(store, (0, 1, 2))  # an attempt that one rank does not live to see
    for attempt in range(3):

        def meet(rank: int, attempt: int = attempt) -> list[bytes]:
            time.sleep(0.1 * chance.random())
            own = wait_for_all(store, rank_info(rank), 20.0)
            own.set(f"attempt of {rank}", str(attempt))
            names = [f"attempt of {other}" for other in range(RANKS)]
            own.wait(names)
            return [own.get(name) for name in names]

        with ThreadPoolExecutor(RANKS) as threads:
            found = list(threads.map(meet, range(RANKS)))
        assert found == [[str(attempt).encode()] * RANKS] * RANKS


def test_ranks_find_each_other_at_the_address_of_the_first() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def meet(rank: int) -> dist.Store:
        return wait_for_all(open_store(rank_info(rank, port), 20.0), rank_info(rank, port), 20.0)

    with ThreadPoolExecutor(RANKS) as threads:
        stores = list(threads.map(meet, range(RANKS)))
    stores[0].set("who", "rank 0")
    assert [bytes(store.get("who")) for store in stores] == [b"rank 0"] * RANKS
