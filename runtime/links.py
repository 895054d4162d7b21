"""Links in a folder that is written: none may lead out of it.

The folder of a run, a sweep or a comparison may be a stranger's, unpacked from an archive. A link
in it that is called as a file of ours would have us write wherever it leads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .errors import AsyncPipeError


def verify_no_links(folder: Path, error: type[AsyncPipeError]) -> None:
    """Raises `error` when something in a folder, however deep, is a link that leads out of it, or
    neither a file nor a folder. A folder that is not there has none."""
    home = os.path.realpath(folder)
    for entry in _entries(home):
        name = os.path.join(folder, os.path.relpath(entry.path, home))
        if entry.is_symlink():
            target = os.path.realpath(entry.path)
            if os.path.commonpath((home, target)) != home:
                raise error(
                    f"{name} is a link to {os.readlink(entry.path)}, outside of the folder, and "
                    "nothing is written through such links.",
                    "Remove the link, or name another folder with --output.",
                )
        elif not (entry.is_file() or entry.is_dir()):
            raise error(
                f"{name} is neither a file nor a folder.",
                "Remove it, or name another folder with --output.",
            )


def open_here(path: Path, flags: int) -> int:
    """Opens a file for writing unless it is a link: OSError (ELOOP) then."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def write_here(path: Path, text: str) -> None:
    """Writes a file, whole; a link of its name is replaced and not followed."""
    path.unlink(missing_ok=True)
    descriptor = open_here(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            inside = list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in inside:
        yield entry
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(entry.path)
