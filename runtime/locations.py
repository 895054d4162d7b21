"""A folder at a URL: its files are listed, read and written with retries and one kind of error.

A location is a URL that fsspec can open:

    s3://bucket/run    with s3fs installed; AWS_ENDPOINT_URL selects another server
    file:///data/run   a folder of this machine
    gs://, abfs://, .. with the package that fsspec names for it

Nothing here imports torch.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from .errors import AsyncPipeError
from .extras import install

PATIENCE_S = 60.0
"""How long a transfer is retried when a connection fails or a server is busy."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_PASSING = {errno.EIO, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT, errno.EPIPE, None}
_PASSING_NAMES = ("Connect", "Timeout", "HTTPClient", "IncompleteRead", "ClientPayload")
"""Parts of the names of transient errors of libraries that are not an OSError."""

_CHANGES = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created")
"""The names that file systems give to facts that change with the content of a file."""

T = TypeVar("T")


class LocationError(AsyncPipeError):
    """A location cannot be reached, or lacks the requested checkpoint."""


def is_url(text: str) -> bool:
    """True if a text is a URL rather than a path."""
    return "://" in text


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a location.

    name: its path in the location.
    path: its path in the file system of fsspec.
    bytes: its size.
    version: a text that changes with its content.
    """

    name: str
    path: str
    bytes: int
    version: str


@dataclass(frozen=True)
class RemoteFolder:
    """A folder at a URL; all failures raise LocationError.

    url: where it is.
    patience_s: how long a failing transfer is retried.
    """

    url: str
    patience_s: float = PATIENCE_S

    def check_name(self) -> None:
        """Raises LocationError for a URL that fsspec cannot open. Makes no connection."""
        self._opened()

    def check(self) -> None:
        """Raises LocationError when nothing can be written here."""
        files, base = self._opened()
        probe = f"{base}/.asyncpipe"
        self._tried("written", files.pipe_file, probe, b"")
        self._tried("written", files.rm_file, probe)

    def list(self) -> list[RemoteFile]:
        """The files here and below, by their names; the file itself for the URL of a file.

        Raises LocationError if there are none.
        """
        files, base = self._opened()
        files.invalidate_cache()
        found = self._tried("read", _found, files, base)
        if not found:
            raise LocationError(f"{self.url} has no files.", "Upload them, or name another place.")
        return [
            RemoteFile(
                path.removeprefix(base).strip("/") or PurePosixPath(path).name,
                path,
                int(facts["size"]),
                _version(facts),
            )
            for path, facts in sorted(found.items())
        ]

    def fetch(self, file: RemoteFile, target: Path) -> None:
        """Copies a file from here; `target` appears when it is complete."""
        aside = target.with_name(f".{target.name}.part")
        self._fetch(file.path, aside)
        aside.replace(target)

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """The bytes of a file from `start` to before `stop`, or to its end."""
        files, _ = self._opened()
        part = {"start": start, "end": min(stop, file.bytes)}
        content: bytes = self._tried("read", lambda: files.cat_file(file.path, **part))
        return content

    def put_file(self, source: Path, name: str) -> None:
        """Copies a file here, under this path."""
        files, base = self._opened()
        self._tried("written", files.put_file, str(source), f"{base}/{name}")

    def clear(self, first: str) -> None:
        """Removes all files here, the file `first` before the others."""
        _, base = self._opened()
        self._clear(base, first)

    def _clear(self, path: str, first: str) -> None:
        files, _ = self._opened()
        files.invalidate_cache()
        if self._tried("read", is_there, files, f"{path}/{first}"):
            self._tried("written", files.rm_file, f"{path}/{first}")
        files.invalidate_cache()
        if self._tried("read", is_there, files, path):
            self._tried("written", files.rm, path, True)

    def _fetch(self, path: str, target: Path) -> None:
        files, _ = self._opened()
        target.parent.mkdir(parents=True, exist_ok=True)
        self._tried("read", files.get_file, path, str(target))

    def _opened(self) -> tuple[Any, str]:
        """The file system of fsspec, and the path of this location in it."""
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
                    install("s3"),
                ) from error
            raise LocationError(f"{self.url} needs a package: {error}.") from error
        except Exception as error:  # file systems raise any error, some for missing options
            raise LocationError(
                f"{self.url} is not a place that fsspec can open: {_message(error)}.",
                "Use for example s3://bucket/folder or file:///folder.",
            ) from error
        if not base.strip("/"):
            raise LocationError(f"{self.url} does not name a folder.", f"{scheme}://bucket/folder")
        return files, base.rstrip("/")

    def _tried(self, done: str, act: Callable[..., T], *arguments: Any) -> T:
        """The result of `act`, retried while errors may be transient."""
        end_s, pause_s = time.monotonic() + self.patience_s, _FIRST_PAUSE_S
        while True:
            try:
                return act(*arguments)
            except Exception as error:
                if not _may_pass(error):
                    raise self._refusal(error, done) from error
                if time.monotonic() + pause_s > end_s:
                    raise LocationError(
                        f"{self.url} could not be {done} for {self.patience_s:g} s: "
                        f"{_message(error)}."
                    ) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _refusal(self, error: Exception, done: str) -> LocationError:
        if "Credentials" in type(error).__name__:
            return LocationError(
                f"{self.url}: no credentials were found.",
                "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE.",
            )
        if isinstance(error, FileNotFoundError):
            return LocationError(
                f"{self.url}: no such bucket or folder.", "Create it, or choose another."
            )
        return LocationError(f"{self.url} could not be {done}: {_message(error)}.")


def is_there(files: Any, path: str) -> bool:
    """Like fsspec's `exists`, but raises an error if the server is silent."""
    try:
        files.info(path)
    except FileNotFoundError:
        return False
    return True


def _found(files: Any, base: str) -> dict[str, dict[str, Any]]:
    """The facts about each file by its path."""
    try:
        found: dict[str, dict[str, Any]] = files.find(base, detail=True)
    except FileNotFoundError:
        return {}
    return {path: facts for path, facts in found.items() if facts["type"] == "file"}


def _version(facts: Mapping[str, Any]) -> str:
    changed = next((facts[name] for name in _CHANGES if facts.get(name)), "")
    return f"{facts['size']} {changed}"


def _may_pass(error: Exception) -> bool:
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    if type(error) is OSError:
        return error.errno in _PASSING
    return any(part in type(error).__name__ for part in _PASSING_NAMES)


def _message(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__
