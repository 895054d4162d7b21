"""A function or a module -> words that say what it computes, alike in every process.

What is not torch's own is told with a hash of the file that it is written in, so that an edit
is another content. What is in no file is told by its place in memory, which is no lasting name.
"""

from __future__ import annotations

import hashlib
import inspect
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = ("torch", "_operator", "builtins", "math")


def describe_function(target: Any) -> str:
    """A function by its name and file; the name of a method as it is."""
    if isinstance(target, str):
        return target
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", repr(target))
    module = getattr(target, "__module__", None) or ""
    where = "" if _is_torchs(module) else _file_hash(inspect.unwrap(target)) or f" {id(target):#x}"
    return f"{module}.{name}{where}"


def describe_module(module: nn.Module) -> str:
    """A module by its class, its settings, and the shapes of its tensors."""
    settings = {key: value for key, value in vars(module).items() if isinstance(value, _PLAIN)}
    tensors = [*module.named_parameters(), *module.named_buffers()]
    kinds = dict.fromkeys(type(part) for part in module.modules())
    return repr(
        (
            [_describe_class(kind) for kind in kinds],
            repr(module),
            sorted(settings.items()),
            [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors],
        )
    )


def _describe_class(kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    if _is_torchs(kind.__module__):
        return name
    return name + (_file_hash(kind) or f" {id(kind):#x}")


def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] in _OF_TORCH


def _file_hash(written: Any) -> str | None:
    try:
        file = inspect.getsourcefile(written)
    except TypeError:
        return None
    return _hash_of(file) if file else None


@cache
def _hash_of(file: str) -> str | None:
    try:
        return " " + hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    except OSError:
        return None
