"""The cost of each staleness method: CPU time of a step, and bytes in addition to the live weights.

One process trains the benchmarks' GPT in four stages on one rank, asynchronously, with each method,
alternating in shuffled rounds. CPU time is compared with that of live weights under the same
optimizer. Bytes are those of the leaves that passes read and of the state that methods keep; they
are compared with `runtime/schedule/asynchronous.py`, whose numbers plans use.

    python benchmarks/staleness_cost.py                 results/staleness_cost.json
    python benchmarks/staleness_cost.py --rounds 3 --only stash msnag
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import gpt
import torch
from machine import write_result

import asyncpipe
from asyncpipe.runtime.config.resolve import resolve
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.executor.executor import Executor
from asyncpipe.runtime.executor.instrumented import StepOptimizers
from asyncpipe.runtime.executor.loading import load_stage
from asyncpipe.runtime.plan.plan import Plan, read_plan
from asyncpipe.runtime.process import keep_freed_memory
from asyncpipe.runtime.schedule.asynchronous import weight_copies
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.training.stage_optimizer import StageOptimizer
from asyncpipe.runtime.transports import LocalHub

STAGES, MICRO_BATCHES = 4, 32
MODEL = {"layers": 4, "width": 128, "heads": 4, "tokens": 64, "vocabulary": 2048}
BASELINE = "none"
METHODS = (
    ("none", "adamw"),
    ("stash", "adamw"),
    ("2bw", "adamw"),
    ("pipemare", "adamw"),
    ("stash+delay-rate", "adamw"),
    ("msnag", "adamw"),
    ("stash+msnag", "adamw"),
    ("stash+partial-gradient", "adamw"),
    ("stash+lwp-w", "adamw"),
    ("xpipe", "adamw"),
    ("pipeoptim", "adamw"),
    ("stash+gap-aware", "adamw"),
    ("stash+dc-asgd", "adamw"),
    ("stash+dc-asgd-adaptive", "adamw"),
    ("stash+error-feedback", "adamw"),
    ("none", "muon"),
    ("stash", "muon"),
    ("stash+msnag", "muon"),
    ("none", "sgd"),
    ("stash", "sgd"),
    ("spectrain", "sgd"),
    ("stash+lwp+spike-compensation", "sgd"),
)
"""Methods joined by +, and the optimizer to measure them with."""


@dataclass(frozen=True)
class Configuration:
    methods: str
    optimizer: str
    step_every: int

    def __str__(self) -> str:
        return f"{self.methods}, {self.optimizer}, k = {self.step_every}"


class Training:
    """One method's pipeline on one rank; `turn` trains a segment."""

    def __init__(self, folder: Path, plan: Plan, made: Configuration) -> None:
        modules = {j: load_stage(folder, plan, j).train() for j in range(STAGES)}
        settings = Settings(
            folder=str(folder),
            schedule="async-1f1b",
            optimizer=made.optimizer,
            lr=1e-4,
            momentum=0.9 if made.optimizer in ("sgd", "sutskever") else 0.0,
            weight_decay=0.01,
            warmup=0,
        )
        config, _ = resolve(settings, plan)
        self._optimizers = {j: StageOptimizer(module, config) for j, module in modules.items()}
        self.pipe = Executor(
            plan,
            modules,
            LocalHub(1).transport(0),
            rank_of_stage=[0] * STAGES,
            staleness=made.methods,
        )
        self.pipe.attach(self._optimizers)
        self._observer = Stepping(self.pipe, self._optimizers)
        self._schedule = make_schedule(
            "async-1f1b",
            stages=STAGES,
            micro_batches=MICRO_BATCHES,
            step_every=made.step_every,
            ranks=1,
        )
        self._batch = [gpt.tokens_of(2, MODEL["tokens"], MODEL["vocabulary"])] * MICRO_BATCHES

    def turn(self) -> float:
        """CPU milliseconds of a micro-batch."""
        start_s = time.process_time()
        self.pipe.run(self._schedule, lambda i: self._batch[i], observer=self._observer)
        return 1e3 * (time.process_time() - start_s) / MICRO_BATCHES

    @property
    def kept_bytes(self) -> list[int]:
        """The bytes of each stage in addition to its live weights."""
        return [binder.kept_bytes for _, binder in sorted(self.pipe.binders.items())]


class Stepping(StepOptimizers):
    """Steps the stages' optimizers at the learning rates of the methods."""

    def __init__(self, pipe: Executor, optimizers: dict[int, StageOptimizer]) -> None:
        super().__init__({})
        self._pipe, self._stages = pipe, optimizers

    def on_step(self, stage: int, version: int) -> None:
        self._stages[stage].step(self._pipe.lr_scale(stage, version))


def measure(folder: Path, configurations: list[Configuration], rounds: int) -> list[dict[str, Any]]:
    plan = read_plan(folder)
    trainings = {made: Training(folder, plan, made) for made in configurations}
    taken: dict[Configuration, list[float]] = {made: [] for made in configurations}
    order = random.Random(0)
    for number in range(rounds + 1):
        names = list(configurations)
        order.shuffle(names)
        for made in names:
            core_ms = trainings[made].turn()
            if number:
                taken[made].append(core_ms)
    rows = []
    for made in configurations:
        baseline = taken[Configuration(BASELINE, made.optimizer, made.step_every)]
        ratio = statistics.median(
            own / other for own, other in zip(taken[made], baseline, strict=True)
        )
        params = [
            sum(tensor.nbytes for tensor in weights.live.values())
            for _, weights in sorted(trainings[made].pipe.weights.items())
        ]
        counted = [
            weight_copies(made.methods, STAGES - 1 - stage, made.step_every) * size
            for stage, size in enumerate(params)
        ]
        rows.append(
            {
                "methods": made.methods,
                "optimizer": made.optimizer,
                "step_every": made.step_every,
                "core_ms": round(statistics.median(taken[made]), 3),
                "extra_work": round(ratio - 1, 4),
                "kept_bytes": trainings[made].kept_bytes,
                "counted_bytes": counted,
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'methods':34} {'optimizer':10} {'k':>2}  core ms  extra  kept MB  counted MB")
    for row in rows:
        kept, counted = (sum(row[key]) / 1e6 for key in ("kept_bytes", "counted_bytes"))
        print(
            f"{row['methods']:34} {row['optimizer']:10} {row['step_every']:2} "
            f"{row['core_ms']:8.2f} {row['extra_work']:+6.1%} {kept:8.1f} {counted:11.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=[], help="only these methods")
    arguments = parser.parse_args()
    chosen = [each for each in METHODS if each[0] in (*(arguments.only or [each[0]]), BASELINE)]
    configurations = [
        Configuration(methods, kind, step_every)
        for step_every in (1, 8)
        for methods, kind in chosen
        if methods != "2bw" or step_every >= STAGES
    ]
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "gpt"
        model, inputs = gpt.build(**MODEL, micro_batch_size=2)
        asyncpipe.partition(
            model, inputs, stages=STAGES, profile="analytic", device="a100-80g", output=folder
        )
        rows = measure(folder, configurations, arguments.rounds)
    show(rows)
    if not arguments.only:
        write_result("staleness_cost", {"model": MODEL, "stages": STAGES, "rows": rows})


if __name__ == "__main__":
    main()
