"""What ranks give between two steps -> a checkpoint on disk, while they go on.

A rank copies what it has to host memory and returns to its steps; a thread of it writes that, and
tells the thread of rank 0 over the board which files there are. When all have, that one writes the
manifest, gives the folder its name, and removes what is not to be kept, or tells all what went
wrong. The next checkpoint, and the end of the run, wait for the one before, on all ranks alike.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.distributed import DistError

from ..activity import Activities, Activity
from ..errors import AsyncPipeError, TransportError
from ..launching.world import World
from ..plan import Plan
from ..tensors import shard_name, write_index
from ..training.board import Board
from ..training.export import names_by_stage
from .elsewhere import copy
from .folders import (
    CHECKPOINTS,
    FACTS,
    MANIFEST,
    SCHEMA,
    STATE,
    WEIGHTS,
    CheckpointError,
    Facts,
    manifest_entry,
    name_of,
    prune,
    remove,
    sync,
    unfinished,
    write_text,
)

_FAILED = "failed"


@dataclass(frozen=True)
class Part:
    """What one rank contributes: the weights of each of its stages, and all else."""

    weights: Mapping[int, Mapping[str, Tensor]]
    state: Mapping[str, Tensor]


class Saver:
    """Writes the checkpoints of one run; every rank has one. `last` and `best` say how many are
    kept, `save_to` where they are copied to; `tell` is told on rank 0 of each that there is, by the
    thread that calls `poll`. `newest` is the last one, on rank 0. `unused` are the names of the
    weights that no stage reads, as far as they are known."""

    def __init__(
        self,
        run_folder: Path,
        plan: Plan,
        world: World,
        board: Board,
        activities: Activities,
        *,
        last: int,
        best: int,
        save_to: str | None,
        patience_s: float,
        tell: Callable[[str], None],
        unused: Collection[str] = (),
    ) -> None:
        self.newest: Path | None = None
        self._run_folder, self._plan, self._world, self._board = run_folder, plan, world, board
        self._activities, self._tell, self._unused = activities, tell, unused
        self._last, self._best, self._save_to, self._patience_s = last, best, save_to, patience_s
        self._thread: threading.Thread | None = None
        self._failed: list[AsyncPipeError] = []
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()

    def save(self, part: Part, facts: Facts) -> None:
        """Begins to write what this rank contributes; every rank calls it, with the same facts.

        Raises CheckpointError where the checkpoint before could not be written.
        """
        self.finish()
        self._thread = threading.Thread(
            target=self._try, args=(part, facts), name="checkpoint", daemon=True
        )
        self._thread.start()

    def poll(self) -> None:
        """Tells of what was written meanwhile."""
        while not self._notes.empty():
            self._tell(self._notes.get())

    def finish(self) -> None:
        """Waits for the last checkpoint. Raises CheckpointError where it could not be written."""
        if self._thread is not None:
            with self._activities.during(Activity("other", "writes a checkpoint")):
                self._thread.join()
            self._thread = None
        self.poll()
        if self._failed:
            raise self._failed.pop()

    def _try(self, part: Part, facts: Facts) -> None:
        target = self._run_folder / CHECKPOINTS / name_of(facts.step)
        try:
            self._write(target, part, facts)
        except Exception as error:
            failure = _failure_of(error, self._world.rank, target)
            self._failed.append(failure)
            told = json.dumps({_FAILED: [failure.what, failure.cure]})
            with suppress(RuntimeError):  # Who is gone needs not be told.
                self._board.post_own(target.name, told)
                if self._world.rank == 0:
                    self._board.post(_outcome(target), told)

    def _write(self, target: Path, part: Part, facts: Facts) -> None:
        start_s = time.perf_counter()
        folder = unfinished(target)
        files: dict[str, list[int | str]] = {}
        for path in self._write_own(folder, part):
            sync(path)
            files |= manifest_entry(folder, path)
        self._board.post_own(target.name, json.dumps(files))
        if self._world.rank != 0:
            told = self._board.awaited(_outcome(target), 0, wait_s=self._patience_s)
            _checked(told or "{}")
            return
        for text in self._board.gathered(target.name, wait_s=self._patience_s):
            files |= _checked(text)
        self._complete(target, files, facts)
        self._board.post(_outcome(target), "{}")
        size = sum(int(entry[0]) for entry in files.values()) / (1 << 20)
        told = f"{target} ({size:.1f} MiB in {time.perf_counter() - start_s:.1f} s)"
        if self._save_to is not None:
            told += f" · {copy(target, self._save_to, last=self._last, best=self._best)}"
        self._notes.put(told)

    def _write_own(self, folder: Path, part: Part) -> list[Path]:
        # It loads torch.distributed.checkpoint, which not every run needs.
        from .storage import write_tensors

        stages, rank = len(self._plan.stages), self._world.rank
        file_of = {
            name: shard_name(stage, stages)
            for stage, tensors in part.weights.items()
            for name in tensors
        }
        tensors = {name: one for own in part.weights.values() for name, one in own.items()}
        return [
            *write_tensors(folder / WEIGHTS, tensors, file_of.__getitem__),
            *write_tensors(folder / STATE, part.state, lambda name: f"rank-{rank:05}.safetensors"),
        ]

    def _complete(self, target: Path, files: dict[str, list[int | str]], facts: Facts) -> None:
        folder = unfinished(target)
        (folder / WEIGHTS).mkdir(exist_ok=True)
        names = names_by_stage(self._plan, self._unused)
        total = sum(int(entry[0]) for name, entry in files.items() if name.startswith(WEIGHTS))
        write_index(folder / WEIGHTS, names, total)
        write_text(folder / FACTS, facts.to_json())
        for path in (folder / FACTS, *(folder / WEIGHTS).glob("*.json")):
            sync(path)
            files |= manifest_entry(folder, path)
        content = {"schema": SCHEMA, "files": dict(sorted(files.items()))}
        write_text(folder / MANIFEST, json.dumps(content, indent=1) + "\n")
        for each in (folder / WEIGHTS, folder / STATE, folder):
            sync(each)
        if target.exists():  # a damaged one, or of a run that went on otherwise
            remove(target)
        folder.rename(target)
        sync(target.parent)
        self.newest = target
        prune(self._run_folder, last=self._last, best=self._best)


def _outcome(target: Path) -> str:
    """Under which rank 0 says that a checkpoint is complete, or why it never will be."""
    return f"{target.name}/outcome"


def _checked(text: str) -> dict[str, list[int | str]]:
    """What a rank says of its files. Raises what it failed with."""
    entries: dict[str, list[int | str]] = json.loads(text)
    if _FAILED in entries:
        raise CheckpointError(*map(str, entries[_FAILED]))
    return entries


def _failure_of(error: Exception, rank: int, target: Path) -> AsyncPipeError:
    if isinstance(error, CheckpointError | TransportError):
        return error
    if isinstance(error, DistError):
        return TransportError(
            f"rank {rank} cannot tell the others of {target}: the process that has their store is "
            "gone.",
            "That is torchrun's agent, or rank 0: see why it ended. --resume auto goes on from the "
            "newest checkpoint.",
        )
    told = error.strerror if isinstance(error, OSError) else None
    return CheckpointError(
        f"rank {rank} cannot write {target}: {told or error}.",
        "Make room, or take another --output; earlier checkpoints are whole, and --resume auto "
        "goes on from the newest.",
    )
