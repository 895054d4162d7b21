"""Muon and SOAP have the matrices inside of a model, and AdamW what leads into it and out of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import asyncpipe
from asyncpipe.runtime.optimizers.param_groups import hidden_matrices
from asyncpipe.tests.support.models.generated import CASES, cut
from asyncpipe.tests.support.models.hand_folders import PlainMlp, write_mlp, write_text


def hidden_names(folder: Path) -> dict[int, set[str]]:
    """The names of the hidden matrices of each stage."""
    pipe = asyncpipe.load(folder)
    found = {}
    for index, stage in enumerate(pipe.stages):
        matrices = {id(matrix) for matrix in hidden_matrices(pipe.plan, index, stage)}
        named = stage.named_parameters(remove_duplicate=False)
        found[index] = {name for name, parameter in named if id(parameter) in matrices}
    return found


def together(found: Mapping[int, set[str]]) -> set[str]:
    return set().union(*found.values())


@pytest.mark.parametrize("stages", [1, 3])
def test_of_a_gpt2_they_are_the_products_of_its_blocks(stages: int, tmp_path: Path) -> None:
    inside = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    expected = {f"transformer.h.{i}.{name}.weight" for i in range(3) for name in inside}
    assert together(hidden_names(cut(CASES["gpt2"], stages, tmp_path / "gpt2"))) == expected


def test_of_a_t5_neither_tables_nor_the_tied_head_are_among_them(tmp_path: Path) -> None:
    found = together(hidden_names(cut(CASES["t5"], 2, tmp_path / "t5")))
    # Two layers each: attention of 4, the decoder's crossed one of 4 more, 2 of the MLP.
    assert len(found) == 2 * (4 + 2) + 2 * (8 + 2)
    assert not [name for name in found if "shared" in name or "bias" in name or "lm_head" in name]


def test_a_resnet_has_none(tmp_path: Path) -> None:
    assert together(hidden_names(cut(CASES["resnet"], 2, tmp_path / "resnet"))) == set()


def test_the_last_matrix_of_the_last_stage_makes_the_output(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp", stages=2)
    assert hidden_names(tmp_path / "mlp") == {
        0: {"layers.0.weight", "layers.1.weight"},
        1: {"layers.2.weight"},
    }
    assert len(PlainMlp().layers) == 4


def test_a_parameter_of_several_stages_is_hidden_at_none(tmp_path: Path) -> None:
    plan = write_text(tmp_path / "text")
    assert hidden_names(tmp_path / "text") == {0: {"inner.weight"}, 1: set()}
    # Were it not the last matrix either, it would still be tied.
    pipe = asyncpipe.load(tmp_path / "text")
    stage = pipe.stages[1]
    stage.add_module("more", nn.Linear(3, 3))
    assert hidden_matrices(plan, 1, stage) == []


def test_a_complex_matrix_is_none(tmp_path: Path) -> None:
    plan = write_mlp(tmp_path / "mlp", stages=2)
    real, complex_ = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.complex64)
    found = hidden_matrices(plan, 0, nn.Sequential(complex_, real))
    assert [matrix is real.weight for matrix in found] == [True]


def test_a_stage_of_vectors_has_none(tmp_path: Path) -> None:
    plan = write_mlp(tmp_path / "mlp", stages=2)
    assert hidden_matrices(plan, 1, nn.LayerNorm(4)) == []
