"""Models that change tensors in place, through views, behind other names: one pattern each.

Every model takes `x`, f32[batch, 8], and has few operations, so that it can be cut at each of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

AWKWARD: dict[str, type[nn.Module]] = {}
"""The models by name."""


def example() -> dict[str, Tensor]:
    """The inputs of every model."""
    return {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(5))}


def build(name: str) -> nn.Module:
    """A model, always with the same weights."""
    torch.manual_seed(0)
    return AWKWARD[name]()


class _Two(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def __init_subclass__(cls) -> None:
        AWKWARD[cls.__name__] = cls


# Statements, operators, functions, modules


class Statement(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.add_(1)
        y.mul_(0.5).sub_(2)
        return self.b(y)


class Operators(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y += 1
        y *= 2
        y -= x
        y /= 3
        return self.b(y)


class OtherName(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = y
        z += 1
        return self.b(y * 2) * y + z


class ReluMethod(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.relu_()
        return self.b(y) + y


class ReluFunction(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        F.relu(y, inplace=True)
        z = F.leaky_relu(self.b(y), 0.1, inplace=True)
        return z + 1


class ReluModule(_Two):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.b(self.act(self.a(x))))


class ReluFirst(_Two):
    """In place on what a stage may just have received, by a module with another reader."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        before = y * 3
        return self.b(self.act(y)) + before + y


class Chained(_Two):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Hardtanh(inplace=True), nn.Linear(8, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.body(self.a(x)))


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.norm(self.linear(x))
        out += identity
        return self.relu(out)


class Residuals(_Two):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(_Residual(), _Residual())

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.layers(self.a(x)))


class _BeforeActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.relu(x))


class Preactivation(_Two):
    """Modules that change their argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_BeforeActivation() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for layer in self.layers:
            h = layer(h)
        return self.b(h)


class InLoop(_Two):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for layer in self.layers:
            t = layer(h)
            t += h
            t *= 0.5
            h = t
        return self.b(h)


class Accumulated(_Two):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = [layer(x) for layer in (self.a, self.b, self.a)]
        total = found[0]
        for value in found[1:]:
            total += value
        return total * 2, found[0]


class Returned(_Two):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.a(x)
        first = h
        second = self.b(h * 1)
        h.add_(second)
        return {"h": h, "first": first, "second": second}


class Products(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.addcmul_(self.b(x), x, value=0.5)
        y.lerp_(x, 0.25)
        y.clamp_(min=-1.0)
        return y.addmm_(x, self.b.weight)


class AfterTheLastRead(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = self.b(y * 2)
        y.zero_()
        return z


class OverwrittenWhole(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = y + 1
        y.copy_(self.b(x))
        y[...] = z * 2
        return y + z


# `out=`, made empty and filled


class Out(_Two):
    def forward(self, x: Tensor) -> Tensor:
        given = torch.empty_like(x)
        torch.add(x, 1, out=given)
        torch.mul(given, x, out=given)
        return self.a(given) * given


class OutView(_Two):
    def forward(self, x: Tensor) -> Tensor:
        given = torch.zeros(x.shape[0], 16)
        torch.add(x, 1, out=given[:, :8])
        torch.sub(x, 1, out=given[:, 8:])
        return self.a(given[:, 4:12]) * given[:, :8]


class OutGrows(_Two):
    def forward(self, x: Tensor) -> Tensor:
        given = torch.empty(0)
        torch.add(x, 1, out=given)
        return self.b(self.a(given) * given)


class Filled(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros(x.shape[0], 8)
        y.fill_(0.5)
        y[:, 0] = x[:, 0]
        y[:, 1:5] = self.a(x)[:, 1:5]
        y[:, 5:].copy_(self.b(x)[:, 5:])
        return y * 2


# Views


class ViewThenMutate(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        view = y[:, :4]
        y.mul_(2)
        return self.b(y) * view.sum(-1, keepdim=True)


class MutateThenView(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.mul_(2)
        view = y[:, :4]
        y += 1
        return self.b(y) * view.mean()


class ThroughAView(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y[:, 1:3].mul_(3)
        y[:, 2:] += 1
        return self.b(y)


class Overlapping(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        low, high = y[:, :5], y[:, 3:]
        low.add_(1)
        high.mul_(2)
        return self.b(torch.cat([low, high], 1)[:, :8])


class ViewOfViews(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).view(-1, 2, 4)
        t = y.transpose(1, 2)
        part = t[:, 1:3]
        part += 1
        diagonal = t.diagonal(dim1=1, dim2=2)
        diagonal.mul_(2)
        return self.b(y.reshape(-1, 8)) + part.sum((1, 2))[:, None] + diagonal.sum(-1)[:, None]


class Chunks(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        low, high = y.chunk(2, -1)
        low += 1
        high.mul_(low)
        return self.a(y) + self.b(torch.cat([high, low], 1))


class Splits(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        a, b, c = y.split([2, 3, 3], dim=1)
        b.sub_(c)
        a[:, 0] = 7
        return self.b(self.a(y) + y)


class Unbound(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        columns = y.unbind(1)
        columns[0].add_(columns[1])
        columns[2].zero_()
        return self.b(self.a(torch.stack(columns, 1)) * y)


class Expanded(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        column = y[:, :1]
        wide = column.expand(-1, 8)
        column.add_(1)
        return self.b(y) + wide


class AsOthers(_Two):
    """Views whose shape is another tensor's."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        square = x.view(-1, 2, 4)
        seen = y.view_as(square)
        y += 1
        column = y[:, :1]
        wide = column.expand_as(x)
        seen[:, 1] *= 2
        return self.b(y) + wide + seen.sum((1, 2))[:, None]


