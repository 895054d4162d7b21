"""The ranks of a task of asyncpipe-comm wait for each other, and name missing ranks."""

import datetime
import time
from pathlib import Path

import torch
import torch.distributed as dist

from asyncpipe.runtime.communication.session import Session
from asyncpipe.runtime.distributed.ranks import RankInfo
from asyncpipe.runtime.errors import TransportError
from asyncpipe.tests.support.processes.gloo_ranks import run_processes

_LIMIT_S = 2.0


def wait_for_rank_1(rank: int, folder: Path) -> str:
    """The error of a rank that waits for rank 1 in a second call, to which rank 1 never comes."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=_LIMIT_S), backend="gloo")
    info, cpu = RankInfo(rank, 3, rank, 3), torch.device("cpu")
    session = Session(info, ("h1", "h2", "h3"), "gloo", cpu, _LIMIT_S, group)
    session.barrier()
    if rank == 1:
        time.sleep(2 * _LIMIT_S)
        return ""
    try:
        session.gathered(rank)
    except TransportError as error:
        return error.what
    return "did not wait"


def test_a_rank_that_waits_names_the_rank_that_does_not_come(tmp_path: Path) -> None:
    texts = run_processes(3, wait_for_rank_1, tmp_path, limit_s=60)
    assert "rank 0 on h1 waited 2 s for rank 1 on h2." in texts, texts
