"""The transport that a run takes: the fastest that works where its ranks are, or the one asked."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from asyncpipe.runtime.communication.options import RankOptions
from asyncpipe.runtime.config.execution_options import LEFT_OUT, TRANSPORTS
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.distributed.connections import agree_on_transport, expect_transport
from asyncpipe.runtime.distributed.process_groups import World
from asyncpipe.runtime.distributed.ranks import ALONE, RankInfo
from asyncpipe.runtime.errors import TransportError
from asyncpipe.runtime.options import options_of
from asyncpipe.runtime.transports.choose import (
    Circumstances,
    choose,
    find_circumstances,
    have_own_gpus,
    open_transport,
    whereabouts,
)
from asyncpipe.tests.support.models.hand_plans import chain
from asyncpipe.tests.support.processes.gloo_ranks import run_processes

ONE_HOST = Circumstances(4)
TWO_HOSTS = replace(ONE_HOST, apart="ranks 0 and 2 are not on one host")
OWN_GPUS = replace(ONE_HOST, on_gpus=True, own_gpus=True, has_nccl=True)
SHARED_GPUS = replace(OWN_GPUS, own_gpus=False)


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        (Circumstances(1), "local (one process)"),
        (ONE_HOST, "shm (one host)"),
        (TWO_HOSTS, "gloo (ranks 0 and 2 are not on one host)"),
        (OWN_GPUS, "nccl (a GPU each)"),
        (replace(OWN_GPUS, apart=TWO_HOSTS.apart), "nccl (a GPU each)"),
        (replace(OWN_GPUS, has_nccl=False), "gloo (GPUs of one host; CUDA IPC: --transport shm)"),
        (SHARED_GPUS, "gloo (GPUs of one host; CUDA IPC: --transport shm)"),
    ],
)
def test_the_fastest_that_works_is_taken(where: Circumstances, chosen: str) -> None:
    assert str(choose("auto", where)) == chosen


@pytest.mark.parametrize(
    ("asked", "where", "why"),
    [
        ("local", ONE_HOST, "it connects ranks of one process, and this run has 4 processes."),
        ("nccl", ONE_HOST, "it carries tensors between GPUs, and --device is cpu."),
        ("nccl", SHARED_GPUS, "several ranks share one GPU, which NCCL refuses."),
        ("nccl", replace(OWN_GPUS, has_nccl=False), "this torch was built without NCCL."),
        ("shm", TWO_HOSTS, "ranks 0 and 2 are not on one host."),
    ],
)
def test_one_that_cannot_work_is_refused_with_the_cure(
    asked: str, where: Circumstances, why: str
) -> None:
    with pytest.raises(TransportError) as raised:
        choose(asked, where)
    assert str(raised.value) == f"--transport {asked}: {why}\n--transport auto"


@pytest.mark.parametrize("asked", ["shm", "gloo", "mpi"])
def test_what_was_asked_for_is_taken_without_a_reason(asked: str) -> None:
    assert str(choose(asked, ONE_HOST)) == asked
    assert choose(asked, Circumstances(1)).name == "local"


def test_ranks_on_one_gpu_are_told_from_ranks_on_their_own() -> None:
    first, second = bytes([1]) * 16 + b"\1", bytes([2]) * 16 + b"\1"
    places = [Circumstances(2, "", True, own, True) for own in (True, False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncpipe.runtime.transports.choose.obstacle", lambda group: None)
        assert find_circumstances(None, [first, second]) == places[0]
        assert find_circumstances(None, [first, first]) == places[1]
        cpu = whereabouts(torch.device("cpu"))
        assert find_circumstances(None, [cpu, cpu]) == Circumstances(2)
        assert not find_circumstances(None, [first, cpu]).on_gpus


def test_ranks_of_one_gpu_with_hosts_of_their_own_are_apart_for_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = SimpleNamespace(uuid="GPU-0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    places = []
    for host in ("a", "b"):
        places += [whereabouts(torch.device("cuda", 0))]
        monkeypatch.setenv("NCCL_HOSTID", host)
        places += [whereabouts(torch.device("cuda", 0))]
    assert have_own_gpus([places[0], places[1], places[3]])
    assert not have_own_gpus([places[1], places[2]])


def test_before_the_ranks_start_those_of_this_machine_are_expected() -> None:
    plan = chain(4).plan
    assert str(expect_transport(Settings(folder="."), plan, 4)) == "shm (one host)"
    assert str(expect_transport(Settings(folder="."), plan, 1)) == "local (one process)"
    with pytest.raises(TransportError, match="--device is cpu"):
        expect_transport(Settings(folder=".", transport="nccl"), plan, 4)


def agree(rank: int, asked: str) -> list[str]:
    world = World(RankInfo(rank, 2, rank, 2), dist.group.WORLD)
    # Only what rank 0 was asked for counts.
    settings = Settings(folder=".", transport=asked if rank == 0 else "auto")
    choice = agree_on_transport(world, settings, "cpu")
    transport = open_transport(choice.name, world.control, timeout_s=20.0, device="cpu")
    transport.close()
    return [str(choice), type(transport).__name__]


@pytest.mark.parametrize(
    ("asked", "found"),
    [("auto", ["shm (one host)", "ShmTransport"]), ("gloo", ["gloo", "GlooTransport"])],
)
def test_all_ranks_take_what_rank_0_was_asked_for(asked: str, found: list[str]) -> None:
    assert run_processes(2, agree, asked) == [found, found]


def test_one_process_needs_none() -> None:
    assert str(agree_on_transport(World(ALONE), Settings(folder="."), "cpu")) == (
        "local (one process)"
    )
    transport = open_transport("local", None, timeout_s=1.0, device="cpu")
    assert type(transport).__name__ == "LocalTransport"


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_name_that_may_be_asked_for_is_known(name: str) -> None:
    where = OWN_GPUS if name == "nccl" else Circumstances(1) if name == "local" else ONE_HOST
    assert choose(name, where).name in TRANSPORTS[1:]


def test_only_a_run_may_leave_the_network_out() -> None:
    of_run, of_ranks = (options_of(kind)["transport"].limit for kind in (Settings, RankOptions))
    assert of_run.has(LEFT_OUT) and not of_ranks.has(LEFT_OUT)
    assert choose(LEFT_OUT, ONE_HOST).name == choose(LEFT_OUT, Circumstances(1)).name == LEFT_OUT
