"""The optimizers that torch does not have: SOAP, and SGD with momentum in Sutskever's form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

LARGEST = 8192
"""Sides of more rows or columns are not rotated: the time of QR grows with their cube."""

_SIDES = ("left", "right")


class Soap(Optimizer):
    """SOAP of two-dimensional parameters, with decoupled weight decay: Adam in the eigenbases of
    the gradients' covariances.

    For a matrix p of m rows and n columns with gradient G (Vyas et al., "SOAP", ICLR 2025,
    algorithm 3; Jung et al., "basis rotation", arXiv 2602.03515, algorithms 1 and 2, whose order
    this is):

        L <- b2 L + (1 - b2) G G'        R <- b2 R + (1 - b2) G' G
        every f steps   Q <- the Q of QR(L Q), its columns first ordered by falling diag(Q' L Q);
                        the rows or columns of V are reordered with it; likewise for R
        M <- b1 M + (1 - b1) G           V <- b2 V + (1 - b2) (Ql' G Qr)^2
        p <- (1 - lr decay) p - lr Ql [Ql' M Qr / (1 - b1^t) / (sqrt(V / (1 - b2^t)) + eps)] Qr'

    The first gradient only gives the bases, the eigenvectors of its L and R: in them it is
    diagonal, and Adam would make whole steps of the rounding errors off the diagonal. M is kept
    unrotated, so that a refresh leaves it valid. Without a rotated side this is AdamW.

    Late gradients harm Adam more, the less the axes of the weights are those of the curvature: then
    each coordinate's step follows from all directions at once, and oscillates. Eigenbases of the
    gradients' covariances are close to those of the curvature.

    The state of an `f[m, n]` has `exp_avg` (M) and `exp_avg_sq` (V, of the rotated gradient), the
    covariances `left` `f[m, m]` and `right` `f[n, n]`, and as large `left_basis` and `right_basis`.
    Bases are refreshed every `refresh_every` steps; a side above `largest` has none.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        refresh_every: int = 10,
        largest: int = LARGEST,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "refresh_every": refresh_every,
            "largest": largest,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of all parameters that have gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(_first_state(parameter, group["largest"]))
                    if _find_bases(state, parameter.grad, group["betas"][1]):
                        continue
                _observe(state, parameter.grad, group["betas"], group["refresh_every"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(_direction(state, group["betas"], group["eps"]), alpha=group["lr"])


def _first_state(parameter: Tensor, largest: int) -> dict[str, Tensor]:
    state = {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
    for side, size in zip(_SIDES, parameter.shape, strict=True):
        if size <= largest:
            state[side] = parameter.new_zeros(size, size)
    return state


def _observe(
    state: dict[str, Tensor], gradient: Tensor, betas: tuple[float, float], refresh_every: int
) -> None:
    """Adds a gradient to all averages of the state, and refreshes the bases when they are due."""
    beta1, beta2 = betas
    state["step"] += 1
    _observe_covariances(state, gradient, beta2)
    if state["step"] % refresh_every == 0:
        _refresh_bases(state)
    turned = rotated(gradient, state)
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(turned, turned, value=1 - beta2)


def _observe_covariances(state: dict[str, Tensor], gradient: Tensor, beta: float) -> None:
    for side, rows in (("left", gradient), ("right", gradient.T)):
        if side in state:
            state[side].addmm_(rows, rows.T, beta=beta, alpha=1 - beta)


def _find_bases(state: dict[str, Tensor], gradient: Tensor, beta: float) -> bool:
    """Puts into a new state, if sides of it are to be rotated, the eigenvectors of G G' and G' G:
    the singular vectors of G, and any that complete them."""
    if not any(side in state for side in _SIDES):
        return False
    _observe_covariances(state, gradient, beta)
    # Where G has no numbers the run ends at its loss, with a better message than the SVD's.
    vectors = torch.linalg.svd(gradient.double().nan_to_num(), full_matrices=False)
    for side, singular in (("left", vectors.U), ("right", vectors.Vh.T)):
        if side in state:
            basis = torch.linalg.qr(singular, mode="complete").Q
            state[f"{side}_basis"] = basis.to(gradient.dtype)
    return True


def _refresh_bases(state: dict[str, Tensor]) -> None:
    """One step of orthogonal iteration from the bases that there are."""
    for dimension, side in enumerate(_SIDES):
        if side not in state:
            continue
        basis = state[f"{side}_basis"]
        turned = state[side] @ basis
        order = (basis * turned).sum(0).argsort(descending=True, stable=True)
        state["exp_avg_sq"] = state["exp_avg_sq"].index_select(dimension, order)
        state[f"{side}_basis"] = torch.linalg.qr(turned[:, order]).Q


def _direction(state: dict[str, Tensor], betas: tuple[float, float], eps: float) -> Tensor:
    """The update of a step at learning rate 1."""
    first, second = (1 - beta ** float(state["step"]) for beta in betas)
    spread = (state["exp_avg_sq"] / second).sqrt_().add_(eps)
    turned = (rotated(state["exp_avg"], state) / first).div_(spread)
    return rotated(turned, state, back=True)


def rotated(matrix: Tensor, state: Mapping[str, Tensor], *, back: bool = False) -> Tensor:
    """The matrix seen in the bases, Ql' matrix Qr; or `back` from there."""
    left, right = state.get("left_basis"), state.get("right_basis")
    if left is not None:
        matrix = (left if back else left.T) @ matrix
    if right is not None:
        matrix = matrix @ (right.T if back else right)
    return matrix


def refresh_periods(delays: Sequence[int], every: int) -> tuple[int, ...]:
    """The number of steps between refreshes of each stage's bases, for stages whose gradients are
    `delays` steps late.

    A basis that turns with the gradients matters more where gradients are later, so each stage has
    a share of all refreshes that is proportional to 1 + its delay (Jung et al., arXiv 2602.03515,
    have the idea; the shares are ours). Together the stages refresh no more often than if each did
    so every `every` steps, which without delays each does.

    >>> refresh_periods([3, 2, 1, 0], 10)
    (7, 9, 13, 25)
    >>> refresh_periods([1, 1], 10)
    (10, 10)
    """
    total = sum(1 + delay for delay in delays)
    return tuple(-(-every * total // (len(delays) * (1 + delay))) for delay in delays)


class Sutskever(Optimizer):
    """SGD with momentum in the form of Sutskever et al. (ICML 2013, section 2).

        v <- momentum v + lr g        p <- p - v

    v, the `momentum_buffer`, is the next step itself; weight decay is added to gradients. torch's
    SGD has v <- momentum v + g and p <- p - lr v. At a constant learning rate both take the same
    steps. When it changes, torch's scales everything in v at once, and here earlier gradients keep
    their rate.
    """

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
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
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
        buffer: Tensor = state["momentum_buffer"]
        return buffer
