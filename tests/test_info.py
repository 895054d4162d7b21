"""asyncpipe-info reports the environment, agrees with a run, and survives missing parts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asyncpipe.commands.info import app
from asyncpipe.commands.running import run
from asyncpipe.runtime.distributed.cpu_affinity import Core, Topology
from asyncpipe.runtime.errors import TransportError
from asyncpipe.runtime.launch import info
from asyncpipe.runtime.launch import info as described
from asyncpipe.runtime.transports.mpi import load_mpi

SECTIONS = [
    "versions",
    "torch build",
    "extras",
    "backends",
    "processor",
    "gpus",
    "links",
    "a run here",
]
FOUR_CORES = Topology(tuple(Core(0, (cpu,)) for cpu in range(4)))


def ask(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["asyncpipe-info", *arguments])
    return run(app)


@pytest.mark.filterwarnings("ignore:Cyclopts application invoked")
def test_all_sections_are_told_as_text_and_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(info, "_mpi", lambda: "MPI of a test")
    assert ask(monkeypatch, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == SECTIONS
    assert printed["versions"]["torch"] == torch.__version__
    assert (
        f"TORCH_VERSION={torch.__version__.partition('+')[0]}" in printed["torch build"]["settings"]
    )
    assert printed["processor"]["memory policy"]
    assert printed["links"] and "loopback" in json.dumps(printed["links"])
    assert ask(monkeypatch, "--ranks", "2") == 0
    text = capsys.readouterr().out
    assert all(section in text for section in SECTIONS) and torch.__version__ in text
    assert ask(monkeypatch, "--ranks", "0") == 2


def test_what_cannot_be_found_out_is_told_and_the_rest_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> dict[str, str]:
        raise OSError("no such file")

    def refused() -> dict[str, str]:
        raise TransportError("it does not work.", "Do this.")

    for name in ("versions", "extras", "cpu", "gpus", "links"):
        monkeypatch.setattr(described, name, broken)
    monkeypatch.setattr(described, "backends", refused)
    found = described.describe(2)
    assert list(found) == SECTIONS
    assert found["gpus"] == {"trouble": "OSError: no such file"}
    assert found["backends"] == {"trouble": "it does not work.", "cure": "Do this."}
    assert found["a run here"]["transport"] == "shm (one host)"


def test_mpi_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("PMI_RANK", "3")  # as of somebody's job
    printed = info._mpi()
    try:
        load_mpi()
    except TransportError:
        assert "MPI cannot start" in printed
    else:
        assert "thread level MULTIPLE" in printed and "CUDA-aware" in printed
        assert printed.split()[0] in ("MPICH", "Open", "Intel(R)")


@pytest.mark.parametrize(
    ("ask_mpi", "words"),
    [
        ("import os; os.abort()", "it ended without a message"),
        ("raise RuntimeError('cannot load MPI library')", "cannot load MPI library"),
        ("import time; time.sleep(60)", "did not start in 0.5 s"),
    ],
)
def test_an_mpi_that_crashes_or_hangs_is_told(
    monkeypatch: pytest.MonkeyPatch, ask_mpi: str, words: str
) -> None:
    monkeypatch.setattr(info, "find_spec", lambda name: True)
    monkeypatch.setattr(info, "_ASK_MPI", ask_mpi)
    monkeypatch.setattr(info, "_PATIENCE_S", 0.5 if "sleep" in ask_mpi else 20.0)
    assert words in info._mpi()


def test_a_process_that_we_start_imports_nothing_from_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "stray.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)  # as where a script calls us
    monkeypatch.setattr(info, "find_spec", lambda name: True)
    monkeypatch.setattr(info, "_ASK_MPI", "import stray")
    assert "No module named 'stray'" in info._mpi()


def test_gpus_are_told_with_those_whose_memory_they_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="Card", total_memory=8 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda one, other: {one, other} < {0, 1, 3}
    )
    told = info.gpus()
    assert told["0"] == "Card, 8.0 GiB, compute capability 9.0, reads the memory of 1"
    assert told["2"].endswith("reads the memory of no other")


def test_the_policy_of_memory_is_the_kernels(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    assert info.memory_policy(tmp_path) == "unknown"
    lines = "7f00 bind:0 anon=1 N0=1\n7f01 default file=/x\n7f02 bind:0 anon=2"
    (tmp_path / "self" / "numa_maps").write_text(lines)
    assert info.memory_policy(tmp_path) == "bind:0, default"


def given_machine(
    monkeypatch: pytest.MonkeyPatch, topology: Topology, *, gpus: int = 0
) -> Callable[[int], dict[str, str]]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(info, "read_topology", lambda: topology)
    monkeypatch.setattr(
        "asyncpipe.runtime.distributed.cpu_affinity.read_topology", lambda cpus: topology
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    return info.would_use


def test_ranks_share_out_the_cores_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = given_machine(monkeypatch, FOUR_CORES)
    two = ask(2)
    assert two["threads"] == "2 a rank, 4 usable cores for 2 ranks"
    assert two["cores"] == "a rank each on 0-1, 2-3 (--pin cores)"
    assert two["device"] == "cpu: torch sees no GPU" and two["transport"] == "shm (one host)"
    assert ask(8)["cores"] == "all ranks share all (4 cores for 8 ranks)"
    assert ask(1)["transport"] == "local (one process)"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert ask(2)["threads"] == "3 a rank, as OMP_NUM_THREADS says"
    assert "more than its share" in ask(2)["cores"]


def test_a_quota_is_told_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = given_machine(monkeypatch, Topology(FOUR_CORES.cores, quota=2.0))
    assert ask(2)["threads"] == "1 a rank, 2 usable cores by the quota for 2 ranks"
    assert "a quota below the cores" in ask(2)["cores"]


def test_gpus_change_the_transport_when_each_rank_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = given_machine(monkeypatch, FOUR_CORES, gpus=2)
    monkeypatch.setattr(info, "has_nccl", lambda: True)
    assert info.default_ranks() == 2
    assert ask(2)["transport of GPUs"] == "nccl (a GPU each)"
    assert ask(4)["transport of GPUs"].startswith("gloo")
    assert "2 ranks per GPU" in ask(4)["device"]


def test_links_tell_the_speed_that_the_system_knows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from asyncpipe.runtime.distributed.interfaces import Interface

    have = (Interface("lo", "127.0.0.1"), Interface("ib0", "10.0.0.2"), Interface("ib0", "fd00::2"))
    monkeypatch.setattr(info, "interfaces", lambda: have)
    (tmp_path / "class/net/ib0").mkdir(parents=True)
    (tmp_path / "class/net/ib0/speed").write_text("25000\n")
    assert info.links(tmp_path) == {
        "lo": "127.0.0.1 (loopback)",
        "ib0": "10.0.0.2, fd00::2, 25 Gbit/s",
    }


def test_without_mpi4py_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("something was started"))
    assert "not installed: pip install 'mpi4py>=" in info._mpi()
