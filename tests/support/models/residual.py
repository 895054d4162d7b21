"""A residual MLP whose skip crosses the cut."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ResidualMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(3)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        embed = self.embed(x)
        hidden = embed
        for block in self.blocks:
            hidden = torch.relu(block(hidden))
        return self.head(hidden + embed)
