"""A tensor rank reads its parts of whole weights, and no weights of another model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncpipe.runtime.errors import DataError
from asyncpipe.runtime.executor.loading import load_stage
from asyncpipe.runtime.tensor_files import read_tensors, write_shard
from asyncpipe.runtime.tensor_parallel import TensorRanks, splits_of
from asyncpipe.tests.support.models.split_folders import write_split_mlp


def test_a_stage_of_a_tensor_rank_has_its_parts_of_the_stored_tensors(tmp_path: Path) -> None:
    plan = write_split_mlp(tmp_path / "two")
    stored = read_tensors(tmp_path / "two", plan.state_keys)
    for rank in range(2):
        ranks = TensorRanks(rank, 2)
        stage = load_stage(tmp_path / "two", plan, 0, dtype=torch.float64, ranks=ranks)
        splits = splits_of(stage)
        assert "blocks.0.channels.running_mean" in splits and "blocks.0.up.bias" in splits
        for name, tensor in stage.state_dict().items():
            split, whole = splits.get(name), stored[name]
            expected = split.part(whole, rank, 2) if split else whole
            assert torch.equal(tensor, expected.to(tensor.dtype)), name


def test_weights_of_another_size_are_refused_with_both_whole_shapes(tmp_path: Path) -> None:
    plan = write_split_mlp(tmp_path / "two")
    stored: dict[str, Tensor] = read_tensors(tmp_path / "two", plan.state_keys)
    stored["blocks.0.up.weight"] = torch.zeros(12, 16)  # as large as the part of a rank
    write_shard(tmp_path / "other", stored, 0, 1)
    message = r"blocks\.0\.up\.weight: \(12, 16\) in the file, \(24, 16\) in the plan"
    with pytest.raises(DataError, match=message):
        load_stage(tmp_path / "two", plan, 0, weights=tmp_path / "other", ranks=TensorRanks(0, 2))
