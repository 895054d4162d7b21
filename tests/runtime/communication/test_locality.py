"""The same ranks in several splits over hosts: the effect, its prediction, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from threading import Barrier
from time import perf_counter
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from asyncpipe.runtime.communication.hosts import Host, HostsError, hosts, in_network
from asyncpipe.runtime.communication.locality_result import (
    SplitTimes,
    result_of,
    result_table,
    strip_plot,
)
from asyncpipe.runtime.communication.locality_steps import planned_step_s
from asyncpipe.runtime.communication.options import LocalityOptions
from asyncpipe.runtime.communication.ring import EndpointKind, ring_all_reduce
from asyncpipe.runtime.communication.splits import (
    Split,
    hosts_of,
    lone_ranks,
    read_split,
    ring_seconds,
    uses_per_step,
)
from asyncpipe.runtime.communication.tcp_links import connect_ring, listen
from asyncpipe.runtime.errors import TransportError
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.processes.in_process import command, error_of
from asyncpipe.tests.support.processes.quick_python import forked_ranks

MBIT_S, SIZE = 200.0, 2**21


@pytest.fixture(scope="module")
def two_hosts() -> Any:
    try:
        with hosts(["h1", "h2"], mbit_s=MBIT_S) as made:
            yield made
    except HostsError as refusal:
        pytest.skip(str(refusal))


def ring_of_threads(
    made: Sequence[Host], split: Split, endpoint: EndpointKind, repeats: int = 4
) -> float:
    """The least seconds of an all-reduce of ranks that are threads, each with its sockets on its
    host; the results are checked."""
    places = hosts_of(split)
    ranks = len(places)
    ends: list[Queue[tuple[str, int]]] = [Queue() for _ in places]
    together = Barrier(ranks)

    def work(rank: int) -> float:
        host = made[places[rank]]
        with in_network(host.process):
            listener = listen(host.address)
            ends[rank].put(listener.getsockname())
            links = connect_ring(rank, ranks, listener, ends[(rank + 1) % ranks].get(), 20.0)
        seconds = []
        for _ in range(repeats):
            together.wait(20.0)
            start_s = perf_counter()
            tensor = torch.full((SIZE // 4,), float(rank))
            result = ring_all_reduce(links, tensor, endpoint=endpoint).tensor
            seconds.append(perf_counter() - start_s)
            assert bool((result == sum(range(ranks))).all())
        links.close()
        return min(seconds)

    with ThreadPoolExecutor(ranks) as threads:
        return max(threads.map(work, range(ranks)))


def test_a_lone_rank_slows_a_ring_of_serial_endpoints_and_not_of_concurrent_ones(
    two_hosts: list[Host],
) -> None:
    even, lone = ((2, 2), (3, 1))
    serial = [ring_of_threads(two_hosts, split, "serial") for split in (even, lone)]
    concurrent = [ring_of_threads(two_hosts, split, "concurrent") for split in (even, lone)]
    assert serial[1] > 1.3 * serial[0]
    assert concurrent[1] < 1.15 * concurrent[0]
    assert serial[0] > 0.9 * ring_seconds(even, SIZE, MBIT_S, is_serial=True)


@pytest.mark.parametrize(
    ("text", "serial", "lone"),
    [
        ("4-2-2", 1, ()),
        ("4-3-1", 2, (7,)),
        ("3-3", 1, ()),
        ("5-1", 2, (5,)),
        ("1-1", 2, (0, 1)),
        ("8", 0, ()),
    ],
)
def test_the_endpoint_model_of_the_splits_of_the_study(
    text: str, serial: int, lone: tuple[int, ...]
) -> None:
    split = read_split(text)
    assert split is not None
    assert lone_ranks(split) == lone
    assert uses_per_step(split, is_serial=True) == serial
    assert uses_per_step(split, is_serial=False) == min(1, serial)


def times_of(split: Split, *seconds: float, is_serial: bool = True) -> SplitTimes:
    uses = uses_per_step(split, is_serial=is_serial)
    return SplitTimes(
        "-".join(map(str, split)), sum(split), ("a",), lone_ranks(split), uses, seconds
    )


def test_a_result_has_the_share_of_the_best_with_as_many_ranks_and_the_published_figures() -> None:
    options = LocalityOptions()
    result = result_of(
        options,
        [times_of((4, 2, 2), 1, 1, 1, 1, 5), times_of((4, 3, 1), 1.6), times_of((3, 3), 0.5)],
    )
    rows = {row["split"]: row for row in result["rows"]}
    assert [row["share"] for row in result["rows"]] == [1.0, 1.6, 1.0]
    assert rows["4-2-2"]["outliers"] == 1 and rows["4-2-2"]["mean_s"] == 1.8
    assert rows["4-3-1"]["predicted_share"] == 2.0
    assert rows["4-3-1"]["published"] == {"seconds": 7.1491, "share": 1.1319}
    assert result["verdict"].startswith(
        "4-3-1 (rank 7) takes 160% of the best split's time: a rank"
    )
    assert "7.1491 s, 113.19%" in result_table(result).to_markdown()
    plot = ElementTree.fromstring(strip_plot(result))
    assert len(list(plot.iter("{http://www.w3.org/2000/svg}circle"))) == 7


def test_an_even_result_is_no_anomaly_and_an_unexplained_one_is_said_to_be_so() -> None:
    options = LocalityOptions(endpoint="concurrent")
    even = [times_of(split, 1.0, is_serial=False) for split in ((4, 2, 2), (4, 3, 1))]
    assert result_of(options, even)["verdict"].startswith("No anomaly: ")
    odd = [even[0], times_of((4, 3, 1), 2.0, is_serial=False)]
    assert "which the prediction does not explain" in result_of(options, odd)["verdict"]


def test_the_planned_step_of_a_split_has_its_links(tmp_path: Path) -> None:
    plan = write_mlp(tmp_path / "mlp4", stages=4)
    local, one, all_apart = (
        planned_step_s(plan, split, 1e-3) for split in ((4,), (2, 2), (1, 1, 1, 1))
    )
    assert local < one < all_apart


def test_a_neighbor_that_is_gone_or_silent_is_named() -> None:
    ends = [listen("127.0.0.1") for _ in range(2)]
    addresses = [end.getsockname() for end in ends]
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(
            lambda rank: connect_ring(rank, 2, ends[rank], addresses[1 - rank], 0.5), range(2)
        )
    with pytest.raises(TransportError, match=r"rank 0 of the ring waits .* rank 1 \(0.5 s\)"):
        first.recv(1, torch.empty(4))
    second.close()
    with pytest.raises(TransportError, match="but rank 1 is gone"):
        first.recv(1, torch.empty(4))
    first.close()
    own, other = (listen("127.0.0.1") for _ in range(2))
    with other, pytest.raises(TransportError, match="of the ring waits for rank 1 to connect"):
        connect_ring(0, 2, own, other.getsockname(), 0.2)


def test_splits_of_emulated_hosts_are_timed_by_the_command(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    words = ["comm", "locality", "--splits", "1-1,2", "--emulate", "1gbit", "--repeat", "2"]
    words += ["--size", "64KiB", "--svg", "plot.svg", "--json"]
    with forked_ranks():
        result = json.loads(command(tmp_path, *words).out)
    assert [(row["split"], row["n"], row["hosts"]) for row in result["rows"]] == [
        ("1-1", 2, ["h1", "h2"]),
        ("2", 2, ["h1"]),
    ]
    assert (tmp_path / "plot.svg").is_file()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--splits 1-1", "the split 1-1 has 2 hosts, and this is one."),
        ("--splits all --ranks 2 --hosts 3", "2 ranks cannot be split over 3 hosts."),
        ("--splits 1-1 --model x", "--model trains on emulated hosts only"),
    ],
)
def test_splits_that_the_hosts_do_not_have_are_refused(
    words: str, told: str, tmp_path: Path
) -> None:
    assert told in error_of(tmp_path, "comm", "locality", *words.split())
