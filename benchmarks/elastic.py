"""Elastic runs that are killed, and elastic runs with many phases.

kills        a rank of a run is killed with SIGKILL at a random moment, and the run restarts its
             ranks; its weights must be those of an undisturbed run, bit for bit; one run after
             the other with each value of --grow
transitions  memory, open files and threads of each rank that computes a loss, after each quarter of
             its micro-batches in a run of 50 phases

python benchmarks/elastic.py --kills 20 --transitions 50
"""

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
from pathlib import Path
from typing import Any

from machine import write_result
from safetensors.torch import load_file

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.layer(self.norm(x))))

class Net(nn.Module):
    def __init__(self, blocks, width):
        super().__init__()
        self.inner = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build(blocks=8, width=32):
    torch.manual_seed(0)
    return Net(blocks, width), {"x": torch.randn(4, 16)}

def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 16, generator=generator)
    return {"x": x, "target": x[:, :4].argmax(1)}

def criterion(output, target):
    import os
    from torch.nn.functional import cross_entropy
    pages = int(open("/proc/self/statm").read().split()[1])
    files, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    with open(f"seen.{os.environ.get('RANK', 0)}", "a") as seen:
        print(pages * os.sysconf("SC_PAGE_SIZE"), files, threads, file=seen)
    return cross_entropy(output, target)
"""
GROWS = ("replicas", "batch", "off")
TRAINED = ("--data", "model.py:data", "--micro-batches", "4", "--schedule", "1f1b", "--warmup", "0")


def command(name: str) -> str:
    found = shutil.which(name, path=f"{sys.prefix}/bin")
    assert found is not None
    return found


def partition(folder: Path, blocks: int, lengths: str, rule: str) -> None:
    words = [
        *(command("asyncpipe-partition"), "--model", "model.py:build", "--stages", lengths[0]),
        *("--model-arg", f"blocks={blocks}", "--micro-batches", "4", "--schedule", "1f1b"),
        *("--loss", "cross_entropy", "--profile", "analytic", "--output", "net", "--force"),
        *("--elastic", lengths, "--freeze", rule, "--quiet"),
    ]
    subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def start(folder: Path, output: str, rule: str, steps: int, *more: str) -> subprocess.Popen[bytes]:
    words = [
        *(command("asyncpipe-train"), "net", "--output", output, "--steps", str(steps), *TRAINED),
        *("--freeze", rule, "--freeze-every", "2", "--elastic", "--eval-batches", "0", *more),
    ]
    log = (folder / f"{output}.log").open("wb")
    return subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)


def weights(run: Path) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for path in sorted((run / "weights").glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def ranks_of(process: subprocess.Popen[bytes]) -> list[int]:
    """The processes of the ranks that a command has started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
        except OSError:
            continue
    own = []
    for number in parents:
        above = number
        while above in parents and above != process.pid:
            above = parents[above]
        try:
            if above == process.pid and b"\0RANK=" in Path(f"/proc/{number}/environ").read_bytes():
                own.append(number)
        except OSError:
            continue
    return own


def steps_in(metrics: Path) -> int:
    """The steps that a run has recorded."""
    text = metrics.read_text() if metrics.is_file() else ""
    return text.count('"event": "step"') + text.count('"event": "loss"')


def kills(folder: Path, number: int) -> dict[str, Any]:
    rule, steps = "schedule:1/3", 14
    partition(folder, 8, "4,2,1", rule)
    expected, made, rows = {}, {}, []
    for grow in GROWS[:number]:
        assert start(folder, grow, rule, steps, "--grow", grow).wait() == 0
        expected[grow] = weights(folder / grow)
        made[grow] = steps_in(folder / grow / "metrics.jsonl")
    for kill in range(number):
        chosen, grow = random.Random(kill), GROWS[kill % len(GROWS)]
        output = f"killed{kill}"
        more = ("--save-every", "2", "--restarts", "3", "--grow", grow)
        process = start(folder, output, rule, steps, *more)
        metrics, step = folder / output / "metrics.jsonl", chosen.randrange(1, made[grow])
        # Every second step is followed by an event, most of which are transitions.
        while process.poll() is None and steps_in(metrics) < step:
            time.sleep(0.01)
        time.sleep(chosen.uniform(0.0, 0.2))
        alive = ranks_of(process)
        victim = chosen.choice(alive) if alive else 0
        seen = steps_in(metrics)
        if victim:
            os.kill(victim, signal.SIGKILL)
        code = process.wait(300)
        found = weights(folder / output)
        same = code == 0 and found.keys() == expected[grow].keys()
        same = same and all(tensor.equal(expected[grow][name]) for name, tensor in found.items())
        row = {"kill": kill, "grow": grow, "killed": bool(victim), "after_step": seen}
        rows.append(row | {"equal": same})
        print(rows[-1], flush=True)
    return {
        "killed": sum(row["killed"] for row in rows),
        "equal": sum(row["equal"] for row in rows),
        "rows": rows,
    }


def transitions(folder: Path, number: int) -> dict[str, Any]:
    rule = ",".join(f"{event}={event}" for event in range(1, number + 1))
    partition(folder, number + 1, "2,1", rule)
    steps = 2 * number + 2
    process = start(folder, "many", rule, steps, "--criterion", "model.py:criterion", "--trust")
    assert process.wait() == 0, (folder / "many.log").read_text()
    lines = (folder / "many" / "metrics.jsonl").read_text().splitlines()
    phases = sum('"phase"' in line for line in lines)
    return {"phases": phases} | {
        f"rank {path.suffix[1:]}": _quarters([*map(str.split, path.read_text().splitlines())])
        for path in sorted(folder.glob("seen.*"))
    }


def _quarters(seen: list[list[str]]) -> dict[str, Any]:
    """The memory, files and threads of a rank after each quarter of its micro-batches."""
    rows = [[*map(int, seen[quarter * len(seen) // 4 - 1])] for quarter in range(1, 5)]
    return {
        "memory_mib": [round(row[0] / 2**20, 1) for row in rows],
        "open_files": [row[1] for row in rows],
        "threads": [row[2] for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--transitions", type=int, default=50)
    given = parser.parse_args()
    before = Path(__file__).parent / "results" / "elastic.json"
    found: dict[str, Any] = json.loads(before.read_text()) if before.is_file() else {}
    found.pop("machine", None)
    for name, measure in (("kills", kills), ("transitions", transitions)):
        if number := getattr(given, name):
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                (folder / "model.py").write_text(MODEL)
                found[name] = measure(folder, number)
                print(name, {key: value for key, value in found[name].items() if key != "rows"})
    write_result("elastic", found)


if __name__ == "__main__":
    main()
