"""Measured links of shaped hosts, a plan made from them, and its measured step.

    python benchmarks/shaped_links.py --mbit 1000,200,50

The hosts are network namespaces of this machine, each of which sends at most at its rate.
`asyncpipe-comm measure` runs on all of them and writes the file of devices for the plan, of a model
with a wide and a narrow boundary. The plan is trained with its ranks on the planned hosts, and in
the reversed order. The hosts share this machine's cores, which a plan ignores, so this model has
large boundaries and computes little.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import write_result

from asyncpipe.runtime.communication.hosts import Host, hosts
from asyncpipe.runtime.plan.forecast import spec_bytes
from asyncpipe.runtime.plan.plan import Plan, read_plan

SCRIPTS = Path(sys.executable).parent
PORT = 29400
MODEL = '''import torch
from torch import Tensor, nn


class Narrowing(nn.Module):
    """A wide boundary between the first layers, and a narrow one before the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.narrow = nn.Linear(16, 2)
        self.head = nn.ModuleList([nn.Linear(2, 16), nn.Linear(16, 16)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.wide:
            x = torch.relu(layer(x))
        x = torch.relu(self.narrow(x))
        for layer in self.head:
            x = torch.relu(layer(x))
        return {"loss": x.square().mean()}


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    return Narrowing(), {"x": torch.randn(64, 1024, 16)}


def data() -> dict[str, Tensor]:
    return {"x": torch.randn(1024, 1024, 16)}
'''


@dataclass(frozen=True)
class Step:
    """A step of the plan with its ranks on these hosts.

    planned_ms: according to the plan, for its own order of hosts only.
    measured_ms: the median of the run.
    """

    hosts: tuple[str, ...]
    planned_ms: float | None
    measured_ms: float


def on_hosts(made: Sequence[Host], *command: str) -> list[str]:
    """Runs a command as one rank on each host, in their order; the output of each."""
    started = []
    for rank, host in enumerate(made):
        meeting = {"RANK": rank, "WORLD_SIZE": len(made)}
        meeting |= {"MASTER_ADDR": made[0].address, "MASTER_PORT": PORT}
        given = [f"{name}={value}" for name, value in meeting.items()]
        line = host.command("env", *given, *command)
        started.append(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=900)[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit(f"{' '.join(command)} failed")
    return outputs


def measured_links(made: Sequence[Host], devices: Path) -> dict[str, Any]:
    """The answer of asyncpipe-comm measure on these hosts, which also writes the file."""
    script = str(SCRIPTS / "asyncpipe-comm")
    outputs = on_hosts(made, script, "measure", "--json", "--output", str(devices))
    answer: dict[str, Any] = json.loads(outputs[0])
    return answer


def planned(folder: Path, devices: Path) -> Plan:
    """A plan of the model for these devices, in `folder/model`."""
    (folder / "model.py").write_text(MODEL)
    subprocess.run(
        [SCRIPTS / "asyncpipe-partition", "--model", f"{folder}/model.py:build", "--quiet"]
        + ["--stages", "3", "--cut-at", "wide.2", "--cut-at", "head.0", "--schedule", "1f1b"]
        + ["--micro-batches", "8", "--threads", "1", "--devices", devices]
        + ["--output", folder / "model"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return read_plan(folder / "model")


def trained(made: Sequence[Host], folder: Path, order: Sequence[str], steps: int) -> Step:
    """Trains the plan with its ranks on these hosts."""
    by_name = {host.name: host for host in made}
    run = folder / "-".join(order)
    on_hosts(
        [by_name[name] for name in order],
        *(str(SCRIPTS / "asyncpipe-train"), str(folder / "model"), "--steps", str(steps)),
        *("--data", f"{folder}/model.py:data", "--threads", "1", "--eval-batches", "0"),
        *("--output", str(run), "--quiet", "--trust"),
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    end = next(line for line in lines if line["event"] == "end")
    is_planned = tuple(order) == hosts_of(read_plan(folder / "model"))
    return Step(tuple(order), end["simulated_step_ms"] if is_planned else None, end["step_ms"])


def hosts_of(plan: Plan) -> tuple[str, ...]:
    """The planned host of every rank."""
    return tuple(spec.host for spec in plan.setting.ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", default="1000,200,50", help="rates of the hosts in Mbit/s")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    rates = [float(rate) for rate in options.mbit.split(",")]
    names = [f"h{number}" for number in range(1, len(rates) + 1)]
    with tempfile.TemporaryDirectory() as scratch, hosts(names, mbit_s=rates) as made:
        folder = Path(scratch)
        answer = measured_links(made, folder / "devices.toml")
        rows = [
            {
                "from": names[link["source"]],
                "to": names[link["target"]],
                "rate_mbit_s": rates[link["source"]],
                "measured_mbit_s": round(8e3 * link["gb_s"], 2),
            }
            for link in answer["links"]
        ]
        print("from  to  Mbit/s  measured  measured / rate - 1")
        for row in rows:
            more = row["measured_mbit_s"] / row["rate_mbit_s"] - 1
            print(
                f"{row['from']:4}  {row['to']:2}  {row['rate_mbit_s']:6g}  "
                f"{row['measured_mbit_s']:8.1f}  {more:+.1%}"
            )
        plan = planned(folder, folder / "devices.toml")
        sizes = [spec_bytes(boundary.tensor, plan.sizes) for boundary in plan.boundaries]
        print(f"boundaries of {' and '.join(f'{size / 2**20:g} MiB' for size in sizes)}")
        steps = [
            trained(made, folder, order, options.steps)
            for order in (hosts_of(plan), hosts_of(plan)[::-1])
        ]
        for step in steps:
            planned_ms = "" if step.planned_ms is None else f", planned {step.planned_ms:.0f} ms"
            print(f"{'-'.join(step.hosts)}: {step.measured_ms:.0f} ms{planned_ms}")
        write_result(
            "shaped_links",
            {
                "links": rows,
                "devices": (folder / "devices.toml").read_text(),
                "boundary_bytes": sizes,
                "steps": [asdict(step) for step in steps],
                "measured": answer,
            },
        )


if __name__ == "__main__":
    main()
