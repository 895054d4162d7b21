"""Seconds of each step of asyncpipe-partition: gpt2 with weights, gpt2-xl without (meta).

Every run is a separate process, as for a user: `start` is the import of asyncpipe (torch is already
loaded), and the load includes importing transformers. gpt2 is measured by a first run, and by a
second one, which finds the measurements in the cache; the two plans are compared.

    python benchmarks/ticks.py
"""

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path

from machine import write_result

CASES = {
    "gpt2": ("gpt2", False),
    "gpt2, from cache": ("gpt2", False),
    "gpt2-xl (meta)": ("gpt2-xl", True),
}
REPEATS = 3


def partition(model: str, meta: bool, output: Path, cache: Path) -> dict[str, float]:
    """The seconds of each step, and their sum."""
    os.environ["ASYNCPIPE_CACHE"] = str(cache)
    began = time.perf_counter()
    from asyncpipe.partitioner.compile import partition_spec
    from asyncpipe.partitioner.planning.options import PartitionOptions

    seconds = {"start": round(time.perf_counter() - began, 2)}

    def end_phase(step: str, _detail: str, took: float, _following: str) -> None:
        seconds[step] = round(took, 2)

    options = PartitionOptions(stages=4, output=output, meta=meta)
    partition_spec(model, options, on_phase=end_phase)
    return seconds | {"total": round(sum(seconds.values()), 2)}


def main() -> None:
    raw: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        for _ in range(REPEATS):
            with tempfile.TemporaryDirectory() as folder:
                for name, case in CASES.items():
                    made = Path(folder) / name.partition(",")[0] / str(len(name))
                    run = (*case, made, Path(folder) / "cache")
                    raw[name].append(fresh.apply(partition, run))
                stages = [
                    json.loads(path.read_text())["stages"]
                    for path in Path(folder).glob("gpt2/*/plan.json")
                ]
                assert stages[0] == stages[1], "the plan from the cache is another one"
    table = {
        name: {step: statistics.median(run[step] for run in runs) for step in runs[0]}
        for name, runs in raw.items()
    }
    for name, row in table.items():
        print(f"{name:18}" + "  ".join(f"{step} {took:.1f} s" for step, took in row.items()))
    write_result("ticks", {"median_seconds": table, "runs": raw})


if __name__ == "__main__":
    main()
