"""The stages of all ranks -> the shared parameters whose holders have come apart.

Holders of a shared parameter begin with the same bits and take the same steps. A difference means
that a step is not the same at all of them: an error of ours, faulty memory, or processors that
round differently. Then the evaluated model is not the saved one, so a run must not be silent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import nn

from ..errors import AsyncPipeError
from ..launching.world import World
from ..plan import Plan
from ..tensors import raw_bytes

_DIGEST_BYTES = 16


class SharedParameterError(AsyncPipeError):
    """A shared parameter that is not the same at all its holders."""


def find_difference(plan: Plan, modules: Mapping[int, nn.Module], world: World) -> str | None:
    """The sentence about the first shared parameter that two stages have different values of, the
    same on all ranks; None where there is no such one. Collective, by checksums."""
    holders = [
        (shared.holders[0], holder)
        for shared in plan.shared
        if len(shared.stages) > 1
        for holder in shared.holders
    ]
    if not holders:
        return None
    own = b"".join(
        _digest(modules[stage].get_parameter(name))
        if stage in modules and world.copy == 0
        else bytes(_DIGEST_BYTES)
        for _, (stage, name) in holders
    )
    told = world.gathered(own)

    def of(place: int) -> bytes:
        at = slice(place * _DIGEST_BYTES, (place + 1) * _DIGEST_BYTES)
        return max(content[at] for content in told)

    digests = {holder: of(place) for place, (_, holder) in enumerate(holders)}
    for first, other in holders:
        if digests[first] != digests[other]:
            return (
                f"{first[1]} of stage {first[0]} and {other[1]} of stage {other[0]} are one shared "
                f"parameter, but their values have come apart; those of stage {first[0]} are saved."
            )
    return None


def _digest(parameter: nn.Parameter) -> bytes:
    return hashlib.blake2b(raw_bytes(parameter), digest_size=_DIGEST_BYTES).digest()
