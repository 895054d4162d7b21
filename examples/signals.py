"""A model with two halves: convolutions that take long, and a dense layer that has the weights.

asyncpipe-partition --model examples/signals.py:build --loss cross_entropy --stages 3 \
    --hosts a:2,b:1 --method pipedream --schedule 1f1b --micro-batches 4 --output signals
asyncpipe-train signals --data examples/signals.py:data
"""

import torch
from torch import Tensor, nn


class Signals(nn.Module):
    def __init__(self, channels: int, depth: int, classes: int) -> None:
        super().__init__()
        self.widen = nn.Conv1d(1, channels, 3, padding=1)
        self.norm = nn.BatchNorm1d(channels)
        self.deep = nn.ModuleList(nn.Conv1d(channels, channels, 3, padding=1) for _ in range(depth))
        self.dense = nn.Linear(channels * 16, 64 * channels)
        self.head = nn.Linear(64 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.widen(x[:, None]))
        for layer in self.deep:
            hidden = torch.relu(layer(hidden))
        return self.head(torch.relu(self.dense(hidden.flatten(1))))


def build(
    channels: int = 32, depth: int = 24, classes: int = 4
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and inputs of the shapes that its forward takes (batch first)."""
    return Signals(channels, depth, classes), {"x": torch.zeros(32, 16)}


def data() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Training and evaluation data: waves of four frequencies in noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (1200,), generator=generator)
    waves = torch.sin(torch.arange(16) * (labels[:, None] + 1) * 0.4)
    x = waves + 0.5 * torch.randn(1200, 16, generator=generator)
    return (
        {"x": x[:1000], "target": labels[:1000]},
        {"x": x[1000:], "target": labels[1000:]},
    )
