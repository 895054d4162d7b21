"""Gradients -> SGD with momentum in the form of Sutskever et al. (ICML 2013, section 2).

    v <- momentum v + lr g        p <- p - v

torch's SGD has v <- momentum v + g and p <- p - lr v. At a constant learning rate both take the
same steps. When it changes, torch's scales all that is in v at once, and here the gradients so far
keep the rate at which they came.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Sutskever(Optimizer):
    """SGD whose `momentum_buffer` is the next step itself; weight decay is added to gradients."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of all parameters that have gradients."""
        for group in self.param_groups:
            parameters = [one for one in group["params"] if one.grad is not None]
            if not parameters:
                continue
            gradients = [parameter.grad for parameter in parameters]
            if group["weight_decay"]:
                decay = group["weight_decay"]
                gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
            velocities = [self._velocity(parameter) for parameter in parameters]
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_add_(velocities, gradients, alpha=group["lr"])
            torch._foreach_sub_(parameters, velocities)

    def _velocity(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        found: Tensor = state["momentum_buffer"]
        return found
