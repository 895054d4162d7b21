"""The cost of stale weights: losses of asynchronous and synchronous training on equal tokens.

Text: a byte-level GPT of 0.1 M parameters on Shakespeare, cut into p stages of half a block or
more; images: a residual MLP on scikit-learn's digits. Each update sees the same samples for every k
up to 8, so one synchronous run is the baseline of all. The runs are those of asyncpipe-compare, on
one core, in the order of their importance, until the time is over; a run that is in
results/convergence.jsonl is not repeated. The tables and plots include all runs in that file.

    python benchmarks/convergence.py --minutes 60
    python benchmarks/convergence.py --minutes 60 --part 1/2     half of the runs; 2/2 has the rest
    python benchmarks/convergence.py --minutes 0

Newton-Schulz iterations of Muon are in float32, since processors without bfloat16 take ten times as
long in bfloat16.
"""

import argparse
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import half_blocks
import torch
from evidence import Case, rows_of, write
from torch import Tensor
from torch.optim import _muon
from tuned_methods import TUNED

import asyncpipe
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.experiments.compare import Arm, arms, key_of, make_runs, read_runs
from asyncpipe.runtime.experiments.trial import read_method
from asyncpipe.runtime.staleness import prediction

RESULTS = Path(__file__).parent / "results"
HALVES = {4: 8, 8: 8, 16: 16}
"""Stages -> half-blocks."""
SAMPLES = {"text": 8, "large": 8, "digits": 32}
"""Samples of one update, unless it has more micro-batches."""
EVALUATED = {"text": 64, "large": 64, "digits": 352}
"""Samples of an evaluation, always the same."""
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
COMMON["large"] = COMMON["text"]
BETAS = (0.9, 0.99)


def folder_of(task: str, stages: int, models: Path) -> Path:
    """The generated folder of a model with this number of stages; generates it if needed."""
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


def samples_of(case: Case) -> int:
    """The number of samples of one update."""
    return max(SAMPLES[case.task], case.every)


