"""Two hosts of two ranks, on network namespaces of this machine: the same numbers, clear ends.

Between the hosts is a link of 100 Mbit/s. The tests run wherever the kernel permits namespaces;
elsewhere they are skipped, and name the refusal. The processes are forks with the imports done.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncpipe.partitioner.planning.cluster_file import read_cluster
from asyncpipe.runtime.communication.hosts import Host, HostsError, cut_link, hosts, restore_link
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.transports.mpi import mpiexec
from asyncpipe.tests.runtime.training.test_stage_replicas import replicate
from asyncpipe.tests.support.models.generated import CASES, cut
from asyncpipe.tests.support.models.hand_folders import FAILING, write_mlp
from asyncpipe.tests.support.processes import fake_slurm
from asyncpipe.tests.support.processes.quick_python import bin_folder, run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    cut(CASES["mlp"], 4, folder / "generated")
    write_mlp(folder / "mlp4", stages=4)
    write_mlp(folder / "mlp2")
    replicate(folder / "first", write_mlp(folder / "first"), 3, 1)
    write_mlp(folder / "slow", stages=4, slow_s=0.02)
    return folder


@contextmanager
def two_hosts(*, names_file: str = "") -> Iterator[list[Host]]:
    try:
        with hosts(["h1", "h2"], mbit_s=100, names_file=names_file) as made:
            yield made
    except HostsError as refusal:
        warnings.warn(f"NO TEST OF SEVERAL HOSTS: {refusal}", stacklevel=1)
        pytest.skip(str(refusal))


class Started:
    """Commands that run on hosts; all are gone when it closes."""

    def __init__(self, *commands: list[str], **environment: str) -> None:
        self.processes = [
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            )
            for command in commands
        ]

    def finish(self, limit_s: float = 120) -> tuple[list[int], list[str]]:
        """The exit codes and what was printed."""
        end_s = time.monotonic() + limit_s
        try:
            printed = [p.communicate(timeout=end_s - time.monotonic())[0] for p in self.processes]
        finally:
            for process in self.processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
        return [process.returncode for process in self.processes], printed


def train() -> str:
    return str(bin_folder() / "asyncpipe-train")


def torchrun(host: Host, *command: str) -> list[str]:
    """The agent of torchrun on one of two hosts of two ranks."""
    agent = (str(bin_folder() / "torchrun"), "--nnodes", "2", "--nproc-per-node", "2")
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "h1:29400", "--rdzv-id", "two")
    return host.command(*agent, *meeting, "--no-python", train(), *command)


def options(output: Path, **given: Any) -> list[str]:
    named = {"output": output, "threads": 1, "log_every": 1, "data": "clusters", "eval_batches": 2}
    named |= given
    return [
        text
        for name, value in named.items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]


def losses(output: Path) -> list[float]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] in ("step", "eval")]


@pytest.fixture(scope="module")
def on_one_host(folder: Path) -> list[float]:
    """The losses of four ranks on one host."""
    given = {"steps": 5, "dtype": "float64", "clip": 0.5, "log_every": 1, "threads": 1}
    given["eval_batches"] = 2
    output = folder / "one"
    run(Settings(folder=str(folder / "generated"), output=str(output), **given), FACTORY)  # type: ignore[arg-type]
    assert events_of(output, "end")
    return losses(output)


def same_run(output: Path) -> list[str]:
    return options(output, steps=5, dtype="float64", clip=0.5)


def test_two_hosts_under_torchrun_make_the_losses_of_one(
    folder: Path, on_one_host: list[float], tmp_path: Path
) -> None:
    with two_hosts() as both:
        command = (str(folder / "generated"), *same_run(tmp_path / "run"))
        codes, printed = Started(*(torchrun(host, *command) for host in both)).finish()
    assert codes == [0, 0], printed
    assert "4 processes on 2 hosts by torchrun · gloo over eth0" in printed[0]
    assert "ranks 0-1 on h1, 2-3 on h2 · " in printed[0]
    assert losses(tmp_path / "run") == on_one_host


@pytest.mark.parametrize(
    ("name", "more", "told_of_ranks"),
    [
        ("mlp2", {"replicas": 2, "micro_batches": 3}, "4 processes, 2 replicas of 2 on 2 hosts"),
        ("first", {"micro_batches": 6}, "4 processes, stage 0 on ranks 0-2 on 2 hosts"),
    ],
    ids=["replicas of the pipeline", "replicas of a stage"],
)
def test_replicas_on_two_hosts_make_the_losses_of_one_process(
    folder: Path, tmp_path: Path, name: str, more: dict[str, Any], told_of_ranks: str
) -> None:
    with two_hosts() as both:
        given = options(
            tmp_path / "run", steps=5, dtype="float64", clip=0.5, check_replicas=1, **more
        )
        codes, printed = Started(
            *(torchrun(host, str(folder / name), *given) for host in both)
        ).finish()
    assert codes == [0, 0], printed
    assert told_of_ranks in printed[0]
    one: dict[str, Any] = {"steps": 5, "dtype": "float64", "clip": 0.5, "log_every": 1}
    one |= {"threads": 1, "schedule": "single", "micro_batches": 6, "data": "clusters"}
    one["eval_batches"] = 2
    run(Settings(folder=str(folder / name), output=str(tmp_path / "one"), **one), FACTORY)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-12)


def srun(both: list[Host], *command: str) -> list[list[str]]:
    """The tasks of a step of Slurm, two on each of the hosts."""
    return [
        both[int(task["SLURM_NODEID"])].command(
            "env", "SLURM_JOB_ID=7", *(f"{name}={value}" for name, value in task.items()), *command
        )
        for task in fake_slurm.tasks(["h1", "h1", "h2", "h2"])
    ]


def test_two_hosts_under_srun_make_the_losses_of_one(
    folder: Path, on_one_host: list[float], tmp_path: Path
) -> None:
    with two_hosts() as both:
        command = (train(), str(folder / "generated"), *same_run(tmp_path / "run"))
        codes, printed = Started(*srun(both, *command)).finish()
    assert codes == [0] * 4, printed
    assert "4 processes on 2 hosts by srun · gloo over eth0" in printed[0]
    assert losses(tmp_path / "run") == on_one_host


@pytest.mark.parametrize(
    ("transport", "more"), [("gloo", ("--master-addr", "h1")), ("mpi", ())], ids=["gloo", "mpi"]
)
def test_two_hosts_under_mpiexec_make_the_losses_of_one(
    folder: Path, on_one_host: list[float], tmp_path: Path, transport: str, more: tuple[str, ...]
) -> None:
    with two_hosts() as both:
        enter = "\n".join(f'{host.name}) exec {" ".join(host.enter)} sh -c "$*";;' for host in both)
        remote = tmp_path / "remote"  # as ssh: its arguments are a host and a command
        remote.write_text(
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1; shift\n'
            f"case $host in\n{enter}\nesac\n"
        )
        remote.chmod(0o755)
        start = (mpiexec(), "-launcher", "ssh", "-launcher-exec", str(remote), "-iface", "eth0")
        command = (train(), str(folder / "generated"), *same_run(tmp_path / "run"))
        ranks = ("-n", "4", "-hosts", "h1:2,h2:2", *command, "--transport", transport, *more)
        codes, printed = Started(both[0].command(*start, *ranks)).finish()
    assert codes == [0], printed
    assert f"4 processes on 2 hosts by mpirun · {transport} over eth0" in printed[0]
    assert losses(tmp_path / "run") == on_one_host


def by_hand(both: list[Host], *command: str) -> list[list[str]]:
    """A rank on each host, told only what one types."""
    place = ("MASTER_ADDR=h1", "MASTER_PORT=29501", "WORLD_SIZE=2")
    return [host.command("env", f"RANK={rank}", *place, *command) for rank, host in enumerate(both)]


def test_two_hosts_that_are_started_by_hand_make_the_losses_of_one(
    folder: Path, tmp_path: Path
) -> None:
    meet = tmp_path / "meet"
    with two_hosts() as both:
        command = (train(), str(folder / "mlp2"))
        codes, printed = Started(*by_hand(both, *command, *same_run(tmp_path / "tcp"))).finish()
        options_of_rank = ("--world-size", "2", "--rendezvous", f"file://{meet}")
        in_file = [
            host.command(*command, *same_run(tmp_path / "file"), *options_of_rank, "--rank", rank)
            for host, rank in zip(both, "01", strict=True)
        ]
        late, told_late = Started(in_file[1] + ["--timeout-s", "2"]).finish()
        codes_of_file, told_of_file = Started(*in_file).finish()
    assert (codes, codes_of_file) == ([0, 0], [0, 0]), (printed, told_of_file)
    assert late == [1] and f"at file://{meet} after 2 s waiting for rank 0." in told_late[0]
    for words in (printed[0], told_of_file[0]):
        assert "2 processes on 2 hosts by hand · gloo over eth0" in words
        assert "ranks 0 on h1, 1 on h2" in words
    given: dict[str, Any] = {"steps": 5, "dtype": "float64", "clip": 0.5, "log_every": 1}
    given |= {"threads": 1, "data": "clusters", "eval_batches": 2}
    run(Settings(folder=str(folder / "mlp2"), output=str(tmp_path / "one"), **given), FACTORY)
    assert losses(tmp_path / "tcp") == losses(tmp_path / "file") == losses(tmp_path / "one")


def test_the_rate_of_each_direction_is_measured(tmp_path: Path) -> None:
    measure = (str(bin_folder() / "asyncpipe-comm"), "measure", "--sizes", "2MiB", "--json")
    with two_hosts() as both:
        to_file = ("--output", str(tmp_path / "devices.toml"))
        codes, told = Started(*by_hand(both, *measure, *to_file)).finish()
    assert codes == [0, 0], told
    answer = json.loads(told[0].splitlines()[-1])
    for link in answer["links"]:  # at 100 Mbit/s
        assert 8e3 * link["gb_s"] == pytest.approx(100, rel=0.1)
    cluster = read_cluster(tmp_path / "devices.toml")
    assert [device.host for device in cluster.devices] == ["h1", "h2"] and cluster.overlap
    assert cluster.link(0, 1).duplex > 1.5


def test_a_rank_that_was_not_started_by_hand_is_named(folder: Path, tmp_path: Path) -> None:
    with two_hosts() as both:
        command = (train(), str(folder / "mlp2"), *options(tmp_path / "run", timeout_s=2))
        first, second = by_hand(both, *command)
        codes, printed = Started(first).finish()
        codes_of_second, told_of_second = Started(second).finish()
    assert codes == codes_of_second == [1]
    assert (
        "rank 0 timed out at h1:29501 after 2 s waiting for rank 1; present: rank 0 on h1"
        in (printed[0])
    )
    assert (
        "rank 1 on h2 cannot reach rank 0 at h1:29501 in 2 s (10.77.0.1: connection ref"
        in (told_of_second[0])
    )


def wait_for_steps(output: Path, started: Started) -> None:
    end_s = time.monotonic() + 60
    while not all((output / "ranks" / f"{rank}.step").exists() for rank in range(4)):
        assert time.monotonic() < end_s, started.finish(1)
        time.sleep(0.1)


def test_a_cut_link_ends_all_in_bounded_time(folder: Path, tmp_path: Path) -> None:
    with two_hosts() as both:
        given = options(tmp_path / "run", steps=10_000, timeout_s=5)
        started = Started(*srun(both, train(), str(folder / "slow"), *given))
        wait_for_steps(tmp_path / "run", started)
        cut_link(both[1])
        codes, printed = started.finish(60)
    assert codes == [1] * 4
    for rank, peer in ((1, 2), (2, 1)):
        assert re.search(f"error: .*rank {rank} waits for .*rank {peer}", printed[rank]), printed


def test_a_link_that_comes_back_in_time_costs_time_and_nothing_else(
    folder: Path, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"steps": 12, "timeout_s": 60}
    with two_hosts() as both:
        command = (train(), str(folder / "slow"), *options(tmp_path / "run", **given))
        started = Started(*srun(both, *command))
        wait_for_steps(tmp_path / "run", started)
        cut_link(both[1])
        time.sleep(1.5)
        restore_link(both[1])
        codes, printed = started.finish(60)
    assert codes == [0] * 4, printed
    one = Settings(
        folder=str(folder / "slow"),
        output=str(tmp_path / "one"),
        threads=1,
        log_every=1,
        steps=12,
        eval_batches=2,
    )
    run(one, FACTORY)
    assert losses(tmp_path / "run") == losses(tmp_path / "one")


def test_a_rank_that_never_comes_is_named(folder: Path, tmp_path: Path) -> None:
    with two_hosts() as both:
        command = (train(), str(folder / "mlp4"), *options(tmp_path / "run", timeout_s=4))
        codes, printed = Started(*srun(both, *command)[:3]).finish(60)
    assert codes == [1] * 3, printed
    assert "rank 0 timed out at h1:" in printed[0]
    assert "4 s waiting for rank 3; present: ranks 0, 1 on h1, rank 2 on h2." in printed[0]


def test_a_failing_rank_on_another_host_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FAILING)
    criterion = f"{tmp_path / 'own.py'}:criterion"
    with two_hosts() as both:
        given = options(tmp_path / "run", steps=50, criterion=criterion)
        started = Started(*(torchrun(host, str(folder / "mlp4"), *given) for host in both))
        codes, printed = started.finish(100)
    assert 0 not in codes
    assert "ValueError: the tenth call fails" in printed[1]
    assert "ends because rank 3 failed: " in printed[0] and "the tenth call fails" in printed[0]


def test_a_rank_that_is_killed_on_another_host_ends_all(folder: Path, tmp_path: Path) -> None:
    with two_hosts() as both:
        given = options(tmp_path / "run", steps=10_000)
        command = (str(folder / "slow"), *given)
        started = Started(*(torchrun(host, *command) for host in both))
        wait_for_steps(tmp_path / "run", started)
        state = json.loads((tmp_path / "run" / "ranks" / "3.state").read_text())
        os.kill(state["pid"], signal.SIGKILL)
        codes, printed = started.finish(60)
    assert 0 not in codes
    errors = [line for text in printed for line in text.splitlines() if "error:" in line]
    assert errors and all("is gone" in line for line in errors), errors
    assert re.search(r"rank +: 3 .*\n.*exitcode +: -9", printed[1])


def test_an_agent_that_is_killed_ends_all_and_is_told(folder: Path, tmp_path: Path) -> None:
    with two_hosts() as both:
        given = options(tmp_path / "run", steps=10_000)
        started = Started(*(torchrun(host, str(folder / "slow"), *given) for host in both))
        wait_for_steps(tmp_path / "run", started)
        os.kill(started.processes[0].pid, signal.SIGKILL)
        codes, printed = started.finish(60)
    assert 0 not in codes
    assert "the process that serves the store is gone" in printed[1], printed


def test_a_head_that_others_do_not_reach_is_told_with_what_was_tried(
    folder: Path, tmp_path: Path
) -> None:
    # As many systems have it: a host's own name is 127.0.1.1, here on both.
    with two_hosts(names_file="127.0.1.1 h1\n") as both:
        command = (train(), str(folder / "mlp4"), *options(tmp_path / "run", timeout_s=4))
        codes, printed = Started(*srun(both, *command)).finish(60)
    assert codes == [1] * 4, printed
    assert "rank 0 timed out at h1:" in printed[0]
    assert "4 s waiting for ranks 2, 3; present: ranks 0, 1 on h1." in printed[0]
    assert "rank 2 on h2 cannot reach rank 0 at h1:" in printed[2]
    assert "127.0.1.1: connection refused; on h2 h1 is 127.0.1.1, its own loopback" in printed[2]
    assert "--master-addr" in printed[2] and "eth0 (10.77.0.2)" in printed[2]
