"""Samples a second of one model: our pipelines, torch's, DDP, and the limit of the machine.

All configurations of a case live in one group of processes with one thread each, and alternate in
shuffled rounds, so that the load of the machine affects all alike; a sample counts only if other
processes used at most 4% of the cores meanwhile. Depending on its place in memory a configuration
may be a tenth faster or slower for the lifetime of its processes: so there are several groups, one
after the other, that build the configurations in different orders. The ceiling is the speed of
independent copies of the plain model, one per process, which no equal computation can exceed. An
asynchronous sample is the work of the slowest rank between its first step and its last, as in the
middle of a run; it steps after every batch, or with k = 1 after every micro-batch. The processes
keep the memory that they free, as ranks of `asyncpipe-train` do; torch's configurations gain from
that too.

With `--memory` each pipeline has its own processes, and their peak memory is measured, ours and
torch's with the same cuts.

    python benchmarks/runtime.py                        results/runtime_<case>.json, every case
    python benchmarks/runtime.py --cases gpt-m8 --rounds 9 --only 1f1b "torch 1F1B"
    python benchmarks/runtime.py --cases wide-m8 --only 1f1b "torch 1F1B" --label named
    python benchmarks/runtime.py --memory               results/runtime_memory.json
"""

import argparse
import os
import random
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import peers
import torch
import torch.distributed as dist
from cases import (
    QUIET,
    Case,
    Turn,
    batch_of,
    build_model,
    measure,
    plans_of,
    together,
)
from machine import write_result
from pipelines import ASYNC_MICRO_BATCHES, OURS, Planned, pipeline

from asyncpipe.runtime.process import keep_freed_memory

CEILING = "ceiling: independent copies"
CEILING_K1 = "the same, k = 1"
CEILING_COMPILED, DDP_COMPILED = "the same, compiled", "DDP, compiled"
MEMORY_STEPS = 4
SAME = (("gpipe", "torch GPipe"), ("1f1b", "torch 1F1B"))


LEADING = (
    "DDP",
    "gpipe",
    "torch GPipe",
    "1f1b",
    "torch 1F1B",
    "interleaved, 2 a rank",
    "interleaved, 4 a rank",
    "torch Interleaved1F1B",
    "zb-v",
    "torch ZBVZeroBubble",
    "torch DualPipeV",
    "auto, 2 a rank",
    "auto, 4 a rank",
    "async-1f1b, stash",
    "async-1f1b, none",
    "async-1f1b, stash, k = 1",
    "async-1f1b, stash, as far ahead as by default",
    "async-1f1b, stash, ahead 2x",
    "async-1f1b, stash, ahead 2x, k = 1",
    CEILING_K1,
)
CASES = {
    "gpt-m8": Case(
        ranks=2,
        micro_batches=8,
        only=(
            *LEADING,
            "zb-h1",
            "looped-bfs, 2 a rank",
            "auto, 1 a rank",
            "plain model, 2 threads",
        ),
    ),
    "gpt-m16": Case(ranks=2, micro_batches=16, only=LEADING),
    "llama-m8": Case(ranks=2, micro_batches=8, family="llama", only=LEADING),
    "t5-m8": Case(ranks=2, micro_batches=8, family="t5", only=LEADING),
    "resnet-m8": Case(ranks=2, micro_batches=8, family="resnet", only=LEADING),
    "vit-m8": Case(ranks=2, micro_batches=8, family="vit", only=LEADING),
    "compiled-m8": Case(
        ranks=2,
        micro_batches=8,
        only=("DDP", DDP_COMPILED, "1f1b", "1f1b, compiled", CEILING_COMPILED),
    ),
    # Weights are many and samples are few: what data parallelism sends is as much as it computes.
    "wide-m8": Case(
        ranks=2,
        micro_batches=8,
        micro_batch_size=1,
        model={"width": 512, "heads": 16, "vocabulary": 16384},
        only=LEADING,
    ),
    # Of processes there are more than cores.
    "four-m16": Case(
        ranks=4,
        micro_batches=16,
        only=(
            *("DDP", "1f1b", "torch 1F1B", "interleaved, 2 a rank", "torch Interleaved1F1B"),
            *("zb-v", "torch DualPipeV", "async-1f1b, stash"),
        ),
    ),
}


