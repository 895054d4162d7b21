"""Checkpoints at a URL: copied there after they are written, fetched before a run resumes.

    --save-to s3://bucket/run                 copies each checkpoint there and keeps as many there
    --resume auto --save-to s3://bucket/run   resumes from the newest there, unless the run's folder
                                              has a later one
    --resume s3://bucket/run[/step-000500]    resumes from the newest there, or from that one
    --init-from s3://bucket/run[/step-..]     starts from its weights

A location is a URL that fsspec can open (`runtime/locations.py`).

A checkpoint is uploaded file by file with its manifest last, and removed manifest first. So a
checkpoint with a manifest is complete, and others are ignored. Fetched files are compared with the
manifest before the folder is renamed. Fetching into the run's folder happens before the ranks
start; from then on the checkpoint is like any other there. Nothing here imports torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from ..config.execution_options import ExecutionOptions
from ..config.option_files import checked
from ..config.settings import Settings
from ..locations import LocationError, RemoteFolder, is_there, is_url
from ..options import options_of
from .folders import (
    CHECKPOINTS,
    FACTS,
    MANIFEST,
    CheckpointError,
    Facts,
    checkpoints_in,
    damage_of,
    files_of,
    is_name,
    read_facts,
    unfinished,
)


@dataclass(frozen=True)
class Location(RemoteFolder):
    """A place for checkpoints; all failures raise LocationError."""

    def names(self) -> list[str]:
        """The complete checkpoints here, in the order of their names."""
        return [name for name, whole in self._folders().items() if whole]

    def put(self, checkpoint: Path) -> None:
        """Copies a checkpoint here; replaces one of the same name."""
        files, base = self._opened()
        target = f"{base}/{checkpoint.name}"
        if self.has(checkpoint.name):
            self.remove(checkpoint.name)
        for file in (*files_of(checkpoint), MANIFEST):
            self._tried("written", files.put_file, str(checkpoint / file), f"{target}/{file}")

    def get(self, name: str, target: Path) -> None:
        """Copies a checkpoint to `target`, which appears only when it is complete.

        Raises LocationError also when a file differs from the manifest.
        """
        files, base = self._opened()
        self._check_there(name)
        aside = unfinished(target)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            self._fetch(f"{base}/{name}/{MANIFEST}", aside / MANIFEST)
            for file in files_of(aside):
                self._fetch(f"{base}/{name}/{file}", aside / file)
            if damage := damage_of(aside):
                raise LocationError(f"{self.url}/{name} is damaged: {damage}.")
            aside.replace(target)
        except CheckpointError as error:
            reason = error.what.removeprefix(f"{aside}/")
            raise LocationError(f"{self.url}/{name} is damaged: {reason}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def facts(self, name: str, aside: Path) -> Facts:
        """The metadata of a checkpoint; `aside` is a folder for the fetched file."""
        _, base = self._opened()
        self._check_there(name)
        self._fetch(f"{base}/{name}/{FACTS}", aside / FACTS)
        return read_facts(aside)

    def has(self, name: str) -> bool:
        """True if the checkpoint of that name is here and complete."""
        files, base = self._opened()
        files.invalidate_cache()
        return self._tried("read", is_there, files, f"{base}/{name}/{MANIFEST}")

    def remove(self, name: str) -> None:
        """Removes a checkpoint, complete or not."""
        _, base = self._opened()
        self._clear(f"{base}/{name}", MANIFEST)

    def keep(self, names: set[str]) -> None:
        """Removes all other checkpoints, and the rest of interrupted transfers."""
        for name, whole in self._folders().items():
            if not whole or name not in names:
                self.remove(name)

    def _folders(self) -> dict[str, bool]:
        """The checkpoints here by name, and whether each is complete."""
        files, base = self._opened()
        files.invalidate_cache()
        entries = self._tried("read", _entries, files, base)
        names = sorted(
            PurePosixPath(entry["name"]).name for entry in entries if entry["type"] == "directory"
        )
        return {name: self.has(name) for name in names if is_name(name)}

    def _check_there(self, name: str) -> None:
        if not self.has(name):
            names = ", ".join(self.names()) or "none"
            raise LocationError(f"{self.url} has no {name}.", f"Checkpoints there: {names}.")


def _entries(files: Any, path: str) -> list[dict[str, Any]]:
    try:
        return list(files.ls(path, detail=True))
    except FileNotFoundError:
        return []


AUTO = "auto"
INITIAL = "initial"
"""The subfolder of a run with the checkpoint whose weights it starts from."""


def bring(settings: ExecutionOptions, run: Path) -> None:
    """Fetches the checkpoint that a run starts from into its folder; one process of the run calls
    it.

    Raises LocationError when it cannot be fetched, or when `save_to` cannot be written.
    """
    copies = Location(settings.save_to) if settings.save_to is not None else None
    if copies is not None:
        copies.check()
    if settings.init_from is not None and is_url(settings.init_from):
        location, name = _newest(settings.init_from)
        if not (run / INITIAL / name).exists():
            location.get(name, run / INITIAL / name)
    if settings.resume is not None:
        _bring_newest(settings.resume, run, copies)
    if copies is not None:
        own = checkpoints_in(run)
        later = [name for name in copies.names() if not own or _step(name) > _step(own[0].name)]
        if later:
            raise LocationError(
                f"{copies.url} has a checkpoint of another run: {later[-1]}.",
                "Give --resume auto to continue from it, or --save-to another location to keep it.",
            )


def _bring_newest(resume: str, run: Path, copies: Location | None) -> None:
    """Fetches the checkpoint of `--resume` if it is remote. A restarted run continues from its own
    checkpoints."""
    own = checkpoints_in(run)
    if is_url(resume):
        if not own:
            location, name = _newest(resume)
            location.get(name, run / CHECKPOINTS / name)
    elif resume == AUTO and copies is not None:
        newest = max(copies.names(), key=_step, default=None)
        if newest is not None and (not own or _step(newest) > _step(own[0].name)):
            copies.get(newest, run / CHECKPOINTS / newest)


def options_at(url: str) -> dict[str, Any]:
    """The options of the run whose checkpoint a URL names, except those that apply to a single
    call.

    Raises LocationError when the checkpoint is missing, SettingsError for an unknown option.
    """
    location, name = _newest(url)
    with TemporaryDirectory() as aside:
        saved: Mapping[str, Any] = location.facts(name, Path(aside)).settings
    options = options_of(Settings)
    return {
        name: checked(name, value, url)
        for name, value in saved.items()
        if value is not None and not (name in options and options[name].scope != "run")
    }


def initial_weights(settings: ExecutionOptions, run: Path) -> str | None:
    """The location of a run's initial weights, if not in its generated folder."""
    if settings.init_from is None or not is_url(settings.init_from):
        return settings.init_from
    (checkpoint,) = (path for path in (run / INITIAL).iterdir() if is_name(path.name))
    return str(checkpoint)


