"""The user's frames on the stack -> source lines, and the variable names that values get.

A value's name is read from the byte code: the instruction after the call that made the value says
which variables it is stored in. Values that reach a variable by a longer way (a tuple, a
conditional expression) are found later among the locals of the frames that were there when the
value was made.
"""

from __future__ import annotations

import contextlib
import dis
import keyword
import linecache
import os
import re
import sys
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

import torch

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LINE = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_DEREF", "STORE_GLOBAL")


@lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Whether a file is neither torch nor this package nor made of thin air."""
    if file.startswith("<"):
        return file.startswith(("<ipython", "<stdin"))
    return not file.startswith((_OURS, _TORCH)) and file != contextlib.__file__


def user_frames(top: FrameType | None, start: FrameType | None = None) -> list[FrameType]:
    """The user's frames from the innermost out to `top`, which is not among them."""
    frames = []
    frame = start or sys._getframe(1)
    while frame is not None and frame is not top:
        if is_user_file(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return frames


class Line(NamedTuple):
    file: str
    line: int
    text: str


def user_lines(stack: str) -> list[Line]:
    """The user's lines in the text of a stack, the innermost last."""
    found = [Line(file, int(line), text) for file, line, text in _LINE.findall(stack)]
    return [line for line in found if is_user_file(line.file)]


def user_frame_of(traceback: TracebackType | None) -> tuple[FrameType, int] | None:
    """The innermost frame of the user in a traceback, and its line."""
    found = None
    while traceback is not None:
        if is_user_file(traceback.tb_frame.f_code.co_filename):
            found = traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next
    return found


def source_text(frame: FrameType, line: int) -> str:
    return linecache.getline(frame.f_code.co_filename, line).strip()


def short_path(frame: FrameType) -> str:
    """The file of a frame as an import would find it, the same on every machine.

    `transformers/models/gpt2/modeling_gpt2.py` for a module of that name, else the file's name.
    """
    return short_name(frame.f_code.co_filename, str(frame.f_globals.get("__name__", "")))


def short_name(file: str, module_name: str) -> str:
    """The same for a file and the name of the module that it is."""
    path = Path(file)
    module = module_name.split(".")
    if path.stem == "__init__":
        module.append("__init__")
    found = path.with_suffix("").parts[-len(module) :]
    return "/".join(found) + path.suffix if list(found) == module else path.name


def where(top: FrameType) -> str:
    """The user's function, file and line that run now."""
    frames = user_frames(top, sys._getframe(1))
    return place(frames[0], frames[0].f_lineno) if frames else "forward"


def place(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_qualname} at {short_path(frame)}:{line}"


def assigned_names(frame: FrameType) -> tuple[str, ...]:
    """The variables that the result of the frame's current instruction goes into.

    `x = f()` gives one name; `a, b = f()` one for each element; anything else none.
    """
    return _assignments(frame.f_code).get(frame.f_lasti, ())


def is_augmented_assignment(frame: FrameType) -> bool:
    """Whether the frame's current instruction is that of `y += 1` and its like."""
    return frame.f_lasti in _augmented(frame.f_code)


@lru_cache(maxsize=4096)
def _instructions(code: CodeType) -> list[dis.Instruction]:
    return list(dis.get_instructions(code))


@lru_cache(maxsize=4096)
def _augmented(code: CodeType) -> frozenset[int]:
    return frozenset(
        step.offset
        for step in _instructions(code)
        if step.opname == "BINARY_OP" and step.argrepr.endswith("=")
    )


@lru_cache(maxsize=4096)
def _assignments(code: CodeType) -> dict[int, tuple[str, ...]]:
    steps = _instructions(code)
    found = {}
    for position, step in enumerate(steps[:-1]):
        following = steps[position + 1]
        if following.opname == "UNPACK_SEQUENCE":
            count = following.arg or 0
            names = [name for later in steps[position + 2 :][:count] for name in _stored(later)]
            if len(names) >= count:
                found[step.offset] = tuple(names[:count])
        elif names := _stored(following):
            found[step.offset] = (names[0],)
    return found


def _stored(step: dis.Instruction) -> list[str]:
    if not step.opname.startswith(_STORES):
        return []
    # From Python 3.13 one instruction may store twice, or store and load.
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return list(names[:1] if "LOAD" in step.opname else names)


def is_good_name(name: str) -> bool:
    return (
        name.isidentifier()
        and not name.startswith("_")
        and not keyword.iskeyword(name)
        and name != "self"
    )
