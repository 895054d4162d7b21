"""asyncpipe-comm measure: the file of devices, the tables, the heat map, and a real measurement."""

import json
import xml.etree.ElementTree as ElementTree
from itertools import combinations, permutations
from pathlib import Path

import pytest

from asyncpipe.partitioner.graph.costs import Link
from asyncpipe.partitioner.planning.cluster_file import read_cluster
from asyncpipe.runtime.communication.measured_links import (
    MeasuredLink,
    MeasuredPair,
    MeasuredRank,
    Measurement,
    link_map,
    measurement_of,
)
from asyncpipe.runtime.communication.options import RankOptions
from asyncpipe.runtime.communication.session import run_task
from asyncpipe.tests.support.processes.in_process import command
from asyncpipe.tests.support.processes.quick_python import forked_ranks


def measured(*hosts: str) -> Measurement:
    """Ranks on these hosts; every link has numbers of its own."""
    return Measurement(
        "gloo",
        tuple(
            MeasuredRank(host, "cpu", 20.0 / (1 + n), (8 - n) << 30) for n, host in enumerate(hosts)
        ),
        tuple(
            MeasuredLink(a, b, 50.0 + a, 1.0 + a + 10 * b, ((4096, 51.0), (1 << 20, 900.0)))
            for a, b in permutations(range(len(hosts)), 2)
        ),
        tuple(
            MeasuredPair(a, b, 4.0, 0.9 + 0.2 * a + 0.4 * b, 0.9 if hosts[a] != hosts[b] else 0.1)
            for a, b in combinations(range(len(hosts)), 2)
        ),
    )


def written(tmp_path: Path, measurement: Measurement) -> Path:
    path = tmp_path / "devices.toml"
    path.write_text(measurement.to_toml())
    return path


def test_the_file_of_devices_is_read_to_the_measured_cluster(tmp_path: Path) -> None:
    measurement = measured("h1", "h1", "h2", "h3")
    cluster = read_cluster(written(tmp_path, measurement))
    assert [device.host for device in cluster.devices] == ["h1", "h1", "h2", "h3"]
    assert [device.speed for device in cluster.devices] == [1, 0.5, 0.333, 0.25]
    assert [device.memory_bytes / 2**30 for device in cluster.devices] == [8, 7, 6, 5]
    within, across = cluster.link(0, 1), cluster.link(2, 3)
    assert within == Link(0.051, 2e9, overlap=True, duplex=1.3)  # 11 GB/s one way, 2 the other
    assert across == Link(0.053, 24e9, overlap=True, duplex=2.0)  # measured 2.5
    assert not read_cluster(written(tmp_path, measured("h1", "h1"))).overlap
    # Both ranks of h1 have the link of the hosts, the median of two.
    assert cluster.link(0, 3) == cluster.link(1, 3)


def test_tables_fit_a_terminal_and_name_the_direction() -> None:
    tables = measured(*(f"host{number}" for number in range(6))).tables
    for table in tables.values():
        assert max(part.width for part in table.fitted(80)) <= 80
    bandwidth = tables["bandwidth in GB/s, in the same direction"]
    assert (
        bandwidth.rows[1][3] == "22" and bandwidth.rows[2][2] == "13" and not bandwidth.rows[1][2]
    )


def test_the_heat_map_is_svg_and_escapes_names() -> None:
    drawn = ElementTree.fromstring(link_map(measured('<h1 & "2">', "h2")))
    texts = ["".join(of.itertext()) for of in drawn.iter() if of.tag.endswith("text")]
    assert '0 <h1 & "2">' in texts and "11" in texts


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_two_ranks_measure_each_other(transport: str) -> None:
    options = RankOptions(transport=transport, timeout_s=60.0)
    with forked_ranks():
        answer = run_task("measure", {"sizes": [4096, 1 << 20]}, options)
    found = measurement_of(answer)
    assert found.transport == transport
    assert [(link.source, link.target) for link in found.links] == [(0, 1), (1, 0)]
    for link in found.links:
        assert 0 < link.latency_us < 1e5 and 1e-3 < link.gb_s < 1e3
        assert [size for size, _ in link.one_way_us] == [4096, 1 << 20]
    assert 0.02 < found.pairs[0].duplex < 50  # two busy cores let it vary
    assert all(rank.gflop_s > 0 and rank.free_bytes > 0 for rank in found.ranks)


def test_a_lone_rank_has_no_links(tmp_path: Path) -> None:
    given = ("--ranks", "1", "--json", "--output", "devices.toml", "--svg", "links.svg")
    done = command(tmp_path, "comm", "measure", *given)
    assert done.code == 0
    assert json.loads(done.out)["links"] == []
    assert len(read_cluster(tmp_path / "devices.toml").devices) == 1
