"""Models with what makes code generation hard, each with inputs that it takes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, SEQUENCE = 4, 7
Example = tuple[nn.Module, dict[str, Any]]


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Layer(nn.Module):
    def __init__(self, width: int, activation: nn.Module, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.activation = activation
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.activation(self.linear(x)) * self.scale


class Shared(nn.Module):
    """One activation for all layers, a linear under two names, modules that are called twice, a
    tied weight that is used without its module."""

    def __init__(self) -> None:
        super().__init__()
        activation, own = nn.GELU(), QuickGELU()
        self.layers = nn.ModuleList([Layer(8, activation, scale) for scale in (0.5, 0.5, 0.25)])
        self.first = nn.Linear(8, 8)
        self.second = nn.Sequential(self.first, nn.ReLU())
        self.again = Layer(8, own, 3.0)
        self.last = Layer(8, own, 2.0)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 8)
        self.out.weight = self.layers[1].linear.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.second(self.first(x))
        x = self.last(self.again(self.again(x)))
        x = self.norm(self.norm(x))
        return self.out(x) + F.linear(x, self.layers[0].linear.weight)


class Names(nn.Module):
    """Containers of every kind, names that are not identifiers, frozen parameters, buffers whose
    values are in no state_dict."""

    random: Tensor
    kept: Tensor
    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleDict({"left": nn.Linear(8, 8), "right-1": nn.Linear(8, 8)})
        self.named = nn.Sequential(OrderedDict(a=nn.Linear(8, 8), b=nn.Tanh()))
        self.add_module("block-1", nn.Linear(8, 8))
        self.deep = nn.ModuleList(
            nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, bias=False)]) for _ in range(2)
        )
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(3)])
        self.token = nn.Parameter(torch.randn(1, 8))
        self.words = nn.Embedding(11, 8)
        self.register_buffer("random", torch.randn(8), persistent=False)
        self.register_buffer("kept", torch.randn(8))
        self.register_buffer("positions", torch.arange(8).unsqueeze(0), persistent=False)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.partly = nn.Linear(8, 8)
        self.partly.bias.requires_grad_(False)
        self.fixed = nn.Parameter(torch.randn(8), requires_grad=False)

    def forward(self, x: Tensor, words: Tensor) -> dict[str, Tensor]:
        x = self.ways["left"](x) + self.ways["right-1"](x)
        x = getattr(self, "block-1")(self.named(x))
        for pair in self.deep:
            for linear in pair:
                x = linear(x)
        for scale in self.scales:
            x = x * scale
        x = torch.cat([self.token.expand(x.shape[0], -1), x], 0)[: x.shape[0]]
        x = x + self.words(words)
        x = self.partly(self.frozen(x * self.random + self.kept + self.positions)) * self.fixed
        return {"logits": F.linear(x, self.words.weight), "x": x}


class Rows(nn.Sequential):
    """As torchvision's RegNet names its blocks."""

    def __init__(self, number: int, depth: int) -> None:
        super().__init__()
        for index in range(depth):
            self.add_module(f"row{number}-{index}", Layer(8, nn.ReLU(), 0.5))


class Chains(nn.Module):
    """Sequentials whose members are named by non-identifiers, or by numbers in another order."""

    def __init__(self) -> None:
        super().__init__()
        depths = enumerate((1, 3, 6, 4))
        self.trunk = nn.Sequential(OrderedDict((f"rows{n}", Rows(n, depth)) for n, depth in depths))
        names = ("2", "0", "7")
        self.digits = nn.Sequential(OrderedDict((name, nn.Linear(8, 8)) for name in names))
        self.rest = nn.Sequential(OrderedDict((name, nn.Tanh()) for name in ("1", "0")))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.digits(self.trunk(x)))


