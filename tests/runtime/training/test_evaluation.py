"""What counts as a right answer, and which runs have an accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.data.own_data import own_parts
from asyncpipe.runtime.errors import DataError
from asyncpipe.runtime.executor.loading import load
from asyncpipe.runtime.training.evaluation import cross_entropy, right_answers
from asyncpipe.tests.support.models.hand_folders import CLASSES, WIDTH, write_mlp
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY

LOGITS = st.lists(st.floats(-9, 9, width=32), min_size=3, max_size=3)
LABELS = st.integers(-2, 2) | st.just(-100)
SAMPLES = st.lists(st.tuples(LOGITS, LABELS), min_size=1, max_size=12)


@given(SAMPLES)
def test_an_answer_is_right_where_its_logit_is_the_largest(
    samples: list[tuple[list[float], int]],
) -> None:
    logits = torch.tensor([row for row, _ in samples])
    labels = torch.tensor([label for _, label in samples])
    asked = [(row, label) for row, label in samples if label >= 0]
    right = sum(row.index(max(row)) == label for row, label in asked)
    assert right_answers(logits, labels) == (right, len(asked))


@pytest.mark.parametrize(
    "labels",
    [torch.ones(5), torch.ones(5, 3), torch.ones(5, 3, dtype=torch.int64), torch.ones(5, 1).long()],
    ids=["numbers", "probabilities", "flags", "column"],
)
def test_labels_that_are_no_classes_have_no_right_answer(labels: torch.Tensor) -> None:
    assert right_answers(torch.randn(5, 3), labels) == (0, 0)


OWN = f"""
import torch

def classes():
    data = {{"x": torch.randn(24, {WIDTH}), "target": torch.arange(24) % {CLASSES}}}
    return data, data

def values():
    data = {{"x": torch.randn(24, {WIDTH}), "target": torch.randn(24, {CLASSES})}}
    return data, data
"""


@pytest.mark.parametrize(
    ("function", "criterion", "counted"),
    [("classes", "cross_entropy", True), ("values", "mse", False)],
)
def test_only_a_classifier_has_an_accuracy(
    tmp_path: Path, function: str, criterion: str, counted: bool
) -> None:
    write_mlp(tmp_path / "mlp")
    (tmp_path / "own.py").write_text(OWN)
    options = Settings(
        folder=str(tmp_path / "mlp"),
        output=str(tmp_path / "run"),
        data=f"{tmp_path / 'own.py'}:{function}",
        criterion=criterion,
        schedule="single",
        steps=1,
        threads=1,
    )
    run(options, FACTORY)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (evaluated,) = [line for line in lines if line["event"] == "eval"]
    assert (evaluated["accuracy"] is not None) == counted


WHOLE = f"""
import torch

def rows(count):
    generator = torch.Generator().manual_seed(count)
    points = torch.randn(count, {WIDTH}, generator=generator)
    return {{"x": points, "target": torch.randint({CLASSES}, (count,), generator=generator)}}

def data():
    return rows(8), rows(11)
"""


@pytest.mark.parametrize(
    ("given", "samples"),
    [
        ({"schedule": "single"}, 11),
        ({"schedule": "1f1b"}, 11),
        ({"schedule": "ddp", "replicas": 2}, 11),
        ({"schedule": "1f1b", "micro_batch_size": 16}, 11),
        ({"schedule": "single", "eval_batches": 2}, 8),
    ],
    ids=["single", "two ranks", "two replicas", "smaller than a micro-batch", "a part"],
)
def test_an_evaluation_covers_every_sample_once(
    tmp_path: Path, given: dict[str, Any], samples: int
) -> None:
    write_mlp(tmp_path / "mlp")
    (own := tmp_path / "own.py").write_text(WHOLE)
    usual = {"folder": str(tmp_path / "mlp"), "output": str(tmp_path / "run"), "steps": 0}
    usual |= {"data": f"{own}:data", "micro_batch_size": 4, "micro_batches": 2, "threads": 1}
    run(Settings(**(usual | given)), FACTORY)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (evaluated,) = [line for line in lines if line["event"] == "eval"]
    assert (evaluated["samples"], evaluated["length"]) == (samples, 11)
    rows = own_parts(f"{own}:data", 1)[1]
    assert rows is not None
    inputs, target = (
        torch.stack([torch.as_tensor(row[name]) for row in rows.samples][:samples])
        for name in ("x", "target")
    )
    logits = load(tmp_path / "mlp").eval()(inputs)
    expected = torch.nn.functional.cross_entropy(logits, target)
    assert evaluated["loss"] == pytest.approx(expected.item(), rel=1e-5)
    right = (logits.argmax(-1) == target).float().mean().item()
    assert evaluated["accuracy"] == pytest.approx(right)


def test_cross_entropy_takes_what_that_of_torch_takes_and_narrower_whole_numbers() -> None:
    logits, classes = torch.randn(3, 4, 5), torch.randint(5, (3, 4))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), classes.flatten())
    for dtype in (torch.int64, torch.int32, torch.uint8):
        assert torch.equal(cross_entropy(logits, classes.to(dtype)), expected)
    shares = torch.nn.functional.one_hot(classes, 5).float()
    assert torch.allclose(cross_entropy(logits, shares), expected)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (torch.tensor([0.0, 1.0]), "whole numbers as classes, but the targets are torch.float32"),
        (torch.tensor([3, 5]), r"go from 3 to 5, but the model has 5 classes \(0 to 4\)"),
        (torch.tensor([0, -1]), "go from -1 to 0, but the model has 5 classes"),
    ],
)
def test_targets_that_are_no_classes_are_named(target: torch.Tensor, words: str) -> None:
    with pytest.raises(DataError, match=words):
        cross_entropy(torch.randn(2, 5), target)
