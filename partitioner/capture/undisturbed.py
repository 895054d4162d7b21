"""A block within which Dynamo reads a model, and after which nothing of it is left.

Locks, log lines and warnings are in Dynamo's way and do nothing for a graph; a user's autograd
function is to be one call of the graph.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from .restore import silent


@contextmanager
def undisturbed(model: nn.Module, of_entry: dict[str, Any]) -> Iterator[None]:
    """`of_entry` are the globals of the function at which Dynamo begins."""
    with ExitStack() as stack:
        stack.enter_context(_without_locks(model))
        stack.enter_context(_functions_as_calls())
        stack.enter_context(_same_globals(of_entry))
        stack.enter_context(_quiet())
        yield


@contextmanager
def _without_locks(model: nn.Module) -> Iterator[None]:
    """Within, locks of the model's modules and packages are blocks that do nothing: Dynamo cannot
    enter a lock."""
    kinds = (type(threading.Lock()), type(threading.RLock()))
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()} - {"torch"}
    scopes: list[dict[str, Any]] = [module.__dict__ for module in model.modules()]
    scopes += [
        vars(module)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in packages and module is not None
    ]
    found: list[tuple[dict[str, Any], str, Any]] = [
        (scope, name, value)
        for scope in scopes
        for name, value in list(scope.items())
        if isinstance(value, kinds)
    ]
    for scope, name, _ in found:
        scope[name] = contextlib.nullcontext()
    try:
        yield
    finally:
        for scope, name, value in found:
            scope[name] = value


@contextmanager
def _functions_as_calls() -> Iterator[None]:
    """Within, a user's autograd function is one call of the graph, not what it does."""
    from torch._dynamo import trace_rules

    allowed: Any = trace_rules._allowed_callable_ids
    new = {id(kind) for kind in _subclasses(Function) if id(kind) not in allowed()}
    for identity in new:
        allowed.add(identity)
    try:
        yield
    finally:
        for identity in new:
            allowed.remove(identity)


def _subclasses(kind: type) -> Iterator[type]:
    children: list[type] = type.__subclasses__(kind)
    for child in children:
        if not child.__module__.startswith("torch."):
            yield child
        yield from _subclasses(child)


@contextmanager
def _same_globals(of_entry: dict[str, Any]) -> Iterator[None]:
    """Takes away what Dynamo leaves in the globals of the function that it reads: it would keep
    the model's parameters in memory."""
    from torch._dynamo import functional_export

    scopes = [(scope, set(scope)) for scope in (of_entry, vars(functional_export))]
    try:
        yield
    finally:
        for scope, before in scopes:
            for name in scope.keys() - before:
                del scope[name]


@contextmanager
def _quiet() -> Iterator[None]:
    """Within, what a forward logs is left out of the graph, and what Dynamo says is not shown."""
    talk = [
        getattr(owner, name)
        for owner, names in (
            (logging.Logger, ("debug", "info", "warning", "error", "critical", "log")),
            (warnings, ("warn",)),
        )
        for name in names
    ]
    with (
        warnings.catch_warnings(),
        silent(),
        torch._dynamo.config.patch(
            ignore_logging_functions={*torch._dynamo.config.ignore_logging_functions, *talk}
        ),
    ):
        warnings.simplefilter("ignore")
        yield