def turns_of(
    case: Case,
    rank: int,
    folders: Mapping[Planned, Path],
    only: Sequence[str],
    order: random.Random,
) -> dict[str, Turn]:
    """The configurations of a case on this rank, those named in `only` or all, built in the order
    of `order`: the first ones get the better places in memory."""
    batch, samples = batch_of(case), case.micro_batch_size * case.micro_batches
    costs = _agreed(peers.unit_costs(build_model(case), batch[0]))

    def ceiling() -> Turn:
        return Turn(peers.plain(build_model(case), batch), case.ranks * samples)

    def compiled() -> Turn:
        return Turn(peers.plain(build_model(case, compiled=True), batch), case.ranks * samples)

    def compiled_parallel() -> Turn:
        model = build_model(case, compiled=True)
        return Turn(peers.data_parallel(model, batch, rank, case.ranks), samples)

    def alone(threads: int) -> Turn:
        step = peers.plain(build_model(case), batch) if rank == 0 else _nothing
        return Turn(step, samples, threads)

    def data_parallel() -> Turn:
        return Turn(peers.data_parallel(build_model(case), batch, rank, case.ranks), samples)

    def torchs(name: str) -> Turn:
        model = build_model(case)
        return Turn(peers.pipelined(model, batch, rank, case.ranks, name, costs), samples)

    def our_own(name: str) -> Turn:
        step = pipeline(folders, OURS[name], batch, rank, case.ranks)
        is_async = OURS[name].is_async
        return Turn(step, case.micro_batch_size * ASYNC_MICRO_BATCHES if is_async else samples)

    def ceiling_k1() -> Turn:
        return Turn(peers.plain(build_model(case), batch, step_every=1), case.ranks * samples)

    possible: dict[str, Callable[[], Turn]] = {
        "plain model, 1 thread": partial(alone, 1),
        f"plain model, {case.ranks} threads": partial(alone, case.ranks),
        "DDP": data_parallel,
        CEILING_K1: ceiling_k1,
        CEILING_COMPILED: compiled,
        DDP_COMPILED: compiled_parallel,
        **{
            name: partial(torchs, name)
            for name in peers.TORCH
            if peers.is_possible(name, case.ranks, case.micro_batches, len(costs))
        },
        **{name: partial(our_own, name) for name in OURS},
    }
    wanted = {
        CEILING: ceiling,
        **{name: make for name, make in possible.items() if not only or name in only},
    }
    names = list(wanted)
    order.shuffle(names)
    return {name: wanted[name]() for name in names}


def memory_of(
    rank: int,
    case: Case,
    folders: Mapping[Planned, Path],
    rendezvous: str,
    name: str,
    costs: Sequence[float],
    results: Any,
) -> None:
    """MiB at the peak of some steps above a rank's memory before it builds anything."""
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=case.ranks)
    batch = batch_of(case)
    before = _memory("VmRSS")
    if name in OURS:
        step = pipeline(folders, OURS[name], batch, rank, case.ranks)
    else:
        step = peers.pipelined(build_model(case), batch, rank, case.ranks, name, costs)
    step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for _ in range(MEMORY_STEPS):
        step()
    results.put((rank, round(_memory("VmHWM") - before, 1)))
    dist.barrier()
    os._exit(0)


def _memory(name: str) -> float:
    """A value of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def _nothing() -> None:
    """The turn of ranks that a configuration leaves idle."""


def _agreed(costs: list[float]) -> list[float]:
    """Rank 0's numbers, so that all ranks cut alike."""
    given = [costs]
    dist.broadcast_object_list(given, src=0)
    return given[0]


def worker(
    rank: int,
    case: Case,
    folders: Mapping[Planned, Path],
    rendezvous: str,
    group: int,
    rounds: int,
    only: Sequence[str],
    results: Any,
) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=case.ranks)
    order, rows = random.Random(group), []
    turns = turns_of(case, rank, folders, only, order)
    for number in range(rounds + 2):  # two to warm up
        names = list(turns)
        order.shuffle(names)
        for name in names:
            row = measure(name, turns[name], case.ranks)
            if rank == 0 and number >= 2:
                rows.append({"group": group + 1, "round": number - 1, **row})
    if rank == 0:
        results.put(rows)
    dist.barrier()
    os._exit(0)  # torch's schedules leave groups and threads behind that end badly