class Magnitude(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.sign() * 2


class Operations(nn.Module):
    """Leaves with several results, regions, views that are changed, slices by sizes, names that
    generated code uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True, dropout=0.1)
        self.out = nn.Linear(12, 4)

    def forward(self, input: Tensor, choice: Tensor) -> tuple[Tensor, ...]:
        y, (h, _) = self.lstm(input)
        z, _ = self.attention(y, y, y, need_weights=False)
        z = z + h.mean(0)[:, None, :].repeat(1, 1, 2)
        a, b, c = z.chunk(3, -1)
        z = self.encoder(torch.cat((c, a, b), -1))
        with torch.no_grad():
            mean = z.mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            weights = z @ z.transpose(1, 2)
        z = Magnitude.apply(weights.float().softmax(-1) @ z - mean)
        value, place = z.max(dim=1)
        t = z.clone()
        t[:, 0] = value
        t[..., 1].mul_(2)
        t[:, 1:3] += 1
        nn_ = t.unbind(2)[0][:, :1].expand(-1, 12)
        F_ = torch.where(choice[:, :1] > 3, nn_, -nn_)
        length = input.size(1)
        t = t.reshape(input.shape[0], length * 12)
        return self.out(F_), 1 - t[:, : length - 1], (place**2).float() / 3, 2**-value


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, length: int, device: torch.device) -> Tensor:
        return self.table(torch.arange(length, device=device))


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.a(x)
        return x if y is None else x + self.b(y)


class Patterns(nn.Module):
    """A module called with only a size, one called in two ways, a loop next to a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.positions = Positions()
        self.twice = Optional()
        self.once = Optional()
        self.blocks = nn.ModuleList([Optional() for _ in range(4)])
        self.head = nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.positions(ids.shape[1], ids.device)
        x = self.twice(self.twice(x, x))
        y = self.once(x)
        for block in self.blocks:
            x = block(x, y)
        return self.head(x.view(-1, 8)).view(ids.shape[0], ids.shape[1], -1)


class Conv(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int = 1, size: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, size, stride, size // 2, bias=False)
        self.norm = nn.BatchNorm2d(outside)
        self.act = nn.ReLU(inplace=True)
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(x)))
        return x.view(x.shape[0], self.outside, -1).view(x.shape)


class Widths(nn.Module):
    """Instances of one class that differ in numbers, functional dropout, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Conv(3, 8, 2)
        self.body = nn.Sequential(Conv(8, 8), Conv(8, 8, size=1), Conv(8, 16, 2), nn.MaxPool2d(2))
        self.tail = nn.Sequential(*(Conv(16, 16) for _ in range(4)))
        self.up = nn.Upsample(scale_factor=2)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(self.stem(x))
        for conv in self.tail:
            x = conv(x)
        x = F.adaptive_avg_pool2d(self.up(x), 1).flatten(1)
        out = self.head(F.dropout(x, 0.3, self.training)) * (1.5 if self.training else 1.0)
        return F.cross_entropy(out, labels, label_smoothing=0.1), out


class Modes(nn.Module):
    """Structure that follows the mode: noise in training, a mixture in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.training:
            hidden = hidden + 0.1 * torch.randn_like(hidden)
        else:
            hidden = (hidden + x) / 2
        return self.second(torch.tanh(hidden))


class Pooler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.dense(x)))


class Unread(nn.Module):
    """A result that nobody reads, of a module that draws random numbers all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.pooler, self.last = Pooler(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.pooler(hidden)
        return self.last(self.second(hidden))


def _seeded(build: Callable[[], nn.Module], inputs: Callable[[], dict[str, Any]]) -> Any:
    def example() -> Example:
        torch.manual_seed(0)
        return build(), inputs()

    return example


HARD: Mapping[str, Callable[[], Example]] = {
    "shared": _seeded(Shared, lambda: {"x": torch.randn(BATCH, 8)}),
    "names": _seeded(
        Names, lambda: {"x": torch.randn(BATCH, 8), "words": torch.randint(0, 11, (BATCH,))}
    ),
    "chains": _seeded(Chains, lambda: {"x": torch.randn(BATCH, 8)}),
    "operations": _seeded(
        Operations,
        lambda: {
            "input": torch.randn(BATCH, SEQUENCE, 8),
            "choice": torch.randint(0, 9, (BATCH, SEQUENCE)),
        },
    ),
    "patterns": _seeded(Patterns, lambda: {"ids": torch.randint(0, 20, (BATCH, SEQUENCE))}),
    "modes": _seeded(Modes, lambda: {"x": torch.randn(BATCH, 8)}),
    "unread": _seeded(Unread, lambda: {"x": torch.randn(BATCH, 8)}),
    "widths": _seeded(
        Widths,
        lambda: {"x": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(0, 5, (BATCH,))},
    ),
}
