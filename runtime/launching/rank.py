"""One rank in a process of its own -> its part of the run, and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ..exits import exits_told
from ..training.settings import Settings
from ..training.stopping import Stopped
from .failure import CANNOT_WRITE, RankFolder, end_process, failure_of
from .launchers import find_place
from .mpi_ranks import keep_output


def run(options: str, folder: str, reporter: str) -> NoReturn:
    """Runs the rank whose place the environment tells, and ends the process."""
    # The launcher ends its ranks by signal; a traceback of that would be noise.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    place = find_place(os.environ)
    assert place is not None
    rank = place.rank
    left = RankFolder(Path(folder))
    left.mark_process(rank)
    if "RANK" not in os.environ:  # torch's agent keeps what its ranks print
        keep_output(Path(folder) / "logs", rank)
    stages = f" (stage {rank})" if place.ranks > 1 else ""
    try:
        from .jobs import make_job, run_rank
        from .world import join, leave, stay_alone

        raw = json.loads(options)
        settings = Settings(**{**raw, "betas": tuple(raw["betas"])})
        job = make_job(settings, Path(folder))
        if place.ranks > 1:
            world = join(replace(place, launcher=""), job.settings, job.plan)
        else:
            world = stay_alone(job.settings, job.plan)
        if world.replicas > 1:
            stages = f" (rank {world.pipeline_rank} of replica {world.replica})"
        elif world.ranks_of_stage:
            (stage,) = (j for j, ranks in enumerate(world.ranks_of_stage) if rank in ranks)
            stages = f" (stage {stage}{world.grid.whose(rank)})"
        try:
            with exits_told():
                run_rank(job, world, reporter)
        except Stopped:  # no failure to whoever watches
            left.mark_stopped()
        leave()
        left.mark_end(rank)
        end_process(0)
    except Exception as error:
        # Whoever started this rank may end it while it waits below.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        failure = failure_of(error, rank, stages, left.step_of(rank), Path(folder))
        code = 1 if left.write(failure) else CANNOT_WRITE
        with contextlib.suppress(OSError):
            sys.stderr.write(failure.trace)
        if failure.consequence:
            left.wait_for_cause()
        end_process(code)
