"""A plan -> the channels of its tensors, the same on every rank.

Between two stages travel the boundary tensors, forward, and the gradients of those that need
one, back. The generator state of a micro-batch goes from each stage that draws random numbers to
the next that does, as one more tensor of that edge. Holders of a shared parameter exchange its
gradients and, once, its checksum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, permutations

import torch

from .boundary_dtypes import BoundaryDtypes
from .plan import Boundary, Plan
from .schedule import Schedule
from .transports.protocol import Channel, ChannelKind

Edge = tuple[int, int]
Sizes = Mapping[str, int]
"""Numbers for a plan's symbols, such as batch and sequence."""
_Spec = tuple[torch.dtype, tuple[int, ...]]

GENERATOR_STATE = "generator state"
"""Name of the channel that carries a micro-batch's generator state."""

CHECKSUM_BYTES = 32


def forward_edges(plan: Plan) -> frozenset[Edge]:
    """The (source, target) stages between which tensors travel in a training forward: boundary
    tensors, and the generator state of stages that draw random numbers."""
    return frozenset((boundary.source, target) for boundary, target in _crossings(plan)) | {
        *_drawing_edges(plan)
    }


def gradient_edges(plan: Plan) -> frozenset[Edge]:
    """The (source, target) stages between which a gradient comes back, from target to source."""
    return frozenset(
        (boundary.source, target)
        for boundary, target in _crossings(plan)
        if boundary.tensor.requires_grad
    )


def shared_stages(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The groups of stages that hold one (tied) parameter."""
    return tuple(shared.stages for shared in plan.shared if len(shared.stages) > 1)


def channels_of_each(
    plan: Plan,
    schedule: Schedule,
    sizes: Sequence[Sizes],
    *,
    shared_specs: Mapping[str, _Spec],
    state_bytes: int,
    dtypes: BoundaryDtypes,
) -> list[tuple[Channel, ...]]:
    """The channels for each micro-batch's sizes and the ranks that have it: they differ in shape or
    ranks, and not in their tags."""
    made: dict[object, tuple[Channel, ...]] = {}
    found, ranks = [], schedule.rank_of_stage
    for index, own in enumerate(sizes):
        if schedule.replicas:
            ranks = tuple(schedule.rank_of(stage, index) for stage in range(schedule.stages))
        if (key := (ranks, *own.items())) not in made:
            made[key] = plan_channels(
                plan,
                ranks,
                sizes=own,
                shared_specs=shared_specs,
                state_bytes=state_bytes,
                dtypes=dtypes,
            )
        found.append(made[key])
    return found


def plan_channels(
    plan: Plan,
    rank_of_stage: Sequence[int],
    *,
    sizes: Sizes,
    shared_specs: Mapping[str, _Spec],
    state_bytes: int,
    dtypes: BoundaryDtypes,
) -> tuple[Channel, ...]:
    """All channels of a plan at the given sizes; each one's tag is its position.

    `shared_specs` gives dtype and shape of the shared parameters that this rank holds, by their
    first name. `dtypes` says what boundary tensors are.
    """
    channels: list[Channel] = []

    def add(kind: ChannelKind, name: str, source: int, target: int, spec: _Spec) -> None:
        ranks = rank_of_stage[source], rank_of_stage[target]
        channels.append(Channel(kind, name, source, target, *ranks, len(channels), *spec))

    for boundary, target in _crossings(plan):
        tensor = boundary.tensor
        is_local = rank_of_stage[boundary.source] == rank_of_stage[target]
        dtype = dtypes.at_stages(tensor) if is_local else dtypes.between_ranks(tensor)
        spec = dtype, tensor.resolve(sizes)
        add("activation", tensor.name, boundary.source, target, spec)
        if tensor.requires_grad:
            add("gradient", tensor.name, target, boundary.source, spec)
    for source, target in _drawing_edges(plan):
        add("activation", GENERATOR_STATE, source, target, (torch.uint8, (state_bytes,)))
    for shared in plan.shared:
        name = shared.names[0]
        # A rank that does not hold the parameter has no use for its shape, but counts its tags.
        spec = shared_specs.get(name, (torch.float32, ()))
        for source, target in permutations(shared.stages, 2):
            add("shared gradient", name, source, target, spec)
            add("checksum", name, source, target, (torch.uint8, (CHECKSUM_BYTES,)))
    return tuple(channels)


def _crossings(plan: Plan) -> Iterator[tuple[Boundary, int]]:
    for boundary in plan.boundaries:
        for target in boundary.targets:
            yield boundary, target


def _drawing_edges(plan: Plan) -> Iterator[Edge]:
    return pairwise(stage.index for stage in plan.stages if stage.draws_random)