def run_case(case: Case, groups: int, rounds: int, only: Sequence[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folders = plans_of(case, [name for name in OURS if not only or name in only], temporary)
        for group in range(groups):
            rendezvous = f"file://{temporary}/rendezvous{group}"
            [of_group] = together(
                worker, case, (folders, rendezvous, group, rounds, only), answers=1
            )
            rows += of_group
    return rows


def run_memory(case: Case) -> list[dict[str, Any]]:
    """Each schedule that torch has too, ours and theirs, both with the cuts for torch."""
    table = []
    costs = peers.unit_costs(build_model(case), batch_of(case)[0])
    edges = peers.cut_units(costs, case.ranks, each=1, v_shaped=False)
    cut_at = peers.names_cut_before(edges, len(costs))
    with tempfile.TemporaryDirectory() as temporary:
        ours = [name for pair in SAME for name in pair if name in OURS]
        folders = plans_of(case, ours, temporary, cut_at)
        for number, name in enumerate(name for pair in SAME for name in pair):
            rendezvous = f"file://{temporary}/rendezvous{number}"
            arguments = (folders, rendezvous, name, costs)
            answers = together(memory_of, case, arguments, answers=case.ranks)
            peaks = [mib for _, mib in sorted(answers)]
            print(f"{name:30} {'  '.join(f'{mib:8.1f}' for mib in peaks)} MiB", flush=True)
            table.append({"configuration": name, "peak_mib": peaks})
    return table


def table_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Medians of the quiet samples, the fastest first, with the fraction of the ceiling."""
    table = []
    for name in dict.fromkeys(row["configuration"] for row in rows):
        mine = [row for row in rows if row["configuration"] == name]
        quiet = [row for row in mine if row["others_share"] <= QUIET] or mine
        rates = [row["samples_per_s"] for row in quiet]
        table.append(
            {
                "configuration": name,
                "samples_per_s": statistics.median(rates),
                "least": min(rates),
                "most": max(rates),
                "core_s_per_sample": statistics.median(row["core_s_per_sample"] for row in quiet),
                "quiet": len(quiet) if quiet is not mine else 0,
                "of": len(mine),
            }
        )
    ceiling = next(entry for entry in table if entry["configuration"] == CEILING)
    for entry in table:
        entry["of_ceiling"] = round(entry["samples_per_s"] / ceiling["samples_per_s"], 4)
        work = entry["core_s_per_sample"] / ceiling["core_s_per_sample"] - 1
        entry["extra_work"] = round(work, 4)
    return sorted(table, key=lambda entry: -entry["samples_per_s"])


def show(name: str, table: Sequence[Mapping[str, Any]]) -> None:
    print(f"\n{name:46} samples/s   least    most  of ceiling  extra work  quiet")
    for entry in table:
        print(
            f"{entry['configuration']:46} {entry['samples_per_s']:9.2f} {entry['least']:7.2f} "
            f"{entry['most']:7.2f} {entry['of_ceiling']:11.1%} {entry['extra_work']:+11.1%} "
            f"{entry['quiet']:3}/{entry['of']}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--groups", type=int, default=3, help="groups of new processes")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each group")
    parser.add_argument("--only", nargs="*", default=[], help="names of configurations")
    parser.add_argument("--label", help="keep the results of --only under this name")
    parser.add_argument("--memory", action="store_true", help="peak memory instead of speed")
    arguments = parser.parse_args()
    known = {*OURS, *peers.TORCH, "DDP", CEILING, CEILING_K1, CEILING_COMPILED, DDP_COMPILED}
    for name in arguments.only:
        if name not in known and not re.match(r"plain model, \d+ threads?$", name):
            parser.error(f"no configuration {name!r}: {', '.join(sorted(known))}")
    if arguments.memory:
        for name in arguments.cases[:1]:
            table = run_memory(CASES[name])
            write_result("runtime_memory", {"case": asdict(CASES[name]), "table": table})
        return
    for name in arguments.cases:
        case = CASES[name]
        rows = run_case(case, arguments.groups, arguments.rounds, arguments.only or case.only)
        table = table_of(rows)
        show(name, table)
        kept = {"case": asdict(case), "table": table, "rows": rows}
        if arguments.label:
            write_result(f"runtime_{name}_{arguments.label}", kept)
        elif not arguments.only:
            write_result(f"runtime_{name}", kept)


if __name__ == "__main__":
    main()
