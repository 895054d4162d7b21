"""Repeated faults in runs -> the number of runs that survive, and the cost of each fault.

Four ranks train with a checkpoint every ten steps. At a random moment a fault hits one of them, or
all. The run then restarts automatically (`--restarts 1`), or with `--resume auto`. It has survived
if its losses equal those of an undisturbed run, bit for bit. Lost steps are steps that were
repeated; the run has recovered when it has repeated the last of them.

    python benchmarks/faults.py --repeats 3
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

from machine import write_result

from asyncpipe.runtime.checkpoint.folders import checkpoints_in
from asyncpipe.tests.support.faults.run_faults import MOMENTS, FaultyRun, losses, notes, plant
from asyncpipe.tests.support.models.hand_folders import write_mlp

RANKS, STEPS, EVERY = 4, 40, 10
REAL = Path(sys.executable).parent
RESULT = Path(__file__).parent / "results" / "faults.json"
OPTIONS = {"steps": STEPS, "save_every": EVERY, "stall_s": 5, "timeout_s": 20}
NO_MEMORY = "torch.empty(1 << 50, dtype=torch.uint8)"


class Trial:
    """One run with a fault, in its own folder."""

    def __init__(self, base: Path, seed: int) -> None:
        self.base, self.chance = base, random.Random(seed)
        self.folder, self.output = base / "mlp", base / "run"
        self.rank = self.chance.randrange(RANKS)
        self.step = self.chance.randint(EVERY + 2, STEPS - 5)
        self.begin_again: Callable[[], None] = lambda: None
        write_mlp(self.folder, stages=RANKS, slow_s=0.005)

    def plant(self, moment: str, **more: Any) -> None:
        """Adds the fault to the code of the rank's stage."""
        call = self.step if moment == "step" else 8 * self.step
        plant(self.folder, self.rank, moment, call, **more)

    def kill(self, run: FaultyRun, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends the rank a signal after a fraction of a step."""
        time.sleep(0.2 * self.chance.random())
        os.kill(run.left.process_of(self.rank), number)

    def fill_disk(self, run: FaultyRun) -> None:
        filler = self.output / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                self.begin_again = filler.unlink

    def cut_checkpoint(self, run: FaultyRun) -> None:
        """Ends the run and truncates a file of its newest checkpoint."""
        run.process.send_signal(signal.SIGTERM)

        def cut() -> None:
            file = next((checkpoints_in(self.output)[0] / "state").iterdir())
            os.truncate(file, file.stat().st_size // 2)

        self.begin_again = cut


Fault = Callable[[Trial, FaultyRun], None]


def to_command(number: signal.Signals) -> Fault:
    return lambda trial, run: run.process.send_signal(number)


def at_checkpoint(trial: Trial, run: FaultyRun) -> None:
    run.wait_for_checkpoint()
    os.kill(run.left.process_of(trial.rank), signal.SIGKILL)


FAULTS: dict[str, Fault | dict[str, Any]] = {
    "a rank is killed, at any moment": Trial.kill,
    **{f"a rank is killed, in {moment}": {"moment": moment} for moment in MOMENTS},
    "a rank is killed, as a checkpoint is written": at_checkpoint,
    "a rank is stopped": lambda trial, run: trial.kill(run, signal.SIGSTOP),
    "a rank has no memory": {"moment": "forward", "code": NO_MEMORY},
    "the command is killed": to_command(signal.SIGKILL),
    "Ctrl-C": to_command(signal.SIGINT),
    "SIGTERM": to_command(signal.SIGTERM),
    "SIGUSR1": to_command(signal.SIGUSR1),
    "the disk is full": Trial.fill_disk,
    "the newest checkpoint is cut off": Trial.cut_checkpoint,
}
"""The faults: functions that act from outside, or the place in a stage for `plant`."""


def tried(name: str, trial: Trial, undisturbed: dict[int, float]) -> dict[str, Any]:
    """Runs with this fault, and returns the outcome."""
    fault = FAULTS[name]
    if isinstance(fault, dict):
        trial.plant(**fault)
    last = 0
    given = OPTIONS | {"restarts": 1}
    with FaultyRun(trial.folder, trial.output, given, scripts=REAL) as run:
        if isinstance(fault, dict):
            while not trial.folder.with_suffix(".met").exists():
                assert run.process.poll() is None, run.process.communicate()
                last = max(last, run.step)
                time.sleep(0.001)
        else:
            run.wait_for(lambda: run.step >= trial.step, limit_s=200)
            last = run.step
            fault(trial, run)
        began_s = time.monotonic()
        while run.process.poll() is None and not run.left.why_again:
            last = max(last, run.step)
            time.sleep(0.005)
        if again := run.process.poll() is None:
            run.wait_for(lambda: run.step >= last, limit_s=200)
            recover_s = time.monotonic() - began_s
        run.finish(limit_s=200)
    if not again:
        trial.begin_again()
        shutil.rmtree(trial.output / "ranks", ignore_errors=True)  # the steps of the one that ended
        began_again_s = time.monotonic()
        given = OPTIONS | {"resume": "auto"}
        with FaultyRun(trial.folder, trial.output, given, scripts=REAL) as run:
            run.wait_for(lambda: run.step >= min(last, STEPS), limit_s=200)
            recover_s = time.monotonic() - began_again_s
            run.process.communicate(timeout=200)
    resumed = [int(text.split()[2]) for text in notes(trial.output, "resumed") if "step" in text]
    return {
        "fault": name,
        "by_itself": again,
        "survived": losses(trial.output) == undisturbed,
        "steps_lost": max(0, last - (resumed or [0])[-1]),
        "recover_s": round(recover_s, 2),
    }


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 16 MiB; needs root."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def table_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each fault: trials, survivals, lost steps and seconds of recovery."""
    table = []
    for name in FAULTS:
        own = [row for row in rows if row["fault"] == name]
        if not own:
            continue
        table.append(
            {
                "fault": name,
                "injected": len(own),
                "survived": sum(row["survived"] for row in own),
                "by_itself": all(row["by_itself"] for row in own),
                "steps_lost": round(mean(row["steps_lost"] for row in own), 1),
                "recover_s": round(median(row["recover_s"] for row in own), 1),
            }
        )
    return table


def shown(table: list[dict[str, Any]]) -> str:
    """The table as text."""
    lines = [f"{'fault':46} {'survived':>8}  {'begun again':12} {'steps lost':>10} {'seconds':>8}"]
    for row in table:
        how = "by itself" if row["by_itself"] else "--resume"
        lines.append(
            f"{row['fault']:46} {row['survived']:>4}/{row['injected']:<3}  {how:12} "
            f"{row['steps_lost']:>10.1f} {row['recover_s']:>8.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", help="only faults whose name contains this text")
    given = parser.parse_args()
    rows = known_rows()
    with tempfile.TemporaryDirectory() as name:
        whole = Trial(Path(name) / "whole", 0)
        with FaultyRun(whole.folder, whole.output, OPTIONS, scripts=REAL) as run:
            ended = run.finish(limit_s=600)
        assert ended.code == 0, ended.error
        undisturbed = losses(whole.output)
        disk = Path(name) / "disk"
        disk.mkdir()
        for seed in range(given.repeats):
            for fault in FAULTS:
                if given.only and given.only not in fault:
                    continue
                if any((row["fault"], row["seed"]) == (fault, seed) for row in rows):
                    continue
                with small_disk(disk):
                    row = {"seed": seed, **tried(fault, Trial(disk, seed), undisturbed)}
                print(row, flush=True)
                rows.append(row)
                figures = {"ranks": RANKS, "every": EVERY, "table": table_of(rows), "rows": rows}
                write_result("faults", figures)
    print(shown(table_of(rows)))


def known_rows() -> list[dict[str, Any]]:
    """Rows measured before; each pair of fault and seed is measured once."""
    return json.loads(RESULT.read_text())["rows"] if RESULT.is_file() else []


if __name__ == "__main__":
    main()
