"""Faults that are planted, each named by `asyncpipe-comm diagnose`, and quiet runs without a fault.

    python benchmarks/diagnoses.py --repeat 3 --quiet-runs 20

Each fault is planted on this machine, and the sentence has to be about it. The quiet runs have no
planted fault, and a cause that is found there is a false alarm. The only exception are other
processes, if the machine was busy: the benchmark looks just before and after each run. Requires
root, for emulated hosts, a slow disk and a full one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from machine import busy_core_seconds, write_result
from shaped_links import on_hosts

from asyncpipe.runtime.communication.hosts import Host, hosts

SCRIPTS = Path(sys.executable).parent
COMMAND = (str(SCRIPTS / "asyncpipe-comm"), "diagnose", "--json")
BUSY_CORES, LOOK_S = 0.25, 1.0
"""The cores that other processes use, from which the machine is busy, and how long to look."""
THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_iops_device")
Answer = dict[str, Any]
Diagnosis = Callable[[], Answer]


@dataclass(frozen=True)
class Result:
    """One run.

    found: the causes with a fault, in their order; the sentence is about the first.
    busy_cores: the cores in use before and after the run.
    """

    found: tuple[str, ...]
    sentence: str
    seconds: float
    busy_cores: tuple[float, float]

    @property
    def was_busy(self) -> bool:
        return max(self.busy_cores) > BUSY_CORES

    @property
    def is_false_alarm(self) -> bool:
        """A cause was found that was not there."""
        return bool(set(self.found) - ({"other processes"} if self.was_busy else set()))


def alone(
    *words: str, prefix: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Answer:
    """Two ranks of this machine."""
    done = subprocess.run(
        [*prefix, *COMMAND, *words],
        env=os.environ | dict(variables or {}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answer: Answer = json.loads(done.stdout)
    return answer


def spread(made: Sequence[Host], *words: str) -> Answer:
    """A rank on each of these hosts, which may occur several times."""
    answer: Answer = json.loads(on_hosts(made, *COMMAND, *words)[0])
    return answer


@contextmanager
def placed(split: Sequence[int], *words: str) -> Iterator[Diagnosis]:
    """Ranks on emulated hosts with slow links."""
    names = [f"h{number}" for number in range(1, len(split) + 1)]
    with hosts(names, mbit_s=100) as made:
        ranks = [host for host, count in zip(made, split, strict=True) for _ in range(count)]
        yield partial(spread, ranks, *words)


@contextmanager
def two_interfaces(mbit_s: float | None) -> Iterator[Diagnosis]:
    """Two hosts with a link of this rate between them, which they use, and a fast one."""
    with hosts(["h1", "h2"], mbit_s=mbit_s) as made:
        first, second = made
        pair = ("type", "veth", "peer", "name", "eth1", "netns", str(second.process))
        first.run("ip", "link", "add", "eth1", *pair)
        for number, host in enumerate(made, start=1):
            host.run("ip", "address", "add", f"10.78.0.{number}/24", "dev", "eth1")
            host.run("ip", "link", "set", "eth1", "up")
        yield partial(spread, made)


@contextmanager
def one_core() -> Iterator[Diagnosis]:
    """Both ranks on one core."""
    yield partial(alone, prefix=("taskset", "-c", "0"))


@contextmanager
def thread_level() -> Iterator[Diagnosis]:
    """MPI that only one thread at a time may call."""
    level = {"MPI4PY_RC_THREAD_LEVEL": "serialized"}
    yield partial(alone, "--transport", "mpi", variables=level)


_WITHOUT_PROGRESS = """
from asyncpipe.commands.comm import app
from asyncpipe.runtime.transports.mpi import Progress
Progress._look_after = lambda self: None
app(["diagnose", "--transport", "mpi", "--json"])
"""


@contextmanager
def without_progress() -> Iterator[Diagnosis]:
    """MPI that moves messages only while a rank waits for them: its progress thread ends."""
    ranks = (str(SCRIPTS / "mpiexec"), "-n", "2", sys.executable, "-c", _WITHOUT_PROGRESS)
    yield lambda: json.loads(_run(*ranks))


@contextmanager
def busy_loop() -> Iterator[Diagnosis]:
    """Another process that uses a core of the ranks."""
    loop = subprocess.Popen(["taskset", "-c", "1", sys.executable, "-c", "while True: pass"])
    try:
        yield alone
    finally:
        loop.kill()
        loop.wait()


@contextmanager
def slow_disk(writes_per_s: int) -> Iterator[Path]:
    """A folder on a disk that makes so many writes a second."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        image, folder = Path(name) / "disk", Path(name) / "folder"
        folder.mkdir()
        with image.open("wb") as file:
            file.truncate(256 << 20)
        _run("mkfs.ext4", "-q", str(image))
        device = _run("losetup", "--show", "-f", str(image)).strip()
        stack.callback(_run, "losetup", "-d", device)
        _run("mount", device, str(folder))
        stack.callback(_run, "umount", str(folder))
        number = os.stat(device).st_rdev
        numbers = f"{os.major(number)}:{os.minor(number)}"
        THROTTLE.write_text(f"{numbers} {writes_per_s}")
        stack.callback(THROTTLE.write_text, f"{numbers} 0")
        yield folder


@contextmanager
def slow_folder() -> Iterator[Diagnosis]:
    """A folder on a slow disk."""
    with slow_disk(10) as folder:
        yield partial(alone, "--output", str(folder))


