"""Microseconds and bytes a second of every transport between two processes of one thread each.

The limit to compare with is a copy within one process (memcpy); raw gloo and raw MPI are limits of
the transports over them. Every round starts a pair of processes in which all transports alternate
in shuffled order, and a pair under mpiexec for MPI, whose progress thread would slow the others;
the results are medians over the rounds in which other processes used at most 4% of the cores (over
all, if there were none), and the minimum.

    one way    half of a round trip: a message there and one of the same size back
    exchange   both ranks send and receive at the same time
    hidden     the same, but each rank computes for 30 ms before it waits: the time beyond that

    python benchmarks/transports.py --rounds 9

MPI is measured where mpi4py and an mpiexec are installed.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from machine import busy_core_seconds, write_result
from torch import Tensor

from asyncpipe.runtime.process import keep_freed_memory
from asyncpipe.runtime.transports import Channel, GlooTransport, ShmTransport, Transport

LATENCIES = {"1 B": 1, "256 B": 256, "4 KiB": 4 * 2**10}
BANDWIDTHS = {"64 KiB": 2**16, "512 KiB": 2**19, "4 MiB": 2**22, "16 MiB": 2**24}
SIZES = LATENCIES | BANDWIDTHS
COMPUTE_S, QUIET, WARM_UP = 0.030, 0.04, 5
LIMIT_S = 1800


class Way(Protocol):
    """How a message of a given size reaches the other rank; posting comes before waiting."""

    def post(self, size: int) -> Any: ...

    def send(self, size: int) -> None: ...

    def wait(self, posted: Any) -> None: ...

    def finish(self, size: int) -> None:
        """Releases the sent buffers to the caller."""


class OverTransport:
    """One of our transports; messages have channels by their size."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.index = {size: [0, 0] for size in SIZES.values()}
        self.content = {size: torch.zeros(size, dtype=torch.uint8) for size in SIZES.values()}
        rank = transport.rank
        self.mine = {size: _channel(n, size, rank) for n, size in enumerate(SIZES.values())}
        self.others = {size: _channel(n, size, 1 - rank) for n, size in enumerate(SIZES.values())}

    def post(self, size: int) -> Any:
        self.index[size][0] += 1
        return self.transport.recv(self.others[size], self.index[size][0])

    def send(self, size: int) -> None:
        self.index[size][1] += 1
        self.transport.send(self.mine[size], self.content[size], self.index[size][1])

    def wait(self, posted: Any) -> None:
        self.transport.wait(posted)

    def finish(self, size: int) -> None:
        self.transport.wait_sent(self.mine[size], self.index[size][1])


def _channel(number: int, size: int, source: int) -> Channel:
    ends = source, 1 - source
    return Channel("activation", "x", *ends, *ends, 2 * number + source, torch.uint8, (size,))


class Raw:
    """Buffers that are reused, without names, checks or time-outs."""

    def __init__(self, rank: int) -> None:
        self.peer = 1 - rank
        self.taken = {size: torch.zeros(size, dtype=torch.uint8) for size in SIZES.values()}
        self.given = {size: torch.zeros(size, dtype=torch.uint8) for size in SIZES.values()}
        self.under_way: Any = None


class RawGloo(Raw):
    def post(self, size: int) -> Any:
        return dist.irecv(self.taken[size], self.peer)

    def send(self, size: int) -> None:
        self.under_way = dist.isend(self.given[size], self.peer)

    def wait(self, posted: Any) -> None:
        posted.wait()

    def finish(self, size: int) -> None:
        self.under_way.wait()


class RawMpi(Raw):
    def __init__(self, rank: int) -> None:
        from mpi4py import MPI

        super().__init__(rank)
        self.world = MPI.COMM_WORLD.Dup()

    def post(self, size: int) -> Any:
        return self.world.Irecv(self.taken[size].numpy(), self.peer)

    def send(self, size: int) -> None:
        self.under_way = self.world.Isend(self.given[size].numpy(), self.peer)

    def wait(self, posted: Any) -> None:
        posted.Wait()

    def finish(self, size: int) -> None:
        self.under_way.Wait()


def one_way(way: Way, rank: int, size: int) -> float:
    """Half a round trip, in seconds."""
    posted = way.post(size)
    start = time.perf_counter()
    if rank == 0:
        way.send(size)
    way.wait(posted)
    if rank == 1:
        way.send(size)
    way.finish(size)
    return (time.perf_counter() - start) / 2


def exchange(way: Way, rank: int, size: int, compute_s: float = 0.0) -> float:
    """Both directions at the same time; seconds beyond the time in which this rank computes."""
    posted = way.post(size)
    dist.barrier()
    start = time.perf_counter()
    way.send(size)
    while time.perf_counter() - start < compute_s:
        pass
    way.wait(posted)
    way.finish(size)
    return time.perf_counter() - start - compute_s


def copy_once(size: int, buffers: dict[int, tuple[Tensor, Tensor]]) -> float:
    source, target = buffers[size]
    start = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - start


def repeated(measure: Callable[[], float], size: int) -> float:
    """The median of a turn, its first ones left out."""
    count = 60 if size <= 2**12 else 20 if size <= 2**19 else 7
    times = [measure() for _ in range(count + WARM_UP)][WARM_UP:]
    return statistics.median(times)


def ways_of(rank: int, over_mpi: bool) -> dict[str, Way]:
    if over_mpi:
        from asyncpipe.runtime.transports import MpiTransport

        return {"mpi": OverTransport(MpiTransport()), "raw MPI": RawMpi(rank)}
    return {
        "shm": OverTransport(ShmTransport()),
        "gloo": OverTransport(GlooTransport()),
        "raw gloo": RawGloo(rank),
    }


