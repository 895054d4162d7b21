"""Seconds of each step of asyncpipe-partition: gpt2 with weights, gpt2-xl without (meta).

Every run is a process of its own, as a user's is: the load includes importing transformers.

    python benchmarks/ticks.py
"""

import multiprocessing
import statistics
import tempfile
from pathlib import Path

from machine import write_result

from asyncpipe.partitioner.compile import partition_spec

CASES = {"gpt2": ("gpt2", False), "gpt2-xl (meta)": ("gpt2-xl", True)}
REPEATS = 3


def partition(model: str, meta: bool) -> dict[str, float]:
    """The seconds of each step, and their sum."""
    seconds: dict[str, float] = {}

    def tick(step: str, _detail: str, took: float, _following: str) -> None:
        seconds[step] = round(took, 2)

    with tempfile.TemporaryDirectory() as folder:
        partition_spec(model, stages=4, output=Path(folder) / "made", meta=meta, on_tick=tick)
    return seconds | {"total": round(sum(seconds.values()), 2)}


def main() -> None:
    raw: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        for _ in range(REPEATS):
            for name, case in CASES.items():
                raw[name].append(fresh.apply(partition, case))
    table = {
        name: {step: statistics.median(run[step] for run in runs) for step in runs[0]}
        for name, runs in raw.items()
    }
    for name, row in table.items():
        print(f"{name:16}" + "  ".join(f"{step} {took:.1f} s" for step, took in row.items()))
    write_result("ticks", {"median_seconds": table, "runs": raw})


if __name__ == "__main__":
    main()
