"""Between split layers each tensor rank has a part of the positions: what is divided, and how.

A partition compares outputs and gradients of its stages on the tensor ranks with those of whole
stages, so a folder that exists is one that agrees.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner.verify_parts import verify_parts
from asyncpipe.runtime.errors import PlanError
from asyncpipe.runtime.plan.plan import Plan, read_plan


class Block(nn.Module):
    """Attention and a gated product with norms, dropouts and residual additions around them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(0.1)
        self.scale = nn.Parameter(torch.ones(16))

    def attended(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = (y.view(batch, length, 4, 4).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attended(self.norm(x)))
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + nn.functional.dropout(self.down(torch.relu(self.up(y))), 0.2, self.training)


class Shifted(Block):
    """Before its products a position reads the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = y + nn.functional.pad(y, (0, 0, 1, 0))[:, :-1]
        return x + self.down(torch.relu(self.up(y)))


class Model(nn.Module):
    """Blocks with an embedding of positions, and a class of the first one."""

    def __init__(self, kind: type[Block], blocks: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(40, 16), nn.Embedding(12, 16)
        self.blocks = nn.Sequential(*(kind() for _ in range(blocks)))
        self.head = nn.Linear(16, 4)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        return self.head(self.blocks(x)[:, 0])


def words(length: int = 8) -> dict[str, Tensor]:
    return {"words": torch.arange(3 * length).view(3, length) % 40}


def divided(folder: Path, model: nn.Module, inputs: dict[str, Any], **options: Any) -> Plan:
    return asyncpipe.partition(
        model,
        inputs,
        output=folder,
        profile="analytic",
        **{"stages": 1, "tensor_parallel": 2, "sequence_parallel": True, **options},
    )


def text_of(folder: Path, stage: int = 0) -> str:
    return (folder / f"stage_{stage}.py").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks in two stages."""
    folder = tmp_path_factory.mktemp("generated") / "net"
    divided(folder, Model(Block), words(), stages=2, cut_at=["blocks.1"])
    return folder


def test_norms_dropouts_and_residuals_have_parts_of_the_positions(folder: Path) -> None:
    text = text_of(folder)
    assert "self.words = VocabEmbedding(40, 16, sequence=1)" in text
    assert "self.norm = shared_module(nn.LayerNorm(16))" in text
    assert "self.out = RowLinear(16, 16, sequence=1)" in text
    assert "self.dropout = SplitDropout(0.1, 1)" in text
    assert "parallel_input(self.norm(x), sequence=1)" in text
    assert "* parallel_input(self.scale)" in text
    assert "split_dropout(" in text and ", dim=1)" in text
    (note,) = [note for note in read_plan(folder).notes if "positions" in note]
    assert "positions are gathered before getitem (test_sequence.py:" in note


def test_boundaries_of_stages_are_whole(folder: Path) -> None:
    (boundary,) = read_plan(folder).boundaries
    assert boundary.tensor.shape == ("batch", "sequence", 16)
    assert "return whole_of(" in text_of(folder)
    assert "part_of(whole_of" in text_of(folder, 1)


def test_less_memory_is_planned(folder: Path, tmp_path: Path) -> None:
    options = {"sequence_parallel": False, "stages": 2, "cut_at": ["blocks.1"]}
    plain = divided(tmp_path / "net", Model(Block), words(), **options, stop_after="plan")
    for one, other in zip(plain.stages, read_plan(folder).stages, strict=True):
        assert other.memory.activations < 0.9 * one.memory.activations


def test_a_gradient_of_a_norm_that_is_not_summed_is_seen(folder: Path, tmp_path: Path) -> None:
    edited = tmp_path / "net"
    shutil.copytree(folder, edited)
    path = edited / "stage_0.py"
    path.write_text(path.read_text().replace("shared_module(nn.LayerNorm(16))", "nn.LayerNorm(16)"))
    with pytest.raises(PlanError, match=r"gradient .*norm\.\w+ .* differs"):
        verify_parts(Model(Block), read_plan(edited), edited, words(), 2)


def test_an_operation_that_mixes_positions_gets_all_of_them_with_a_note(tmp_path: Path) -> None:
    plan = divided(tmp_path / "net", Model(Shifted, 1), words(), tensor_parallel=4)
    text = text_of(tmp_path / "net")
    assert "y = whole_of(y, dim=1)" in text
    assert "self.norm = shared_module(" in text
    assert any("gathered before pad (test_sequence.py:" in note for note in plan.notes)


def test_a_length_that_the_ranks_do_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"7 positions cannot be divided over 2 tensor ranks"):
        divided(tmp_path / "net", Model(Shifted, 1), words(7))


def test_a_model_without_positions_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.LayerNorm(8))
    with pytest.raises(PlanError, match=r"runs on parts of the positions: their sums have no such"):
        divided(tmp_path / "net", model, {"input": torch.randn(4, 8)})


def test_sequences_are_divided_among_tensor_ranks_alone(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"over tensor ranks, but there is one"):
        divided(tmp_path / "net", Model(Block), words(), tensor_parallel=1)


def test_layouts_are_compared_with_parts_of_the_positions(tmp_path: Path) -> None:
    options = {"tensor_parallel": "auto", "stages": None, "ranks": 2, "stop_after": "plan"}
    plan = divided(tmp_path / "net", Model(Shifted, 1), words(), **options, schedule="1f1b")
    assert plan.layouts[-1].devices == 2
