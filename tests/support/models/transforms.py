"""Models whose forward calls the transforms of torch.func."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F

WIDTH = 8


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(x, self.first(x)))

    def middle(self, x: Tensor, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class Ensemble(_Two):
    """Three networks with stacked parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(3, WIDTH))
        self.templates = [nn.Linear(WIDTH, WIDTH, device="meta")]

    def middle(self, x: Tensor, hidden: Tensor) -> Tensor:
        def run(parameters: dict[str, Tensor]) -> Tensor:
            return functional_call(self.templates[0], parameters, hidden).tanh()

        return vmap(run)({"weight": self.weight, "bias": self.bias}).mean(0)


class OfOneRow(_Two):
    """A module, a table and a place for each row, without gradients in a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.register_buffer("scale", torch.arange(1.0, WIDTH + 1))

    def middle(self, x: Tensor, hidden: Tensor) -> Tensor:
        def run(row: Tensor, place: Tensor) -> Tensor:
            with torch.no_grad():
                norm = row.norm()
            row = row.clone()
            row[0] = 0
            return self.last(row * self.scale) / norm + self.table(place) * row[place]

        return vmap(run)(hidden, x.argmax(-1))


class Noisy(_Two):
    """Dropout and noise, other ones for every row."""

    def middle(self, x: Tensor, hidden: Tensor) -> Tensor:
        def run(row: Tensor) -> Tensor:
            return F.dropout(row, 0.5, self.training) + 0.1 * torch.randn(WIDTH)

        return vmap(run, randomness="different")(hidden)


class Curvature(_Two):
    """Derivatives of each row."""

    def middle(self, x: Tensor, hidden: Tensor) -> Tensor:
        def energy(row: Tensor) -> Tensor:
            return self.first(row).sin().sum()

        slopes = vmap(grad(energy))(x)
        curvature = vmap(hessian(energy))(x).sum(1)
        return hidden + slopes + curvature + vmap(jacfwd(self.first))(x).sum(1)


class Derivatives(_Two):
    """Derivatives of the whole batch."""

    def middle(self, x: Tensor, hidden: Tensor) -> Tensor:
        result, back = vjp(lambda rows: self.first(rows).tanh(), x)
        slope = jvp(torch.sin, (hidden,), (x,))[1]
        jacobian = jacrev(lambda rows: self.first(rows).sum(0))(x)
        return slope + back(result)[0] + jacobian.sum(0)


class InnerSteps(_Two):
    """Two steps of gradient descent inside forward."""

    def middle(self, x: Tensor, hidden: Tensor) -> Tensor:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return functional_call(self.first, parameters, x).square().mean()

        parameters: dict[str, Tensor] = dict(self.first.named_parameters())
        for _ in range(2):
            slopes = grad(loss)(parameters)
            parameters = {name: p - 0.1 * slopes[name] for name, p in parameters.items()}
        return functional_call(self.first, parameters, x)


class _Cube(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.saved_tensors[0]


class OwnBackward(_Two):
    """A backward of its own for each row, which is not the derivative of its forward."""

    def middle(self, x: Tensor, hidden: Tensor) -> Tensor:
        return vmap(_Cube.apply)(hidden)


class NormOfRows(_Two):
    """A function for whose rows torch asks for the batch size as a number."""

    def middle(self, x: Tensor, hidden: Tensor) -> Tensor:
        return vmap(lambda row: F.layer_norm(row, (WIDTH,)))(hidden)


class OfManyRows(_Two):
    """Another computation for large batches, decided inside of nested transforms."""

    def middle(self, x: Tensor, hidden: Tensor) -> Tensor:
        def scaled(number: Tensor) -> Tensor:
            return number * (2 if hidden.shape[0] > 1000 else 1)

        return vmap(vmap(scaled))(hidden)


class Counts(_Two):
    """A buffer that is assigned inside of a transform."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def middle(self, x: Tensor, hidden: Tensor) -> Tensor:
        def run(row: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return row * 2

        return vmap(run)(hidden)
