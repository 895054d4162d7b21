"""Seconds of each step of asyncpipe-partition: gpt2 with weights, gpt2-xl without (meta).

python benchmarks/ticks.py
"""

import statistics
import tempfile
from pathlib import Path

from machine import write_result

from asyncpipe.partitioner.compile import partition_spec

CASES = {
    "gpt2": {"meta": False},
    "gpt2-xl (meta)": {"meta": True},
}
REPEATS = 3


def main() -> None:
    table: dict[str, dict[str, float]] = {}
    raw: dict[str, list[dict[str, float]]] = {}
    for name, options in CASES.items():
        runs = []
        for _ in range(REPEATS):
            seconds: dict[str, float] = {}

            def tick(
                step: str,
                _detail: str,
                took: float,
                _following: str,
                into: dict[str, float] = seconds,
            ) -> None:
                into[step] = round(took, 2)

            with tempfile.TemporaryDirectory() as folder:
                spec = name.split()[0]
                partition_spec(spec, stages=4, output=Path(folder) / "x", on_tick=tick, **options)
            seconds["total"] = round(sum(seconds.values()), 2)
            runs.append(seconds)
        raw[name] = runs
        table[name] = {step: statistics.median(run[step] for run in runs) for step in runs[0]}
    for name, row in table.items():
        print(f"{name:16}" + "  ".join(f"{step} {took:.1f} s" for step, took in row.items()))
    write_result("ticks", {"median_seconds": table, "runs": raw, "repeats": REPEATS})


if __name__ == "__main__":
    main()
