"""Your own model, as small as it gets: a residual MLP with its example inputs.

asyncpipe-partition --model examples/residual_mlp.py:build --stages 2 --loss cross_entropy
asyncpipe-train generated_models/residual_mlp_2p --data examples/residual_mlp.py:data
"""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class ResidualMLP(nn.Module):
    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embed(x)
        hidden = embedded
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden + embedded)


def build(width: int = 64, depth: int = 4, classes: int = 4) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and inputs of the shapes that its forward takes (batch first)."""
    return ResidualMLP(width, depth, classes), {"x": torch.zeros(8, 16)}


def data() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Training and evaluation data: four noisy clusters; the loss compares with `target`."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 16, generator=generator)
    labels = torch.randint(4, (1200,), generator=generator)
    x = centres[labels] + 0.8 * torch.randn(1200, 16, generator=generator)
    return (
        {"x": x[:1000], "target": labels[:1000]},
        {"x": x[1000:], "target": labels[1000:]},
    )
