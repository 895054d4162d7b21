"""Predictions of trained weights, against the model in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import asyncpipe
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.launch import prediction
from asyncpipe.runtime.launch.prediction import Prediction, predict
from asyncpipe.tests.support.models.generated import CASES, cut
from asyncpipe.tests.support.processes.gloo_ranks import RankError, run_processes
from asyncpipe.tests.support.processes.in_process import command

DATA = """
import torch

made = torch.Generator().manual_seed(5)
X = torch.randn(11, 16, generator=made)
IDS = torch.randint(61, (5, 9), generator=made)

def rows():
    return {"x": X}

def pairs():
    return [(x, 1) for x in X[:7]]

def both():
    return rows(), {"x": X[:3]}

def stream():
    return iter(X)

def ids():
    return [{"input_ids": row} for row in IDS]
"""


def on_rank(rank: int, work: Any) -> int:
    return prediction._run_rank(work)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that have their imports done."""

    def launch(function: Callable[..., int], work: Any, *, ranks: int) -> list[int]:
        made = run_processes(ranks, on_rank, work)
        for each in made:
            if isinstance(each, RankError):
                raise AssertionError(each)
        return made

    monkeypatch.setattr(prediction, "launch", launch)


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "data.py").write_text(DATA)
    return str(tmp_path / "data.py")


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut(CASES["mlp"], 2, tmp_path_factory.mktemp("mlp") / "mlp_2p")


def values(name: str) -> Tensor:
    made: dict[str, Any] = {}
    exec(compile(DATA, "data", "exec"), made)
    found: Tensor = made[name]
    return found


def outputs_of(folder: Path, given: Tensor) -> Any:
    with torch.no_grad():
        return asyncpipe.load(folder).eval()(given)


def test_the_command_writes_the_outputs_of_all_samples_in_order(
    mlp: Path, data: str, tmp_path: Path, forked: None
) -> None:
    arguments = (str(mlp), "--data", f"{data}:pairs", "--batch-size", "3", "--json")
    told = command(tmp_path, "train", "predict", *arguments)
    assert told.code == 0, told
    facts = json.loads(told.out)
    assert facts["samples"] == 7 and facts["tensors"] == {"output": ["F32", [7, 4]]}
    written = load_file(tmp_path / "predictions.safetensors")
    assert torch.allclose(written["output"], outputs_of(mlp, values("X")[:7]), atol=1e-6)
    refused = command(tmp_path, "train", "predict", *arguments)
    assert refused.code == 1 and "predictions.safetensors exists already" in refused.err
    assert {path.name for path in tmp_path.iterdir()} >= {"predictions.safetensors"}
    assert not list(tmp_path.glob(".predictions-*"))


@pytest.mark.parametrize(
    ("function", "split", "samples"),
    [("rows", None, 11), ("both", None, 3), ("both", "train", 11), ("pairs", "train", 7)],
)
def test_the_samples_are_those_of_the_split(
    mlp: Path, data: str, tmp_path: Path, forked: None, function: str, split: str, samples: int
) -> None:
    output = tmp_path / "new" / "p.safetensors"
    made = predict(Prediction(mlp, output, f"{data}:{function}", split, 4))
    assert made.samples == samples
    assert torch.allclose(
        load_file(output)["output"], outputs_of(mlp, values("X")[:samples]), atol=1e-6
    )


def test_a_model_with_its_loss_inside_needs_no_labels(
    data: str, tmp_path: Path, forked: None
) -> None:
    folder = cut(CASES["gpt2"], 2, tmp_path / "gpt2_2p")
    output = tmp_path / "p.safetensors"
    made = predict(Prediction(folder, output, f"{data}:ids", batch_size=3))
    assert made.left_out == ("loss",) and [*made.tensors] == ["logits"]
    ids = values("IDS")
    expected = asyncpipe.load(folder).eval()(input_ids=ids, labels=ids)["logits"]
    assert torch.allclose(load_file(output)["logits"], expected, atol=1e-5)


class Nested(nn.Module):
    """Outputs of both stages, in a dict and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.first(x).relu()
        return {"states": (hidden, hidden * 2), "out": self.second(hidden)}


def test_outputs_of_several_ranks_stand_under_their_places(
    data: str, tmp_path: Path, forked: None
) -> None:
    folder, output = tmp_path / "nested", tmp_path / "p.safetensors"
    asyncpipe.partition(
        Nested(),
        torch.zeros(4, 16),
        stages=2,
        output=folder,
        profile="analytic",
        cut_at=["second"],
    )
    made = predict(Prediction(folder, output, f"{data}:rows", batch_size=4))
    assert made.tensors.keys() == {"states.0", "states.1", "out"} and not made.left_out
    found, expected = load_file(output), outputs_of(folder, values("X"))
    assert torch.allclose(found["out"], expected["out"], atol=1e-6)
    for place in (0, 1):
        assert torch.allclose(found[f"states.{place}"], expected["states"][place], atol=1e-6)


def test_data_without_numbered_samples_are_refused(mlp: Path, data: str, tmp_path: Path) -> None:
    def refused(source: str, **more: Any) -> str:
        asked = Prediction(mlp, tmp_path / "p.safetensors", source, **more)
        with pytest.raises(AsyncPipeError) as told:
            predict(asked)
        assert not asked.output.exists() and not list(tmp_path.glob(".predictions-*"))
        return told.value.what

    assert "is text, of which a run draws windows" in refused("shakespeare")
    assert "none.py" in refused("none.py:rows")


def test_a_stream_is_refused(mlp: Path, data: str, tmp_path: Path, forked: None) -> None:
    asked = Prediction(mlp, tmp_path / "p.safetensors", f"{data}:stream")
    with pytest.raises(AssertionError, match="is a stream, and its samples have no number"):
        predict(asked)
    assert [path.name for path in tmp_path.iterdir()] == ["data.py"]


def test_code_of_another_machine_is_refused(
    mlp: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCPIPE_STATE", str(tmp_path / "empty"))
    with pytest.raises(AsyncPipeError, match="was not made on this machine"):
        predict(Prediction(mlp, tmp_path / "p.safetensors", f"{data}:rows"))
