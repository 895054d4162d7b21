"""An exception in a generated stage -> the line of the stage, and the author's line it was made of.

Generated statements carry the place in the author's code that they come from (`# model.py:34`),
at their end or above; of a class that stands for many modules, where it is called.
"""

from __future__ import annotations

import inspect
import linecache
import re
import traceback

from torch import nn

_PLACE = re.compile(r"#.*?(\S+\.py:\d+(?:-\d+)?)")


def where_in_stage(error: BaseException, module: nn.Module) -> str:
    """`stage_1.py:48 in forward (residual_mlp.py:34): return self.head(hidden)`; "" for an
    exception that did not come through the file of the module's class."""
    try:
        file = inspect.getfile(type(module))
    except (OSError, TypeError):
        return ""
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == file
    ]
    if not frames:
        return ""
    frame, line = frames[-1]
    places = (_authors_place(file, at, one.f_code.co_firstlineno) for one, at in reversed(frames))
    author = next(filter(None, places), "")
    name = re.split(r"[/\\]", file)[-1]
    of_author = f" ({author})" if author else ""
    statement = linecache.getline(file, line).partition("  # ")[0].strip()
    return f"{name}:{line} in {frame.f_code.co_name}{of_author}: {statement}"


def _authors_place(file: str, line: int, first: int) -> str:
    """The nearest place at the end of a line or above it, within the function from `first` on."""
    for number in range(line, first, -1):
        if found := _PLACE.search(linecache.getline(file, number)):
            return found[1]
    return ""
