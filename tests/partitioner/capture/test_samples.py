"""The inputs of verify and of the check of a capture: the example's own values, as models take."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    BigBirdPegasusConfig,
    BigBirdPegasusForSequenceClassification,
)

import asyncpipe
from asyncpipe.partitioner.capture.sizes import first_accepted, resized
from asyncpipe.partitioner.verify import verify
from asyncpipe.runtime.errors import PlanError
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.tests.support.models.batch_dimensions import example

SMALL: dict[str, Any] = {
    "vocab_size": 67,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
}


def cut(model: nn.Module, inputs: dict[str, Any], folder: Path) -> str:
    """The line that verify prints of a model cut in two."""
    told: list[str] = []

    def on_phase(name: str, detail: str, seconds: float, following: str) -> None:
        if name == "verify":
            told.append(detail)

    asyncpipe.partition(
        model,
        inputs,
        stages=2,
        output=folder,
        profile="analytic",
        save_weights=False,
        on_phase=on_phase,
    )
    return told[0]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (BartForSequenceClassification, BartConfig),
        (BigBirdPegasusForSequenceClassification, BigBirdPegasusConfig),
    ],
)
def test_a_model_that_asks_for_an_end_of_sentence_gets_it(
    kind: Any, config: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = kind(config(**SMALL, eos_token_id=2, pad_token_id=1, decoder_start_token_id=2))
    ids = torch.randint(3, 67, (4, 20))
    ids[:, -1] = 2
    inputs = {"input_ids": ids, "labels": torch.randint(2, (4,))}
    assert "at batch 3, sequence 17" in cut(model, inputs, tmp_path / "made")


class Sorted(nn.Module):
    """A packed sequence, whose lengths are sorted and one of them the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), Packed()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.last(self.first(x), lengths)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        return self.rnn(packed)[1][0]


def test_flat_text_is_tried_with_offsets_that_lie_within_it(tmp_path: Path) -> None:
    assert "at text_rows 14, offsets_rows 3" in cut(*example("bags"), tmp_path / "made")


def test_lengths_stay_sorted() -> None:
    model = Sorted()
    inputs = {"x": torch.randn(4, 7, 5), "lengths": torch.tensor([7, 5, 3, 2])}
    dims = {"x": {0: "batch"}, "lengths": {0: "batch"}}
    for batch in (3, 9):
        sample = first_accepted(
            lambda given: model(**given), inputs, dims, {"batch": 4}, [{"batch": batch}]
        )
        assert sample.sizes == {"batch": batch}
        assert sample.result.shape == (batch, 4)


class Demanding(nn.Module):
    """Takes no batch but of 4, which nothing in its graph shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.flag: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and self.refuses(x):
            raise RuntimeError("not these")
        return self.last(torch.relu(self.first(x)))

    def refuses(self, x: Tensor) -> bool:
        return len(x) != 4


class Refusing(Demanding):
    def refuses(self, x: Tensor) -> bool:
        return self.training


def test_what_runs_at_its_own_sizes_alone_is_verified_there_and_says_so(tmp_path: Path) -> None:
    told = cut(Demanding(), {"x": torch.randn(4, 5)}, tmp_path / "made")
    assert "at x_rows 4 as captured (the original accepts no other size that was tried)" in told


def test_an_exception_of_the_original_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="Refusing itself raises RuntimeError on its example"):
        cut(Refusing(), {"x": torch.randn(4, 5)}, tmp_path / "made")


def test_an_exception_of_a_stage_is_a_sentence_with_its_line(tmp_path: Path) -> None:
    model, inputs = example("bags")
    folder = tmp_path / "made"
    cut(model, inputs, folder)
    plan = read_plan(folder)
    stage = folder / "stage_1.py"
    stage.write_text(
        stage.read_text().replace("return ", "raise RuntimeError('here')\n        return ")
    )
    with pytest.raises(PlanError, match=r"stage 1 raises RuntimeError .* here \(stage_1.py:\d+"):
        verify(model, plan, folder, inputs)


def test_a_dimension_is_stretched_in_order_between_its_ends() -> None:
    ids = torch.tensor([[0, 5, 6, 2], [0, 7, 8, 2]])
    dims = {"ids": {0: "batch", 1: "sequence"}}
    for length in (2, 3, 4, 9):
        made = resized({"ids": ids}, dims, {"batch": 5, "sequence": length})["ids"]
        assert made.shape == (5, length)
        assert (made[:, 0] == 0).all() and (made[:, -1] == 2).all()
        assert all((row == 2).sum() == 1 for row in made)
        assert {row[1].item() for row in made} <= {5, 6, 7, 8, 0, 2}
