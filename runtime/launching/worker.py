"""The process of one rank, started by the launcher: `python -m ... OPTIONS FOLDER REPORTER`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from ..training.settings import Settings
from .failure import GRACE_S, RankFolder, end_process, failure_of
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
    if "RANK" not in os.environ:  # the elastic launcher keeps what its ranks print
        keep_output(Path(folder) / "logs", rank)
        left.mark_process(rank)
    stages = f" (stage {rank})"
    try:
        from .jobs import make_job, run_rank
        from .world import join, leave

        raw = json.loads(options)
        settings = Settings(**{**raw, "betas": tuple(raw["betas"])})
        job = make_job(settings, Path(folder))
        world = join(replace(place, launcher=""), job.settings, job.plan)
        if world.replicas > 1:
            stages = f" (rank {world.pipeline_rank} of replica {world.replica})"
        elif world.ranks_of_stage:
            (stage,) = (j for j, ranks in enumerate(world.ranks_of_stage) if rank in ranks)
            stages = f" (stage {stage}{world.grid.whose(rank)})"
        run_rank(job, world, reporter)
        leave()
        end_process(0)
    except SystemExit as stopped:
        leave()
        end_process(int(stopped.code or 0))
    except Exception as error:
        failure = failure_of(error, rank, stages, left.step_of(rank))
        left.write(failure)
        sys.stderr.write(failure.trace)
        if failure.consequence:
            time.sleep(GRACE_S)
        end_process(1)


if __name__ == "__main__":
    main()
