"""The state of all ranks after a step -> a checkpoint on disk, written while training continues.

A rank copies its state to host memory and returns to its steps; a thread writes the copy and posts
the names of its files to the shared store. Once all ranks have posted, rank 0's thread writes the
manifest, renames the folder and removes old checkpoints; if a rank failed, it posts the error to
all. The next checkpoint, and the end of the run, wait for the previous checkpoint on all ranks.
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

from ..config.settings import RunConfig
from ..distributed.process_groups import SharedStore, World
from ..errors import STORE_IS_GONE, AsyncPipeError, TransportError
from ..executor.instrumented import Activities, Activity
from ..formatting import write_bytes, write_duration
from ..plan.plan import Plan
from ..tensor_files import shard_name, write_index
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
from .remote import copy
from .storage import names_by_stage, write_tensors

_FAILED = "failed"


@dataclass(frozen=True)
class CheckpointPart:
    """One rank's part of a checkpoint.

    weights: the weights of each of its stages.
    state: everything else.
    """

    weights: Mapping[int, Mapping[str, Tensor]]
    state: Mapping[str, Tensor]


class Saver:
    """Writes the checkpoints of a run; every rank has one.

    newest: the last checkpoint, on rank 0.

    Arguments:
    config: the numbers of checkpoints to keep, and the location to copy them to.
    tell: called on rank 0 with a message for each checkpoint, by the thread that calls `poll`.
    unused: names of the weights that no stage reads, if known.
    """

    def __init__(
        self,
        run_folder: Path,
        plan: Plan,
        world: World,
        board: SharedStore,
        activities: Activities,
        config: RunConfig,
        *,
        tell: Callable[[str], None],
        unused: Collection[str] = (),
    ) -> None:
        self.newest: Path | None = None
        self._run_folder, self._plan, self._world, self._board = run_folder, plan, world, board
        self._activities, self._tell, self._unused = activities, tell, unused
        self._last, self._best = config.keep_last, config.keep_best
        self._save_to, self._patience_s = config.save_to, config.patience_s
        self._thread: threading.Thread | None = None
        self._failed: list[AsyncPipeError] = []
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()

    def save(self, part: CheckpointPart, facts: Facts) -> None:
        """Starts writing this rank's part; every rank calls it with the same facts.

        Raises CheckpointError when the previous checkpoint could not be written.
        """
        self.finish()
        self._thread = threading.Thread(
            target=self._try, args=(part, facts), name="checkpoint", daemon=True
        )
        self._thread.start()

    def poll(self) -> None:
        """Reports the checkpoints that were completed meanwhile."""
        while not self._notes.empty():
            self._tell(self._notes.get())

    def finish(self) -> None:
        """Waits for the last checkpoint. Raises CheckpointError when it could not be written."""
        if self._thread is not None:
            with self._activities.during(Activity("writing", "writes a checkpoint")):
                self._thread.join()
            self._thread = None
        self.poll()
        if self._failed:
            raise self._failed.pop()

    def _try(self, part: CheckpointPart, facts: Facts) -> None:
        target = self._run_folder / CHECKPOINTS / name_of(facts.step)
        try:
            self._write(target, part, facts)
        except Exception as error:
            failure = _failure_of(error, self._world.rank, target)
            self._failed.append(failure)
            message = json.dumps({_FAILED: [failure.what, failure.cure]})
            with suppress(RuntimeError):  # The store's process may be gone.
                self._board.post_own(target.name, message)
                if self._world.rank == 0:
                    self._board.post(_outcome(target), message)

    def _write(self, target: Path, part: CheckpointPart, facts: Facts) -> None:
        start_s = time.perf_counter()
        folder = unfinished(target)
        files: dict[str, list[int | str]] = {}
        for path in self._write_own(folder, part):
            sync(path)
            files |= manifest_entry(folder, path)
        self._board.post_own(target.name, json.dumps(files))
        if self._world.rank != 0:
            outcome = self._board.awaited(_outcome(target), 0, wait_s=self._patience_s)
            _checked(outcome or "{}")
            return
        for text in self._board.gathered(target.name, wait_s=self._patience_s):
            files |= _checked(text)
        self._complete(target, files, facts)
        self._board.post(_outcome(target), "{}")
        size = sum(int(entry[0]) for entry in files.values())
        note = f"{target} ({write_bytes(size)} in {write_duration(time.perf_counter() - start_s)})"
        if self._save_to is not None:
            note += f" · {copy(target, self._save_to, last=self._last, best=self._best)}"
        self._notes.put(note)

    def _write_own(self, folder: Path, part: CheckpointPart) -> list[Path]:
        stages, rank = len(self._plan.stages), self._world.rank
        file_of = {
            name: shard_name(stage, stages)
            for stage, tensors in part.weights.items()
            for name in tensors
        }
        tensors = {name: tensor for own in part.weights.values() for name, tensor in own.items()}
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
        for written in (folder / WEIGHTS, folder / STATE, folder):
            sync(written)
        if target.exists():  # damaged, or of a run that continued differently
            remove(target)
        folder.rename(target)
        sync(target.parent)
        self.newest = target
        prune(self._run_folder, last=self._last, best=self._best)


def _outcome(target: Path) -> str:
    """The key under which rank 0 posts that a checkpoint is complete, or why it failed."""
    return f"{target.name}/outcome"


def _checked(text: str) -> dict[str, list[int | str]]:
    """The files that a rank has posted. Raises the error that it posted instead."""
    entries: dict[str, list[int | str]] = json.loads(text)
    if _FAILED in entries:
        raise CheckpointError(*map(str, entries[_FAILED]))
    return entries


def _failure_of(error: Exception, rank: int, target: Path) -> AsyncPipeError:
    if isinstance(error, CheckpointError | TransportError):
        return error
    if isinstance(error, DistError):
        return TransportError(
            f"rank {rank} cannot post its part of {target}: the process that serves the store is "
            "gone.",
            STORE_IS_GONE,
        )
    reason = error.strerror if isinstance(error, OSError) else None
    return CheckpointError(
        f"rank {rank} cannot write {target}: {reason or error}.",
        "Free disk space, or choose another --output; earlier checkpoints are complete, and "
        "--resume auto continues from the newest.",
    )
