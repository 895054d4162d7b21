"""The user's source code: frames, lines, and names of variables and modules.

`user_frames` and its relatives find the user's frames on the stack and their lines.

`assigned_names` reads the variable of a value from the byte code: the instruction after the call
stores the result. (`NodeHints` finds values that reach a variable later, through a tuple or a
conditional expression, among the locals of the frames.)

`exchanged` replaces, for a block, functions that imported modules and the model hold by name:
`from torch import is_grad_enabled` keeps a reference that a patch of torch cannot change.

`replacement` finds a function of the user's that a function of torch calls in place of torch's own.

`verify_names` checks that generated code can use the names of modules, parameters and buffers.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import keyword
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, NamedTuple

import torch
import typing_extensions
from torch import nn

from ...runtime.errors import CaptureError
from ...runtime.formatting import hiding_in, one_line

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_DECORATORS = (contextlib.__file__, typing_extensions.__file__)
_LIBRARIES = (sysconfig.get_path("stdlib") + os.sep, "<frozen ")
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_LINE = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_DEREF", "STORE_GLOBAL")


@lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """True for a real file outside of torch, of its decorators and of this package."""
    if file.startswith("<"):
        return file.startswith(("<ipython", "<stdin"))
    return not file.startswith((_OURS, _TORCH)) and file not in _DECORATORS


def is_installed_file(file: str) -> bool:
    """True for a file of an installed package."""
    return not _PACKAGES.isdisjoint(file.split(os.sep))


def is_library_file(file: str) -> bool:
    """True for a file of the standard library; installed packages may lie within its folder."""
    return file.startswith(_LIBRARIES) and not is_installed_file(file)


def user_frames(top: FrameType | None, start: FrameType | None = None) -> list[FrameType]:
    """The user's frames from the innermost out to `top`, without `top`."""
    frames = []
    frame = start or sys._getframe(1)
    while frame is not None and frame is not top:
        if is_user_file(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return frames


class SourceLine(NamedTuple):
    file: str
    line: int
    text: str


def user_lines(stack: str) -> list[SourceLine]:
    """The user's lines in the text of a stack, the innermost last."""
    lines = [SourceLine(file, int(line), text) for file, line, text in _LINE.findall(stack)]
    return [line for line in lines if is_user_file(line.file)]


def user_frame_of(traceback: TracebackType | None) -> tuple[FrameType, int] | None:
    """The innermost frame of the user in a traceback, and its line."""
    innermost = None
    while traceback is not None:
        if is_user_file(traceback.tb_frame.f_code.co_filename):
            innermost = traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next
    return innermost


def source_text(frame: FrameType, line: int) -> str:
    """The text of a line in the file of a frame, without indentation; "" if it is not readable."""
    return linecache.getline(frame.f_code.co_filename, line).strip()


def short_path(frame: FrameType) -> str:
    """The file of a frame as an import names it, the same on every machine.

    `transformers/models/gpt2/modeling_gpt2.py` for a module of that name, else the file's name.
    """
    return short_name(frame.f_code.co_filename, str(frame.f_globals.get("__name__", "")))


def short_name(file: str, module_name: str) -> str:
    """`short_path` for a file and the name of its module."""
    path = Path(file)
    module = module_name.split(".")
    if path.stem == "__init__":
        module.append("__init__")
    tail = path.with_suffix("").parts[-len(module) :]
    return "/".join(tail) + path.suffix if list(tail) == module else path.name


def where(top: FrameType | None) -> str:
    """The user's current function, file and line."""
    frames = user_frames(top, sys._getframe(1))
    return place(frames[0], frames[0].f_lineno) if frames else "forward"


def place(frame: FrameType, line: int) -> str:
    """A line in words: `GPT2Attention.forward at transformers/models/gpt2/modeling_gpt2.py:201`."""
    return f"{frame.f_code.co_qualname} at {short_path(frame)}:{line}"


def assigned_names(frame: FrameType) -> tuple[str, ...]:
    """The variables that store the result of the frame's current instruction.

    `x = f()` gives one name; `a, b = f()` one for each element; other code gives none.
    """
    return _assignments(frame.f_code).get(frame.f_lasti, ())


def is_augmented_assignment(frame: FrameType) -> bool:
    """True if the frame's current instruction is an augmented assignment such as `y += 1`."""
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
    names_at = {}
    for position, step in enumerate(steps[:-1]):
        following = steps[position + 1]
        if following.opname == "UNPACK_SEQUENCE":
            count = following.arg or 0
            names = [name for later in steps[position + 2 :][:count] for name in _stored(later)]
            if len(names) >= count:
                names_at[step.offset] = tuple(names[:count])
        elif names := _stored(following):
            names_at[step.offset] = (names[0],)
    return names_at


def _stored(step: dis.Instruction) -> list[str]:
    if not step.opname.startswith(_STORES):
        return []
    # From Python 3.13 one instruction may store twice, or store and load.
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return list(names[:1] if "LOAD" in step.opname else names)


def is_good_name(name: str) -> bool:
    """True for an identifier that can name a variable of generated code."""
    return (
        name.isidentifier()
        and not name.startswith("_")
        and not keyword.iskeyword(name)
        and name != "self"
    )


@contextmanager
def exchanged(
    model: nn.Module,
    other: Callable[[str, str, Any], Any],
    ids: Set[int],
    kinds: tuple[type, ...] = (),
) -> Iterator[None]:
    """Replaces, for the block, globals of imported modules and attributes of the model's modules.

    other: `other(holder, name, value)` returns the replacement, or `value` itself. It is asked in
        scopes that hold an object of one of these `ids`, or an instance of one of these `kinds`.
    """
    changed: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for scope, holder in _scopes_with(model, frozenset(ids), kinds):
            for name, value in list(scope.items()):
                replacement = other(holder, name, value)
                if replacement is not value:
                    changed.append((scope, name, value))
                    scope[name] = replacement
        yield
    finally:
        for scope, name, value in reversed(changed):
            scope[name] = value


def _scopes_with(
    model: nn.Module, ids: frozenset[int], kinds: tuple[type, ...]
) -> Iterator[tuple[dict[str, Any], str]]:
    """The globals of imported modules and the attributes of the model's modules that hold an object
    of one of these `ids`, or an instance of one of these `kinds`; each with its name."""
    passed_over = _libraries_without(ids, kinds)
    for name, module in list(sys.modules.items()):
        known = passed_over.get(name)
        if known is not None and known[0] is module and len(known[1]) == known[2]:
            continue
        if not isinstance(module, ModuleType):
            continue
        scope, root = vars(module), name.partition(".")[0]
        is_left_out = root in ("torch", "sympy", "asyncpipe") or (
            root == "numpy" and name != "numpy.random"
        )
        if not is_left_out and _holds(scope, ids, kinds):
            yield scope, name
        elif is_left_out or _is_installed(module):
            passed_over[name] = module, scope, len(scope)
    for path, part in model.named_modules():
        if _holds(vars(part), ids, kinds):
            yield vars(part), f"self.{path}" if path else "self"


@lru_cache(maxsize=4)
def _libraries_without(
    ids: frozenset[int], kinds: tuple[type, ...]
) -> dict[str, tuple[ModuleType, dict[str, Any], int]]:
    """The installed modules that held none of these objects, with their globals, and the number of
    them then.

    A program has thousands, with tens of thousands of globals: to search all of them at every
    trace would take a tenth of a capture."""
    return {}


def _is_installed(module: ModuleType) -> bool:
    file = vars(module).get("__file__") or ""  # getattr would import what is lazy
    return is_installed_file(file) or is_library_file(file)


def _holds(scope: dict[str, Any], ids: frozenset[int], kinds: tuple[type, ...]) -> bool:
    values = list(scope.values())
    # Only sets are fast enough for all globals.
    types = set(map(type, values)) if kinds else ()
    return not ids.isdisjoint(map(id, values)) or any(issubclass(t, kinds) for t in types)


_OWN = frozenset((*dir(nn.Module), *vars(nn.Module())))


_NAMESPACES = (nn.functional, torch, torch.Tensor)
_WRAPPED = ("__wrapped__", "_torchdynamo_orig_callable")  # of functools.wraps, and of torch.compile


def replacement(
    start: Callable[..., Any], owner: type[nn.Module] | None, seen: set[CodeType]
) -> str:
    """The name and place of the first function that is, or that is called by, a function of torch's
    or the forward of the module `owner`, and is not torch's own; "" if there is none. `seen`
    receives the code that calls none."""
    classes = {kind.__qualname__ for kind in owner.__mro__} if owner else set()
    waiting: list[tuple[str, Any]] = [("forward" if owner else start.__name__, start)]
    while waiting:
        name, function = waiting.pop()
        code = getattr(function, "__code__", None)
        if code is None:
            continue
        file = code.co_filename
        if is_user_file(file) and not is_library_file(file):
            return f"{name} of {os.path.basename(file)}:{code.co_firstlineno}"
        of_class = function.__qualname__.rpartition(".")[0]
        if owner and function is start and of_class not in classes:
            return f"the forward of {of_class}"
        if code in seen:
            continue
        seen.add(code)
        inside = [getattr(function, each, None) for each in _WRAPPED]
        inside += [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
        waiting += [(name, each) for each in inside]
        for called in _names_in(code):
            if any(_has_other(place, called) for place in _NAMESPACES):
                return f"another {called}"
            for place in (owner, *_NAMESPACES):
                found = inspect.getattr_static(place, called, None)
                if isinstance(found, FunctionType):
                    waiting.append((called, found))
    return ""


def _has_other(place: Any, name: str) -> bool:
    """True if torch's function of a public name is an object of another name: a function of
    torch's, or something that is called and is no function."""
    found = inspect.getattr_static(place, name, None)
    if name.startswith("_") or not callable(found) or isinstance(found, type):
        return False
    if isinstance(found, FunctionType) and is_user_file(found.__code__.co_filename):
        return False  # which is told with its place
    own = getattr(found, "__name__", "").replace("_", "")
    is_operator = isinstance(found, torch._ops.OpOverloadPacket)
    return own != name.replace("_", "") or (is_operator and not str(found).startswith("aten."))


@lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """The global names and attributes that some code reads."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*map(_names_in, inner))


def verify_names(model: nn.Module) -> None:
    """Raises CaptureError for a name that an attribute of a generated class cannot have, or that
    has invisible characters."""
    for path, module in model.named_modules():
        kinds = {
            "module": module._modules, "parameter": module._parameters, "buffer": module._buffers
        }  # fmt: skip
        for kind, members in kinds.items():
            for name, member in members.items():
                if member is not None and (wrong := _wrong(name)):
                    raise CaptureError(
                        f"a {kind} of {one_line(path) or 'the model'} is called "
                        f'"{one_line(name)[:80]}", {wrong}.',
                        "Give it another name.",
                    )


def _wrong(name: str) -> str:
    """The reason why a name is invalid, as a clause; "" if it is valid."""
    if not name or "." in name:
        return "which cannot be distinguished from a path"
    if hiding_in(name) or "\n" in name or "\t" in name:
        return "which contains an invisible character"
    if name in _OWN:
        return f"as an attribute that every module has: {name} of nn.Module"
    return ""
