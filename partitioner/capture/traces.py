"""One run of a model's forward in one mode on fake tensors -> a tracer with its graph.

Either the forward itself runs, or in its place the torch-level graph that Dynamo makes of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher

from ...runtime.errors import CaptureError
from .arguments import Arguments
from .automatic_leaves import FailedTrace
from .dynamo import torch_graph
from .explain import explained, pinned
from .fakes import Dynamic, FakeWorld
from .inputs import sizes_in
from .leaves import LeafRule
from .patches import patched
from .random_numbers import watched_draws
from .replay import replay
from .restore import in_mode, silent, without_cache
from .samples import resized, smaller_sizes
from .seeds import watched_seeds
from .shadow import Shadow
from .structure import plain_structure
from .tracer import LenNeeded, Tracer


class Trace(Protocol):
    """One run of a model's forward in one mode, written down."""

    def __call__(
        self,
        model: nn.Module,
        world: FakeWorld,
        given: Arguments,
        dims: Dynamic,
        is_leaf: LeafRule,
        *,
        training: bool,
        true: Collection[int] = (),
        gradients: bool = True,
    ) -> Tracer:
        """Of the decisions that random numbers make, those of the numbers in `true` are true;
        forward reads of torch that gradients are recorded if `gradients` says so."""


def trace_forward(
    model: nn.Module,
    world: FakeWorld,
    given: Arguments,
    dims: Dynamic,
    is_leaf: LeafRule,
    *,
    training: bool,
    true: Collection[int] = (),
    gradients: bool = True,
    forward: Callable[[Tracer, Mapping[str, Any]], Any] | None = None,
) -> Tracer:
    """One run of forward in one mode, again for every module that turns out to call `len` on a
    symbolic size, and after a run that has exchanged modules. `forward` stands in for the model's.
    """
    scopes: list[dict[str, Any]] = []
    modules = list(model.modules())
    while True:
        shadow = Shadow(world, given, _others(given.tensors, dims), training)
        tracer = Tracer(model, world, is_leaf, shadow, true, gradients)
        try:
            with (
                in_mode(model, training),
                without_cache(model),
                silent(),
                torch.enable_grad(),
                world.inside(sys._getframe()),
                patched(tracer, scopes),
                watched_draws(tracer, model),
                watched_seeds(tracer),
                # opt_einsum takes sizes as numbers; the order of a product is no matter here.
                torch.backends.opt_einsum.flags(enabled=False),
                enable_python_dispatcher(),
                world.mode,
                tracer.random,
            ):
                tracer.flags = {path: module.training for path, module in model.named_modules()}
                fakes = {
                    name: world.input(tensor, dims.get(name, {}))
                    for name, tensor in given.tensors.items()
                }
                for name, fake in fakes.items():
                    tracer.placeholder(name, fake)
                with tracer:
                    result = forward(tracer, fakes) if forward else given.call(model, fakes)
                tracer.output(plain_structure(result))
        except LenNeeded as needed:
            scopes.append(needed.scope)
            continue
        except CaptureError as error:
            raise FailedTrace(error, tracer.failed_in(error)) from error.__cause__
        except Exception as error:
            told = explained(error, model, given, tracer.drawn_symbols)
            raise FailedTrace(told, tracer.failed_in(error)) from error
        if (now := list(model.modules())) != modules:
            modules = now  # To make new ones takes random numbers, but in the first run alone.
            continue
        return tracer


def trace_dynamo(
    model: nn.Module,
    world: FakeWorld,
    given: Arguments,
    dims: Dynamic,
    is_leaf: LeafRule,
    *,
    training: bool,
    true: Collection[int] = (),
    gradients: bool = True,
) -> Tracer:
    """Dynamo's graph of forward, run in its place."""

    def call(tensors: dict[str, Tensor]) -> Any:
        return given.call(model, tensors)

    try:
        found = torch_graph(model, call, given.tensors, dims, is_leaf, training=training)
    except Exception as error:
        what = pinned(error, given, dims) or explained(error, model, given)
        raise FailedTrace(what, ()) from error

    def forward(tracer: Tracer, fakes: Mapping[str, Any]) -> Any:
        return replay(found, model, world, tracer, [fakes[name] for name in given.tensors])

    return trace_forward(
        model,
        world,
        given,
        dims,
        is_leaf,
        training=training,
        true=true,
        gradients=gradients,
        forward=forward,
    )


def _others(inputs: Mapping[str, Tensor], dims: Dynamic) -> list[dict[str, Tensor]]:
    """Inputs of other sizes, if any size is free."""
    sizes = sizes_in(inputs, dims)
    larger = {name: size + 3 for name, size in sizes.items()}
    return [resized(inputs, dims, each) for each in (smaller_sizes(sizes), larger) if each]
