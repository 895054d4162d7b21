"""Transforms of torch.func inside forward: the stages have their results and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from asyncpipe import partition
from asyncpipe.partitioner.capture import capture
from asyncpipe.runtime.errors import CaptureError
from asyncpipe.tests.support.models import transforms


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        (transforms.Ensemble, ".tanh().mean(0)"),
        (transforms.OfOneRow, "with torch.no_grad():"),
        (transforms.Noisy, "randn("),
        (transforms.Curvature, ".cos()"),
        (transforms.Derivatives, ".cos()"),
        (transforms.InnerSteps, "* 0.1"),
    ],
)
def test_stages_equal_the_model(kind: type[nn.Module], written: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kind()
    # `partition` compares results and all gradients with the model's, at several batch sizes.
    plan = partition(model, (torch.randn(6, 8),), stages=2, output=tmp_path, profile="analytic")
    text = "".join((tmp_path / stage.file).read_text() for stage in plan.stages)
    assert written in text and "vmap" not in text
    assert not any("Dynamo" in note for note in plan.notes)


def test_a_size_that_decides_inside_is_guarded(tmp_path: Path) -> None:
    inputs = (torch.randn(6, 8),)
    plan = partition(transforms.OfManyRows(), inputs, stages=2, output=tmp_path, profile="analytic")
    text = "".join((tmp_path / stage.file).read_text() for stage in plan.stages)
    assert "captured for batch <= 1000 (transforms.py:" in text


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (transforms.OwnBackward, "_Cube is an autograd function inside a transform"),
        (transforms.NormOfRows, "torch.vmap asks for sizes as numbers here"),
        (transforms.Counts, r"transforms.py:\d+ assigns the buffer calls inside a transform"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(kind: type[nn.Module], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(kind(), {"x": torch.randn(6, 8)})