def copy(checkpoint: Path, url: str, *, last: int, best: int) -> str:
    """Copies a checkpoint of a run's folder, and removes all there except the `last` ones and the
    `best`.

    Returns the outcome as a message.
    """
    location = Location(url)
    try:
        location.put(checkpoint)
        location.keep(_to_keep(location, last, best))
    except LocationError as error:
        return f"not copied: {error.what}"
    return f"copied to {url}"


def _to_keep(location: Location, last: int, best: int) -> set[str]:
    """As `folders.prune`, but for the checkpoints at the location: the run's folder may be lost."""
    names = sorted(location.names(), key=_step, reverse=True)
    if not best:
        return set(names[:last])
    with TemporaryDirectory() as aside:
        losses = {name: location.facts(name, Path(aside)).evaluation for name in names}
    evaluated = [(loss, name) for name, loss in losses.items() if loss is not None]
    return {*names[:last], *(name for _, name in sorted(evaluated)[:best])}


def _newest(url: str) -> tuple[Location, str]:
    """The location of a URL, and the checkpoint that it names, or else the newest one there."""
    parent, _, last = url.rstrip("/").rpartition("/")
    if is_name(last):
        return Location(parent), last
    location = Location(url)
    newest = max(location.names(), key=_step, default=None)
    if newest is None:
        raise LocationError(f"{url} has no checkpoint.", "--save-to copies those of a run there.")
    return location, newest


def _step(name: str) -> int:
    return int(name.rpartition("-")[2])
