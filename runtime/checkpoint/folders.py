"""A run's folder -> its checkpoints, their integrity and retention, and the lock of the folder.

    RUN/checkpoints/step-000500/
        manifest.json       every other file, its size and SHA-256
        checkpoint.json     step, samples, evaluation, settings
        weights/            as in the run's folder: safetensors under original names
        state/              rank-00000.safetensors ..: optimizers and all else

A folder of that name is complete: it is written under another name, and renamed when all of its
content has reached the disk.

Only one run at a time may write a folder: the process that leads the run holds a POSIX lock
(`fcntl.lockf`) on a file in it. The lock belongs to that process alone, not to its children, and
the system releases it however the process ends. So a lock file that is left behind locks nothing;
its content, the owner of the lock, is only for messages. On a network file system without locks,
nothing prevents two runs in one folder.

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import IO, Any

from ..config.settings import SettingsError
from ..errors import AsyncPipeError
from ..plan.trust import open_here, verify_no_links
from ..serialization import Origin, known_fields, parse_json, read_text, shaped

CHECKPOINTS = "checkpoints"
FACTS, MANIFEST = "checkpoint.json", "manifest.json"
WEIGHTS, STATE = "weights", "state"
LOOP_FACTS = "loop.json"
"""The facts of a pipeline that a loop of one's own has saved."""
_NAME = re.compile(r"step-(\d{6,})")
SCHEMA = 1


class CheckpointError(AsyncPipeError):
    """A checkpoint cannot be written or read, or belongs to another model."""


@dataclass(frozen=True)
class Facts:
    """The metadata of a checkpoint.

    plan: the name of the plan.
    step: the last completed step.
    samples: the position in the data, in samples.
    length: the samples of an epoch.
    stages, ranks, replicas: their numbers.
    schedule: the text of a computed schedule, if there is one.
    evaluation: the loss of an evaluation at this very step.
    seconds: the time that the steps so far took.
    trainer: the state besides tensors that the next steps depend on.
    settings: the options of the run.
    schema: the version of this format.
    """

    plan: str
    step: int
    samples: int
    length: int
    stages: int
    ranks: int
    replicas: int
    schedule: str = ""
    evaluation: float | None = None
    seconds: float = 0.0
    trainer: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def name_of(step: int) -> str:
    """The name of the checkpoint after a step: `step-000100`."""
    return f"step-{step:06}"


def is_name(name: str) -> bool:
    """True if the text is a checkpoint's name."""
    return _NAME.fullmatch(name) is not None


def is_checkpoint(path: Path) -> bool:
    """True for a folder with the manifest of a complete checkpoint."""
    return (path / MANIFEST).is_file()


def checkpoints_in(run_folder: Path) -> list[Path]:
    """The checkpoints of a run, the newest first."""
    path_of_step = {
        int(named[1]): path
        for path in (run_folder / CHECKPOINTS).glob("step-*")
        if (named := _NAME.fullmatch(path.name)) and path.is_dir()
    }
    return [path_of_step[step] for step in sorted(path_of_step, reverse=True)]


def read_facts(checkpoint: Path) -> Facts:
    """Reads the metadata of a checkpoint. Raises CheckpointError when it cannot be read."""
    raw = _read_json(checkpoint / FACTS)
    if raw.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{checkpoint} has schema {raw.get('schema')!r}, this version reads {SCHEMA}.",
            "Resume with the version that wrote it.",
        )
    origin = Origin(str(checkpoint / FACTS), CheckpointError)
    facts = shaped(Facts, known_fields(Facts, raw), origin)
    for name in ("step", "samples", "length", "stages", "ranks", "replicas"):
        if (count := getattr(facts, name)) < (name == "length"):
            raise origin.refused(f": {name} is {count}.")
    if not 0 <= facts.seconds < inf:
        raise origin.refused(f": seconds is {facts.seconds}.")
    return facts


