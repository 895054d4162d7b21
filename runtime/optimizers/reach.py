"""What the step of an unknown optimizer depends on, found by trying it on small tensors.

A stage steps its own parameters, and a tensor rank its parts of them. These are the steps of the
plain model only if a step looks at no more than that: not at a norm over all parameters, as LAMB
does that clips, and on a tensor rank not at the norm of a parameter.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_STEPS = 10
_SIDE = 4
"""The largest side of a stand-in for a parameter."""
_SIZE = 1e3
"""The size of its gradients, above the norms at which optimizers clip."""
_RATE = 1.0
"""The learning rate, for which estimates of it grow at once, and not 0, as before a warm-up."""


class Reach(IntEnum):
    """What the step of one number of a parameter depends on."""

    NUMBER = 0
    """Its own gradients."""
    PARAMETER = 1
    """Those of its parameter, as with Muon, Adafactor and LARS."""
    PARAMETERS = 2
    """Those of other parameters too, as with Prodigy, or LAMB that clips by a norm over all."""


def reach_of(optimizer: Optimizer) -> Reach | None:
    """The reach of an optimizer, of which copies step small tensors in place of its parameters;
    None if they fail to. Neither the optimizer nor the random numbers of the run change.

    Which gradients a step depends on is seen by changing some: first those of every second
    parameter, then every second number in all of them.

    >>> weights = [nn.Parameter(torch.ones(8, 8)) for _ in range(2)]
    >>> reach_of(torch.optim.AdamW(weights)), reach_of(torch.optim.Adafactor(weights))
    (<Reach.NUMBER: 0>, <Reach.PARAMETER: 1>)
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    draws = torch.Generator().manual_seed(0)
    starts, given, others = ([_drawn(each, draws) for each in parameters] for _ in range(3))
    by_parameter = [(given, others)[number % 2][number] for number in range(len(parameters))]
    by_number = [_alternating(*pair) for pair in zip(given, others, strict=True)]
    try:
        steps, of_parameters, of_numbers = (
            _steps(optimizer, parameters, starts, gradients)
            for gradients in (given, by_parameter, by_number)
        )
    except (Exception, SystemExit):  # a stranger's code may do either for other tensors
        return None
    if not _are_equal(steps[::2], of_parameters[::2]):
        return Reach.PARAMETERS
    unchanged = ([each.flatten()[::2] for each in made] for made in (steps, of_numbers))
    return Reach.NUMBER if _are_equal(*unchanged) else Reach.PARAMETER


def _drawn(parameter: Tensor, draws: torch.Generator) -> Tensor:
    """Random numbers in as many dimensions, in the precision that shows the smallest steps."""
    dtype = torch.complex128 if parameter.is_complex() else torch.float64
    return torch.randn([min(side, _SIDE) for side in parameter.shape], generator=draws, dtype=dtype)


def _alternating(one: Tensor, two: Tensor) -> Tensor:
    """The numbers of two tensors in turn."""
    numbers = one.flatten().clone()
    numbers[1::2] = two.flatten()[1::2]
    return numbers.reshape(one.shape)


def _are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(
        torch.allclose(*pair, rtol=0.0, atol=0.0, equal_nan=True)
        for pair in zip(some, others, strict=True)
    )


def _steps(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    starts: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> list[Tensor]:
    """By how much some steps change each start, on gradients of changing sizes."""
    stand_ins = [_stand_in(*pair) for pair in zip(parameters, starts, strict=True)]
    tried = _copy(optimizer, dict(zip(parameters, stand_ins, strict=True)))
    sizes = torch.Generator().manual_seed(1)
    with torch.random.fork_rng({each.device for each in parameters if each.is_cuda}):
        torch.manual_seed(0)
        for _ in range(_STEPS):
            for stand_in, gradient in zip(stand_ins, gradients, strict=True):
                size = _SIZE * (0.5 + torch.rand(gradient.shape, generator=sizes))
                stand_in.grad = (gradient * size).to(stand_in.device)
            type(tried).step(tried)  # without what a scheduler has put around it
    return [
        stand_in.detach().cpu() - start for stand_in, start in zip(stand_ins, starts, strict=True)
    ]


def _stand_in(parameter: Tensor, start: Tensor) -> nn.Parameter:
    stand_in = nn.Parameter(start.to(parameter.device, copy=True))
    stand_in.__dict__.update(parameter.__dict__)  # marks by which some optimizers tell them apart
    return stand_in


def _copy(optimizer: Optimizer, stand_ins: dict[Tensor, nn.Parameter]) -> Optimizer:
    """A copy of an optimizer with stand-ins in place of its parameters, and without its hooks.

    `Optimizer.__getstate__` would leave out what a class of its own keeps beside the groups.
    """
    tried: Optimizer = object.__new__(type(optimizer))
    known: dict[int, object] = {id(optimizer): tried}
    for parameter, stand_in in stand_ins.items():
        known[id(parameter)] = stand_in
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                known[id(value)] = torch.zeros_like(stand_in)
    tried.__dict__.update(copy.deepcopy(optimizer.__dict__, known))
    tried._optimizer_step_pre_hooks = OrderedDict()
    tried._optimizer_step_post_hooks = OrderedDict()
    for group in tried.param_groups:
        group["lr"] = _RATE
    return tried
