"""A command in several ranks that are started here."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from asyncpipe.runtime.distributed.failure import RankError
from asyncpipe.runtime.launch.local import run_command
from asyncpipe.runtime.process import Interrupted

STARTED = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch(); "


def test_ctrl_c_ends_the_ranks_and_is_told_from_a_keyboard_interrupt_of_code(
    tmp_path: Path,
) -> None:
    mark = tmp_path / "started"

    def interrupt() -> None:
        while not mark.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted):
        run_command(("-c", f"{STARTED} import time; time.sleep(60)", str(mark)), 2, tmp_path)
    thread.join()


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    die = "import os, signal, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9)"
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        run_command(("-c", f"{die}; time.sleep(60)"), 2, tmp_path)