class Diagonal(_Two):
    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("bi,bj->bij", self.a(x), x)
        scores.diagonal(dim1=1, dim2=2).fill_(0)
        scores.diagonal(dim1=1, dim2=2).add_(x)
        return self.b(scores.softmax(-1).sum(1))


class Transposed(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        t = y.t()
        t[0] += 1
        y.T[1].mul_(2)
        return self.b(y) + t.sum(0)[:, None]


class Squeezed(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.unsqueeze(1).squeeze(1).mul_(2)
        flat = y.flatten()
        flat += 1
        y.unflatten(1, (2, 4)).narrow(1, 0, 1).sub_(1)
        y.permute(1, 0).select(0, 3).zero_()
        return self.b(y) + flat.view(-1, 8)


class CopiedByReshape(_Two):
    """A reshape that has to copy: what follows does not change what was reshaped."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        turned = y.view(-1, 2, 4).transpose(1, 2)
        flat = turned.reshape(-1, 8)
        flat += 1
        also = turned.contiguous()
        also.mul_(2)
        return self.b(flat) + y + also.view(-1, 8) + turned.sum()


class SwappedHalves(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        left = y[:, :4].clone()
        y[:, :4] = y[:, 4:]
        y[:, 4:] = left
        return self.b(y)


class Shifted(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y[:, 1:] += y[:, :-1].clone()
        y[:, ::2] = 0
        y[1:, 1] = y[:-1, 3].clone()
        return self.b(y)


class TwoFamilies(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y, z = self.a(x), self.b(x)
        y[:, :4].copy_(z[:, 4:])
        z += y
        y.sub_(1)
        return y * z


class OfOnlyAPart(_Two):
    """Later operations use only a view of a large tensor."""

    def forward(self, x: Tensor) -> Tensor:
        large = self.a(x).repeat(1, 4)
        part = large[:, 3:11]
        part += 1
        part = self.b(part * 2) + part
        return part


# By index and by mask


class Masked(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y[x > 0.5] = 0
        y[y < -0.5] += 1
        return self.b(y)


class MaskedFill(_Two):
    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("bi,bj->bij", self.a(x), self.b(x))
        allowed = torch.ones(8, 8, dtype=torch.bool).tril()
        scores.masked_fill_(~allowed, float("-inf"))
        scores = scores.softmax(-1)
        return scores @ x[:, :, None]


class Indexed(_Two):
    index: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("index", torch.tensor([1, 3, 3]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.index_add_(1, self.index, x[:, :3])
        y.index_fill_(1, self.index[:1], 0.5)
        y[:, self.index] *= 2
        return self.b(y)


class Scattered(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        place = x.argmax(1, keepdim=True)
        y.scatter_(1, place, 0.0)
        hot = torch.zeros_like(x).scatter_(1, place, 1.0)
        y.scatter_add_(1, place, self.b(x)[:, :1])
        return self.b(y) * hot


# Other dtypes


class Integers(_Two):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 8)

    def forward(self, x: Tensor) -> Tensor:
        ids = x.argmax(1)
        ids += 1
        ids.clamp_(max=7)
        first = self.words(ids * 1)
        ids[ids == 3] = 0
        return self.b(self.words(ids) + self.a(first))


class Booleans(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        kept = y > 0
        kept &= x > -1
        kept |= x > 2
        y *= kept
        number = kept.long()
        number -= 1
        return self.b(y) + number


class Promoted(_Two):
    """In place the dtype stays: half precision plus single precision is half."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).bfloat16()
        y += x
        y.mul_(x[:1])
        return self.b(y.float()) + y


# Inputs and skips


class Input(_Two):
    def forward(self, x: Tensor) -> Tensor:
        x -= x.mean(0)
        return self.b(self.a(x).relu())


class InputAsSkip(_Two):
    def forward(self, x: Tensor) -> Tensor:
        before = x.sum(-1, keepdim=True)
        first = x[:, :2]
        x[:, 0] = 5
        h = self.b(self.a(x).tanh())
        return h + x + first.mean() + before


class Skip(_Two):
    def forward(self, x: Tensor) -> Tensor:
        skip = self.a(x)
        inner = skip + 0.5
        skip.mul_(3)
        return self.b(inner.tanh()) + skip


class SkipOfBoth(_Two):
    def forward(self, x: Tensor) -> Tensor:
        skip, y = self.a(x), self.b(x)
        skip += y
        y = y * 2
        skip += y
        return skip + y


# State


class Running(_Two):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * h.mean(0))
        return self.b((h - self.mean).tanh()) * self.mean


class Counter(_Two):
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.steps += 1
        return self.b(h.tanh()) / self.steps


class Reassigned(_Two):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.b(self.a(x).tanh()) + self.mean


class Memory(_Two):
    memory: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        old = self.memory[0] * 1
        row = self.memory[1]
        h = self.a(x)
        row.copy_(h.detach().mean(0))
        self.memory[2] += 1
        return self.b(h + row) + self.memory.sum(0) + old


class NormTwice(_Two):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(self.norm(x))))