@contextmanager
def full_folder() -> Iterator[Diagnosis]:
    """A folder of a file system that is full."""
    with tempfile.TemporaryDirectory() as name:
        _run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", name)
        try:
            (Path(name) / "all").write_bytes(bytes((1 << 20) - 8192))
            yield partial(alone, "--output", name)
        finally:
            _run("umount", name)


def partitioned(folder: str) -> str:
    """A small model in two stages."""
    model = f"{folder}/model"
    _run(
        *(str(SCRIPTS / "asyncpipe-partition"), "--model", "mlp", "--stages", "2", "--quiet"),
        *("--schedule", "1f1b", "--output", model),
    )
    return model


def training(model: str, run: str, *words: str) -> list[str]:
    """The command that trains it for a few steps."""
    command = [str(SCRIPTS / "asyncpipe-train"), model, "--steps", "10", "--eval-batches", "0"]
    return [*command, "--output", run, "--quiet", "--trust", *words]


@contextmanager
def written_run() -> Iterator[Diagnosis]:
    """A run that writes a checkpoint to a slow disk after every step."""
    with tempfile.TemporaryDirectory() as name, slow_disk(40) as folder:
        run = str(folder / "run")
        _run(*training(partitioned(name), run, "--save-every", "1"))
        yield partial(alone, run)


@contextmanager
def slow_run() -> Iterator[Diagnosis]:
    """A run whose two ranks are on hosts with a slow link between them."""
    with tempfile.TemporaryDirectory() as name, hosts(["h1", "h2"], mbit_s=10) as made:
        words = ("--trace", "3", "--micro-batch-size", "64", "--threads", "1")
        on_hosts(made, *training(partitioned(name), f"{name}/run", *words))
        yield partial(alone, f"{name}/run")


FAULTS: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "lone rank, 4-3-1 with serial endpoints": (
        "placement",
        partial(placed, (4, 3, 1), "--endpoint", "serial"),
    ),
    "MPI thread level serialized": ("progress", thread_level),
    "MPI without a progress thread": ("progress", without_progress),
    "one core for both ranks": ("cores, memory", one_core),
    "slow interface, a fast one is free": ("interface", partial(two_interfaces, 50)),
    "slow folder": ("files", slow_folder),
    "full folder": ("files", full_folder),
    "a checkpoint after every step of a run": ("writing", written_run),
    "a run over slow links": ("communication", slow_run),
    "busy loop on a core": ("other processes", busy_loop),
}
"""Name -> the cause that has to be named, and how the fault is planted."""

CONTROLS: Mapping[str, Callable[[], Any]] = {
    "4-3-1 with concurrent endpoints": partial(placed, (4, 3, 1)),
    "4-2-2 with serial endpoints": partial(placed, (4, 2, 2), "--endpoint", "serial"),
    "two fast interfaces": partial(two_interfaces, None),
}
"""Placements without a fault."""


def _run(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def busy_cores() -> float:
    """The cores that other processes use now."""
    before_s = busy_core_seconds()
    time.sleep(LOOK_S)
    return round((busy_core_seconds() - before_s) / LOOK_S, 2)


def measured(diagnosis: Diagnosis, *, planted: bool) -> Result:
    """One run; the load is not looked at while a fault is planted, which may be a part of it."""
    before = 0.0 if planted else busy_cores()
    start_s = time.perf_counter()
    answer = diagnosis()
    seconds = round(time.perf_counter() - start_s, 1)
    after = 0.0 if planted else busy_cores()
    found = tuple(each["cause"] for each in answer["checks"] if each["verdict"] == "fault")
    sentence = re.sub(rf"{re.escape(tempfile.gettempdir())}/tmp\w+", "FOLDER", answer["sentence"])
    return Result(found, sentence, seconds, (before, after))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3, help="runs of each fault and control")
    parser.add_argument("--quiet-runs", type=int, default=20, help="runs without a fault")
    parser.add_argument("--only", default="", help="a word in the names of faults and controls")
    given = parser.parse_args()
    faults: dict[str, Any] = {}
    for name, (cause, plant) in FAULTS.items():
        if given.only not in name:
            continue
        with plant() as diagnosis:
            runs = [measured(diagnosis, planted=True) for _ in range(given.repeat)]
        named = sum(run.found[:1] == (cause,) for run in runs)
        print(f"{name}: named {named} of {len(runs)}\n    {runs[0].sentence}", flush=True)
        faults[name] = {"cause": cause, "named": named, "runs": list(map(asdict, runs))}
    controls: dict[str, Any] = {}
    for name, plant in CONTROLS.items():
        if given.only not in name:
            continue
        with plant() as diagnosis:
            runs = [measured(diagnosis, planted=False) for _ in range(given.repeat)]
        controls[name] = reported(name, runs)
    quiet = [] if given.only else [measured(alone, planted=False) for _ in range(given.quiet_runs)]
    result = {"faults": faults, "controls": controls, "quiet": reported("no fault", quiet)}
    if not given.only:
        write_result("diagnoses", result)


def reported(name: str, runs: Sequence[Result]) -> dict[str, Any]:
    """Prints and returns the false alarms of runs without a planted fault."""
    false = sum(run.is_false_alarm for run in runs)
    busy = sum(run.was_busy for run in runs)
    print(f"{name}: {false} false alarms in {len(runs)} runs, {busy} on a busy machine", flush=True)
    for run in runs:
        if run.is_false_alarm:
            print(f"    {run.busy_cores[0]:.2f}, {run.busy_cores[1]:.2f} busy: {run.found}")
    return {
        "runs": len(runs),
        "false_alarms": false,
        "on_a_busy_machine": busy,
        "all": list(map(asdict, runs)),
    }


if __name__ == "__main__":
    main()
