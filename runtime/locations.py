"""A place where folders of files lie, each under a name: what fsspec can reach, by URL.

    s3://bucket/run    with the extra asyncpipe[s3]; AWS_ENDPOINT_URL names another server than AWS
    file:///data/run   a folder of this machine
    gs://, abfs://, .. with the package that fsspec names for it

A folder is put file by file and its manifest last; it is removed manifest first. So what has a
manifest is whole, and all else is as if it were not there. The manifest has the size and the
SHA-256 of each file, and what is fetched is compared with them before it gets its name.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from .errors import AsyncPipeError

MANIFEST = "uploaded.json"
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

    def check(self) -> None:
        """Raises LocationError when nothing can be written here."""
        files, base = self._opened()
        probe = f"{base}/.asyncpipe"
        self._tried("written", files.pipe_file, probe, b"")
        self._tried("written", files.rm_file, probe)

    def names(self) -> list[str]:
        """The folders that are here as a whole, in the order of their names."""
        return [name for name, whole in self._folders().items() if whole]

    def put(self, folder: Path, name: str) -> None:
        """Copies a folder here; one that has this name already is replaced."""
        files, base = self._opened()
        manifest = {
            path.relative_to(folder).as_posix(): _facts_of(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        if self.has(name):
            self.remove(name)
        for file in manifest:
            self._tried("written", files.put_file, str(folder / file), f"{base}/{name}/{file}")
        content = json.dumps({"files": manifest}, indent=1).encode()
        self._tried("written", files.pipe_file, f"{base}/{name}/{MANIFEST}", content)

    def get(self, name: str, target: Path) -> None:
        """Copies the folder of that name to `target`, which is not there before it is whole.

        Raises LocationError also where a file differs from what was put.
        """
        files, base = self._opened()
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}.part")
        shutil.rmtree(aside, ignore_errors=True)
        try:
            for file, facts in self._manifest(name).items():
                path = aside / file
                path.parent.mkdir(parents=True, exist_ok=True)
                self._tried("read", files.get_file, f"{base}/{name}/{file}", str(path))
                if _facts_of(path) != facts:
                    raise LocationError(f"{self.url}/{name}/{file} is not what was written there.")
            aside.replace(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def has(self, name: str) -> bool:
        """Whether the folder of that name is here as a whole."""
        files, base = self._opened()
        files.invalidate_cache()
        return self._tried("read", _is_there, files, f"{base}/{name}/{MANIFEST}")

    def remove(self, name: str) -> None:
        """Removes a folder, or what is there of one."""
        files, base = self._opened()
        path = f"{base}/{name}"
        if self.has(name):
            self._tried("written", files.rm_file, f"{path}/{MANIFEST}")
        files.invalidate_cache()
        if self._tried("read", _is_there, files, path):
            self._tried("written", files.rm, path, True)

    def remove_parts(self) -> None:
        """Removes what is left of folders whose transfer or removal was cut short."""
        for name, whole in self._folders().items():
            if not whole:
                self.remove(name)

    def _folders(self) -> dict[str, bool]:
        """The folders here by name, and whether each is whole."""
        files, base = self._opened()
        files.invalidate_cache()

        entries = self._tried("read", _entries, files, base)
        names = sorted(
            PurePosixPath(each["name"]).name for each in entries if each["type"] == "directory"
        )
        return {name: self.has(name) for name in names}

    def _manifest(self, name: str) -> Mapping[str, Any]:
        files, base = self._opened()
        if not self.has(name):
            there = ", ".join(self.names()) or "nothing"
            raise LocationError(f"{self.url} has no {name}.", f"There is {there}.")
        content = self._tried("read", files.cat_file, f"{base}/{name}/{MANIFEST}")
        try:
            found: dict[str, Any] = dict(json.loads(content)["files"])
        except (ValueError, TypeError, KeyError) as error:
            raise LocationError(f"{self.url}/{name}/{MANIFEST} is damaged: {error}.") from error
        for file in found:
            if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
                raise LocationError(f"{self.url}/{name}/{MANIFEST} names a file outside: {file}.")
        return found

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
        except ValueError as error:
            raise LocationError(
                f"{self.url} is no place that fsspec knows: {error}.",
                "s3://bucket/folder, or file:///folder.",
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


def _facts_of(path: Path) -> dict[str, Any]:
    """What the manifest has of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _may_pass(error: Exception) -> bool:
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    if type(error) is OSError:
        return error.errno in _PASSING
    return any(part in type(error).__name__ for part in _PASSING_NAMES)


def _told(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__
