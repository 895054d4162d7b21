"""The values of a sweep -> its runs, their shares of the machine, and their processes.

`lr=1e-3,3e-3` and `[sweep]` in TOML make a run of every combination of values. Concurrent runs
share the cores as ranks do (`runtime/distributed/cpu_affinity.py`): each has its own cores, which
its ranks share. Where cores cannot be divided, each rank computes with fewer threads. GPUs are
divided evenly. All processes end when the process that started them ends.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

from ..config.option_files import SWEEP, checked, read_layers
from ..config.settings import Settings, SettingsError
from ..distributed.cpu_affinity import Cpus, Topology, share_cores
from ..known_names import TRAIN
from ..options import options_of
from ..process import STOPPED, STOPPING, Ended, die_with_parent, handled

Values = Mapping[str, Any]
"""The values of one run by option."""

_NAME_AT_MOST = 100


def lists_of(
    texts: Iterable[str], config: Path | None, given: Container[str]
) -> dict[str, tuple[Any, ...]]:
    """The values of each option to vary. `--sweep` and options that were `given` one value take
    precedence over the file.

    Raises SettingsError as `lists_from_texts`, and for an option that was given both ways.
    """
    of_texts = lists_from_texts(texts)
    for name in of_texts:
        if name in given:
            raise SettingsError(
                f"{name} is given by --sweep and by its own flag.", "Leave one out."
            )
    of_file = lists_of_file(config) if config else {}
    return {name: values for name, values in of_file.items() if name not in given} | of_texts


def lists_from_texts(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """The values of each option, of texts as `--sweep` takes them.

    >>> lists_from_texts(["lr=1e-3,3e-3", "seed=1,2"])
    {'lr': (0.001, 0.003), 'seed': (1, 2)}

    Raises SettingsError for an unknown option, one that cannot be varied, or a wrong value.
    """
    lists: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        flag = f"--sweep {text}"
        name, equals, values = text.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise SettingsError(f"{flag} has no values.", "--sweep lr=1e-3,3e-3")
        if name in lists:
            raise SettingsError(
                f"{flag}: the values of {name} were given already.", "Give them in one list."
            )
        lists[name] = _distinct([value_of(name, word, flag) for word in values.split(",")], flag)
    return lists


def lists_of_file(path: Path) -> dict[str, tuple[Any, ...]]:
    """The values of each option in `[sweep]` of a TOML file; none without that table.

    Raises SettingsError as `lists_from_texts` does.
    """
    return {
        name: values
        for file, content in read_layers(path)
        for name, values in _lists_in(content.get(SWEEP, {}), file)
    }


def _lists_in(table: Any, path: Path) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The lists of the table of one file."""
    if not isinstance(table, dict):
        raise SettingsError(
            f"{path}: sweep is not a table.", "[sweep] and below it lr = [1e-3, 3e-3]"
        )
    for name, values in table.items():
        place = f"{path}: [sweep]"
        _check_name(name, place)
        if not isinstance(values, list) or not values:
            raise SettingsError(
                f"{place} {name} = {values!r} is not a list of values.", f"{name} = [.., ..]"
            )
        yield name, _distinct([checked(name, value, place) for value in values], place)


def variants(lists: Mapping[str, Sequence[Any]]) -> list[Values]:
    """All combinations, the first option outermost.

    >>> [name_of(values) for values in variants({"lr": (0.1, 0.2), "seed": (1, 2)})]
    ['lr=0.1,seed=1', 'lr=0.1,seed=2', 'lr=0.2,seed=1', 'lr=0.2,seed=2']
    """
    return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]


def name_of(values: Values, strategy: str = "") -> str:
    """The name of a run's folder: its strategy and its values. A name that is not valid for a file
    is shortened and gets a hash."""
    pairs = [f"{name}={in_words(value)}" for name, value in values.items()]
    text = ",".join(filter(None, [strategy, *pairs]))
    plain = re.sub(r"[^\w=,.+-]", "_", text)
    if plain == text and len(text) <= _NAME_AT_MOST:
        return text
    return f"{plain[:_NAME_AT_MOST]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def in_words(value: Any) -> str:
    """A value as a person would write it."""
    if isinstance(value, tuple):
        return "/".join(map(in_words, value))
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _check_name(name: str, place: str) -> None:
    options = options_of(Settings)
    legal = tuple(known for known, option in options.items() if option.scope == "run")
    if name in legal:
        return
    if name in options:
        raise SettingsError(f"{place}: {name} cannot differ between runs.", "Leave it out.")
    raise SettingsError(
        f"{place}: {name} is not an option of asyncpipe-train.",
        TRAIN.meant(name, legal, f"Options: {', '.join(legal)}."),
    )


