"""The stages of a rank and the process group of its replicas -> the owners of their parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor, nn

from ..config.settings import RunConfig
from ..optimizers.param_groups import hidden_matrices
from ..plan.plan import Plan
from ..plan.sharing import GRADIENTS
from ..tensor_parallel.ranks import largest_part
from .owners import owners_of, state_numbers
from .shards import WHOLE, Shards


def divide(
    plan: Plan,
    modules: Mapping[int, nn.Module],
    config: RunConfig,
    group: dist.ProcessGroup | None,
) -> dict[int, Shards]:
    """The owners of the parameters of stages among the ranks of a group, all of which have these
    stages; the same on all of them."""
    if not config.zero or group is None:
        return dict.fromkeys(modules, WHOLE)
    sizes = sizes_of(plan, modules, config)
    owners = owners_of([size for *_, size in sizes], dist.get_world_size(group))
    others = [str(r) for r in dist.get_process_group_ranks(group) if r != dist.get_rank()]
    peers = f"rank{'s' if len(others) > 1 else ''} {', '.join(others)}"
    of_stage: dict[int, dict[Tensor, int]] = {stage: {} for stage in modules}
    for (stage, parameter, _), owner in zip(sizes, owners, strict=True):
        of_stage[stage][parameter] = owner
    each_backward = config.zero >= GRADIENTS
    return {
        stage: Shards(own, dist.get_rank(group), group, peers, each_backward)
        for stage, own in of_stage.items()
    }


def sizes_of(
    plan: Plan, modules: Mapping[int, nn.Module], config: RunConfig
) -> list[tuple[int, nn.Parameter, int]]:
    """Stage, parameter and size for the balance of all parameters that train."""
    hidden = {
        id(matrix)
        for stage, module in modules.items()
        for matrix in hidden_matrices(plan, stage, module)
    }
    return [
        (stage, each, _size(each, config, is_hidden=id(each) in hidden))
        for stage, module in modules.items()
        for each in module.parameters()
        if each.requires_grad
    ]


def _size(parameter: nn.Parameter, config: RunConfig, *, is_hidden: bool) -> int:
    """The bytes of the optimizer's state, or of the parameter where that is larger: its step
    computes as much. Tensor ranks agree on it, and so on the owners."""
    shape = largest_part(parameter, config.tensor_ranks)
    numbers = state_numbers(config.optimizer, shape, is_hidden=is_hidden, momentum=config.momentum)
    return parameter.element_size() * max(shape.numel(), numbers)