def manifest_entry(folder: Path, file: Path) -> dict[str, list[int | str]]:
    """A file's entry in the manifest of `folder`: its size in bytes and its SHA-256."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return {file.relative_to(folder).as_posix(): [file.stat().st_size, digest]}


def files_of(checkpoint: Path) -> dict[str, tuple[int, str]]:
    """The manifest: bytes and SHA-256 by file. Raises CheckpointError when it is damaged."""
    raw = _read_json(checkpoint / MANIFEST).get("files")
    entries = raw if isinstance(raw, dict) else {}
    files = {
        name: (entry[0], entry[1])
        for name, entry in entries.items()
        if isinstance(entry, list) and [type(part) for part in entry] == [int, str]
        if ".." not in Path(name).parts and not Path(name).is_absolute()
    }
    if FACTS not in files or len(files) != len(entries):
        raise CheckpointError(f"{checkpoint / MANIFEST} is not the manifest of a checkpoint.")
    return files


def damage_of(checkpoint: Path, *, part: int = 0, parts: int = 1) -> str:
    """The first difference between the files of a checkpoint and its manifest; "" if there is none.

    With several `parts`, checks only every `parts`-th file, beginning with number `part`.
    """
    try:
        entries = sorted(files_of(checkpoint).items())
        for name, (size, digest) in entries[part::parts]:
            file = checkpoint / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size:,} bytes instead of {size:,}"
            if manifest_entry(checkpoint, file)[name][1] != digest:
                return f"{name} does not match its SHA-256"
    except CheckpointError as error:
        return error.what.removeprefix(f"{checkpoint}/").rstrip(".")
    except OSError as error:
        return f"{error.filename or checkpoint} cannot be read: {error.strerror}"
    return ""


def best_of(checkpoints: Iterable[Path], count: int) -> list[Path]:
    """The checkpoints with the lowest evaluation losses, the best first."""
    losses: dict[Path, float] = {}
    for path in checkpoints:
        try:
            loss = read_facts(path).evaluation
        except CheckpointError:
            continue
        if loss is not None:
            losses[path] = loss
    return sorted(losses, key=lambda path: (losses[path], path))[:count]


def prune(run_folder: Path, *, last: int, best: int) -> None:
    """Removes all but the `last` checkpoints and the `best` ones."""
    checkpoints = checkpoints_in(run_folder)
    keep = {*checkpoints[:last], *best_of(checkpoints, best)}
    for path in checkpoints:
        if path not in keep:
            remove(path)


def remove(checkpoint: Path) -> None:
    """Removes a checkpoint; an interruption never leaves a partial one under its name."""
    going = checkpoint.with_name(f".{checkpoint.name}.old")
    _delete(going)
    checkpoint.rename(going)
    _delete(going)


def _delete(path: Path) -> None:
    """Removes a folder, or a file in its place; ignores errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def unfinished(checkpoint: Path) -> Path:
    """The folder in which a checkpoint is written before it is renamed."""
    return checkpoint.with_name(f".{checkpoint.name}.part")


def clear_unfinished(run_folder: Path) -> None:
    """Removes the checkpoints that an earlier run was writing or removing when it ended."""
    for path in (run_folder / CHECKPOINTS).glob(".step-*"):
        _delete(path)


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Writes a file and waits until it is on the disk."""
    path.write_text(text, encoding="utf-8")
    sync(path)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing.")
    origin = Origin(f"{path} is damaged: it", CheckpointError)
    raw = parse_json(read_text(path, origin), origin, finite=False)
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return raw


_LOCK_NAME = ".lock"
_HELD = (errno.EAGAIN, errno.EACCES)


class FolderInUse(SettingsError):
    """Another running process has locked the folder."""


class FolderLock:
    """Locks a folder against other runs, or sweeps, until its `with` block or this process ends."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._file: IO[str] | None = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def take(self, folder: Path) -> None:
        """Locks the folder, which is created if necessary.

        Raises FolderInUse when another process has locked it; SettingsError for a link that leads
        out of the folder; OSError when nothing can be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        verify_no_links(folder, SettingsError)
        descriptor = open_here(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        file = open(descriptor, "a+", encoding="utf-8")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                with file:
                    raise self._refusal(folder, file) from None
        self._file = file
        with contextlib.suppress(OSError):  # on a full disk the owner stays unknown
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()

    def _refusal(self, folder: Path, file: IO[str]) -> FolderInUse:
        file.seek(0)
        owner = re.match(r"process \d{1,10} on [\w.-]{1,255}", file.read(300))
        who = f", {owner[0]}" if owner else ""
        return FolderInUse(
            f"{folder} is being written by another {self._kind}{who}.",
            "Wait for its end, or end it; or choose another folder with --output.",
        )
