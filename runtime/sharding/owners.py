"""The parameters of stages -> the replica that owns each of them, by the size of its state.

Whole tensors have owners, because Muon and SOAP step whole matrices, and because a checkpoint then
has the same names and shapes for any number of replicas. The largest parameters are placed first,
each with the replica that has least so far (Graham, "Bounds on multiprocessing timing anomalies",
1969: at most 4/3 of the best maximum). Every rank computes the same owners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch.distributed as dist
from torch import Tensor, nn

from ..config.settings import RunConfig
from ..optimizers.facts import OPTIMIZERS, facts_of
from ..optimizers.param_groups import hidden_matrices
from ..optimizers.soap import LARGEST
from ..plan.plan import Plan
from ..plan.sharing import GRADIENTS
from ..tensor_parallel.ranks import largest_part
from .shards import WHOLE, Shards

_NUMBERS = frozenset({"step", "mu_product"})
_SHORT = frozenset({"row_var", "col_var"})


def state_numbers(
    optimizer: str, shape: Sequence[int], *, is_hidden: bool, momentum: float = 0.0
) -> int:
    """The numbers of an optimizer's state of a parameter of a shape; `is_hidden` says that it is
    one of the hidden matrices, which Muon and SOAP step.

    >>> state_numbers("adamw", (30, 20), is_hidden=True)
    1200
    >>> state_numbers("muon", (30, 20), is_hidden=True)
    600
    >>> state_numbers("soap", (30, 20), is_hidden=True)
    3800
    >>> state_numbers("adafactor", (30, 20), is_hidden=True)
    50
    """
    facts = facts_of(optimizer)
    if facts.hidden_matrices_only and not is_hidden:
        facts = OPTIMIZERS["adamw"]
    numbers, is_vector = prod(shape), len(shape) < 2
    names = set(facts.state_of_vectors if is_vector and facts.state_of_vectors else facts.state)
    if facts.has_momentum and facts.plain_sgd and not momentum:
        names.discard("momentum_buffer")
    total = numbers * len(names - _NUMBERS - _SHORT)
    if names & _SHORT:
        total += prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]
    if facts.rotates:
        total += 2 * sum(side * side for side in shape if side <= LARGEST)
    return total


def owners_of(sizes: Sequence[int], copies: int) -> tuple[int, ...]:
    """The owner of each of the sizes among so many copies.

    >>> owners_of([5, 9, 4, 1, 4], 2)
    (1, 0, 1, 1, 0)
    """
    owners, loads = [0] * len(sizes), [0] * copies
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        owners[place] = min(range(copies), key=lambda copy: (loads[copy], copy))
        loads[owners[place]] += sizes[place]
    return tuple(owners)


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
