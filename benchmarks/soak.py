"""A long run with periodic faults -> whether it ends like an undisturbed one, and its growth.

Four ranks train 2,000 steps; at regular intervals one of them is killed or stopped, and the run
restarts from its last checkpoint. The losses must equal those of an undisturbed run, bit for bit.
Resident memory and open files of every working rank, and of the process that starts them, are
sampled twice a second; the first tenth of that time is left out.

    python benchmarks/soak.py --steps 2000 --every 30
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from machine import write_result

from asyncpipe.tests.support.faults.run_faults import Ended, FaultyRun, losses, notes
from asyncpipe.tests.support.models.hand_folders import write_mlp

RANKS = 4
REAL = Path(sys.executable).parent
_LOOK_S = 0.5


def usage(process: int) -> tuple[int, int] | None:
    """Resident bytes and open files."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE"), len(os.listdir(f"/proc/{process}/fd"))
    except OSError:
        return None


def growth(seen: list[tuple[int, int]], skipped: float) -> tuple[int, int]:
    """The most by which the later half of a process's life exceeds the earlier; without its first
    part, in which it allocates its lasting memory."""
    kept = seen[int(len(seen) * skipped) :]
    half = len(kept) // 2
    if not half:
        return 0, 0
    memory, files = (
        max(each[i] for each in kept[half:]) - max(each[i] for each in kept[:half])
        for i in range(2)
    )
    return max(0, memory), max(0, files)


def options(steps: int, **more: Any) -> dict[str, Any]:
    return {"steps": steps, "schedule": "1f1b", "stall_s": 5, "timeout_s": 20} | more


def ended_meanwhile(run: FaultyRun) -> Ended | None:
    """The result of the run, if it ended within the sampling interval; reads its output, which
    would block it otherwise."""
    try:
        return run.finish(limit_s=_LOOK_S)
    except subprocess.TimeoutExpired:
        return None


def soaked(folder: Path, output: Path, steps: int, every_s: float, seed: int) -> dict[str, Any]:
    """A run with faults: the faults, the outcome, and the resources used."""
    chance = random.Random(seed)
    seen: dict[int, list[tuple[int, int]]] = defaultdict(list)
    faults: list[str] = []
    given = options(steps, save_every=20, keep_last=2, restarts=100_000)
    with FaultyRun(folder, output, given, scripts=REAL) as run:
        next_s = time.monotonic() + every_s
        while (ended := ended_meanwhile(run)) is None:
            at_work = [run.left.process_of(rank) for rank in range(RANKS) if run.left.step_of(rank)]
            for process in (run.process.pid, *at_work):
                if (used := usage(process)) is not None:
                    seen[process].append(used)
            if time.monotonic() < next_s or len(at_work) < RANKS:
                continue
            number = chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
            os.kill(chance.choice(at_work), number)
            faults.append(number.name)
            next_s = time.monotonic() + every_s
    starter = growth(seen.pop(run.process.pid), 0.1)
    of_ranks = [growth(each, 0.1) for each in seen.values()]
    return {
        "exit_code": ended.code,
        "error": ended.error,
        "faults": {name: faults.count(name) for name in sorted(set(faults))},
        "restarts": len(notes(output, "restart")),
        "rank_growth_mib": round(max(memory for memory, _ in of_ranks) / 2**20, 1),
        "rank_growth_files": max(files for _, files in of_ranks),
        "starter_growth_mib": round(starter[0] / 2**20, 1),
        "starter_growth_files": starter[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        write_mlp(base / "mlp", stages=RANKS, slow_s=0.002)
        with FaultyRun(base / "mlp", base / "whole", options(given.steps), scripts=REAL) as run:
            undisturbed = run.finish(limit_s=3600)
        assert undisturbed.code == 0, undisturbed.error
        began_s = time.monotonic()
        figures = soaked(base / "mlp", base / "run", given.steps, given.every, given.seed)
        figures["seconds"] = round(time.monotonic() - began_s)
        figures["steps"] = given.steps
        figures["equal"] = losses(base / "run") == losses(base / "whole")
    for label, figure in figures.items():
        print(f"{label:22} {figure}")
    print(write_result("soak", figures))


if __name__ == "__main__":
    main()