class ClampedWeight(_Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        with torch.no_grad():
            self.b.weight.clamp_(-0.1, 0.1)
        return F.linear(h, self.b.weight) + self.b.weight.sum()


# Gradients, modes, random numbers


class NoGrad(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.no_grad():
            y.clamp_(-0.3, 0.3)
            y[:, 0] = 1
        return self.b(y)


class Detached(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        free = y.detach()
        free.mul_(2)
        return self.b(y) + free


class DetachedWithGradient(_Two):
    """Detached, then given a gradient of its own by what is written into it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        free = y.detach()
        free.copy_(self.b(x))
        y += 1
        return y.mean() + free * 2


class StateThenViewed(_Two):
    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.state.add_(x.mean(0))
        seen = self.state[:4]
        y = self.a(x)
        return self.b(y * self.state[2:3]) + self.state[:1].expand(8) * seen.sum()


class Data(_Two):
    """Behind autograd's back: `exp` has saved what is changed."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).exp()
        y.data.mul_(2)
        return self.b(y)


class Saved(_Two):
    """The input of a frozen layer may change: autograd saves only its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        k = self.frozen(h)
        h.add_(k)
        kept = h * 2
        k -= 1
        return self.b(kept + k)


class GradientByChange(_Two):
    """Made without a gradient, given one by what is written into it."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        z = y[:, :4]
        y[:, 2:6] = self.a(x)[:, 2:6]
        return self.b(y) * z.sum(-1, keepdim=True)


class InMetadata(_Two):
    """What changes is the shape."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.unsqueeze_(1)
        y += 1
        y.squeeze_(1)
        return self.b(y)


class DropoutInPlace(_Two):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        F.dropout(y, 0.3, self.training, inplace=True)
        z = self.drop(self.b(y))
        return z + y


class DropoutThenChange(_Two):
    """In evaluation mode dropout gives back its argument, which then changes too."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        kept = self.drop(h)
        kept += 1
        return self.b(kept) * h


class Noise(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        noise = torch.empty_like(y)
        noise.normal_()
        kept = torch.empty_like(x).bernoulli_(0.5)
        y += 0.1 * noise
        y.mul_(kept)
        return self.b(y)


class InTraining(_Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.training:
            y.mul_(2)
            y[:, 0] += 1
        return self.b(y)


class ConvolvedResidual(nn.Module):
    """The block of a ResNet: in place at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(2)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 2, 2, 2)
        out = self.relu(self.norm(self.first(image)))
        out = self.norm2(self.second(out))
        out += image
        return self.relu(out).flatten(1)


AWKWARD["ConvolvedResidual"] = ConvolvedResidual
