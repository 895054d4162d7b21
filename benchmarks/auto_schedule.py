"""`--schedule auto` and every named schedule, on the same stages in the same memory.

A configuration may be a tenth faster or slower for the lifetime of its processes, depending on its
place in memory; so `runtime.py` needs many groups of processes to tell schedules apart that differ
by a few percent. Here all schedules with so many stages a rank run on one plan, whose cuts are
those of `auto`, and those that place the stages alike share one set of weights: they differ in
nothing but their order. `auto` measures its costs and tries its finalists there first, as in a run.
The schedules then alternate in shuffled rounds.

    python benchmarks/auto_schedule.py                              results/auto_schedule.json
    python benchmarks/auto_schedule.py --models gpt vit --ranks 2 --rounds 5
"""

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from cases import QUIET, Case, Turn, batch_of, measure, plans_of, together
from machine import RESULTS, write_result
from pipelines import OURS, Configuration, Planned

from asyncpipe.runtime.process import keep_freed_memory
from asyncpipe.runtime.schedule.builders import named_for
from asyncpipe.runtime.schedule.schedule import Schedule

MODELS = ("gpt", "llama", "t5", "resnet", "vit")
SEQUENTIAL = "seq"
EACH = (1, 2)
"""Stages a rank."""
PLACEMENTS = {1: ("1f1b",), 2: ("interleaved, 2 a rank", "zb-v")}
"""A configuration for each way in which the named schedules place so many stages a rank."""


def turns_of(case: Case, each: int, rank: int, folder: Path) -> tuple[dict[str, Turn], str]:
    """The schedules of so many stages a rank, and the one that `auto` has kept."""
    batch, samples = batch_of(case), case.micro_batch_size * case.micro_batches
    auto = Configuration(folder, OURS[f"auto, {each} a rank"], batch, rank, case.ranks)
    placed = {auto.rank_of_stage: auto}
    for name in PLACEMENTS[each]:
        other = Configuration(folder, OURS[name], batch, rank, case.ranks)
        placed.setdefault(other.rank_of_stage, other)
    steps: dict[str, Callable[[], Any]] = {"auto": auto.step}
    orders = set()
    for at, configuration in placed.items():
        for schedule in named_for(at, case.micro_batches):
            if schedule.name != SEQUENTIAL and schedule.ranks not in orders:
                orders.add(schedule.ranks)
                steps[schedule.name] = partial(_run, configuration, schedule)
    split = f", {len(auto.schedule.split)} backwards split" if auto.schedule.split else ""
    kept = f"{auto.schedule.name}{split}"
    return {f"{name}, {each} a rank": Turn(step, samples) for name, step in steps.items()}, kept


def _run(configuration: Configuration, schedule: Schedule) -> None:
    configuration.run(configuration.lowered(schedule))


def worker(
    rank: int,
    case: Case,
    folders: Mapping[Planned, Path],
    rendezvous: str,
    rounds: int,
    results: Any,
) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=case.ranks)
    turns: dict[str, Turn] = {}
    kept = {}
    for each in EACH:
        folder = folders[OURS[f"auto, {each} a rank"].planned]
        of_each, kept[each] = turns_of(case, each, rank, folder)
        turns |= of_each
    order, rows = random.Random(0), []
    for number in range(rounds + 1):  # one to warm up
        names = list(turns)
        order.shuffle(names)
        for name in names:
            row = measure(name, turns[name], case.ranks)
            if rank == 0 and number:
                rows.append({"round": number, **row})
    if rank == 0:
        results.put((kept, rows))
    dist.barrier()
    os._exit(0)


def run_model(family: str, ranks: int, rounds: int) -> dict[str, Any]:
    """The rows of one model, their upper quartiles, and `auto` as a share of the best named
    schedule, for each number of stages a rank."""
    case = Case(ranks=ranks, micro_batches=8, micro_batch_size=2, family=family)
    with tempfile.TemporaryDirectory() as temporary:
        folders = plans_of(case, [f"auto, {each} a rank" for each in EACH], temporary)
        arguments = (folders, f"file://{temporary}/rendezvous", rounds)
        [(kept, rows)] = together(worker, case, arguments, answers=1)
    rates = rates_of(rows)
    found: dict[str, Any] = {"samples_per_s": rates, "rows": rows}
    for each in EACH:
        own = {name: rate for name, rate in rates.items() if name.endswith(f", {each} a rank")}
        auto = own.pop(f"auto, {each} a rank")
        best = max(own, key=lambda name: own[name])
        found[f"{each} a rank"] = {
            "auto_keeps": kept[each],
            "best_named": best,
            "auto_of_best": round(auto / own[best], 4),
        }
        print(
            f"{family:8} {ranks} ranks, {each} a rank: auto ({kept[each]}) {auto:.2f} samples/s, "
            f"{auto / own[best]:.1%} of {best.partition(',')[0]}; "
            + ", ".join(f"{name.partition(',')[0]} {rate:.2f}" for name, rate in own.items()),
            flush=True,
        )
    return found


def rates_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The upper quartile of each schedule's quiet samples: what disturbs a sample makes it
    slower."""
    rates = {}
    for name in dict.fromkeys(row["configuration"] for row in rows):
        own = [row for row in rows if row["configuration"] == name]
        quiet = [row for row in own if row["others_share"] <= QUIET] or own
        samples = sorted(row["samples_per_s"] for row in quiet)
        rates[name] = round(samples[3 * (len(samples) - 1) // 4], 3)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    path = RESULTS / "auto_schedule.json"
    models = json.loads(path.read_text())["models"] if path.exists() else {}
    for ranks in arguments.ranks:
        for family in arguments.models:
            models[f"{family}, {ranks} ranks"] = run_model(family, ranks, arguments.rounds)
            write_result("auto_schedule", {"models": models})


if __name__ == "__main__":
    main()
