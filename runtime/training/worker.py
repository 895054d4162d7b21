"""The process of one rank, started by the launcher: `python -m ... OPTIONS FOLDER REPORTER`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from .failure import GRACE_S, RankFolder, end_process, failure_of
from .mpi_ranks import die_with_parent, keep_output
from .settings import Settings
from .world import find_place, join, leave


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
        from .launch import make_job, run_rank

        raw = json.loads(options)
        settings = Settings(**{**raw, "betas": tuple(raw["betas"])})
        world = join(place, settings.patience_s, settings.transport)
        run_rank(make_job(settings, Path(folder)), world, reporter)
        leave()
        end_process(0)
    except Exception as error:
        failure = failure_of(error, rank, stages, left.step_of(rank))
        left.write(failure)
        sys.stderr.write(failure.trace)
        if failure.consequence:
            time.sleep(GRACE_S)
        end_process(1)


if __name__ == "__main__":
    main()
