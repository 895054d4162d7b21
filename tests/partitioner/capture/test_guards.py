"""A forward that decides by the values of tensors is captured, and refuses inputs that decide
otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner.capture import capture
from asyncpipe.partitioner.capture.graph import must_fail, must_hold
from asyncpipe.runtime.errors import CaptureError

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x)
        if mask.any():
            x = x.masked_fill(mask, 0.0)
        return self.second(x)


class Checked(Masked):
    """A number that only a comparison reads, an assertion about what was computed."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        assert lengths.max().item() <= x.shape[1]
        x = self.first(x)
        assert not x.isnan().any(), "not a number"
        return self.second(x)


class Labelled(Masked):
    """A size that only values tell, compared and used."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.first(x)
        place = (labels >= 0).nonzero()
        if place.size(0) > 0:
            x = torch.gather(x, 0, place.expand(place.size(0), x.size(1)))
        return self.second(x).sum()


def cut(model: nn.Module, folder: Path, stages: int = 2, **inputs: Any) -> str:
    """Partitions the model and gives the text of its stages."""
    asyncpipe.partition(
        model, inputs, stages=stages, output=folder, profile="analytic", name="model"
    )
    return "".join((folder / f"stage_{stage}.py").read_text() for stage in range(stages))


@pytest.mark.parametrize("stages", [1, 2])
def test_inputs_that_go_another_way_are_refused_by_the_generated_stages(
    stages: int, tmp_path: Path
) -> None:
    model, mask = Masked(), torch.zeros(8, 6, dtype=torch.bool)
    mask[:, 1] = True
    text = cut(model, tmp_path / "cut", stages, x=X, mask=mask)
    assert "        if not mask.any():\n            raise RuntimeError(" in text
    pipe = asyncpipe.load(tmp_path / "cut")
    torch.testing.assert_close(pipe(x=X, mask=~mask), model(x=X, mask=~mask))
    line = Masked.forward.__code__.co_firstlineno + 2
    with pytest.raises(RuntimeError, match=f"the other way at test_guards.py:{line}$"):
        pipe(x=X, mask=torch.zeros_like(mask))


def test_an_assertion_about_a_number_is_kept(tmp_path: Path) -> None:
    model, lengths = Checked(), torch.arange(7).expand(8, 7)
    text = cut(model, tmp_path / "cut", x=X, lengths=lengths)
    assert "if not lengths.max().item() <= 6:" in text
    assert ".isnan().any():" in text
    with pytest.raises(RuntimeError, match="captured for inputs that go the other way"):
        asyncpipe.load(tmp_path / "cut")(x=X, lengths=lengths + 1)
    with pytest.raises(RuntimeError, match="captured for inputs that go the other way"):
        asyncpipe.load(tmp_path / "cut")(x=X / 0, lengths=lengths)


def test_a_size_that_only_values_tell_is_read_off_its_tensor(tmp_path: Path) -> None:
    model, labels = Labelled(), torch.tensor([0, 1, -1, 2, -1, 3, 0, 0])
    cut(model, tmp_path / "cut", x=X, labels=labels)
    pipe = asyncpipe.load(tmp_path / "cut")
    fewer = torch.tensor([-1, -1, -1, -1, -1, -1, -1, 2])
    torch.testing.assert_close(pipe(x=X, labels=fewer), model(x=X, labels=fewer))
    with pytest.raises(RuntimeError, match="captured for inputs that go the other way"):
        pipe(x=X, labels=fewer - 3)


def test_what_was_decided_is_said() -> None:
    captured = capture(Masked(), {"x": X, "mask": X > 0})
    line = Masked.forward.__code__.co_firstlineno + 2
    assert captured.notes[-1] == (
        f'"if mask.any():" (test_guards.py:{line}) takes the branch of the example '
        "inputs; inputs that take another branch are refused at run time"
    )
    assert [node.target for node in captured.graph.nodes if "must" in node.name] == [must_hold]
    nothing = torch.zeros(8, 6, dtype=torch.bool)
    captured = capture(Masked(), {"x": X, "mask": nothing})
    assert [node.target for node in captured.graph.nodes if "must" in node.name] == [must_fail]


class ByState(nn.Module):
    """Decides by a buffer, which will be another one the next time."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.seen > 0:
            x = x / self.seen
        self.seen += 1
        return self.linear(x)


class BySize(Masked):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if mask.sum() > 40 else x


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (ByState(), {"x": X}),
        (BySize(), {"x": X, "mask": torch.ones(8, 6, dtype=torch.bool)}),
    ],
)
def test_no_guard_stands_for_what_changes_from_run_to_run(
    model: nn.Module, inputs: dict[str, Any]
) -> None:
    with pytest.raises(CaptureError, match="depends on tensor values"):
        capture(model, inputs)


def test_a_model_without_numbers_decides_nothing() -> None:
    with torch.device("meta"):
        model = Masked()
    with pytest.raises(CaptureError, match="depends on tensor values"):
        capture(model, {"x": X, "mask": X > 0})


def test_layers_that_are_never_dropped_need_no_guard() -> None:
    class Drops(Masked):
        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.first, self.second):
                if torch.rand([]) < 0.0:
                    continue
                x = layer(x)
            return x

    captured = capture(Drops(), {"x": X})
    assert captured.notes == ()
    assert [n.target for n in captured.graph.nodes if n.op == "call_module"] == ["first", "second"]


def test_a_model_of_transformers_that_looks_for_padding_is_cut(tmp_path: Path) -> None:
    from transformers import FSMTConfig, FSMTForConditionalGeneration

    torch.manual_seed(0)
    config = FSMTConfig(
        langs=["en", "de"], src_vocab_size=61, tgt_vocab_size=61, d_model=16, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32,
    )  # fmt: skip
    tokens = torch.randint(3, 61, (2, 9))
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens, "labels": tokens}
    text = cut(FSMTForConditionalGeneration(config).train(), tmp_path / "cut", **inputs)
    assert ".any():\n" in text
    padded = tokens.clone()
    padded[0, -2:] = config.pad_token_id
    pipe = asyncpipe.load(tmp_path / "cut")
    with pytest.raises(RuntimeError, match=r"modeling_fsmt.py:\d+"):
        pipe(**(inputs | {"decoder_input_ids": padded}))


class Experts(nn.Module):
    """Sends each row to one of three experts: sizes that follow from values only."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        choice = self.router(x).argmax(-1)
        place = choice.argsort(stable=True)
        sizes = torch.zeros(3, dtype=torch.long).index_add(0, choice, torch.ones_like(choice))
        parts = x[place].split(sizes.tolist())
        done = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return torch.zeros_like(x).index_add(0, place, done)


def test_a_mixture_of_experts_is_written_with_the_sizes_of_its_parts(tmp_path: Path) -> None:
    model = Experts()
    text = cut(model, tmp_path / "cut", x=X)
    assert "item, item_1, item_2 = sizes.unbind(0)" in text and "[item.item()," in text
    other = torch.randn(11, 6)
    torch.testing.assert_close(asyncpipe.load(tmp_path / "cut")(x=other), model(x=other))