def value_of(name: str, text: str, flag: str) -> Any:
    """The value of an option that may differ between runs, of a text of `flag`. Raises
    SettingsError."""
    _check_name(name, flag)
    return checked(name, options_of(Settings)[name].limit.read(text), flag)


def _distinct(values: Sequence[Any], place: str) -> tuple[Any, ...]:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise SettingsError(f"{place}: {in_words(value)} is there twice.", "Leave one out.")
    return tuple(values)


@dataclass(frozen=True, slots=True)
class Share:
    """The share that one of several concurrent runs has of the machine."""

    cpus: Cpus = frozenset()
    """Its CPUs; empty for all."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to its environment."""


def share_machine(
    jobs: int, topology: Topology, *, ranks: int = 1, gpus: Sequence[str] | None = None
) -> tuple[Share, ...]:
    """The share of each of `jobs` concurrent runs with at most `ranks` ranks. `gpus` are the GPUs
    to divide, in the form of CUDA_VISIBLE_DEVICES.

    Raises SettingsError for more runs than GPUs.
    """
    if jobs == 1:
        return (Share(),)
    if gpus is not None and len(gpus) < jobs:
        raise SettingsError(
            f"--jobs {jobs}, but {len(gpus) or 'no'} GPUs visible: each run needs its own.",
            f"--jobs {max(1, len(gpus))}",
        )
    cpus = share_cores(topology, jobs)
    threads = max(1, topology.usable // (jobs * ranks))
    return tuple(
        Share(
            cpus[job] if cpus else frozenset(),
            ({} if cpus else {"OMP_NUM_THREADS": str(threads)})
            | (
                {"CUDA_VISIBLE_DEVICES": ",".join(_part(gpus, job, jobs))}
                if gpus is not None
                else {}
            ),
        )
        for job in range(jobs)
    )


def _part(items: Sequence[str], index: int, parts: int) -> Sequence[str]:
    return items[len(items) * index // parts : len(items) * (index + 1) // parts]


GRACE_S = 60.0
"""Seconds that a process may take to end after a signal, in which it may write a checkpoint."""

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Child:
    """A process to run, and the file for its output."""

    name: str
    command: tuple[str, ...]
    log: Path


def run_children(
    children: Iterable[Child], shares: Sequence[Share], *, grace_s: float = GRACE_S
) -> Generator[tuple[Child, int]]:
    """Runs one process for each share at a time; yields each with its exit code (-N: signal N) when
    it has ended.

    When the block that reads this ends early, the running processes get SIGINT after Ctrl-C, else
    SIGTERM, and SIGKILL if they still run `grace_s` seconds later.
    """
    waiting = iter(children)
    running: dict[int, tuple[Child, subprocess.Popen[bytes]]] = {}
    last_words = signal.SIGTERM
    try:
        while True:
            for slot, share in enumerate(shares):
                if slot not in running and (child := next(waiting, None)) is not None:
                    running[slot] = child, _start(child, share)
            if not running:
                return
            ended = {slot for slot, (_, process) in running.items() if process.poll() is not None}
            for slot in sorted(ended):
                child, process = running.pop(slot)
                yield child, process.returncode
            if not ended:
                time.sleep(_POLL_S)
    except KeyboardInterrupt:
        last_words = signal.SIGINT
        raise
    finally:
        _end([process for _, process in running.values()], last_words, grace_s)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside the block, SIGTERM and SIGUSR1 raise Ended with the exit code of a stopped run."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Ended(STOPPED)

    with handled(STOPPING, stop):
        yield


def _start(child: Child, share: Share) -> subprocess.Popen[bytes]:
    own = os.sched_getaffinity(0) if share.cpus else None
    with child.log.open("wb") as log:
        if share.cpus:
            os.sched_setaffinity(0, share.cpus)
        try:
            # Ctrl-C is for this process alone, which ends all.
            return subprocess.Popen(
                child.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **share.environment},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        finally:
            if own is not None:
                os.sched_setaffinity(0, own)


def _end(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals, s: float) -> None:
    for process in processes:
        process.send_signal(number)
    end_s = time.monotonic() + s
    for process in processes:
        try:
            process.wait(max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
