"""Who a process is, as each launcher says it in the environment."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from asyncpipe.runtime.config.settings import SettingsError
from asyncpipe.runtime.distributed.ranks import (
    DEFAULT_PORT,
    RankInfo,
    find_rank_info,
    first_host,
    tasks_per_node,
)

SLURM_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}


def srun_task(rank: int, per_node: str = "2(x2)", **more: str) -> dict[str, str]:
    """What Slurm sets for one task of a step over two nodes, without --ntasks-per-node."""
    counts = tasks_per_node(per_node)
    ends = list(itertools.accumulate(counts))
    node = next(n for n, end in enumerate(ends) if rank < end)
    return SLURM_SCRIPT | {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank - ([0, *ends][node])),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_TASKS": str(sum(counts)),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_STEP_NODELIST": "gpu-a[03-04]",
        "SLURM_STEP_ID": "0",
        **more,
    }


def test_no_launcher_no_rank() -> None:
    assert find_rank_info({}) is None


def test_the_rank_under_torchrun() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert find_rank_info(torchrun | {"MASTER_ADDR": "a", "MASTER_PORT": "5"}) == RankInfo(
        3, 4, 1, 2, "a", 5, "torchrun"
    )


BY_HAND = {"RANK": "1", "WORLD_SIZE": "2"}


def test_the_rank_of_a_process_that_is_started_by_hand() -> None:
    place = {"MASTER_ADDR": "a", "MASTER_PORT": "5"}
    assert find_rank_info(BY_HAND | place) == RankInfo(1, 2, 0, 0, "a", 5, "hand")
    here = RankInfo(1, 2, 0, 0, "127.0.0.1", DEFAULT_PORT, "hand")
    assert find_rank_info(BY_HAND) == find_rank_info({}, rank=1, world_size=2) == here
    assert find_rank_info(BY_HAND | {"RANK": "0"} | place, rank=1) == RankInfo(
        1, 2, 0, 0, "a", 5, "hand"
    )
    assert find_rank_info(BY_HAND, rendezvous="tcp://[fd00::1]:77") == RankInfo(
        1, 2, 0, 0, "fd00::1", 77, "hand"
    )
    assert find_rank_info(BY_HAND | place, rendezvous="file:///shared/meet") == RankInfo(
        1, 2, 0, 0, "", 0, "hand", file="/shared/meet"
    )


@pytest.mark.parametrize(
    ("environment", "options", "what"),
    [
        ({}, {"rank": 1}, "--rank 1, but the number of ranks is missing"),
        ({}, {"world_size": 2}, "--world-size 2, but the rank is missing"),
        ({}, {"rank": 2, "world_size": 2}, "--rank 2 is not less than the number of ranks, 2"),
        ({}, {"rendezvous": "tcp://a:5"}, "but this process has no rank"),
        (BY_HAND, {"rendezvous": "tcp://a", "master_port": 5}, "and --master-port both say"),
        (BY_HAND | {"LOCAL_WORLD_SIZE": "2"}, {"rank": 0}, "--rank 0, but torchrun started this"),
    ],
)
def test_options_that_contradict_each_other_or_a_launcher_are_named(
    environment: dict[str, str], options: dict[str, Any], what: str
) -> None:
    with pytest.raises(SettingsError, match=what):
        find_rank_info(environment, **options)


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x, which is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "-2"}, "WORLD_SIZE=-2, which is not a whole number"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5, which is not less than WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "ssh"}, "MASTER_PORT=ssh, which is"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2.5"}, "LOCAL_WORLD_SIZE=2.5"),
        ({"PMI_RANK": "0", "PMI_SIZE": ""}, "PMI_SIZE=, which is not a whole number"),
        (srun_task(0, SLURM_NODEID="a"), "SLURM_NODEID=a, which is not a whole number"),
    ],
)
def test_a_variable_that_no_launcher_sets_so_is_named(
    environment: dict[str, str], what: str
) -> None:
    with pytest.raises(SettingsError, match=what) as refused:
        find_rank_info(environment)
    assert "unset" in refused.value.cure


def test_the_places_of_a_step_of_slurm() -> None:
    infos = [find_rank_info(srun_task(rank)) for rank in range(4)]
    assert [info and (info.rank, info.local_rank, info.local_ranks) for info in infos] == [
        (0, 0, 2), (1, 1, 2), (2, 0, 2), (3, 1, 2)
    ]  # fmt: skip
    assert len({info and info.port for info in infos}) == 1
    assert {info and info.head for info in infos} == {"gpu-a03"}
    assert {info and info.all_local for info in infos} == {False}


def test_hosts_of_slurm_may_have_unequal_numbers_of_tasks() -> None:
    infos = [find_rank_info(srun_task(rank, "2,1")) for rank in range(3)]
    assert [info and info.local_ranks for info in infos] == [2, 2, 1]
    option = {k: v for k, v in srun_task(0).items() if "TASKS_PER_NODE" not in k}
    info = find_rank_info(option | {"SLURM_NTASKS_PER_NODE": "2"})
    assert info is not None and info.local_ranks == 2


def test_two_steps_of_one_job_meet_at_two_ports() -> None:
    first, second = (find_rank_info(srun_task(0, SLURM_STEP_ID=step)) for step in "01")
    assert first is not None and second is not None and first.port != second.port


def test_a_batch_script_of_slurm_is_not_a_rank_and_neither_is_a_lone_task() -> None:
    assert find_rank_info(SLURM_SCRIPT) is None
    assert find_rank_info(srun_task(0, "1")) is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[10-12]", "n10"),
        ("gpu-a[03-05,11],gpu-b1", "gpu-a03"),
        ("gpu-a[07,09]-ib", "gpu-a07-ib"),
        ("r[1-2]n[01-16]", "r1n01"),
        ("", None),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str | None) -> None:
    assert first_host(nodes) == host


def mpich(rank: int, local_rank: int = 0) -> dict[str, str]:
    """What MPICH 5's hydra sets; it has no name of the job, and no address of rank 0."""
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": "4",
        "MPI_LOCALRANKID": str(local_rank),
        "MPI_LOCALNRANKS": "2",
        "PMI_HOSTNAME": "a",
    }


