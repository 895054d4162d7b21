"""Each cause is named by its sentence when it is planted, and none where there is none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncpipe.runtime.communication.diagnosis import (
    Communicators,
    Cores,
    Files,
    Link,
    Networks,
    Observation,
    Others,
    Placement,
    Progress,
)
from asyncpipe.runtime.communication.host_facts import (
    Binding,
    FolderProbe,
    cpu_seconds,
    probe_folder,
    rdma_devices,
    read_binding,
)
from asyncpipe.runtime.communication.hosts import HostsError, hosts, in_network
from asyncpipe.runtime.communication.tcp_links import (
    EchoPath,
    EchoServer,
    NetworkPath,
    echo_rates,
)
from asyncpipe.runtime.errors import DataError
from asyncpipe.runtime.monitoring.run_files import RunRecords
from asyncpipe.runtime.reports.causes import checks_of_run, conclusion, longest_wait
from asyncpipe.tests.support.processes.in_process import command, error_of
from asyncpipe.tests.support.processes.quick_python import forked_ranks

HOSTS = ("a", "a", "a", "a", "b", "b", "b", "c")
SERIAL, CONCURRENT = Link(6, 7, 0.01, 1.02, 0.1), Link(6, 7, 0.01, 1.95, 0.1)
LONE = Placement(HOSTS, (CONCURRENT, SERIAL), "serial")
SHARED = Communicators(4, is_shared=True, shared_ms=20.0, own_ms=10.0, over="gloo")
MPI = Progress("MPICH 5.0.2", 3, "MULTIPLE", "", 10.0, 1.0)
SERIALIZED = replace(
    MPI, level=2, level_name="SERIALIZED", asked_by="MPI4PY_RC_THREAD_LEVEL=serialized"
)
OWN = Cores(("a", "a"), (Binding((0,), 2), Binding((1,), 2)), (0.01, 0.02))
CROWDED = replace(OWN, bindings=(Binding((0,), 2), Binding((0,), 2)), waited=(0.5, 0.49))
PATHS = (
    NetworkPath(0, 1, "eth0", "10.0.0.2", 0.006, is_used=True),
    NetworkPath(0, 1, "eth1", "10.1.0.2", 1.2, is_used=False),
)
NETWORK = Networks("gloo", ("a", "b"), PATHS, ((), ()))
DISK = FolderProbe("/runs", "ext4", 50 << 30, 100 << 30, 2.0)
QUIET = Others(("a", "a"), ((0, 1), (0, 1)), (0.1, 0.1), (0.05, 0.05), (0.02, 0.01), (0.0, 0.0))
RDMA = replace(NETWORK, paths=PATHS[:1], rdma=((), ("mlx5_0",)))


@pytest.mark.parametrize(
    ("observed", "sentence"),
    [
        (LONE, "Rank 7 is alone on its host c, and its endpoint sends and receives one after"),
        (SHARED, "4 threads of a rank share one communicator, and their messages take 20.00 ms"),
        (SERIALIZED, "MPI was started with thread level SERIALIZED because MPI4PY_RC_THREAD_LEVEL"),
        (
            replace(MPI, exposed_ms=8.0),
            "MPI moves no messages while a rank computes (an exch",
        ),
        (
            CROWDED,
            "Ranks 0, 1 may only run on core 0 of a, which has 2 cores, and each waits",
        ),
        (
            replace(OWN, bindings=(Binding((0,), 2, far_share=0.9), Binding((1,), 2))),
            "90% of the memory of rank 0 is not on the memory node of its cores 0",
        ),
        (
            replace(OWN, bindings=(Binding((0,), 2), Binding((1,), 2, policy="interleave:0-1"))),
            "The memory of rank 1 has the policy interleave:0-1",
        ),
        (NETWORK, "a and b communicate over eth0 with 6.0 MB/s, and eth1 between them has 1.20"),
        (RDMA, "The ranks communicate over TCP although mlx5_0 can do remote direct memory access"),
        (
            replace(RDMA, transport="nccl", nccl_ib_disable=(1,)),
            "NCCL_IB_DISABLE is set on rank 1, so that NCCL leaves mlx5_0 unused: unset it.",
        ),
        (Files(replace(DISK, write_ms=400.0)), "A write of 64.0 KiB to /runs takes 400.0 ms until"),
        (
            Files(replace(DISK, write_ms=400.0, system="nfs4")),
            "A write of 64.0 KiB to /runs on a network file system (nfs4) takes 400.0 ms",
        ),
        (Files(replace(DISK, free_bytes=4096)), "The file system of /runs is full (4.0 KiB free"),
        (
            Files(replace(DISK, error="Permission denied")),
            "Nothing can be written to /runs (permission denied): choose another folder",
        ),
        (
            replace(QUIET, used=(1.1, 1.1), busiest=(1.0, 1.0), waited=(0.3, 0.5)),
            "Other processes use 1.10 of the 2 cores of rank 1 on a, which waits for a core 50%",
        ),
        (replace(QUIET, stolen=(0.0, 0.3)), "The hypervisor takes 30% of the time of the cores"),
    ],
)
def test_each_cause_is_named_with_its_cure(observed: Observation, sentence: str) -> None:
    check = observed.check()
    assert check.verdict == "fault" and check.sentence.startswith(sentence), check
    assert ": " in check.sentence and check.sentence.endswith(".")
    assert conclusion([QUIET.check(), check, LONE.check()]) == check.sentence


@pytest.mark.parametrize(
    "observed",
    [
        Placement(HOSTS, (CONCURRENT,), "concurrent"),
        Placement(HOSTS, (replace(SERIAL, busy=0.9),), "concurrent"),
        Placement(("a", "a", "b", "b"), (), "serial"),
        replace(SHARED, shared_ms=13.0),
        replace(SHARED, is_shared=False),
        Communicators(0, is_shared=False),
        MPI,
        Progress(),
        OWN,
        replace(CROWDED, waited=(0.05, 0.05)),
        replace(CROWDED, bindings=(Binding((0,), 1), Binding((0,), 1))),
        replace(NETWORK, paths=(replace(PATHS[0], gb_s=1.0), PATHS[1])),
        replace(RDMA, transport="mpi"),
        Networks("shm", ("a", "a"), rdma=(("mlx5_0",),)),
        Files(DISK),
        Files(replace(DISK, write_ms=60.0, system="nfs4")),
        QUIET,
        replace(QUIET, used=(1.0, 1.0), busiest=(1.0, 1.0)),
        replace(QUIET, waited=(0.3, 0.3)),
    ],
)
def test_no_cause_is_named_where_there_is_none(observed: Observation) -> None:
    check = observed.check()
    assert check.verdict != "fault" and not check.sentence, check
    assert conclusion([check]).startswith("Nothing found")


def test_the_facts_of_a_host_come_from_proc_and_sys(tmp_path: Path) -> None:
    proc, system = tmp_path / "proc", tmp_path / "sys"
    files = {
        proc / "self/status": "Name:\tpython\nCpus_allowed_list:\t4-5\n",
        proc / "self/numa_maps": "7f00 interleave:0-1 anon=30 N0=10 N1=20 kernelpagesize_kB=4\n"
        "7f01 default file=/lib/libc.so mapped=99 N0=99 kernelpagesize_kB=4\n",
        proc / "stat": "cpu  9 9 9 9\ncpu0 100 50 50 800 0 7 7 30 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\n",
        system / "devices/system/cpu/online": "0-7\n",
        system / "devices/system/node/node0/cpulist": "0-3\n",
        system / "devices/system/node/node1/cpulist": "4-7\n",
        system / "class/infiniband/mlx5_0/ports": "",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    binding = read_binding(proc=proc, sys=system)
    assert binding == Binding((4, 5), 8, (1,), "interleave:0-1", 0.3333)
    seconds, tick_s = cpu_seconds(proc=proc)[0], 1 / os.sysconf("SC_CLK_TCK")
    assert (seconds.busy, seconds.stolen) == pytest.approx((200 * tick_s, 30 * tick_s))
    assert rdma_devices(sys=system) == ("mlx5_0",) and rdma_devices(sys=proc) == ()
    probe = probe_folder(tmp_path / "not" / "yet", proc=proc)
    assert probe.write_ms > 0 and not probe.error and list(tmp_path.iterdir()) == [proc, system]


def test_a_slow_interface_next_to_a_fast_one_is_measured() -> None:
    try:
        with hosts(["h1", "h2"], mbit_s=80.0) as made, in_network(made[1].process):
            pair = ("type", "veth", "peer", "name", "eth1", "netns", str(made[1].process))
            made[0].run("ip", "link", "add", "eth1", *pair)
            for number, host in enumerate(made, start=1):
                host.run("ip", "address", "add", f"10.78.0.{number}/24", "dev", "eth1")
                host.run("ip", "link", "set", "eth1", "up")
            with EchoServer(["10.77.0.2", "10.78.0.2"], b"word") as server:
                ends = [
                    EchoPath(address[:-1] + "1", address, port)
                    for address, port in server.ports.items()
                ]
                with in_network(made[0].process):
                    lost = EchoPath("10.77.0.1", "10.77.0.2", 1)
                    slow, fast, none = echo_rates([*ends, lost], b"word")
    except HostsError as refusal:
        pytest.skip(str(refusal))
    assert 0.8 * 10e6 < slow < 1.1 * 10e6 and fast > 2 * slow and none == 0.0


def run_of(folder: Path, end: dict[str, Any], step: dict[str, Any]) -> RunRecords:
    start = {"facts": {"ranks": "2 processes · shm (one host) · 1 thread each"}}
    steps = ({"event": "step", "step": 9, "idle": [0.5, 0.5], "step_ms": 40.0, **step},)
    return RunRecords(folder, {}, start, steps, (), (), None, end, "", 0)


def parts(**shares: float) -> dict[str, float]:
    names = ("bubble", "imbalance", "communication", "data", "overhead")
    return dict.fromkeys(names, 0.01) | shares


@pytest.mark.parametrize(
    ("shares", "sentence"),
    [
        (parts(communication=0.3), "Communication takes 30% of a step, 12.00 ms (shm (one host)"),
        (parts(exchange=0.3), "The sum of gradients over replicas takes 30% of a step"),
        (parts(bubble=0.1, imbalance=0.1), "Waits that the schedule and unequal stages cause"),
        (parts(writing=0.4, communication=0.3), "Checkpoints and records take 40% of a step"),
        (parts(data=0.2), "The ranks read data for 20% of a step"),
        (parts(overhead=0.2), "The executor takes 20% of a step"),
        (parts(communication=0.09), "Nothing found"),
    ],
)
def test_the_largest_part_of_the_idle_time_of_a_run_is_named(
    shares: dict[str, float], sentence: str, tmp_path: Path
) -> None:
    end = {"idle_parts_by_rank": [shares, shares], "step_ms": 40.0}
    checks = checks_of_run(run_of(tmp_path, end, {}))
    assert conclusion(checks).startswith(sentence)
    assert len(checks) == len(set(shares) - {"imbalance"})


def test_a_run_that_has_not_ended_has_the_kinds_of_its_idle_time(tmp_path: Path) -> None:
    names = ("waiting", "sending", "data", "overhead", "writing")
    step = {f"{name}_shares": [0.02, 0.02] for name in names} | {"writing_shares": [0.3, 0.1]}
    first = checks_of_run(run_of(tmp_path, {}, step))[0]
    assert first.cause == "writing" and first.measured.startswith("20% of a step, 8.00 ms")
    with pytest.raises(DataError, match="no record of a step"):
        checks_of_run(replace(run_of(tmp_path, {}, step), steps=()))


def test_a_trace_tells_which_rank_waits_longest(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    assert longest_wait(file) is None
    spans = [
        {"cat": "receive", "pid": 0, "dur": 3000.0, "args": {"source": 1}},
        {"cat": "receive", "pid": 1, "dur": 1000.0, "args": {"source": 0}},
        *({"cat": "S", "pid": 0, "dur": 1.0, "args": {"step": step}} for step in (1, 2)),
    ]
    file.write_text(json.dumps({"traceEvents": spans}))
    wait = longest_wait(file)
    assert wait is not None and (wait.rank, wait.source, wait.wait_ms) == (0, 1, 1.5)
    file.write_text('{"traceEvents": [1]}')
    with pytest.raises(DataError, match="is not a trace of a run"):
        longest_wait(file)


@contextmanager
def on_core(core: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def diagnosed(folder: Path, *words: str) -> tuple[str, dict[str, str]]:
    """The sentence of real ranks, and the verdict of each cause."""
    answer = json.loads(command(folder, "comm", "diagnose", "--json", *words).out)
    verdicts: Sequence[dict[str, str]] = answer["checks"]
    return answer["sentence"], {check["cause"]: check["verdict"] for check in verdicts}


def test_two_ranks_on_one_core_are_named_by_the_command(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with on_core(core):
        sentence, verdicts = diagnosed(tmp_path)
    assert sentence.startswith(f"Ranks 0, 1 may only run on core {core} of ")
    causes = ["placement", "threads", "progress", "cores, memory", "interface", "files"]
    assert list(verdicts) == [*causes, "other processes"]
    assert not any(tmp_path.iterdir())


def test_a_lower_thread_level_of_mpi_is_named_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPI4PY_RC_THREAD_LEVEL", "serialized")
    with forked_ranks():
        sentence, verdicts = diagnosed(tmp_path, "--transport", "mpi")
    assert sentence.startswith("MPI was started with thread level SERIALIZED because MPI4PY_RC")
    assert verdicts["progress"] == "fault"


def test_a_run_and_ranks_are_not_diagnosed_together(tmp_path: Path) -> None:
    text = error_of(tmp_path, "comm", "diagnose", "run", "--ranks", "3", code=2)
    assert "--ranks applies to ranks that are measured" in text
    assert "does not contain a run" in error_of(tmp_path, "comm", "diagnose", ".")
