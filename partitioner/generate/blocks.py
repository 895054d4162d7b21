"""Regions and recomputed parts of a forward -> lines that open blocks, and names of methods."""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import fx, nn

from ..capture import LocalDevice, Recompute, Region
from ..capture.skips import is_of_training
from . import layout
from .choices import EVALUATION, TRAINING
from .function_names import FunctionNames
from .layout import Code, call
from .members import Scope
from .quoting import quoted
from .statements import Opener
from .variables import is_good


def open_block(region: Region, names: FunctionNames, decided: Mapping[int, fx.Node]) -> Opener:
    """The line that opens a region; `decided` has the value that each decision is made by."""
    if region == TRAINING:
        return Opener(region, "if self.training:", EVALUATION)
    if region == EVALUATION:
        return Opener(region, "if not self.training:", TRAINING)
    if region.kind in ("unless", "if"):
        node = decided[region.decision]
        other = Region("if" if region.kind == "unless" else "unless", decision=region.decision)
        condition = names.value(node).within(layout.NOT)
        if is_of_training(node):
            condition = f"self.training and {condition}"
        if region.kind == "if":
            return Opener(region, f"if {condition}:", other)
        inside = f"({condition})" if is_of_training(node) else condition
        return Opener(region, f"if not {inside}:", other)
    return Opener(region, _with(region, names))


def _with(region: Region, names: FunctionNames) -> str:
    if region.kind != "autocast":
        return f"with torch.{region.kind}():"
    is_local = isinstance(region.device_type, LocalDevice)
    items = [Code(f"{names.device()}.type" if is_local else quoted(str(region.device_type)))]
    if region.dtype is not None and region.enabled:
        items.append(Code(f"dtype={region.dtype}"))
    if not region.enabled:
        items.append(Code("enabled=False"))
    if not region.cache_enabled:
        items.append(Code("cache_enabled=False"))
    return f"with {call('torch.autocast', tuple(items))}:"


def helper_name(recompute: Recompute, taken: Container[str], scope: Scope) -> str:
    """The name of the method for what is recomputed: the author's function's, if that can be."""
    stem = recompute.function
    if not is_good(stem) or stem in ("forward", "checkpoint"):
        stem = "recomputed"
    name, count = stem, 1
    while name in taken or hasattr(nn.Module, name) or scope.has(name):
        count += 1
        name = f"{stem}_{count}"
    return name
