"""Cores for ranks: whole, distinct, near their memory and GPU; shared where there are too few."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.runtime.distributed.cpu_affinity import (
    Core,
    Topology,
    allowed_cpus,
    format_cpus,
    near_cores,
    node_of_pci,
    parse_cpus,
    read_topology,
    share_cores,
)


def machine(
    sockets: int, cores: int, *, smt: bool = False, allowed: set[int] | None = None
) -> Topology:
    """Sockets of so many cores; with SMT the second threads are numbered after all first ones."""
    total = sockets * cores
    made = []
    for core in range(total):
        cpus = (core, core + total) if smt else (core,)
        own = tuple(cpu for cpu in cpus if allowed is None or cpu in allowed)
        if own:
            made.append(Core(core // cores, own))
    return Topology(tuple(made))


def shares(topology: Topology, ranks: int, near: tuple[int | None, ...] = ()) -> list[str] | None:
    made = share_cores(topology, ranks, near)
    return None if made is None else [format_cpus(cpus) for cpus in made]


def test_ranks_share_the_cores_of_one_socket_evenly_and_in_order() -> None:
    assert shares(machine(1, 2), 2) == ["0", "1"]
    assert shares(machine(1, 8), 2) == ["0-3", "4-7"]
    assert shares(machine(1, 8), 3) == ["0-1", "2-4", "5-7"]


def test_a_rank_has_both_threads_of_a_core() -> None:
    assert shares(machine(1, 4, smt=True), 2) == ["0-1,4-5", "2-3,6-7"]
    assert shares(machine(1, 2, smt=True), 2) == ["0,2", "1,3"]


def test_no_rank_has_cores_of_two_sockets_when_there_are_as_many_ranks() -> None:
    assert shares(machine(2, 4), 2) == ["0-3", "4-7"]
    assert shares(machine(2, 4), 3) == ["0-1", "2-3", "4-7"]
    assert shares(machine(2, 3), 4) == ["0", "1-2", "3", "4-5"]


def test_fewer_ranks_than_sockets_have_whole_sockets() -> None:
    assert shares(machine(4, 2), 2) == ["0-3", "4-7"]
    assert shares(machine(4, 2), 3) == ["0-1", "2-3", "4-7"]


def test_only_allowed_cpus_are_shared_out() -> None:
    assert shares(machine(2, 4, allowed={1, 2, 6, 7}), 2) == ["1-2", "6-7"]
    assert shares(machine(2, 4, allowed={1, 4, 5, 6}), 2) == ["1", "4-6"]
    assert shares(machine(1, 4, smt=True, allowed={0, 4, 5, 6}), 3) == ["0,4", "5", "6"]


def test_a_rank_is_near_its_gpu_while_there_is_room() -> None:
    two = machine(2, 4)
    assert shares(two, 2, (1, 0)) == ["4-7", "0-3"]
    assert shares(two, 4, (1, 1, 0, 0)) == ["4-5", "6-7", "0-1", "2-3"]
    assert shares(two, 3, (1, 1, 1)) == ["4", "5", "6-7"]
    assert shares(machine(2, 1), 2, (1, 1)) == ["1", "0"]
    assert shares(two, 2, (7, None)) == ["0-3", "4-7"]  # a node that is not ours


def test_one_rank_too_few_cores_or_a_quota_are_left_to_the_system() -> None:
    assert shares(machine(1, 8), 1) is None
    assert shares(machine(1, 2), 3) is None
    assert shares(Topology(machine(1, 8).cores, quota=2.0), 2) is None


def test_a_share_widens_to_the_memory_nodes_that_it_touches() -> None:
    two = machine(2, 4)
    made = share_cores(two, 4)
    assert made is not None
    assert [format_cpus(cpus) for cpus in near_cores(two, made)] == ["0-3", "0-3", "4-7", "4-7"]


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    smt=st.booleans(),
    ranks=st.integers(2, 12),
    data=st.data(),
)
def test_shares_are_distinct_whole_cores_for_every_machine(
    sizes: list[int], smt: bool, ranks: int, data: st.DataObject
) -> None:
    total = sum(sizes)
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    cores = tuple(Core(n, (c, c + total) if smt else (c,)) for c, n in enumerate(nodes))
    wanted = st.none() | st.integers(0, len(sizes) - 1)
    near = data.draw(st.lists(wanted, min_size=ranks, max_size=ranks))
    made = share_cores(Topology(cores), ranks, near)
    assert (made is None) == (total < ranks)
    if made is None:
        return
    assert len(made) == ranks and all(made)
    taken = [cpu for share in made for cpu in share]
    assert len(taken) == len(set(taken)) <= total * (1 + smt)
    for core in cores:
        assert sum(bool(share & set(core.cpus)) for share in made) <= 1
        assert all(set(core.cpus) <= share for share in made if share & set(core.cpus))
    if ranks >= len(sizes):
        for share in made:
            assert len({core.node for core in cores if share & set(core.cpus)}) == 1


# What /sys says


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def two_sockets_with_threads(root: Path) -> None:
    files = {"devices/system/node/node0/cpulist": "0-1,4-5\n"}
    files["devices/system/node/node1/cpulist"] = "2-3,6-7\n"
    for cpu in range(8):
        path = f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        files[path] = f"{cpu % 4},{cpu % 4 + 4}\n"
    write(root, files)


def test_cores_threads_and_nodes_are_read(tmp_path: Path) -> None:
    two_sockets_with_threads(tmp_path)
    found = read_topology(range(8), sys=tmp_path, proc=tmp_path)
    assert found.cores == (Core(0, (0, 4)), Core(0, (1, 5)), Core(1, (2, 6)), Core(1, (3, 7)))
    assert (found.usable, found.nodes) == (4, (0, 1))
    some = read_topology({1, 5, 7}, sys=tmp_path, proc=tmp_path)
    assert some.cores == (Core(0, (1, 5)), Core(1, (7,)))


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/job\n", {"job/cpu.max": "250000 100000\n", "cpu.max": "max 100000\n"}, 2.5),
        ("0::/job\n", {"cpu.max": "150000 100000\n"}, 1.5),  # a container: the root is its own
        ("0::/\n", {}, inf),
        (
            "4:cpu,cpuacct:/job\n0::/\n",
            {"cpu/job/cpu.cfs_quota_us": "300000\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
            3.0,
        ),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, inf),
    ],
)
def test_the_quota_of_a_container_is_read(
    tmp_path: Path, groups: str, files: Mapping[str, str], quota: float
) -> None:
    write(tmp_path / "sys/fs/cgroup", files)
    write(tmp_path / "proc", {"self/cgroup": groups})
    found = read_topology(range(4), sys=tmp_path / "sys", proc=tmp_path / "proc")
    assert found.quota == quota
    assert found.usable == max(1, int(min(4, quota)))


def test_without_sys_every_cpu_is_a_core(tmp_path: Path) -> None:
    found = read_topology({3, 5}, sys=tmp_path, proc=tmp_path)
    assert found.cores == (Core(0, (3,)), Core(0, (5,)))


def test_this_machine_has_the_cpus_that_the_system_allows() -> None:
    assert read_topology().cpus == allowed_cpus() == os.sched_getaffinity(0)


def test_the_node_of_a_gpu_is_read_where_it_is_known(tmp_path: Path) -> None:
    write(tmp_path, {"bus/pci/devices/0000:3b:00.0/numa_node": "1\n"})
    write(tmp_path, {"bus/pci/devices/0000:5e:00.0/numa_node": "-1\n"})
    assert node_of_pci("0000:3b:00.0", sys=tmp_path) == 1
    assert node_of_pci("0000:5e:00.0", sys=tmp_path) is None
    assert node_of_pci("0000:af:00.0", sys=tmp_path) is None


@given(st.frozensets(st.integers(0, 40)))
def test_a_list_of_cpus_is_read_as_it_is_written(cpus: frozenset[int]) -> None:
    assert frozenset(parse_cpus(format_cpus(cpus))) == cpus
