"""Time and memory to generate stages of models that are too large to run here.

Every run is a separate process, as for a user. No weights are allocated (`--meta`), so the peak
memory is that of Python, torch, transformers and the graph. The limits are the project's targets on
two cores for capture and generation; next to them is the total of asyncpipe-partition, from the
import on, in wall-clock seconds and in CPU seconds.

    python benchmarks/capture_speed.py --repeats 3
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import write_result

# Seconds that a model may take, and MiB that any of them may.
LIMITS_S = {"gpt2-xl": 10.0, "t5-3b": 15.0, "llama-7b": 10.0, "llama-70b": 30.0}
LIMIT_MIB = 1500
STAGES = 8


def partition(model: str) -> dict[str, Any]:
    """Seconds of each step in this process, their total, and the peak memory."""
    started, cpu_started = time.perf_counter(), time.process_time()
    from asyncpipe.partitioner.compile import partition_spec
    from asyncpipe.partitioner.planning.options import PartitionOptions

    steps: dict[str, float] = {"import": time.perf_counter() - started}

    def end_phase(step: str, _detail: str, took: float, _following: str) -> None:
        steps[step] = took

    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made"
        options = PartitionOptions(stages=STAGES, output=made, meta=True)
        plan = partition_spec(model, options, on_phase=end_phase)
        lines = [len((made / stage.file).read_text().splitlines()) for stage in plan.stages]
    return {
        "made": steps["capture"] + steps["generate"],
        "total": time.perf_counter() - started,
        "cpu": time.process_time() - cpu_started,
        "steps": {step: round(took, 3) for step, took in steps.items()},
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "longest_stage_lines": max(lines),
    }


def run_fresh(model: str) -> dict[str, Any]:
    """Runs `partition` in a process that has imported nothing yet."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(partition, (model,))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=list(LIMITS_S), choices=list(LIMITS_S))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    raw: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.models}
    for _ in range(arguments.repeats):
        for name in arguments.models:
            raw[name].append(run_fresh(name))
    table = []
    for name, runs in raw.items():
        row = {
            "model": name,
            **{
                key: round(statistics.median(run[key] for run in runs), 2)
                for key in ("made", "total", "cpu", "peak_mib")
            },
            "limit_s": LIMITS_S[name],
            "longest_stage_lines": runs[0]["longest_stage_lines"],
            "steps": {
                step: round(statistics.median(run["steps"][step] for run in runs), 2)
                for step in runs[0]["steps"]
            },
        }
        row["met"] = row["made"] <= row["limit_s"] and row["peak_mib"] <= LIMIT_MIB
        table.append(row)
    figures = {"stages": STAGES, "limit_mib": LIMIT_MIB, "table": table, "runs": raw}
    if arguments.json:
        print(json.dumps(figures, indent=1))
    else:
        print(f"{'model':10} made, s  limit  total    cpu  peak MiB  limit  met  steps")
        for row in table:
            steps = "  ".join(f"{step} {took:.1f}" for step, took in row["steps"].items())
            print(
                f"{row['model']:10} {row['made']:7.1f} {row['limit_s']:6.0f} {row['total']:6.1f} "
                f"{row['cpu']:6.1f} "
                f"{row['peak_mib']:9.0f} {LIMIT_MIB:6}  {'yes' if row['met'] else 'no ':3}  {steps}"
            )
    write_result("capture_speed", figures)


if __name__ == "__main__":
    main()
