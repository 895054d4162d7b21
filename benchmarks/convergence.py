"""What stale weights cost: losses of asynchronous training against synchronous, at equal tokens.

Text: a GPT of bytes of 0.1 M parameters on Shakespeare, cut into p stages of half a block or more;
images: a residual MLP on scikit-learn's digits. Each update sees the same samples whatever k, so
that one synchronous run is the baseline of all; runs are those of asyncpipe-compare, on one core.
Runs are made in the order of what they decide, until the time is over; a run that is in
results/convergence.jsonl is not repeated. The tables and plots are made of all there are.

    python benchmarks/convergence.py --minutes 60
    python benchmarks/convergence.py --minutes 0

Newton-Schulz iterations of Muon are in float32, since processors without bfloat16 take ten times as
long in bfloat16.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import half_blocks
import torch
from torch import Tensor
from torch.optim import _muon

import asyncpipe
from asyncpipe.runtime.comparison.methods import read_method
from asyncpipe.runtime.comparison.runs import Arm, arms, make_runs
from asyncpipe.runtime.training.settings import Settings

RESULTS = Path(__file__).parent / "results"
HALVES = {4: 8, 8: 8, 16: 16}
"""Stages -> half-blocks."""
SAMPLES = {"text": 8, "digits": 32}
"""Of one update."""
COMMON = {
    "text": {
        "data": "shakespeare",
        "steps": 300,
        "warmup": 30,
        "eval_every": 50,
        "clip": 1.0,
        "decay": "cosine",
        "final_lr_ratio": 0.1,
        "weight_decay": 0.01,
    },
    "digits": {
        "data": "digits",
        "steps": 300,
        "warmup": 30,
        "eval_every": 30,
        "clip": 1.0,
        "decay": "cosine",
        "final_lr_ratio": 0.1,
        "weight_decay": 0.01,
    },
}
BETAS = (0.9, 0.99)


def folder_of(task: str, stages: int, models: Path) -> Path:
    """The generated folder of a model in so many stages, made if it is not there."""
    folder = models / f"{task}_{stages}p"
    if not folder.exists():
        halves = HALVES[stages]
        model, inputs = getattr(half_blocks, task)(halves=halves)
        each = halves // stages
        asyncpipe.partition(
            model,
            inputs,
            stages=stages,
            name=task,
            output=folder,
            profile="analytic",
            device="t4",
            cut_at=[f"halves.{each * stage - 1}" for stage in range(1, stages)],
        )
    return folder


def arms_of(
    task: str,
    stages: int,
    every: int,
    methods: Sequence[str],
    models: Path,
    *,
    lr: float = 3e-3,
    seed: int = 1,
) -> list[Arm]:
    """The runs of these methods at p = `stages` and k = `every`; synchronous ones are the same for
    all k, and are made with k = 1."""
    made = []
    for text in methods:
        method = read_method(text)
        k = 1 if method.is_sync else every
        settings = Settings(
            folder=str(folder_of(task, stages, models)),
            micro_batches=k,
            micro_batch_size=SAMPLES[task] // k,
            eval_batches=64 * k // SAMPLES[task] if task == "text" else 352 * k // SAMPLES[task],
            seed=seed,
            lr=lr,
            **COMMON[task],
        )
        if method.optimizer not in ("sgd", "sutskever"):
            settings = replace(settings, betas=BETAS)
        made += arms(settings, [method])
    return made


SYNC = ("sync:adamw", "sync:muon", "sync:nadam")
FIRST = ("stash:adamw", "stash:muon", "none:muon", "none:adamw", "stash:nadam")
START = ("stash:muon,sync-start=10%", "stash:adamw,sync-start=10%")


def wanted(models: Path) -> Iterator[Arm]:
    """All runs, those first that decide most."""
    for seed in (1, 2):
        yield from arms_of("text", 8, 1, SYNC, models, seed=seed)
        yield from arms_of("text", 8, 8, FIRST[:2], models, seed=seed)
        yield from arms_of("text", 8, 1, FIRST, models, seed=seed)
        yield from arms_of("text", 8, 1, START, models, seed=seed)
        yield from arms_of("text", 8, 8, (*FIRST[2:], *START), models, seed=seed)
        yield from arms_of("text", 8, 4, (*FIRST, *START), models, seed=seed)
        yield from arms_of("digits", 8, 1, SYNC, models, seed=seed)
        for every in (8, 1):
            yield from arms_of("digits", 8, every, FIRST, models, seed=seed)
        for stages in (4, 16):
            yield from arms_of("text", stages, 1, SYNC, models, seed=seed)
            for every in (4, 1):
                yield from arms_of("text", stages, every, FIRST, models, seed=seed)
    for lr in (1e-3, 1e-2):
        yield from arms_of("text", 8, 1, SYNC, models, lr=lr)
        for every in (1, 8):
            yield from arms_of("text", 8, every, (*FIRST, *START), models, lr=lr)


def somebody_measures(lock: Path | None) -> bool:
    """Whether another process wants the machine alone."""
    if lock is None:
        return False
    return subprocess.run(["flock", "-n", "-s", lock, "true"], check=False).returncode != 0


def newton_schulz(
    gradient: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """torch's, in the precision of the gradient."""
    a, b, c = coefficients
    tall = gradient.size(0) > gradient.size(1)
    x = gradient.T if tall else gradient
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--models", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--output", type=Path, default=RESULTS / "convergence.jsonl")
    parser.add_argument("--lock", type=Path, help="held exclusively by who measures alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    _muon._zeropower_via_newtonschulz = newton_schulz
    end_s = time.monotonic() + 60 * options.minutes
    began_s = time.monotonic()
    for run, is_new in make_runs(wanted(options.models), options.output):
        if is_new:
            took_s = time.monotonic() - began_s
            print(
                f"p {run.stages} k {run.micro_batches} {run.method} lr {run.lr:g} seed {run.seed}: "
                f"{run.curve.last:.4f} ({took_s:.0f} s)",
                flush=True,
            )
        began_s = time.monotonic()
        if began_s > end_s:
            break
        while somebody_measures(options.lock):
            time.sleep(5)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
