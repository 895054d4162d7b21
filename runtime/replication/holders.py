"""A plan and this rank's stages -> the parameters that other stages hold too, and who they are.

Where single stages have replicas, all ranks of all holders sum such a parameter's gradient
together, in the order of the plan, which is the same on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from ..launching.world import World
from ..plan import Plan


@dataclass(frozen=True)
class Held:
    """A parameter of several stages, by its first name, with the `ranks` that hold it and their
    group."""

    name: str
    parameter: nn.Parameter
    ranks: tuple[int, ...]
    group: dist.ProcessGroup


def held_parameters(plan: Plan, modules: Mapping[int, nn.Module], world: World) -> list[Held]:
    """Those of this rank; none unless single stages have replicas."""
    found = []
    for number, group in world.holders.items():
        shared = plan.shared[number]
        (parameter,) = (
            modules[stage].get_parameter(name) for stage, name in shared.holders if stage in modules
        )
        ranks = world.grid.holders_of(shared.stages)
        found.append(Held(shared.names[0], parameter, ranks, group))
    return found
