"""A classifier of repeated blocks, which draws random numbers and keeps statistics, generated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.runtime.plan.plan import Plan

WIDTH, CLASSES, BLOCKS = 16, 4, 4


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.layer(self.norm(x))))


class Classifier(nn.Module):
    """An input layer with dropout, `BLOCKS` blocks, and a head."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.25)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.inner(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def write_classifier(folder: Path, *, stages: int = 2) -> Plan:
    """A `Classifier` with cuts between its blocks."""
    torch.manual_seed(7)
    cuts = {2: ("blocks.1",), 3: ("blocks.0", "blocks.2"), 4: ("blocks.0", "blocks.1", "blocks.2")}
    return asyncpipe.partition(
        Classifier(),
        {"x": torch.randn(4, WIDTH)},
        stages=stages,
        cut_at=cuts[stages],
        loss="cross_entropy",
        name="blocks",
        output=str(folder),
        profile="analytic",
    )


def write_elastic(
    folder: Path, lengths: str, freeze: str | None = None, cut_at: tuple[str, ...] = ()
) -> Plan:
    """A `Classifier` without statistics, which differ between replicas, with the phases of these
    lengths."""
    torch.manual_seed(7)
    return asyncpipe.partition(
        Classifier(nn.LayerNorm),
        {"x": torch.randn(4, WIDTH)},
        stages=int(lengths.partition(",")[0]),
        schedule="1f1b",
        micro_batches=4,
        loss="cross_entropy",
        name="blocks",
        output=str(folder),
        profile="analytic",
        elastic=lengths,
        cut_at=cut_at,
        freeze=freeze,
    )


def write_flat(folder: Path) -> Plan:
    """The same in one stage, without modules."""
    return asyncpipe.partition(
        Classifier(nn.LayerNorm),
        {"x": torch.randn(4, WIDTH)},
        stages=1,
        loss="cross_entropy",
        name="blocks",
        output=str(folder),
        profile="analytic",
        code="flat",
    )
