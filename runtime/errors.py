"""The errors a user can cause, each with what is wrong and, where it is known, the cure."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from .formatting import write_bytes
from .process import Ended


class AsyncPipeError(Exception):
    """One sentence that says what is wrong, with both values, and a cure as a command.

    The command line prints `error: <what>` and the cure below it, and exits with 1.

    what: the sentence
    cure: a command or an option that helps; "" if none is known
    comes_again: True if the same run would fail again, so that another attempt is useless
    """

    comes_again = True

    def __init__(self, what: str, cure: str = "") -> None:
        super().__init__(f"{what}\n{cure}" if cure else what)
        self.what = what
        self.cure = cure

    def and_also(self, cure: str) -> Self:
        """The error itself, with one more line of cure."""
        self.cure = f"{self.cure}\n{cure}" if self.cure else cure
        self.args = (f"{self.what}\n{self.cure}",)
        return self


class ModelError(AsyncPipeError):
    """A model that cannot be found, built or fed."""


class CaptureError(AsyncPipeError):
    """A model whose forward cannot be written down as a graph."""


class GpuStoppedError(CaptureError):
    """A model that has stopped its GPU: no later work of the process succeeds there."""

    def __init__(self, error: Exception, where: str = "") -> None:
        reason = str(error).partition("\n")[0]
        super().__init__(
            f"the model stopped its GPU{where}: {reason}.",
            "Partition it on the CPU, which names the line: model.cpu(). asyncpipe-train --device "
            "cuda moves the stages to GPUs.",
        )


class PlanError(AsyncPipeError):
    """A plan that cannot be made, read or followed."""


class ScheduleError(AsyncPipeError):
    """A schedule that is not legal or would never end."""


class TransportError(AsyncPipeError):
    """A tensor that did not arrive, or arrived in another shape.

    comes_again: False: a restart may succeed
    """

    comes_again = False


class DataError(AsyncPipeError):
    """Data that does not fit the model or the plan."""


def is_out_of_memory(error: BaseException) -> bool:
    """True for an exception of Python, torch or the system that reports a lack of memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = ("can't allocate memory", "CUDA out of memory", "not enough memory")
    is_reported = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return isinstance(error, MemoryError) or is_reported


STORE_IS_GONE = (
    "That is torchrun's agent, or rank 0: see why it ended. --resume auto continues from the "
    "newest checkpoint."
)
LOADER_HAS_ENDED = (
    "A data-loading process has ended: out of memory (dmesg | tail), or an error of its own."
)


def is_of_loader(error: BaseException) -> bool:
    """True if it comes from the error that a DataLoader's signal handler raises, wherever the
    process is at the time, because a worker has ended."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RuntimeError) and "DataLoader worker (pid" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def root_of(error: BaseException) -> BaseException:
    """The innermost AsyncPipeError that the error comes from, or the error itself."""
    while isinstance(error.__cause__, AsyncPipeError):
        error = error.__cause__
    return error


def why_ended(error: BaseException) -> str:
    """The reason in the records of a run that ends with this error."""
    match root_of(error):
        case AsyncPipeError() as known:
            return known.what
        case KeyboardInterrupt() as interrupt:
            return str(interrupt) or "interrupted"
        case Ended() as leaving:
            return f"it was asked to stop (exit code {leaving.code})"
        case unknown:
            return f"{type(unknown).__name__}: {unknown}"


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ERRORS = frozenset(
    (
        *(*_FULL, errno.EROFS, errno.EIO),
        *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ESTALE),
    )
)


class DiskError(AsyncPipeError):
    """A file or folder that cannot be written: its disk is full, over its quota or read-only."""


def disk_error(error: BaseException, folder: Path) -> DiskError | None:
    """The DiskError for an error that comes from a failed write below `folder`; None for other
    errors.

    Libraries that write files raise their own errors, which contain the system's message.
    """
    for cause in _chain(error):
        if isinstance(cause, OSError) and cause.errno in _ERRORS:
            path = Path(cause.filename) if isinstance(cause.filename, str) else folder
            if cause.errno in _FULL or _is_below(path, folder):
                return cannot_write(path, os.strerror(cause.errno or 0))
        for number in _FULL:
            if os.strerror(number) in str(cause):
                return cannot_write(folder, os.strerror(number))
    return None


def cannot_write(path: Path, why: str) -> DiskError:
    """The error for a path that cannot be written, with the room on its disk."""
    known = next((parent for parent in (path, *path.parents) if parent.exists()), Path("/"))
    free, whole = shutil.disk_usage(known).free, shutil.disk_usage(known).total
    return DiskError(
        f"{path} cannot be written: {why.lower()} ({write_bytes(free)} of {write_bytes(whole)} "
        "free).",
        "Free disk space or make the folder writable, or choose another disk with --output.",
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _is_below(path: Path, folder: Path) -> bool:
    return path.absolute().is_relative_to(folder.absolute())