def _as_long(case: Case) -> dict[str, int]:
    """The options that differ in a case with its own number of steps."""
    if case.steps is None:
        return {}
    return {"steps": case.steps, "warmup": case.steps // 10, "eval_every": case.steps // 6}


def arms_of(
    case: Case, methods: Sequence[str], models: Path, *, lr: float = 3e-3, seed: int = 1
) -> list[Arm]:
    """The runs of these methods; synchronous runs are the same for all k, and made with k = 1."""
    made = []
    for text in methods:
        method = read_method(text)
        # A synchronous run is the same however the model is cut, but for the order of additions.
        stages = HALVES[case.stages] if method.is_sync else case.stages
        size = samples_of(case) // (1 if method.is_sync else case.every)
        settings = Settings(
            folder=str(folder_of(case.task, stages, models)),
            micro_batches=1 if method.is_sync else case.every,
            micro_batch_size=size,
            eval_batches=EVALUATED[case.task] // size,
            seed=seed,
            lr=lr,
            betas=BETAS,
            **COMMON[case.task] | _as_long(case),
        )
        made += arms(settings, [method])
    return made


SYNC = ("sync:muon", "sync:adamw", "sync:soap", "sync:nadam")
CORE = ("stash+msnag:muon", "stash:muon", "stash:adamw", "none:muon", "none:adamw")
START = ("stash+msnag:muon,sync-start=10%", "stash:muon,sync-start=10%")
NEAR = (
    *START,
    "stash:soap",
    "none:soap",
    "stash:nadam",
    "stash+pipemare-rate:adamw",
    "pipemare:adamw",
    "stash+msnag:adamw",
    "xpipe:adamw",
    "stash:adamw,sync-start=10%",
    "stash+aggmsnag:adamw",
    "stash+gap-aware:adamw",
    "stash+gap-aware-activations:adamw",
    "stash+dc-asgd-adaptive:adamw",
    "stash+error-feedback:adamw",
    "stash+error-feedback:muon",
)
"""Methods for k below p, in addition to the core."""
WIDE = (
    *START,
    "stash+partial-gradient:muon",
    "stash+partial-gradient:adamw",
    "2bw:muon",
    "2bw+error-feedback:muon",
    "stash+msnag:adamw",
    "stash:adamw,sync-start=10%",
    "stash+error-feedback:adamw",
    "stash:soap",
    "stash:nadam",
)
"""Methods for k = p, in addition to the core."""
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
USUAL = {"muon": 2}
"""Index of the learning rate to try first, by optimizer; 1 for the others."""


def wanted(models: Path) -> Iterator[tuple[Case, Arm]]:
    """All runs, the most important first."""

    def runs(
        case: Case, methods: Sequence[str], *, shift: int = 0, seed: int = 1
    ) -> Iterator[tuple[Case, Arm]]:
        """The runs at the first learning rate of each method, or `shift` rates away from it."""
        for text in methods:
            rate = USUAL.get(str(read_method(text).optimizer), 1) + shift
            if 0 <= rate < len(RATES):
                for arm in arms_of(case, [text], models, lr=RATES[rate], seed=seed):
                    yield case, arm

    near, wide, long = Case("text", 8, 1), Case("text", 8, 8), Case("text", 8, 8, 1200)
    yield from _tuned(models)
    partial = ("stash+partial-gradient:muon",)
    yield from runs(wide, CORE[:1], shift=1)
    for shift in (1, 0):
        yield from runs(wide, partial, shift=shift)
    yield from runs(near, SYNC[:1], shift=1, seed=2)
    yield from runs(wide, partial, shift=1, seed=2)
    yield from runs(wide, START)
    yield from runs(wide, START, shift=1)
    yield from runs(wide, CORE[:1], shift=1, seed=2)
    for shift in (0, 1):
        yield from runs(long, (SYNC[0], *partial), shift=shift)
    yield from runs(wide, (f"{partial[0]},sync-start=10%",), shift=1)
    yield from runs(wide, CORE)
    yield from runs(Case("text", 16, 1), (*SYNC[:2], CORE[1], CORE[2], CORE[0]))
    yield from runs(Case("text", 16, 16), (*partial, CORE[2], CORE[1]))
    yield from runs(near, ("sync:soap", "stash:soap"))
    for shift in (1, -1):
        yield from runs(Case("digits", 8, 1), (*SYNC[:2], *CORE[1:3]), shift=shift)
    yield from runs(Case("text", 16, 16), (SYNC[0], *partial), shift=1)
    yield from runs(Case("text", 16, 4), (CORE[0], CORE[2]))
    others = (*(Case("text", p, k) for p, k in ((4, 1), (4, 4), (8, 4), (16, 1), (16, 4))),)
    digits = Case("digits", 8, 1), Case("digits", 8, 8)
    for case in (near, *others, Case("text", 16, 16), *digits):
        yield from runs(case, (*SYNC[:2], *CORE, *(partial if case.every >= case.stages else ())))
    yield from runs(near, (*SYNC, *NEAR))
    yield from runs(wide, WIDE)
    for shift, seed in ((0, 2), (-1, 1), (1, 1), (-1, 2), (1, 2)):
        for case in (near, wide, *others, *digits):
            yield from runs(case, (*SYNC[:2], *CORE), shift=shift, seed=seed)
        for case in (near, *others[2:4], digits[0]):
            yield from runs(case, (*SYNC, *NEAR), shift=shift, seed=seed)
        for case in (wide, digits[1]):
            yield from runs(case, WIDE, shift=shift, seed=seed)


def _tuned(models: Path) -> Iterator[tuple[Case, Arm]]:
    """The runs that look for what grows between 300 and 1,200 updates."""
    for case, methods, lr, seeds in TUNED:
        for method, seed in product(methods.split(), seeds):
            for arm in arms_of(case, [method], models, lr=lr, seed=seed):
                yield case, arm


def by_case(found: Iterable[tuple[Case, Arm]], models: Path) -> dict[Case, list[tuple[Arm, str]]]:
    """The runs of each case with their keys, including the synchronous runs of the same model."""
    cases: dict[Case, list[tuple[Arm, str]]] = defaultdict(list)
    baselines: dict[tuple[object, ...], list[tuple[Arm, str]]] = defaultdict(list)

    def model(case: Case) -> tuple[object, ...]:
        return case.task, HALVES[case.stages], samples_of(case), case.steps

    for case, arm in found:
        of = baselines[model(case)] if arm.method.is_sync else cases[case]
        of.append((arm, key_of(arm, models)))
    return {case: [*baselines[model(case)], *own] for case, own in cases.items()}


def somebody_measures(lock: Path | None) -> bool:
    """True if another process needs the machine for itself."""
    if lock is None:
        return False
    return subprocess.run(["flock", "-n", "-s", lock, "true"], check=False).returncode != 0


def newton_schulz(
    gradient: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """torch's function, in the precision of the gradient."""
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
    parser.add_argument(
        "--part", default="1/1", help="part of the runs that this process makes, as 1/2"
    )
    parser.add_argument(
        "--lock", type=Path, help="lock file of processes that need the machine alone"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    for module in (_muon, prediction):
        module._zeropower_via_newtonschulz = newton_schulz
    found = list(wanted(options.models))
    part, parts = map(int, options.part.split("/"))
    own = found[part - 1 :: parts]
    run_until(own, options.output, time.monotonic() + 60 * options.minutes, options.lock)
    table = rows_of(by_case(found, options.models), read_runs(options.output))
    write(table, options.output.parent)


def run_until(
    found: Iterable[tuple[Case, Arm]], output: Path, end_s: float, lock: Path | None = None
) -> None:
    """Makes the missing runs, until the time is over."""
    for _, arm in found:
        began_s = time.monotonic()
        if began_s > end_s:
            return
        while somebody_measures(lock):
            time.sleep(5)
        [(run, is_new)] = make_runs([arm], output)
        if is_new:
            print(
                f"p {run.stages} k {run.micro_batches} {run.method} lr {run.lr:g} seed {run.seed}: "
                f"{run.curve.last:.4f} ({time.monotonic() - began_s:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
