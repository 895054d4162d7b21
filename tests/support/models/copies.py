"""Folders that several tests begin with: made once in a run of the tests, and then copied."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def made_once(label: str, folder: Path, make: Callable[[], Any]) -> Path:
    """`folder`, which `make` makes, or a copy of what it made for a test with the same label.

    The workers share the copies, and the record of what is trusted, by the environment that
    conftest.py sets."""
    digest = hashlib.sha256(label.encode()).hexdigest()[:16]
    kept = Path(os.environ["ASYNCPIPE_CACHE"], "made", digest)
    if kept.is_dir():
        return Path(shutil.copytree(kept, folder))
    make()
    part = kept.with_suffix(f".{os.getpid()}")
    shutil.copytree(folder, part)
    with contextlib.suppress(OSError):  # where another worker was faster
        part.rename(kept)
    return folder
