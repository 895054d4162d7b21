"""What a forward leaves behind in attributes, and whether its next call reads it.

A stage has parameters and buffers and no other memory. Where a second call with the same inputs
gives other results, the model has some.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_OWN = frozenset({"training", "_parameters", "_buffers", "_modules"})


def state_between_calls(
    model: nn.Module, call: Callable[[], Mapping[str, Tensor]]
) -> tuple[str, str] | None:
    """What is wrong and the cure, if two equal calls differ because of what the first has left in
    attributes. `call` makes the results from equal parameters, buffers and random numbers."""
    before = _attributes(model)
    first = call()
    after = _attributes(model)
    names = [name for name, value in after.items() if before.get(name) != value]
    if not names:
        return None
    second = call()
    if first.keys() == second.keys() and all(
        torch.equal(value, second[name]) or bool(value.isnan().any())
        for name, value in first.items()
    ):
        return None
    where = next(filter(None, (_line(model, name) for name in names)), "")
    return (
        f"{type(model).__name__} keeps what a call computes in self.{names[0]}{where} and reads it "
        "in the next call: a second call with the same inputs gives other results, and a stage has "
        "no such memory.",
        "Make it an argument and a result of forward, or keep what does not depend on the batch as "
        "a buffer: self.register_buffer(name, tensor).",
    )


def _attributes(model: nn.Module) -> dict[str, Any]:
    """By name what tells whether an attribute has changed: of containers what is in them."""
    return {
        f"{path}.{name}" if path else name: _identity(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OWN
    }


def _identity(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, (int, float, str)):
        return value
    if isinstance(value, dict):
        return [(id(key), id(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set)) or hasattr(value, "maxlen"):
        return [id(item) for item in value]
    return id(value)


def _line(model: nn.Module, name: str) -> str:
    """` (nets.py:12)`: where forward writes to an attribute, if that can be found."""
    path, _, attribute = name.rpartition(".")
    kind = type(model.get_submodule(path))
    try:
        lines, start = inspect.getsourcelines(kind)
        file = inspect.getsourcefile(kind) or ""
    except (OSError, TypeError):
        return ""
    writes = re.compile(rf"\bself\.{re.escape(attribute)}\b(?:\[.*\])?(?:\s*[-+*/]?=[^=]|\.)")
    found = [number for number, line in enumerate(lines) if writes.search(line)]
    return f" ({Path(file).name}:{start + found[-1]})" if found else ""