def test_the_rank_under_open_mpi() -> None:
    open_mpi = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "PMIX_NAMESPACE": "prterun-a-17@1",
    }
    found = find_rank_info(open_mpi)
    assert found is not None
    assert (found.rank, found.local_rank, found.head) == (3, 1, "127.0.0.1")
    other = find_rank_info(open_mpi | {"OMPI_COMM_WORLD_RANK": "0"})
    assert other is not None and other.port == found.port


def test_the_rank_under_mpich_on_two_hosts() -> None:
    found = find_rank_info(mpich(3, 1))
    assert found == RankInfo(3, 4, 1, 2, "", DEFAULT_PORT, "mpirun")
    named = find_rank_info(mpich(3, 1), master_addr="a", master_port=77)
    assert named is not None and (named.head, named.port) == ("a", 77)


def test_what_the_user_names_comes_before_what_the_launcher_says() -> None:
    found = find_rank_info(srun_task(1), master_addr="gpu-a03-ib0", master_port=5)
    assert found is not None and (found.head, found.port) == ("gpu-a03-ib0", 5)


def test_ranks_of_mpich_within_slurm_are_its_own() -> None:
    # mpirun has one task a node of Slurm's, whose children the ranks are.
    found = find_rank_info(srun_task(1, "1(x2)") | mpich(3, 1))
    assert found is not None and (found.rank, found.ranks, found.launcher) == (3, 4, "mpirun")


def test_ranks_of_slurm_with_pmi_are_slurms() -> None:
    # srun --mpi=pmi2 sets these, but knows nothing of MPI_LOCALRANKID.
    found = find_rank_info(srun_task(3) | {"PMI_RANK": "3", "PMI_SIZE": "4"})
    assert found is not None and (found.local_rank, found.launcher) == (1, "srun")
