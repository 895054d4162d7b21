"""Training steps of a generated model, with its ranks in a split over emulated hosts."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..config.settings import SettingsError
from ..distributed.cpu_affinity import read_topology
from ..distributed.failure import RankError
from ..import_path import ISOLATED
from ..monitoring.run_files import number, read_run
from ..plan.forecast import forecast_step, spec_bytes
from ..plan.plan import Plan, read_plan
from .hosts import Host
from .locality_result import SplitTimes
from .options import LocalityOptions, RankOptions
from .splits import Split, hosts_of, lone_ranks, written

SCHEDULE = "1f1b"
_PORT = 29500
_TRAIN = "from asyncpipe.cli import train; train()"


def step_times(
    options: LocalityOptions, split: Split, hosts: Sequence[Host], where: RankOptions
) -> SplitTimes:
    """Trains the model in a split; the first step is not timed.

    Raises SettingsError for a split that the plan does not have the ranks for, RankError with the
    output of a rank that fails.
    """
    assert options.model is not None and options.mbit_s is not None
    plan = read_plan(options.model)
    if (ranks := len(plan.stages)) != sum(split):
        raise SettingsError(
            f"{options.model} has {ranks} stages, and the split {written(split)} {sum(split)} "
            "ranks.",
            f"Give splits of {ranks} ranks.",
        )
    with tempfile.TemporaryDirectory(prefix="asyncpipe-comm-") as scratch:
        run = Path(scratch) / "run"
        _train(_commands(options, plan, split, hosts, where, run))
        seconds = [number(step, "step_ms") / 1000 for step in read_run(run).steps]
    return SplitTimes(
        written(split),
        ranks,
        tuple(host.name for host in hosts[: len(split)]),
        lone_ranks(split, is_ring=False),
        None,
        tuple(seconds[1:]),
        planned_step_s(plan, split, options.mbit_s),
    )


def planned_step_s(plan: Plan, split: Split, mbit_s: float) -> float:
    """The simulated step of the plan's stages on the cores of this machine, with a link of this
    rate wherever neighbors are on different hosts."""
    host = hosts_of(split)
    crossing: dict[tuple[int, int], float] = {
        (source, target): ms for source, target, ms in plan.setting.transfer_ms
    }
    for boundary in plan.boundaries:
        for target in boundary.targets:
            if host[boundary.source] != host[target]:
                edge = (boundary.source, target)
                sent_ms = 8 * spec_bytes(boundary.tensor, plan.sizes) / (1e3 * mbit_s)
                crossing[edge] = crossing.get(edge, 0.0) + sent_ms
    setting = replace(
        plan.setting, transfer_ms=tuple((*edge, ms) for edge, ms in sorted(crossing.items()))
    )
    cores = read_topology().usable
    forecast = forecast_step(
        replace(plan, setting=setting), SCHEDULE, plan.setting.micro_batches, processors=cores
    )
    return forecast.step_ms / 1000


def _commands(
    options: LocalityOptions,
    plan: Plan,
    split: Split,
    hosts: Sequence[Host],
    where: RankOptions,
    run: Path,
) -> list[list[str]]:
    """The command of each rank, as one would start it by hand on its host."""
    given = {
        "schedule": SCHEDULE,
        "micro-batches": plan.setting.micro_batches,
        "steps": options.repeat + 1,
        "threads": 1,
        "eval-batches": 0,
        "log-every": 1,
        "timeout-s": f"{where.timeout_s:g}",
        "world-size": sum(split),
        "rendezvous": f"tcp://{hosts[0].address}:{_PORT}",
        "output": run,
    }
    model = Path(str(options.model)).absolute()  # a host has its own current folder
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    train = (sys.executable, *ISOLATED, "-c", _TRAIN, str(model), *flags, "--json")
    return [
        hosts[place].command(*train, "--rank", str(rank))
        for rank, place in enumerate(hosts_of(split))
    ]


def _train(commands: Sequence[Sequence[str]]) -> None:
    """Runs the ranks to their end; ends all where one is left when this process is interrupted."""
    with contextlib.ExitStack() as started:
        outputs = [started.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        ranks = [
            started.enter_context(_running(command, output.fileno()))
            for command, output in zip(commands, outputs, strict=True)
        ]
        codes = [rank.wait() for rank in ranks]
        for rank, output in enumerate(outputs):
            if codes[rank]:
                output.seek(0)
                lines = output.read().splitlines()
                error = next((line for line in lines if line.startswith("error: ")), "")
                raise RankError(
                    f"rank {rank} ended with exit code {codes[rank]}"
                    f"{': ' if error else ''}{error.removeprefix('error: ')}"
                )


@contextlib.contextmanager
def _running(command: Sequence[str], output: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
