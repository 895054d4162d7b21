"""One rank in its own process -> its part of the run, and a record of its end.

With the transport `mpi`, mpiexec starts and ends the ranks of a run that was not started under it.
Rank 0's standard output is shown; output of mpiexec and the other ranks goes to the run's logs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from ..config.settings import Settings
from ..distributed.failure import CANNOT_WRITE, RankFolder, end_process, failure_of
from ..distributed.ranks import RankInfo, find_rank_info
from ..process import die_with_parent
from ..training.checkpointing import Stopped
from ..transports.mpi import mpiexec
from ..user_code import exits_as_errors

_RULER = b"====="
"""The beginning of a report of MPICH's mpiexec, which may be on standard output."""

_WATCHED = """
"$@"
code=$?
[ $code = 0 ] && exit
echo $code > "$0/${PMI_RANK:-$OMPI_COMM_WORLD_RANK}.code"
kill -KILL $$
"""
"""Runs a rank and records its exit code: mpiexec then kills the others, and may name one of them.

It does so reliably only after a signal: with MPICH 5.0.2 the others wait forever for a rank that
ends with an exit code, if mpiexec reads its last output before it notices its end.
"""


def run_over_mpi(
    arguments: Sequence[str], ranks: int, left: RankFolder, stages: Mapping[int, str]
) -> None:
    """Runs the interpreter with `arguments` on every rank of an MPI world, to the end.

    Raises RankError with the first cause when a rank fails; `stages` names the stages of each rank.
    """
    logs = left.path.parent / "logs"
    logs.mkdir(exist_ok=True)
    command = [mpiexec(), "-n", str(ranks), *watched(left.path), sys.executable, *arguments]
    with (logs / "mpiexec.txt").open("wb") as log:
        # mpiexec ends its ranks when it ends; Ctrl-C goes to this process only.
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            _show(process, log.fileno())
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            left.wait_until_gone()
    if code:
        raise left.first_cause(left.exit_codes() or {0: code}, stages)
    if unfinished := left.unfinished(ranks):
        raise left.first_cause(unfinished, stages)


def watched(folder: Path) -> list[str]:
    """The prefix of a rank's command that records a failed exit code in `folder` and ends the other
    ranks."""
    return ["sh", "-c", _WATCHED, str(folder)]


def keep_output(logs: Path, rank: int) -> None:
    """Sends this rank's output to a file, except rank 0's standard output, which belongs to the
    run."""
    logs.mkdir(exist_ok=True)
    file = os.open(logs / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 2)
    if rank:
        os.dup2(file, 1)


def _show(process: subprocess.Popen[bytes], log: int) -> None:
    assert process.stdout is not None
    is_report = False
    for line in process.stdout:
        is_report = is_report or line.startswith(_RULER)
        if is_report:
            os.write(log, line)
        else:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


@dataclass
class OwnRank:
    """The rank of this process: where it is, its files, and its stages as messages name them."""

    info: RankInfo
    left: RankFolder
    stages: str = ""


def run(options: str, folder: str, reporter: str) -> NoReturn:
    """Trains as the rank that the environment describes, and ends the process."""
    as_rank(Path(folder), lambda own: _train(own, options, reporter))


def _train(own: OwnRank, options: str, reporter: str) -> None:
    from ..distributed.process_groups import join, stay_alone
    from .job import make_job, run_rank

    info = own.info
    own.stages = f" (stage {info.rank})" if info.ranks > 1 else ""
    raw = json.loads(options)
    settings = Settings(**{**raw["settings"], "betas": tuple(raw["settings"]["betas"])})
    job = make_job(settings, own.left.path.parent, raw["code"])
    if info.ranks > 1:
        world = join(replace(info, launcher=""), job.config, job.plan, job.code)
    else:
        world = stay_alone(job.config, job.plan, job.code)
    if world.replicas * world.tensor_ranks > 1:
        own.stages = f" (rank {world.pipeline_rank}{world.grid.whose(info.rank)})"
    elif world.ranks_of_stage:
        (stage,) = (j for j, ranks in enumerate(world.ranks_of_stage) if info.rank in ranks)
        own.stages = f" (stage {stage}{world.grid.whose(info.rank)})"
    try:
        with exits_as_errors():
            run_rank(job, world, reporter)
    except Stopped:  # not a failure for the parent process
        own.left.mark_stopped()


def as_rank(
    folder: Path, work: Callable[[OwnRank], None], *, counts_steps: bool = True
) -> NoReturn:
    """Does the work of the rank that the environment describes, records its end or its failure in
    `folder`, and ends the process. Where steps are counted, an error names the step."""
    # The launcher ends its ranks by signal, which needs no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    info = find_rank_info(os.environ)
    assert info is not None
    own = OwnRank(info, RankFolder(folder))
    own.left.mark_process(info.rank)
    if "RANK" not in os.environ:  # torch's agent captures its ranks' output
        keep_output(folder / "logs", info.rank)
    try:
        from ..distributed.process_groups import leave

        work(own)
        leave()
        own.left.mark_end(info.rank)
        end_process(0)
    except Exception as error:
        # The parent process may end this rank while it waits below.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # A DataLoader raises another error here when a process of its own ends.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        step = own.left.step_of(info.rank) if counts_steps else None
        failure = failure_of(error, info.rank, own.stages, step, folder)
        code = 1 if own.left.write(failure) else CANNOT_WRITE
        with contextlib.suppress(OSError):
            sys.stderr.write(failure.trace)
        if failure.consequence:
            own.left.wait_for_cause()
        end_process(code)
