"""A function and cases -> its results from a few processes; a case may end its process.

`concurrent.futures` gives up the whole run when one process is killed by a signal. Here the result
of its current case is `Died`, and a new process takes the next case.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

Case = TypeVar("Case")
Result = TypeVar("Result")
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Died:
    """The process ended during a case."""

    why: str


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection
    case: Any = None
    since: float = field(default_factory=time.monotonic)
    done: int = 0


def each(
    function: Callable[[Case], Result],
    cases: Sequence[Case],
    *,
    processes: int,
    limit_s: float,
    cases_a_process: int = 60,
) -> Iterator[tuple[Case, Result | Died]]:
    """Every case with its result, in the order of completion. A case over `limit_s` ends its
    process."""
    waiting = list(reversed(cases))
    workers: list[_Worker] = []
    try:
        while waiting or workers:
            while waiting and len(workers) < processes:
                workers.append(_start(function))
                _hand(workers[-1], waiting)
            ready = wait([worker.pipe for worker in workers], timeout=1.0)
            for worker in list(workers):
                late = time.monotonic() - worker.since > limit_s
                if worker.pipe not in ready and not late:
                    continue
                case = worker.case
                answer = (
                    _answer(worker, limit_s) if worker.pipe in ready else _kill(worker, limit_s)
                )
                spent = isinstance(answer, Died) or worker.done >= cases_a_process
                if spent or not waiting:
                    _end(worker)
                    workers.remove(worker)
                else:
                    _hand(worker, waiting)
                yield case, answer
    finally:
        for worker in workers:
            worker.process.kill()


def _start(function: Callable[[Any], Any]) -> _Worker:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(function, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _serve(function: Callable[[Any], Any], pipe: Connection) -> None:
    with suppress(EOFError, BrokenPipeError):  # the run was stopped
        while (case := pipe.recv()) is not None:
            pipe.send(function(case))


def _hand(worker: _Worker, waiting: list[Any]) -> None:
    worker.case = waiting.pop()
    worker.since = time.monotonic()
    worker.done += 1
    worker.pipe.send(worker.case)


def _answer(worker: _Worker, limit_s: float) -> Any:
    try:
        return worker.pipe.recv()
    except EOFError:
        return _kill(worker, limit_s)


def _kill(worker: _Worker, limit_s: float) -> Died:
    worker.process.join(timeout=1.0)
    if worker.process.exitcode is None:
        worker.process.kill()
        worker.process.join()
        return Died(f"took over {limit_s:.0f} s and was stopped")
    code = worker.process.exitcode
    return Died(f"ended its process ({f'signal {-code}' if code < 0 else f'exit status {code}'})")


def _end(worker: _Worker) -> None:
    if worker.process.is_alive():
        worker.pipe.send(None)
    worker.process.join(timeout=5.0)
    worker.pipe.close()
