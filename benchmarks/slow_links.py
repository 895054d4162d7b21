"""The effect of a slow link between two hosts on a step: measured and predicted.

    python benchmarks/slow_links.py --mbit 1000,100,25

Two hosts of two ranks each are network namespaces of this machine, joined by a link of that
bandwidth in each direction. The model is planned for these hosts and this link (`--devices`), and
trained under torchrun. Both hosts share this machine's cores, which the plan ignores: the first
row, with an unlimited link, shows the cost of that.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from machine import write_result

from asyncpipe.runtime.communication.hosts import Host, hosts
from asyncpipe.runtime.plan.plan import read_plan

SCRIPTS = Path(sys.executable).parent
MODEL = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 256}
DEVICES = """
[[devices]]
name = "two cores"
host = "h1"
count = 2

[[devices]]
name = "two cores"
host = "h2"
count = 2

[[links]]
between = ["h1", "h2"]
bandwidth_gb_s = {gigabytes}
latency_us = 100
"""


@dataclass(frozen=True)
class Row:
    """One bandwidth: milliseconds of a step, bytes of a micro-batch that cross hosts."""

    mbit_s: float
    crossing_bytes: int
    planned_ms: float
    measured_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--mbit", default="1000,100,25", help="bandwidths of the link, comma-separated"
    )
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    rows = []
    print("Mbit/s  KiB per micro-batch  planned ms  measured ms  planned / measured - 1")
    for mbit_s in map(float, options.mbit.split(",")):
        row = measure(mbit_s, options.steps)
        rows.append(row)
        print(
            f"{row.mbit_s:6g}  {row.crossing_bytes / 1024:17.0f}  {row.planned_ms:10.0f}  "
            f"{row.measured_ms:11.0f}  {row.planned_ms / row.measured_ms - 1:+22.1%}",
            flush=True,
        )
    write_result("slow_links", {"rows": [vars(row) for row in rows]})


def measure(mbit_s: float, steps: int) -> Row:
    """Plans for the link, and trains over it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        plan_for(mbit_s, folder)
        with hosts(["h1", "h2"], mbit_s=mbit_s) as both:
            agents = [subprocess.Popen(command(host, folder, steps)) for host in both]
            codes = [agent.wait(timeout=600) for agent in agents]
        if any(codes):
            sys.exit(f"the run ended with {codes}")
        lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        end = next(line for line in lines if line["event"] == "end")
        plan = read_plan(folder / "model")
        host_of = [spec.host for spec in plan.setting.ranks]
        crossing = [
            each.tensor.resolve(plan.sizes)
            for each in plan.boundaries
            if host_of[each.source] != host_of[each.targets[-1]]
        ]
        return Row(mbit_s, sum(4 * count(shape) for shape in crossing), *times_of(end))


def times_of(end: dict[str, float]) -> tuple[float, float]:
    return end["simulated_step_ms"], end["step_ms"]


def count(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def plan_for(mbit_s: float, folder: Path) -> None:
    """Four stages for two hosts and this link, in `folder/model`."""
    (folder / "devices.toml").write_text(DEVICES.format(gigabytes=mbit_s / 8000))
    given = [f"--model-arg={name}={value}" for name, value in MODEL.items()]
    sizes = ["--seq", "128", "--micro-batch-size", "8", "--stages", "4"]
    subprocess.run(
        [SCRIPTS / "asyncpipe-partition", "--model", "gpt2", *given, *sizes, "--quiet"]
        + ["--schedule", "1f1b", "--threads", "1", "--devices", folder / "devices.toml"]
        + ["--output", folder / "model"],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def command(host: Host, folder: Path, steps: int) -> list[str]:
    """The torchrun agent of a host."""
    agent = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "h1:29400", "--no-python"]
    train = [str(SCRIPTS / "asyncpipe-train"), str(folder / "model"), "--steps", str(steps)]
    rest = ["--threads", "1", "--eval-batches", "0", "--output", str(folder / "run"), "--quiet"]
    return host.command(sys.executable, *agent, *meeting, *train, *rest)


if __name__ == "__main__":
    main()
