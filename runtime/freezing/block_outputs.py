"""The outputs of blocks for one micro-batch -> their similarities.

A block is observed where its module is called. Which of its outputs is meant, and which dimension
of it counts samples, is found by running all stages on fake tensors with one and with two
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..executor.precision import running_on_fake_tensors
from ..plan.plan import Plan
from ..rng import GeneratorState, drawing_from
from .blocks import Blocks, FreezeError
from .plasticity import Similarities
from .stages import Builds, fake_forward, is_called

SAMPLES = 32
"""The most samples of a micro-batch that are compared."""
_AT_ONCE = 1 << 16
"""The numbers of a sample that are converted to float64 at a time."""


@dataclass(frozen=True)
class Place:
    """The output of a block that is compared.

    leaf: its number among the tensors that the block returns.
    dim: the dimension that counts samples.
    """

    leaf: int
    dim: int


def check_observable(plan: Plan, blocks: Blocks, own: range, builds: Builds) -> None:
    """Raises FreezeError if one of these blocks is not a module of its stage."""
    with running_on_fake_tensors(plan):
        for spec, build in zip(plan.stages, builds, strict=True):
            module, here = build(), set(spec.parameters)
            for block in own:
                path = blocks.paths[block]
                if here.intersection(blocks.parameters[block]) and not is_called(module, path):
                    raise FreezeError(
                        f"--freeze plasticity observes the outputs of {path}, but its code is "
                        f"written out in the forward of {spec.file}, where no module makes them.",
                        "Partition the model again with cuts between blocks, such as --cut-at "
                        f"{path}, and without --code flat.",
                    )


def places_of(plan: Plan, blocks: Blocks, own: range, builds: Builds) -> Mapping[int, Place]:
    """The place of the output of each of these blocks. Raises FreezeError for a block without one,
    and PlanError if a stage cannot run on fake tensors."""
    check_observable(plan, blocks, own, builds)
    batch = plan.sizes["batch"]
    doubled = replace(plan, sizes={**plan.sizes, "batch": 2 * batch})
    once, twice = (_shapes(sized, blocks, own, builds) for sized in (plan, doubled))
    places = {}
    for block in own:
        pairs = enumerate(zip(once.get(block, ()), twice.get(block, ()), strict=True))
        found = [
            Place(leaf, dim)
            for leaf, (shape, longer) in pairs
            for dim, sizes in enumerate(zip(shape, longer, strict=True))
            if sizes == (batch, 2 * batch)
        ]
        if not found:
            raise FreezeError(
                f"--freeze plasticity compares the outputs of {blocks.paths[block]} for several "
                "samples, but none of them has a dimension that counts samples.",
                "--freeze gradnorm:1/3, or schedule:1/3",
            )
        places[block] = found[0]
    return places


_Shapes = dict[int, list[tuple[int, ...]]]


def _shapes(plan: Plan, blocks: Blocks, own: range, builds: Builds) -> _Shapes:
    """The shapes of the tensors that each block returns."""
    shapes: _Shapes = {}

    def take(block: int, output: Any) -> None:
        shapes[block] = [tuple(leaf.shape) for leaf in _leaves(output)]

    with running_on_fake_tensors(plan) as values, torch.no_grad():
        for spec, build in zip(plan.stages, builds, strict=True):
            module = build().eval()
            with _hooked(module, blocks, own, take):
                given = {name: values[name] for name in spec.inputs}
                values |= fake_forward(spec, module, given, "the outputs of its blocks")
    return shapes


@contextmanager
def observed(
    modules: Mapping[int, nn.Module],
    blocks: Blocks,
    places: Mapping[int, Place],
    own: range,
    seed: int,
) -> Iterator[dict[int, Similarities]]:
    """Inside, forwards of these stages add the similarities of their blocks; afterwards buffers and
    random generators are as before. Compiled stages run as they are written."""
    found: dict[int, Similarities] = {}

    def take(block: int, output: Any) -> None:
        place = places[block]
        rows = list(_leaves(output))[place.leaf].movedim(place.dim, 0)
        found.setdefault(block, similarities(rows))

    buffers = [buffer for module in modules.values() for buffer in module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    devices = {buffer.device for module in modules.values() for buffer in module.parameters()}
    with ExitStack() as inside:
        inside.enter_context(torch.compiler.set_stance("force_eager"))
        inside.enter_context(drawing_from(seed, "probe"))
        for device in devices:
            inside.enter_context(GeneratorState.seeded(device, seed).drawing())
        for module in modules.values():
            inside.enter_context(_hooked(module, blocks, own, take))
        yield found
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


def similarities(rows: Tensor) -> Similarities:
    """The similarities of the samples in dimension 0.

    >>> similarities(torch.tensor([[3.0, 0.0], [4.0, 0.0], [0.0, 5.0]]))[:3]
    (0.6, 0.8, 0.0)
    """
    products = torch.zeros((), dtype=torch.float64, device=rows.device)
    for part in torch.split(rows.detach()[:SAMPLES].flatten(1), _AT_ONCE, dim=1):
        products = products + (exact := part.double()) @ exact.T
    return tuple(F.normalize(products).flatten().tolist())


@contextmanager
def _hooked(
    module: nn.Module, blocks: Blocks, own: range, take: Callable[[int, Any], None]
) -> Iterator[None]:
    """Inside, `take` gets the output of each of these blocks that is a module of the stage."""

    def hook(block: int) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, arguments, output: take(block, output)

    with ExitStack() as hooks:
        for block in own:
            if is_called(module, path := blocks.paths[block]):
                handle = module.get_submodule(path).register_forward_hook(hook(block))
                hooks.callback(handle.remove)
        yield


def _leaves(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors of a result."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping | tuple | list):
        for inner in output.values() if isinstance(output, Mapping) else output:
            yield from _leaves(inner)
