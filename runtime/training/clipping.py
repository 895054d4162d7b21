"""Gradients of many stages -> one norm and one factor, the same on every rank.

Each stage contributes the sum of its squares; a tied parameter is counted by its owner alone.
Every rank gets all contributions and adds them in the order of the stages, so that the number of
ranks changes no bit of the result. The same message tells every rank the loss, and whether a
gradient overflowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..plan import Plan
from ..shared import shared_weights

PIECE = 2**14
"""Elements that torch adds up in one thread: fewer than the grain of its parallel loops, 2**15."""


@dataclass(frozen=True, slots=True)
class Share:
    """One stage's parameters: its `own`, whose gradients are complete with its last backward, and
    those `shared` with other stages, whose gradients are summed before the step; `owned` are the
    shared ones that this stage counts."""

    own: list[nn.Parameter]
    shared_by_name: dict[str, nn.Parameter]
    owned: list[nn.Parameter]

    @property
    def shared(self) -> list[nn.Parameter]:
        return list(self.shared_by_name.values())

    @property
    def counted(self) -> list[nn.Parameter]:
        return self.own + self.owned


def share_of(plan: Plan, index: int, stage: nn.Module) -> Share:
    """What the stage counts of all stages' gradients: nothing is counted twice."""
    share = Share([], {}, [])
    holders = shared_weights(plan, index)
    for name, parameter in stage.named_parameters():
        if name not in holders:
            share.own.append(parameter)
            continue
        share.shared_by_name[name] = parameter
        if holders[name][0] == index:
            share.owned.append(parameter)
    return share


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The sum of squares of all gradients, `f64[]` where they are; nobody waits for it yet."""
    given = list(gradients)
    if not given:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(given)).double().square().sum()


def squared_norm_alike(gradient: Tensor) -> Tensor:
    """The same of one gradient, to the last bit wherever its bits are the same: in pieces that a
    kernel adds up in one order, whatever the number of its threads."""
    pieces = torch.split(gradient.detach().reshape(-1), PIECE)
    return torch.stack(torch._foreach_norm(pieces, 2, torch.float64)).square().sum()


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know of a step: each stage's sum of squares, whether a gradient that was
    scaled is no number, and the mean loss."""

    squares: tuple[float, ...]
    overflowed: bool
    loss: float

    @property
    def norm(self) -> float:
        return math.sqrt(sum(self.squares, 0.0))


class StepMessage:
    """One all-reduce a step, which goes on while others still compute.

    Begun by every rank as soon as it knows its part: `own` squares by stage, and the loss if it
    is made there. Replicas have the same gradients, whose squares the first one tells, and each a
    part of the loss. `agreed` waits for the other ranks.
    """

    def __init__(
        self,
        own: Mapping[int, Tensor],
        stages: int,
        group: dist.ProcessGroup | None,
        *,
        overflowed: bool = False,
        loss: float = math.nan,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        self._stages = stages
        self._content = torch.zeros(stages + 1 + replicas, dtype=torch.float64)
        for stage, square in own.items() if replica == 0 else ():
            self._content[stage] = square
        self._content[stages] = float(overflowed)
        self._content[stages + 1 + replica] = loss
        # Every place has one contributor: adding zeros is exact in any order.
        self._work = None
        if group is not None:
            self._work = dist.all_reduce(self._content, group=group, async_op=True)

    def agreed(self) -> Agreed:
        if self._work is not None:
            self._work.wait()
        content = self._content.tolist()
        squares, (overflowed, *losses) = content[: self._stages], content[self._stages :]
        return Agreed(tuple(squares), overflowed > 0, sum(losses))


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of this norm are multiplied by; `limit` 0 means no limit."""
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    # Fused optimizers would divide by 1 / factor on their way, in a quarter of the time of this
    # pass, but that is not the product to the last bit.
    gradients = gradients_of(parameters)
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)
