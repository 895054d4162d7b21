"""A write that failed -> the sentence that says which disk is full, or cannot be written to."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import AsyncPipeError

_ERRORS = frozenset(
    (
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO),
        *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ESTALE),
    )
)
_PROBE = bytes(4096)


class DiskError(AsyncPipeError):
    """A file that could not be written."""

    comes_again = False


def disk_error(error: BaseException, folder: Path) -> DiskError | None:
    """What to tell of an error that comes of not being able to write below `folder`; None of
    another. Libraries that write files raise errors of their own, which have the system's words."""
    for one in _chain(error):
        if isinstance(one, OSError) and one.errno in _ERRORS:
            path = Path(one.filename) if isinstance(one.filename, str) else folder
            if one.errno in (errno.ENOSPC, errno.EDQUOT) or _is_below(path, folder):
                return _told(path, os.strerror(one.errno or 0))
        elif os.strerror(errno.ENOSPC) in str(one):
            return _told(folder, os.strerror(errno.ENOSPC))
    return None


def unwritable(folder: Path) -> DiskError | None:
    """Why nothing can be written to a folder; None if it can. One page is tried."""
    probe = folder / "probe"
    try:
        probe.write_bytes(_PROBE)
        probe.unlink()
    except OSError as error:
        probe.unlink(missing_ok=True)
        return _told(folder, os.strerror(error.errno or 0))
    return None


def disk_is_tight(folder: Path) -> DiskError:
    """What to tell where a process could not write, and another can by now."""
    return _told(folder, "no room, or no right to write")


def _told(path: Path, why: str) -> DiskError:
    known = next((each for each in (path, *path.parents) if each.exists()), Path("/"))
    free, whole = shutil.disk_usage(known).free, shutil.disk_usage(known).total
    return DiskError(
        f"{path} cannot be written: {why.lower()} ({free / 2**20:,.1f} of {whole / 2**20:,.1f} MiB "
        "free).",
        "Make room or the folder writable, or take another disk with --output.",
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it came of."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _is_below(path: Path, folder: Path) -> bool:
    return path.absolute().is_relative_to(folder.absolute())
