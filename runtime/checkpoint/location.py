"""A place where checkpoints lie, each under its name: what fsspec can reach, by URL.

    s3://bucket/run    with the extra asyncpipe[s3]; AWS_ENDPOINT_URL names another server than AWS
    file:///data/run   a folder of this machine
    gs://, abfs://, .. with the package that fsspec names for it

A checkpoint is put file by file and its manifest last; it is removed manifest first. So what has a
manifest is whole, and all else is as if it were not there. What is fetched is compared with the
manifest before it gets its name. Nothing here imports torch.
"""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from ..errors import AsyncPipeError
from .folders import (
    FACTS,
    MANIFEST,
    CheckpointError,
    Facts,
    damage_of,
    files_of,
    is_name,
    read_facts,
    unfinished,
)

PATIENCE_S = 60.0
"""How long one transfer is tried again when a connection fails or a server is busy."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_PASSING = {errno.EIO, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT, errno.EPIPE, None}
_PASSING_NAMES = ("Connect", "Timeout", "HTTPClient", "IncompleteRead", "ClientPayload")
"""In the names of errors of libraries that are no OSError."""

T = TypeVar("T")


class LocationError(AsyncPipeError):
    """A place that cannot be reached, or that has not what is asked for."""


def is_url(text: str) -> bool:
    """Whether a text names a location rather than a path."""
    return "://" in text


@dataclass(frozen=True, slots=True)
class Location:
    """The place that `url` names; each transfer is given up when it has failed for `patience_s`.

    All that can go wrong raises LocationError.
    """

    url: str
    patience_s: float = PATIENCE_S

    def check_name(self) -> None:
        """Raises LocationError when fsspec does not know such a place; nothing is reached."""
        self._opened()

    def check(self) -> None:
        """Raises LocationError when nothing can be written here."""
        files, base = self._opened()
        probe = f"{base}/.asyncpipe"
        self._tried("written", files.pipe_file, probe, b"")
        self._tried("written", files.rm_file, probe)

    def names(self) -> list[str]:
        """The checkpoints that are here as a whole, in the order of their names."""
        return [name for name, whole in self._folders().items() if whole]

    def put(self, checkpoint: Path) -> None:
        """Copies a checkpoint here; one that has its name already is replaced."""
        files, base = self._opened()
        there = f"{base}/{checkpoint.name}"
        if self.has(checkpoint.name):
            self.remove(checkpoint.name)
        for file in (*files_of(checkpoint), MANIFEST):
            self._tried("written", files.put_file, str(checkpoint / file), f"{there}/{file}")

    def get(self, name: str, target: Path) -> None:
        """Copies a checkpoint to `target`, which is not there before it is whole.

        Raises LocationError also where a file differs from what was put.
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
            told = error.what.removeprefix(f"{aside}/")
            raise LocationError(f"{self.url}/{name} is damaged: {told}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def facts(self, name: str, aside: Path) -> Facts:
        """What a checkpoint says of itself; `aside` is a folder for what is read of it."""
        _, base = self._opened()
        self._check_there(name)
        self._fetch(f"{base}/{name}/{FACTS}", aside / FACTS)
        return read_facts(aside)

    def has(self, name: str) -> bool:
        """Whether the checkpoint of that name is here as a whole."""
        files, base = self._opened()
        files.invalidate_cache()
        return self._tried("read", _is_there, files, f"{base}/{name}/{MANIFEST}")

    def remove(self, name: str) -> None:
        """Removes a checkpoint, or what is there of one."""
        files, base = self._opened()
        path = f"{base}/{name}"
        if self.has(name):
            self._tried("written", files.rm_file, f"{path}/{MANIFEST}")
        files.invalidate_cache()
        if self._tried("read", _is_there, files, path):
            self._tried("written", files.rm, path, True)

    def keep(self, names: set[str]) -> None:
        """Removes all checkpoints but these, and what is left of transfers that were cut short."""
        for name, whole in self._folders().items():
            if not whole or name not in names:
                self.remove(name)

    def _folders(self) -> dict[str, bool]:
        """The checkpoints here by name, and whether each is whole."""
        files, base = self._opened()
        files.invalidate_cache()
        entries = self._tried("read", _entries, files, base)
        names = sorted(
            PurePosixPath(each["name"]).name for each in entries if each["type"] == "directory"
        )
        return {name: self.has(name) for name in names if is_name(name)}

    def _check_there(self, name: str) -> None:
        if not self.has(name):
            there = ", ".join(self.names()) or "none"
            raise LocationError(f"{self.url} has no {name}.", f"Checkpoints there: {there}.")

    def _fetch(self, path: str, target: Path) -> None:
        files, _ = self._opened()
        target.parent.mkdir(parents=True, exist_ok=True)
        self._tried("read", files.get_file, path, str(target))

    def _opened(self) -> tuple[Any, str]:
        """What fsspec reaches the place by, and the place's path there."""
        from fsspec.core import url_to_fs
        from fsspec.utils import get_protocol

        scheme = get_protocol(self.url)
        options = {"auto_mkdir": True} if scheme in ("file", "local") else {}
        try:
            files, base = url_to_fs(self.url, **options)
        except ImportError as error:
            if scheme in ("s3", "s3a"):
                raise LocationError(
                    f"{self.url} needs s3fs, which is not installed.",
                    'pip install "asyncpipe[s3]"',
                ) from error
            raise LocationError(f"{self.url} needs a package: {error}.") from error
        except Exception as error:  # file systems raise what they like, some for want of options
            raise LocationError(
                f"{self.url} is not a place that fsspec can open: {_told(error)}.",
                "Use for example s3://bucket/folder or file:///folder.",
            ) from error
        if not base.strip("/"):
            raise LocationError(f"{self.url} names no folder.", f"{scheme}://bucket/folder")
        return files, base.rstrip("/")

    def _tried(self, done: str, act: Callable[..., T], *arguments: Any) -> T:
        """What `act` gives, tried again while what fails may pass."""
        end_s, pause_s = time.monotonic() + self.patience_s, _FIRST_PAUSE_S
        while True:
            try:
                return act(*arguments)
            except Exception as error:
                if not _may_pass(error):
                    raise self._refusal(error, done) from error
                if time.monotonic() + pause_s > end_s:
                    raise LocationError(
                        f"{self.url} could not be {done} for {self.patience_s:g} s: {_told(error)}."
                    ) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _refusal(self, error: Exception, done: str) -> LocationError:
        if "Credentials" in type(error).__name__:
            return LocationError(
                f"{self.url}: no credentials were found.",
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, or AWS_PROFILE.",
            )
        if isinstance(error, FileNotFoundError):
            return LocationError(
                f"{self.url}: there is no such bucket or folder.", "Make it, or name another."
            )
        return LocationError(f"{self.url} could not be {done}: {_told(error)}.")


def _is_there(files: Any, path: str) -> bool:
    """As `exists`, which takes a server that does not answer for one that says no."""
    try:
        files.info(path)
    except FileNotFoundError:
        return False
    return True


def _entries(files: Any, path: str) -> list[dict[str, Any]]:
    try:
        return list(files.ls(path, detail=True))
    except FileNotFoundError:
        return []


def _may_pass(error: Exception) -> bool:
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    if type(error) is OSError:
        return error.errno in _PASSING
    return any(part in type(error).__name__ for part in _PASSING_NAMES)


def _told(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__
