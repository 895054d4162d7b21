"""cross_entropy takes classes last, and says so before and at the first loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.training.evaluation import cross_entropy
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY

DATA = """
import torch
def made():
    return {"x": torch.randn(24, 6, 8), "target": torch.zeros(24, 6, dtype=torch.int64)}
"""


class Tagger(nn.Module):
    """Predicts 3 classes for every place in a row, in dimension 1, or in the last with `last`."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.body, self.head, self.last = nn.Linear(8, 8), nn.Linear(8, 3), last

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.body(x).relu())
        return logits if self.last else logits.movedim(-1, 1)


@pytest.mark.parametrize("last", [True, False])
def test_a_layout_is_named_at_partition_and_refused_at_the_first_loss(
    tmp_path: Path, last: bool
) -> None:
    folder = tmp_path / "tagger"
    plan = asyncpipe.partition(
        Tagger(last),
        {"x": torch.randn(4, 6, 8)},
        stages=2,
        output=folder,
        loss="cross_entropy",
        profile="analytic",
    )
    classes = 3 if last else 6
    assert any("last dimension of" in note and f"{classes} classes" in note for note in plan.notes)
    (tmp_path / "data.py").write_text(DATA)
    settings = Settings(
        folder=str(folder),
        output=str(tmp_path / "run"),
        data=f"{tmp_path / 'data.py'}:made",
        schedule="single",
        steps=1,
        threads=1,
        eval_batches=0,
    )
    if last:
        run(settings, FACTORY)
        return
    with pytest.raises(AsyncPipeError) as caught:
        run(settings, FACTORY)
    assert "takes the last dimension as the classes" in caught.value.what
    assert "rows of 6 classes" in caught.value.what and "movedim(1, -1)" in caught.value.cure


def test_the_loss_is_the_mean_over_all_targets() -> None:
    logits, target = torch.randn(2, 5, 3), torch.randint(3, (2, 5))
    expected = nn.functional.cross_entropy(logits.movedim(-1, 1), target)
    torch.testing.assert_close(cross_entropy(logits, target), expected)
    one = nn.functional.cross_entropy(logits[:, 0], target[:, 0])
    torch.testing.assert_close(cross_entropy(logits[:, 0], target[:, :1]), one)
