"""The rendezvous of ranks, and the error when a rank is missing."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from asyncpipe.runtime.config.settings import SettingsError
from asyncpipe.runtime.distributed import rendezvous
from asyncpipe.runtime.distributed.ranks import RankInfo
from asyncpipe.runtime.distributed.rendezvous import (
    found_hosts,
    free_port,
    listen,
    open_store,
    wait_for_all,
)
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
    port = free_port()

    def meet(rank: int) -> dist.Store:
        return wait_for_all(open_store(rank_info(rank, port), 20.0), rank_info(rank, port), 20.0)

    with ThreadPoolExecutor(RANKS) as threads:
        stores = list(threads.map(meet, range(RANKS)))
    stores[0].set("who", "rank 0")
    assert [bytes(store.get("who")) for store in stores] == [b"rank 0"] * RANKS


def test_a_rank_of_another_run_at_the_same_port_is_left_out() -> None:
    server = listen()

    def meet(rank: int, run: str) -> dist.Store:
        info = replace(rank_info(rank, server.port), run=run, shares_store=True)
        return wait_for_all(open_store(info, 20.0), info, 20.0)

    runs = [name for name in ("first", "second") for _ in range(RANKS)]
    with ThreadPoolExecutor(len(runs)) as threads:
        stores = list(threads.map(meet, [*range(RANKS)] * 2, runs))
    for run, store in zip(runs, stores, strict=True):
        store.set("run", run)
    assert [store.get("run").decode() for store in stores] == runs
    stranger = replace(rank_info(1, server.port), shares_store=True)
    with pytest.raises(TransportError, match="waiting for rank 0"):
        wait_for_all(open_store(stranger, 0.3), stranger, 0.3)


def test_ranks_meet_in_a_file_that_an_earlier_run_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "meet"
    infos = [RankInfo(rank, 2, 0, 0, "", 0, "hand", file=str(file)) for rank in range(2)]

    def meet(info: RankInfo) -> RankInfo:
        return found_hosts(wait_for_all(open_store(info, 20.0), info, 20.0), info)[0]

    left = []
    for _ in range(2):
        left.append(open_store(infos[0], 1.0))  # as by a process that was killed
        with ThreadPoolExecutor(2) as threads:
            met = list(threads.map(meet, infos))
        assert [(info.local_rank, info.local_ranks) for info in met] == [(0, 2), (1, 2)]
    assert file.is_file()
    monkeypatch.setattr(rendezvous, "_SILENT_S", 0.2)
    with pytest.raises(TransportError) as missing:
        wait_for_all(open_store(infos[1], 1.0), infos[1], 0.6)
    assert missing.value.what == (
        f"rank 1 timed out at file://{file} after 0.6 s waiting for rank 0."
    )
    assert "that all hosts see this file" in missing.value.cure


@pytest.mark.parametrize("content", [b"notes of mine\n" * 20, None], ids=["notes", "no folder"])
def test_a_file_that_is_no_place_to_meet_is_left_as_it_is(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "folder" / "notes"
    if content is not None:
        file.parent.mkdir()
        file.write_bytes(content)
    with pytest.raises(TransportError, match="rank 0 on .* cannot use file:///.*/notes for the"):
        open_store(RankInfo(0, 2, 0, 0, "", file=str(file)), 1.0)
    assert content is None or file.read_bytes() == content


def test_a_process_with_the_rank_of_another_and_unequal_numbers_of_ranks_are_named() -> None:
    store = dist.HashStore()

    def meet(info: RankInfo) -> str:
        try:
            found_hosts(wait_for_all(store, info, 1.0), info)
        except (TransportError, SettingsError) as error:
            return error.what
        return ""

    here = [rank_info(rank) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS + 1) as threads:
        told = list(threads.map(meet, [*here, here[1]]))
    assert sorted(map(bool, told)) == [False] * RANKS + [True]
    for late in (max(told), meet(here[2])):
        assert "the other ranks have begun without it; a process on" in late
    with ThreadPoolExecutor(RANKS) as threads:
        told = list(threads.map(meet, [*here[:3], replace(here[3], ranks=5)]))
    assert all("was started as one of 5 ranks, rank 0 on" in text for text in told)
