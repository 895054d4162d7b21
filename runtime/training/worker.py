"""The process of one rank, started by the launcher: `python -m ... OPTIONS FOLDER REPORTER`."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

from .failure import GRACE_S, RankFolder, end_process, failure_of
from .settings import Settings


def main() -> None:
    options, folder, reporter = sys.argv[1:]
    _die_with_parent()
    # The launcher ends its ranks by signal; a traceback of that would be noise.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rank = int(os.environ["RANK"])
    left = RankFolder(Path(folder))
    stages = f" (stage {rank})"
    try:
        from .launch import make_job, run_rank
        from .world import find_place, join, leave

        raw = json.loads(options)
        settings = Settings(**{**raw, "betas": tuple(raw["betas"])})
        place = find_place(os.environ)
        assert place is not None
        world = join(place, settings.timeout_s, settings.transport)
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


def _die_with_parent() -> None:
    """Lets Linux kill this process when the one that started it is gone."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    main()
