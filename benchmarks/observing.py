"""The cost of observing a run.

Every rank always counts the time of its activities and reports its state once a second; with
`--trace` it keeps the activities too. This benchmark measures the cost of a single activity in CPU
time (the best of several rounds, because other processes can only add time), and multiplies it with
the number of activities per step in the trace of a real run with two ranks.

    python benchmarks/observing.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import write_result

from asyncpipe.runtime.config.execution_options import ExecutionOptions
from asyncpipe.runtime.distributed.process_groups import World
from asyncpipe.runtime.executor.instrumented import Activities, Activity, StageMessage
from asyncpipe.runtime.monitoring.watchdog import Watchdog
from asyncpipe.runtime.schedule.schedule import Action

ACTION = Action(1, "F", 3, version=1)
MESSAGE = StageMessage("activation", "hidden", 0, 1, 0, 1, 4)
STEPS = 12


def cpu_us(call: Callable[[], Any], times: int, rounds: int = 9) -> float:
    """CPU microseconds of one call."""
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(times):
            call()
        best = min(best, (time.process_time() - began) / times)
    return 1e6 * best


def cost_of_an_activity(*, recorded: bool) -> float:
    """The mean cost of an action and of a wait, which are about equally frequent in a run."""
    activities = Activities()

    def both() -> None:
        activities.begin(Activity("F", ACTION, 3))
        activities.end()
        with activities.during(Activity("receive", MESSAGE, 3)):
            pass

    if recorded:
        activities.spans = []
    return cpu_us(both, 20_000) / 2


def cost_of_a_beat(folder: Path) -> float:
    (folder / "ranks").mkdir()
    watchdog = Watchdog(ExecutionOptions(), folder, World(), Activities())
    return cpu_us(watchdog._publish, 500)


def traced_run(folder: Path) -> tuple[float, float]:
    """Activities per rank and step, and the step's milliseconds."""
    script = Path(sys.executable).parent
    model = ["--model", "gpt2", "--model-arg", "n_layer=4", "--model-arg", "n_embd=256"]
    cut = [*model, "--model-arg", "n_head=8", "--model-arg", "vocab_size=8192", "--stages", "2"]
    commands = (
        ["asyncpipe-partition", *cut, "--micro-batch-size", "4", "--output", "gpt"],
        [
            "asyncpipe-train",
            "gpt",
            "--steps",
            str(STEPS),
            "--trace",
            "4",
            "--eval-batches",
            "8",
            "--output",
            "run",
        ],
    )
    for command in commands:
        subprocess.run([script / command[0], *command[1:], "-q"], cwd=folder, check=True)
    events = json.loads((folder / "run" / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    (end,) = [line for line in lines if line["event"] == "end"]
    return len(slices) / 2 / 4, end["step_ms"]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        beat_us = cost_of_a_beat(Path(name))
        count, step_ms = traced_run(Path(name))
    counted_us, recorded_us = (cost_of_an_activity(recorded=on) for on in (False, True))
    figures = {
        "activities_a_step": round(count, 1),
        "step_ms": round(step_ms, 1),
        "counting_us_an_activity": round(counted_us, 2),
        "recording_us_an_activity": round(recorded_us, 2),
        "watchdog_us_a_second": round(beat_us, 1),
        "counting_share": counted_us * count / step_ms / 1e3,
        "recording_share": recorded_us * count / step_ms / 1e3,
        "watchdog_share": beat_us / 1e6,
    }
    for label, figure in figures.items():
        shown = f"{figure:.4%}" if label.endswith("share") else figure
        print(f"{label:26} {shown}")
    print(write_result("observing", figures))


if __name__ == "__main__":
    main()
