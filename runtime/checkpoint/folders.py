"""A run's folder -> its checkpoints, whether they are whole, and which are kept.

    RUN/checkpoints/step-000500/
        manifest.json       every other file, its size and SHA-256
        checkpoint.json     step, samples, evaluation, settings
        weights/            as in the run's folder: safetensors under original names
        state/              rank-00000.safetensors ..: optimizers and all else

A folder of that name is complete: it is written under another and renamed when all that is in it
has reached the disk. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from ..errors import AsyncPipeError
from ..reading import Origin, known_fields, parse_json, read_text, shaped

CHECKPOINTS = "checkpoints"
FACTS, MANIFEST = "checkpoint.json", "manifest.json"
WEIGHTS, STATE = "weights", "state"
_NAME = re.compile(r"step-(\d{6,})")
SCHEMA = 1


class CheckpointError(AsyncPipeError):
    """A checkpoint that cannot be written or read, or that is of another model."""


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says of itself.

    `samples` is the position in the data, of `length` samples an epoch. `schedule` is the text of
    one that was computed; `trainer` what a run's steps follow from besides tensors. `evaluation` is
    the loss of an evaluation at this very step, and `seconds` what the steps so far took.
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
    return f"step-{step:06}"


def is_name(name: str) -> bool:
    """Whether a checkpoint may be called so."""
    return _NAME.fullmatch(name) is not None


def is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def checkpoints_in(run_folder: Path) -> list[Path]:
    """The checkpoints of a run, the newest first."""
    found = {
        int(named[1]): path
        for path in (run_folder / CHECKPOINTS).glob("step-*")
        if (named := _NAME.fullmatch(path.name)) and path.is_dir()
    }
    return [found[step] for step in sorted(found, reverse=True)]


def read_facts(checkpoint: Path) -> Facts:
    """What a checkpoint says of itself. Raises CheckpointError where that is not to be read."""
    raw = _read_json(checkpoint / FACTS)
    if raw.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{checkpoint} is of schema {raw.get('schema')!r}, this version reads {SCHEMA}.",
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
    """A file's entry in the manifest of `folder`: its bytes and their SHA-256."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return {file.relative_to(folder).as_posix(): [file.stat().st_size, digest]}


def files_of(checkpoint: Path) -> dict[str, tuple[int, str]]:
    """The manifest: file -> bytes and SHA-256. Raises CheckpointError where it is damaged."""
    raw = _read_json(checkpoint / MANIFEST).get("files")
    entries = raw if isinstance(raw, dict) else {}
    files = {
        name: (entry[0], entry[1])
        for name, entry in entries.items()
        if isinstance(entry, list) and [type(part) for part in entry] == [int, str]
        if ".." not in Path(name).parts and not Path(name).is_absolute()
    }
    if FACTS not in files or len(files) != len(entries):
        raise CheckpointError(f"{checkpoint / MANIFEST} lists no checkpoint's files.")
    return files


def damage_of(checkpoint: Path, *, part: int = 0, parts: int = 1) -> str:
    """What is wrong with the files of a checkpoint; "" when they are as they were written.

    Of several ranks each reads its part of them.
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
                return f"{name} is not as it was written (SHA-256)"
    except CheckpointError as error:
        return error.what.removeprefix(f"{checkpoint}/").rstrip(".")
    except OSError as error:
        return f"{error.filename or checkpoint} cannot be read: {error.strerror}"
    return ""


def best_of(checkpoints: Iterable[Path], count: int) -> list[Path]:
    """Those with the lowest evaluation losses, the best first."""
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
    there = checkpoints_in(run_folder)
    kept = {*there[:last], *best_of(there, best)}
    for path in there:
        if path not in kept:
            remove(path)


def remove(checkpoint: Path) -> None:
    """Removes a folder so that, whatever happens, nothing half of it bears its name."""
    going = checkpoint.with_name(f".{checkpoint.name}.old")
    _delete(going)
    checkpoint.rename(going)
    _delete(going)


def _delete(path: Path) -> None:
    """Removes a folder, or a file that is where one should be, as far as that can be done."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def unfinished(checkpoint: Path) -> Path:
    """Where a checkpoint is written before it bears its name."""
    return checkpoint.with_name(f".{checkpoint.name}.part")


def clear_unfinished(run_folder: Path) -> None:
    """Removes what an ended run was about to write or to remove."""
    for path in (run_folder / CHECKPOINTS).glob(".step-*"):
        _delete(path)


def sync(path: Path) -> None:
    """Returns when a file's content, or a folder's list of names, has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
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
