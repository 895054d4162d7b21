"""One run a folder: the process that leads a run locks a file in it for as long as it lives.

The lock is POSIX's (`fcntl.lockf`), which belongs to one process: the system gives it back however
that ends, and no process that it has started holds it. So a file that is left behind means nothing.
What is in it, who has the lock, is only to tell others. A file system of a network may have no
locks; then runs are as alone as their user keeps them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
from pathlib import Path
from typing import IO

from ..links import open_here, verify_no_links
from ..training.settings import SettingsError

_NAME = ".lock"
_HELD = (errno.EAGAIN, errno.EACCES)


class FolderInUse(SettingsError):
    """Another process that lives has the folder."""


class FolderLock:
    """Keeps others of its kind, `run` or `sweep`, out of a folder until the block ends that it is
    entered for, or this process."""

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
        """Takes the folder, which is made if there is none.

        Raises FolderInUse when another process has it, SettingsError for a link in it that leads
        out of it, OSError where nothing can be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        verify_no_links(folder, SettingsError)
        descriptor = open_here(folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        file = open(descriptor, "a+", encoding="utf-8")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                with file:
                    raise self._refusal(folder, file) from None
        self._file = file
        with contextlib.suppress(OSError):  # on a full disk nobody reads who it is
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()

    def _refusal(self, folder: Path, file: IO[str]) -> FolderInUse:
        file.seek(0)
        told = re.match(r"process \d{1,10} on [\w.-]{1,255}", file.read(300))
        who = f", {told[0]}" if told else ""
        return FolderInUse(
            f"{folder} is being written by another {self._kind}{who}.",
            "Wait for its end, or end it. With --output and another folder both can be.",
        )
