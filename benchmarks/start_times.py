"""The time before the first step: `asyncpipe-partition`, and `asyncpipe-train` with two ranks.

Every run is a command in a process of its own, from its start to its end; `asyncpipe-train` counts
to the first sample that a rank reads, right before its first forward. The rounds alternate all
cases. Beside them stands what a process needs that imports torch and transformers
and builds gpt2 with its weights, and does nothing else.

    gpt2, 4 stages          nothing in the cache
    gpt2 again              the same command, which finds its earlier result
    Llama, 2 stages         the 10 M parameters of llama.py, nothing in the cache
    gpt2-xl, 4 stages       1.6 G parameters, on the meta device
    DeepSeek V4, 2 stages   the smallest of its class, by operation counts, from Python
    first action            asyncpipe-train of the Llama

    python benchmarks/start_times.py --rounds 3        results/start_times.json

With a former version of the package beside it, which every round runs as well:

    git worktree add --detach /tmp/former/asyncpipe dcbb002b
    python benchmarks/start_times.py --former /tmp/former
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import write_result

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
_PHASE = re.compile(r"✓ (\w+) .*\[([\d.]+) s\]")
PARTITIONS = {
    "gpt2, 4 stages": ("--model", "gpt2", "--stages", "4"),
    "gpt2 again": ("--model", "gpt2", "--stages", "4"),
    "Llama, 2 stages": ("--model", f"{HERE / 'llama.py'}:build", "--stages", "2"),
    "gpt2-xl, 4 stages": ("--model", "gpt2-xl", "--stages", "4", "--meta"),
}
WITH_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
"""Modules of an installed package are compiled already."""
SMALLEST = "DeepSeek V4, 2 stages"
FROM_PYTHON = (
    "import asyncpipe, sys\n"
    "from tiny_models import Recipe\n"
    "made = Recipe('causal', 'DeepseekV4ForCausalLM')\n"
    "asyncpipe.partition(made.build().train(), made.inputs(), stages=2, output=sys.argv[1],\n"
    "                    profile='analytic', save_weights=False)\n"
)
FLOOR_NAME = "torch, transformers and gpt2's weights"
FLOOR = (
    "from transformers import AutoModelForCausalLM, CONFIG_MAPPING\n"
    "AutoModelForCausalLM.from_config(CONFIG_MAPPING['gpt2']())\n"
)
DATA = """import os
import time
import torch

class Samples:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        stamp = "{stamp}"
        if "RANK" in os.environ and not os.path.exists(stamp):
            with open(stamp, "w") as file:
                file.write(repr(time.time()))
        row = torch.arange(128) + index
        return {{"input_ids": row, "labels": row}}

def samples():
    return Samples()
"""


def ended(*command: str, cache: Path, former: Path | None = None) -> tuple[float, str]:
    """The seconds that a command takes, and what it prints; with the package in `former`."""
    start_s = time.perf_counter()
    done = subprocess.run(
        command,
        env=os.environ
        | WITH_BYTECODE
        | {"ASYNCPIPE_CACHE": str(cache), "ASYNCPIPE_STATE": str(cache)}
        | {"PYTHONPATH": os.pathsep.join(str(path) for path in (former, HERE) if path)},
        check=True,
        capture_output=True,
        text=True,
    )
    return time.perf_counter() - start_s, done.stdout


def partitioned(
    words: tuple[str, ...], output: Path, cache: Path, former: Path | None = None
) -> dict[str, float]:
    """The seconds of one partition, in total and of each phase."""
    command = (str(BIN / "asyncpipe-partition"), *words, "--output", str(output))
    total_s, printed = ended(*command, cache=cache, former=former)
    phases = {name: float(seconds) for name, seconds in _PHASE.findall(printed)}
    return {"total": round(total_s, 2)} | phases


def first_action(folder: Path, place: Path, cache: Path, former: Path | None) -> dict[str, float]:
    """The seconds from the start of `asyncpipe-train` to the first sample of a rank."""
    stamp = place / "stamp"
    (place / "own.py").write_text(DATA.format(stamp=stamp))
    start_s = time.time()
    ended(
        str(BIN / "asyncpipe-train"), str(folder), "--trust", "--steps", "1",
        "--data", f"{place / 'own.py'}:samples", "--eval-batches", "0",
        "--output", str(place / "run"), cache=cache, former=former,
    )  # fmt: skip
    return {"total": round(float(stamp.read_text()) - start_s, 2)}


def one_round(former: Path | None = None) -> dict[str, dict[str, float]]:
    """All cases once, with a cache that is empty at first."""
    with tempfile.TemporaryDirectory() as folder:
        place, made = Path(folder), dict[str, dict[str, float]]()
        cache = place / "cache"
        floor_s, _ = ended(sys.executable, "-c", FLOOR, cache=cache)
        made[FLOOR_NAME] = {"total": round(floor_s, 2)}
        for name, words in PARTITIONS.items():
            output = place / re.split(",| again", name)[0]
            shutil.rmtree(output, ignore_errors=True)
            made[name] = partitioned(words, output, cache, former)
        smallest = (sys.executable, "-c", FROM_PYTHON, str(place / "smallest"))
        smallest_s, _ = ended(*smallest, cache=cache, former=former)
        made[SMALLEST] = {"total": round(smallest_s, 2)}
        made["first action"] = first_action(place / "Llama", place, cache, former)
    return made


def medians(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """The median of the rounds, of each phase of each case."""
    return {
        name: {
            phase: round(statistics.median(each[name][phase] for each in rounds), 2)
            for phase in rounds[0][name]
        }
        for name in rounds[0]
    }


def revision(checkout: Path) -> str:
    """The commit of a checkout."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--former", type=Path, help="a folder with a checkout named asyncpipe")
    options = parser.parse_args()
    rounds, of_former = [], []
    for _ in range(options.rounds):
        rounds.append(one_round())
        if options.former:
            of_former.append(one_round(options.former))
    table = medians(rounds)
    for name, row in table.items():
        print(f"{name:40}" + "  ".join(f"{phase} {took:.2f} s" for phase, took in row.items()))
    result: dict[str, Any] = {"median_seconds": table, "rounds": rounds}
    if of_former:
        before = medians(of_former)
        result |= {"former": revision(options.former / "asyncpipe")}
        result |= {"former_median_seconds": before, "former_rounds": of_former}
        for name, row in before.items():
            ratio = table[name]["total"] / row["total"]
            print(f"{name:40}now {ratio:.2f} of the former {row['total']:.2f} s")
    write_result("start_times", result)


if __name__ == "__main__":
    main()
