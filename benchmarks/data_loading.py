"""The share of a step in which ranks wait for data, with and without worker processes.

A sample takes 3 ms to read, as a small picture does: the data set sleeps for so long. A step of
four micro-batches of one sample takes 5 ms besides, which the stages sleep too: the cores are
free. Each of the two ranks reads the four samples, one the inputs and the other the targets. The
figures are medians over the steps after the first ten.

    python benchmarks/data_loading.py
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import write_result

from asyncpipe.tests.support.models.hand_folders import WIDTH, write_mlp

SAMPLE_MS, STAGE_MS, STEPS, LEFT_OUT = 3.0, 1.0, 150, 10
WORKERS = (0, 2, 4)
OWN = f"""
import time
import torch

class Pictures:
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep({SAMPLE_MS / 1e3})
        return {{"x": torch.full(({WIDTH},), float(index % 7)), "target": index % 4}}

def data():
    return Pictures()
"""


def measure(folder: Path, workers: int) -> dict[str, float]:
    """The milliseconds of a step, and the mean share of the ranks' time that they wait for data."""
    output = folder / f"run_{workers}"
    command = [Path(sys.executable).parent / "asyncpipe-train", "mlp", "--data", "own.py:data"]
    command += ["--steps", str(STEPS), "--micro-batches", "4", "--micro-batch-size", "1"]
    command += ["--workers", str(workers), "--output", output, "--log-every", "1", "-q"]
    subprocess.run([*map(str, command)], cwd=folder, check=True)
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["event"] == "step"][LEFT_OUT:]
    return {
        "step_ms": statistics.median(step["step_ms"] for step in steps),
        "data_share": statistics.median(statistics.mean(step["data_shares"]) for step in steps),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        here = Path(made)
        write_mlp(here / "mlp", slow_s=STAGE_MS / 1e3)
        (here / "own.py").write_text(OWN)
        figures = {workers: measure(here, workers) for workers in WORKERS}
    for workers, found in figures.items():
        print(
            f"{workers} workers: {found['step_ms']:5.1f} ms per step, "
            f"{found['data_share']:6.1%} of the ranks' time is data"
        )
    write_result(
        "data_loading",
        {
            "sample_ms": SAMPLE_MS,
            "stage_ms": STAGE_MS,
            "samples_per_step": 4,
            "steps": STEPS - LEFT_OUT,
            "workers": {str(workers): found for workers, found in figures.items()},
        },
    )
