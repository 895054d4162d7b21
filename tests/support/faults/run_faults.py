"""Faults put into real runs, and what must be true when they are over.

A run is the command itself, with its ranks as processes. A fault comes from outside (a signal to
one rank, a disk that fills, a link that is cut), or from what is the user's own and lies in the
run's process anyway: the code of a stage, as `plant` changes it. So nothing in the product knows
of faults.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from asyncpipe.runtime.checkpoint.folders import checkpoints_in, damage_of
from asyncpipe.runtime.distributed.failure import RankFolder
from asyncpipe.tests.support.processes.quick_python import bin_folder

MOMENTS = ("forward", "backward", "step")
"""Where `plant` can put a fault."""

KILL = "os.kill(os.getpid(), signal.SIGKILL)"

_MEETING = """
import os
import signal
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
MET = dict.fromkeys({moments!r}, 0)


def meet(moment):
    MET[moment] += 1
    if moment == {moment!r} and MET[moment] == {call} and not ({once} and os.path.exists({mark!r})):
        open({mark!r}, "w").close()
        {code}


"""


def plant(
    folder: Path, stage: int, moment: str, call: int, *, code: str = KILL, once: bool = True
) -> None:
    """Changes a stage of a hand-made folder: `code` runs in it at the `call`-th forward, backward
    or optimizer step of its process; `once`, whatever begins again, or each time."""
    mark = folder.with_suffix(".met")
    file = folder / f"stage_{stage}.py"
    meeting = _MEETING.format(
        moments=MOMENTS, moment=moment, call=call, mark=str(mark), code=code, once=once
    )
    text = file.read_text()
    head, begin, end = "import time\n", "        super().__init__()\n", "        return h\n"
    assert all(text.count(anchor) == 1 for anchor in (head, begin, end)), text
    text = text.replace("class Stage(", f"{meeting}class Stage(")
    at_step = "        register_optimizer_step_pre_hook(lambda *_: meet('step'))\n"
    text = text.replace(begin, f"{begin}{at_step}")
    backward = (
        "        if h.requires_grad:\n            h.register_hook(lambda _: meet('backward'))\n"
    )
    file.write_text(text.replace(end, f"        meet('forward')\n{backward}{end}"))


@dataclass(frozen=True)
class Ended:
    """The end of a run: exit code, output, errors, and the seconds from `fault` to the end."""

    code: int
    out: str
    error: str
    after_s: float

    @property
    def first_line(self) -> str:
        """The first line of the error."""
        return self.error.partition("\n")[0]


@dataclass
class FaultyRun:
    """Runs `asyncpipe-train` with real ranks in a folder of its own; checks for leftovers at the
    end. `command` precedes it, such as torchrun with its options; options of None are left
    out."""

    folder: Path
    output: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    scripts: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[], None] | None = None

    def __enter__(self) -> FaultyRun:
        scripts = self.scripts or bin_folder()
        given = {"output": self.output, "threads": 1, "log_every": 1, "data": "clusters"}
        flags = [
            text
            for name, value in (given | {"eval_batches": 0} | dict(self.options)).items()
            if value is not None
            for text in (f"--{name.replace('_', '-')}", str(value))
        ]
        start: list[str | Path] = [*self.command, "asyncpipe-train"]
        start[0], start[-1] = scripts / start[0], scripts / "asyncpipe-train"
        own = self.output.parent / f"{self.output.name}.cwd"
        own.mkdir(exist_ok=True)
        self.own = own.resolve()
        self._segments: set[Path] = set()
        self._fault_s = time.monotonic()
        self.process = subprocess.Popen(
            [*start, self.folder.resolve(), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=own,
            env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "500"} | dict(self.environment),
            preexec_fn=self.before,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in {*self.processes(), self.process.pid}:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if self.process.poll() is None:
            self.process.communicate()

    @property
    def left(self) -> RankFolder:
        return RankFolder(self.output)

    @property
    def step(self) -> int:
        """The last step that any rank has made, in this attempt."""
        return self.left.last_step()

    def wait_for(self, what: Callable[[], Any], limit_s: float = 60.0) -> Any:
        """What that gives, when it gives something."""
        end_s = time.monotonic() + limit_s
        while not (given := what()):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end_s, f"waited {limit_s} s in vain"
            time.sleep(0.01)
        return given

    def wait_for_step(self, step: int = 1, ranks: int = 2) -> dict[int, int]:
        """The process of each rank, when all have made the step."""
        self.wait_for(lambda: all(self.left.step_of(rank) >= step for rank in range(ranks)))
        for process in self.processes():
            self._segments |= segments_of(process)
        return {
            rank: self.wait_for(lambda rank=rank: max(0, self.left.process_of(rank)))
            for rank in range(ranks)
        }

    def wait_for_checkpoint(self) -> None:
        """Until one is being written."""
        folder, found = self.output / "checkpoints", []
        self.wait_for(lambda: folder.is_dir())
        while not found:
            assert self.process.poll() is None, self.process.communicate()
            found = [path for path in os.listdir(folder) if path.endswith(".part")]

    def now(self) -> None:
        """The fault is now."""
        self._fault_s = time.monotonic()

    def processes(self) -> set[int]:
        """All that work in this run's folder."""
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if (entry / "cwd").readlink() == self.own:
                        found.add(int(entry.name))
                except OSError:
                    continue
        return found

    def finish(self, limit_s: float = 60.0) -> Ended:
        """Waits for the end, and looks for what should not be there any more."""
        out, error = self.process.communicate(timeout=limit_s)
        after_s = time.monotonic() - self._fault_s
        self.check_nothing_is_left()
        return Ended(self.process.returncode, out, error, after_s)

    def check_nothing_is_left(self, *, within_s: float = 5.0) -> None:
        """No process, and so no port, no shared memory and no half of a file."""
        end_s = time.monotonic() + within_s
        while left := self.processes():
            assert time.monotonic() < end_s, f"processes {left} are left"
            time.sleep(0.05)
        assert not [segment for segment in self._segments if segment.exists()]
        check_whole(self.output)


def check_whole(output: Path) -> None:
    """Nothing in the folder of a run is half-written."""
    metrics = output / "metrics.jsonl"
    for line in metrics.read_text().splitlines() if metrics.is_file() else ():
        json.loads(line)
    for name in ("*.json", "ranks/*.json"):
        for file in output.glob(name):
            json.loads(file.read_text())
    for checkpoint in checkpoints_in(output):
        assert not damage_of(checkpoint)


def losses(output: Path) -> dict[int, float]:
    """The loss of every step: the last record, where a step has several."""
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["event"] == "step"}


def notes(output: Path, about: str) -> list[str]:
    """The notes about a subject."""
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line["text"] for line in lines if line["event"] == "note" and line["about"] == about]


def segments_of(process: int) -> set[Path]:
    """The files in shared memory that a process has mapped."""
    try:
        maps = Path(f"/proc/{process}/maps").read_text()
    except OSError:
        return set()
    return {Path(word) for word in maps.split() if word.startswith("/dev/shm/")}
