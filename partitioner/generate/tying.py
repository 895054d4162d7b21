"""The tensors of a stage that are one in the original -> the assignments that tie them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..capture import Capture
from .canonical import Canonicalizer
from .items import Body


def ties(capture: Capture, canonicalizer: Canonicalizer, stage: Body) -> list[tuple[str, str]]:
    """Pairs `(name, owner's name)` of modules with tensors, then of parameters of one stage that
    are the same object; the owner is the first in the model's order."""
    leaves = set(_leaves(canonicalizer, stage))
    modules = [
        (path, module)
        for path, module in capture.model.named_modules(remove_duplicate=False)
        if path in leaves and any(True for _ in (*module.parameters(), *module.buffers()))
    ]
    tied_modules = _pairs(modules)
    tied = tuple(f"{path}." for path, _ in tied_modules)
    held = set(_parameters(capture, canonicalizer, stage))
    parameters = [
        (name, parameter)
        for name, parameter in capture.model.named_parameters(remove_duplicate=False)
        if name in held and not name.startswith(tied)
    ]
    return tied_modules + _pairs(parameters)


def _pairs(named: Sequence[tuple[str, object]]) -> list[tuple[str, str]]:
    owners: dict[int, str] = {}
    found = []
    for name, value in named:
        owner = owners.setdefault(id(value), name)
        if owner != name:
            found.append((name, owner))
    return found


def _leaves(canonicalizer: Canonicalizer, body: Body) -> Iterator[str]:
    canonical = canonicalizer.canonical(body)
    yield from (leaf.path for leaf in canonical.leaves)
    for child in canonical.children:
        yield from _leaves(canonicalizer, child.body)


def _parameters(capture: Capture, canonicalizer: Canonicalizer, body: Body) -> Iterator[str]:
    canonical = canonicalizer.canonical(body)
    for leaf in canonical.leaves:
        module = capture.model.get_submodule(leaf.path)
        for name, _ in module.named_parameters():
            yield f"{leaf.path}.{name}"
    for held in canonical.tensors:
        if held.is_parameter:
            yield held.path
    for child in canonical.children:
        yield from _parameters(capture, canonicalizer, child.body)
