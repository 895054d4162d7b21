"""Memory and time of a step with `--zero` 0, 1 and 2, on the same model and replicas.

For each layout and optimizer the levels run one after the other, in several rounds; every run has
fresh processes, because the peak of a process's memory is that of its life. Planned and measured
memory are those of the fullest rank, without what a process has before it loads its stages. Times
are medians over the steps of all rounds but the first of each run.

python benchmarks/zero.py --rounds 3
"""

import argparse
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from machine import write_result

from asyncpipe.runtime.monitoring.run_files import read_run
from asyncpipe.runtime.reports.measures import rank_memory

LEVELS = (0, 1, 2)


class Layout(NamedTuple):
    """Stages, replicas and schedule of a run, and the micro-batches of each replica."""

    name: str
    stages: int
    options: tuple[str, ...]


LAYOUTS = (
    Layout(
        "1 stage x 2 replicas", 1, ("--schedule", "ddp", "--replicas", "2", "--micro-batches", "8")
    ),
    Layout(
        "2 stages x 2 replicas",
        2,
        ("--schedule", "1f1b", "--replicas", "2", "--micro-batches", "4"),
    ),
)


def call(folder: Path, program: str, *words: str) -> None:
    path = shutil.which(program, path=f"{sys.prefix}/bin")
    assert path is not None
    subprocess.run([path, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def partition(folder: Path, layout: Layout, optimizer: str, width: int) -> str:
    net = f"gpt_{layout.stages}p_{optimizer}"
    model = Path(__file__).parent / "gpt.py"
    call(
        folder,
        *("asyncpipe-partition", "--model", f"{model}:build", "--model-arg", f"width={width}"),
        *("--model-arg", "micro_batch_size=1", "--stages", str(layout.stages)),
        *("--schedule", "1f1b", "--micro-batches", "4", "--optimizer", optimizer),
        *("--profile", "analytic", "--output", net, "--quiet"),
    )
    return net


def run(folder: Path, net: str, layout: Layout, optimizer: str, zero: int) -> dict[str, Any]:
    output = folder / "run"
    call(
        folder,
        *("asyncpipe-train", net, "--data", "text.txt", "--steps", "6", "--log-every", "1"),
        *("--eval-batches", "0", "--threads", "1", "--optimizer", optimizer),
        *("--zero", str(zero), "--output", str(output), "--quiet", *layout.options),
    )
    records = read_run(output)
    memory = [rank.stages for rank in rank_memory(records)]
    shutil.rmtree(output)
    return {
        "layout": layout.name,
        "optimizer": optimizer,
        "zero": zero,
        "planned_mib": round(max(each.predicted for each in memory) / 2**20, 1),
        "measured_mib": round(max(each.measured for each in memory) / 2**20, 1),
        "step_ms": [round(step["step_ms"], 1) for step in records.steps[1:]],
        "loss": records.steps[-1]["loss"],
    }


def table_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each layout, optimizer and level, over all rounds."""
    table = []
    for key in dict.fromkeys((row["layout"], row["optimizer"], row["zero"]) for row in rows):
        own = [row for row in rows if (row["layout"], row["optimizer"], row["zero"]) == key]
        planned = own[0]["planned_mib"]
        measured = statistics.median(row["measured_mib"] for row in own)
        table.append(
            {
                **dict(zip(("layout", "optimizer", "zero"), key, strict=True)),
                "planned_mib": planned,
                "measured_mib": measured,
                "difference": round(measured / planned - 1, 3) if planned else math.nan,
                "step_ms": round(statistics.median(ms for row in own for ms in row["step_ms"]), 1),
                "loss": own[0]["loss"],
            }
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon"])
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
        for layout in LAYOUTS:
            for optimizer in arguments.optimizers:
                net = partition(folder, layout, optimizer, arguments.width)
                for _ in range(arguments.rounds):
                    rows += [run(folder, net, layout, optimizer, zero) for zero in LEVELS]
                for row in table_of(rows)[-len(LEVELS) :]:
                    print(
                        f"{row['layout']}  {row['optimizer']:6}  zero {row['zero']}  "
                        f"{row['planned_mib']:8.1f} MiB planned  {row['measured_mib']:8.1f} "
                        f"measured ({row['difference']:+.1%})  {row['step_ms']:8.1f} ms",
                        flush=True,
                    )
    print(write_result("zero", {"table": table_of(rows), "runs": rows}))


if __name__ == "__main__":
    main()