def worker(rank: int, folder: Path, number: int, over_mpi: bool) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as in training
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ways = ways_of(rank, over_mpi)
    buffers = {
        size: (torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8))
        for size in SIZES.values()
    }
    turns: list[tuple[str, str, str, Callable[[], float]]] = []
    for label, size in SIZES.items():
        if not over_mpi:
            copy = (lambda s=size: copy_once(s, buffers)) if rank == 0 else (lambda: 0.0)
            turns.append(("memcpy", "one way", label, copy))
        for name, way in ways.items():
            turns.append((name, "one way", label, lambda w=way, s=size: one_way(w, rank, s)))
            if label in BANDWIDTHS:
                for what, busy_s in (("exchange", 0.0), ("hidden", COMPUTE_S)):
                    turns.append(
                        (
                            name,
                            what,
                            label,
                            lambda w=way, s=size, b=busy_s: exchange(w, rank, s, b),
                        )
                    )
    random.Random(number).shuffle(turns)
    rows = []
    for name, what, label, measure in turns:
        dist.barrier()
        busy, own, start = busy_core_seconds(), sum(os.times()[:2]), time.perf_counter()
        seconds = repeated(measure, SIZES[label])
        dist.barrier()
        wall_s = time.perf_counter() - start
        used = torch.tensor([sum(os.times()[:2]) - own], dtype=torch.float64)
        dist.all_reduce(used)
        others = max(0.0, busy_core_seconds() - busy - used.item()) / (2 * wall_s)
        rows.append(
            {
                "round": number,
                "way": name,
                "what": what,
                "size": label,
                "us": round(1e6 * seconds, 2),
                "others_share": round(others, 3),
            }
        )
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    for way in ways.values():
        if isinstance(way, OverTransport):
            way.transport.close()
    dist.barrier()
    dist.destroy_process_group()


def measure_all(rounds: range) -> list[dict[str, Any]]:
    mpiexec = _mpiexec()
    if mpiexec is None:
        print("mpi4py or mpiexec is not installed: MPI is left out")
    rows: list[dict[str, Any]] = []
    for number in rounds:
        rows += _measure(number, None)
        if mpiexec is not None:
            rows += _measure(number, mpiexec)
    return rows


def _measure(number: int, mpiexec: str | None) -> list[dict[str, Any]]:
    """The rows of one round, from a pair of processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--round", str(number), "--worker", folder]
        if mpiexec:
            started = [subprocess.Popen([mpiexec, "-n", "2", *command, "--over-mpi"])]
        else:
            environments = ({**os.environ, "RANK": str(rank)} for rank in range(2))
            started = [subprocess.Popen(command, env=environment) for environment in environments]
        for process in started:
            if process.wait(LIMIT_S):
                raise SystemExit("a rank failed")
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "rows.json").read_text())
    return rows


def report(rows: list[dict[str, Any]], rounds: int) -> None:
    cells: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cells[row["way"], row["what"], row["size"]].append(row)
    tables: dict[str, list[dict[str, Any]]] = {"median_us": [], "least_us": []}
    for what in ("one way", "exchange", "hidden"):
        for way in sorted({way for way, of_what, _ in cells if of_what == what}):
            found = {size: cells[way, what, size] for size in SIZES if (way, what, size) in cells}
            head = {"way": way, "what": what}
            medians = {size: _median(of_cell) for size, of_cell in found.items()}
            least = {size: min(row["us"] for row in of_cell) for size, of_cell in found.items()}
            tables["median_us"].append(head | medians)
            tables["least_us"].append(head | least)
    for title, table in tables.items():
        print(f"\n{title:12} {'':9}" + "".join(f"{size:>10}" for size in SIZES))
        for row in table:
            texts = (f"{row[size]:.1f}" if size in row else "" for size in SIZES)
            print(f"{row['way']:12} {row['what']:9}" + "".join(f"{text:>10}" for text in texts))
    print(f"\n{'GB/s':12} {'(median)':9}" + "".join(f"{size:>10}" for size in BANDWIDTHS))
    for row in tables["median_us"]:
        if row["what"] == "one way":
            rates = "".join(f"{SIZES[size] / row[size] / 1e3:10.1f}" for size in BANDWIDTHS)
            print(f"{row['way']:12} {'one way':9}{rates}")
    others = round(statistics.median(row["others_share"] for row in rows), 3)
    print(f"\nother processes used {others:.0%} of the cores (median)")
    write_result(
        "transports",
        {
            "rounds": rounds,
            "compute_ms": 1e3 * COMPUTE_S,
            "others_share": others,
            **tables,
            "rows": rows,
        },
    )


def _median(rows: list[dict[str, Any]]) -> float:
    """The median over the rounds without other load on the cores, or over all if there are none."""
    quiet = [row["us"] for row in rows if row["others_share"] <= QUIET]
    return round(statistics.median(quiet or [row["us"] for row in rows]), 2)


def _mpiexec() -> str | None:
    """The command that starts MPI's ranks, if mpi4py is installed."""
    beside = Path(sys.executable).parent
    found = shutil.which("mpiexec", path=f"{beside}:{os.environ.get('PATH', '')}")
    return found if find_spec("mpi4py") else None


def _rank() -> int:
    names = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
    return next(int(os.environ[name]) for name in names if name in os.environ)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--over-mpi", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(_rank(), arguments.worker, arguments.round, arguments.over_mpi)
    else:
        report(measure_all(range(arguments.rounds)), arguments.rounds)


if __name__ == "__main__":
    main()
