"""The process of one rank, started by the launcher: `python -m ... OPTIONS FOLDER REPORTER`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from ..training.settings import Settings
from .failure import CANNOT_WRITE, RankFolder, end_process, failure_of
from .launchers import find_place
from .mpi_ranks import die_with_parent, keep_output


def main() -> None:
    options, folder, reporter = sys.argv[1:]
    die_with_parent()
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
        run_rank(job, world, reporter)
        leave()
        end_process(0)
    except SystemExit:  # It was asked to stop, which is no failure to whoever watches.
        left.mark_stopped()
        leave()
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


if __name__ == "__main__":
    main()
