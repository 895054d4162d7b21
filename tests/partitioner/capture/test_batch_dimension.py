"""The batch dimension of each input: how it is found and reported, and which cases are refused."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner.capture import Capture, capture, model_state, read_arguments
from asyncpipe.partitioner.capture.batch_dimension import find_batch
from asyncpipe.partitioner.capture.sizes import parse_dimension
from asyncpipe.runtime.errors import CaptureError
from asyncpipe.tests.support.models.batch_dimensions import edges, example
from asyncpipe.tests.support.oracles.captures import assert_graph_is_model


def shapes(captured: Capture) -> list[str]:
    return [str(spec) for spec in captured.inputs]


FOUND = {
    "graph": ["f32[x_rows, 5]", "i64[2, edge_index_columns]"],
    "dense_graph": ["f32[x_rows, 5]", "f32[x_rows, x_rows]"],
    "gru_batch_first": ["f32[batch, 3, 5]", "f32[2, batch, 6]"],
    "gru_time_first": ["f32[sequence, batch, 5]", "f32[2, batch, 6]"],
    "gru_equal_sizes": ["f32[batch, 3, 5]", "f32[2, batch, 6]"],
    "lstm_batch_first": ["f32[batch, 3, 5]", "f32[2, batch, 6]", "f32[2, batch, 6]"],
    "word_model": ["i64[sequence, batch]", "f32[2, batch, 6]", "f32[2, batch, 6]"],
    "time_first": ["f32[sequence, batch, 5]"],
    "one_state": ["f32[12]"],
    "bags": ["i64[text_rows]", "i64[offsets_rows]"],
    "tagger": ["f32[batch, 7, 8]", "i64[batch, sequence]", "bool[batch, sequence]"],
    "shared": ["f32[batch, 6, 5]", "f32[adjacency_rows, 6]"],
}


@pytest.mark.parametrize("name", FOUND)
def test_the_batch_is_found_and_stages_are_the_model(name: str, tmp_path: Path) -> None:
    model, inputs = example(name)
    told: list[str] = []
    folder = tmp_path / "made"
    plan = asyncpipe.partition(
        model,
        inputs,
        stages=2,
        output=folder,
        profile="analytic",
        on_phase=lambda step, detail, *_: told.append(detail) if step == "verify" else None,
    )
    assert [str(spec) for spec in plan.inputs] == FOUND[name]
    assert "match the original model" in told[0]
    pipe = asyncpipe.load(folder)
    for module in (model, *pipe.stages):
        module.eval()
    for larger in LARGER.get(name, ()):
        torch.testing.assert_close(pipe(**larger), model(**larger), rtol=0, atol=0)


LARGER: dict[str, list[dict[str, Any]]] = {
    "graph": [{"x": torch.randn(23, 5), "edge_index": edges(23, 61)}],
    "dense_graph": [{"x": torch.randn(17, 5), "adjacency": (torch.rand(17, 17) > 0.5).float()}],
    "gru_time_first": [{"x": torch.randn(8, 11, 5), "hidden": torch.randn(2, 11, 6)}],
    "gru_equal_sizes": [{"x": torch.randn(5, 3, 5), "hidden": torch.randn(2, 5, 6)}],
    "word_model": [
        {"tokens": torch.randint(31, (5, 9)), "hidden": (torch.ones(2, 9, 6), torch.ones(2, 9, 6))}
    ],
    "time_first": [{"src": torch.randn(15, 9, 5)}, {"src": torch.randn(3, 2, 5)}],
    "bags": [{"text": torch.arange(28), "offsets": torch.tensor([0, 2, 3, 11, 19, 20])}],
}


def test_what_was_chosen_is_a_note_that_names_the_option() -> None:
    time_first = capture(*example("time_first"), check=False).notes
    assert any("the batch is dimension 1 of src" in note for note in time_first)
    graph = " ".join(capture(*example("graph"), check=False).notes)
    assert "the model has no batch" in graph and "--batch-dim INPUT=DIMENSION" in graph
    assert "dimension 0 of edge_index is fixed: GraphConvolution.forward at" in graph
    assert "batch_dimensions.py" in graph and "works for 2 only" in graph
    dense = " ".join(capture(*example("dense_graph"), check=False).notes)
    assert "dimension 1 of adjacency equals dimension 0 of x" in dense


def test_a_usual_model_has_no_note() -> None:
    class Usual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 2)

        def forward(self, ids: Tensor, position: Tensor) -> Tensor:
            return self.head(self.embed(ids) + self.embed(position))

    inputs = {"ids": torch.randint(11, (4, 7)), "position": torch.arange(7)[None]}
    captured = capture(Usual(), inputs)
    assert captured.notes == ()
    assert shapes(captured) == ["i64[batch, sequence]", "i64[1, sequence]"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batch_dim": {"src": 0}}, ["f32[batch, 4, 5]"]),
        ({"batch_dim": 1}, ["f32[sequence, batch, 5]"]),
        ({"batch_dim": None}, ["f32[src_rows, 4, 5]"]),
        ({"sequence_dim": None}, ["f32[7, batch, 5]"]),
        ({"batch_dim": 0, "sequence_dim": 1}, ["f32[batch, sequence, 5]"]),
        ({"batch_dim": {"src": 1}, "sequence_dim": {"src": 0}}, ["f32[sequence, batch, 5]"]),
    ],
)
def test_what_is_said_holds(options: dict[str, Any], expected: list[str]) -> None:
    model, inputs = example("time_first")
    captured = capture(model, inputs, check=False, **options)
    assert shapes(captured) == expected
    assert "batch_dim" not in options or not any("batch" in note for note in captured.notes)
    assert_graph_is_model(captured, inputs)


def test_one_input_that_is_said_tells_of_the_others() -> None:
    model, inputs = example("gru_equal_sizes")
    captured = capture(model, inputs, check=False, batch_dim={"x": 0, "hidden": 1})
    assert shapes(captured) == FOUND["gru_equal_sizes"]
    model, inputs = example("graph")
    captured = capture(model, inputs, check=False, batch_dim={"edge_index": None})
    assert shapes(captured) == ["f32[batch, 5]", "i64[2, edge_index_columns]"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_dim": {"scr": 1}},
            "--batch-dim scr=1, but the inputs are src.\nDid you mean src?",
        ),
        ({"batch_dim": {"src": 3}}, r"--batch-dim src=3, but src has 3 dimensions \(\[7, 4, 5\]\)"),
        ({"batch_dim": 4}, r"--batch-dim 4, but no input has a dimension 4: src \[7, 4, 5\]"),
        ({"sequence_dim": {"src": -1}}, "--sequence-dim src=-1, but src has 3 dimensions"),
        ({"batch_dim": "first"}, "--batch-dim 'first' is not a dimension"),
        ({"batch_dim": 2}, "always be 5. It is dimension 2 of src.\n.*--batch-dim src=none"),
        ({"sequence_dim": {"src": 2}}, "--sequence-dim src=DIMENSION, or --sequence-dim src=none"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_a_sentence(options: dict[str, Any], message: str) -> None:
    model, inputs = example("time_first")
    with pytest.raises(CaptureError, match=message):
        capture(model, inputs, check=False, **options)


def test_batches_of_different_sizes_are_a_sentence() -> None:
    model, inputs = example("gru_batch_first")
    with pytest.raises(CaptureError, match="different sizes: 4 of x=0 and 2 of hidden=0"):
        capture(model, inputs, batch_dim={"x": 0, "hidden": 0})


@pytest.mark.parametrize("texts", [["x=one"], ["x"], ["-1"], ["x=-1"], ["none", "x=1"], ["x="]])
def test_an_option_that_is_no_dimension_is_a_sentence(texts: list[str]) -> None:
    with pytest.raises(CaptureError, match="--batch-dim"):
        parse_dimension("--batch-dim", texts)


class Contrast(nn.Module):
    """A loss that compares the samples of a batch, which has its samples first all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 4)

    def forward(self, views: Tensor) -> Tensor:
        one, two = self.embed(views).unbind(1)
        logits = one @ two.T
        return nn.functional.cross_entropy(logits, torch.arange(views.shape[0]))


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x) + torch.rand(x.shape[0], x.shape[1], 4)


class Remembers(nn.Module):
    """Keeps what it made of the first sizes that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 4)
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(self.calls))
        return self.embed(x)


@pytest.mark.parametrize("kind", [Contrast, Noise, Remembers])
def test_the_first_dimension_stays_the_batch_where_nothing_speaks_for_another(kind: Any) -> None:
    name = "views" if kind is Contrast else "x"
    captured = capture(kind(), {name: torch.randn(4, 2, 5)}, check=False)
    assert shapes(captured) == ["f32[batch, 2, 5]"]


class TrainsAlone(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            raise NotImplementedError
        return super().forward(input)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.GRU(4, 5, device="meta"), "the model cannot be run;"),
        (TrainsAlone(4, 5), "the model cannot be run in evaluation mode;"),
    ],
)
def test_a_batch_that_is_assumed_is_a_note(model: nn.Module, why: str) -> None:
    given = read_arguments(model, {"input": torch.ones(7, 3, 4)})
    batch, note = find_batch(model, given)
    assert batch == {"input": 0}
    assert f"the batch is dimension 0 of input: assumed, because {why}" in note


def test_a_head_of_zeros_hides_nothing() -> None:
    model, inputs = example("time_first")
    nn.init.zeros_(model.head.weight)
    batch, _ = find_batch(model, read_arguments(model, inputs))
    assert batch == {"src": 1}


def test_to_find_out_leaves_the_model_as_it_was() -> None:
    model = Remembers()
    given = read_arguments(model, {"x": torch.randn(4, 2, 5)})
    before = torch.get_rng_state()
    find_batch(model, given)
    assert model.calls == [] and torch.equal(torch.get_rng_state(), before)


class Deviations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.layer(x - x.mean(0)), target)}


def test_what_forward_warns_of_while_inputs_are_divided_is_not_shown() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        captured = capture(Deviations(), {"x": torch.randn(4, 5), "target": torch.randn(4, 5)})
    assert not [each for each in shown if "target size" in str(each.message)]
    assert shapes(captured) == ["f32[batch, 5]", "f32[batch, 5]"]


@pytest.mark.parametrize("has_copies", [True, False])
def test_a_large_model_keeps_its_parameters_though_forward_changes_them(
    monkeypatch: pytest.MonkeyPatch, has_copies: bool
) -> None:
    class Averaged(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                torch._foreach_mul_([self.weight.view(-1)], 0.9)
                self.bias.data.add_(1.0)
                torch.mul(self.bias, 2.0, out=self.bias)
            return super().forward(x)

    place = "asyncpipe.partitioner.capture.batch_dimension.MAX_PARAMETERS_WITH_GRADIENTS"
    monkeypatch.setattr(place, 0)
    if not has_copies:
        monkeypatch.setattr(model_state, "MOST_BYTES", 0)
        monkeypatch.setattr(model_state, "SMALL", 0)
    model, inputs = Averaged(3, 2), {"x": torch.randn(4, 3)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    memory = model.weight.data_ptr()
    find_batch(model, read_arguments(model, inputs))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.weight.data_ptr() == memory


class Sampled(nn.Module):
    """Draws in both modes, so that parts of a batch have other results than the whole batch; the
    mean over positions is that of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.head = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean(x).mean(1)
        return self.head(mean + torch.rand(x.shape[0], 6))  # type: ignore[no-any-return]


def test_positions_are_no_samples_if_forward_draws() -> None:
    captured = capture(Sampled(), {"x": torch.randn(4, 12, 8)})
    assert shapes(captured) == ["f32[batch, 12, 8]"]


class Logarithms(nn.Module):
    """Of numbers below zero: some results are no numbers, others infinite."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return weights.log().unsqueeze(1) * x / x.relu()


def test_results_that_are_no_numbers_decide_nothing() -> None:
    inputs = {"x": torch.randn(6, 3), "weights": torch.tensor([1.0, -2.0, 3.0, 0.0, -1.0, 4.0])}
    assert shapes(capture(Logarithms(), inputs)) == ["f32[batch, 3]", "f32[batch]"]


class Mixed(nn.Module):
    """A language model whose only result is the loss; `mix` mixes the positions."""

    def __init__(self, mix: str, scale: float, batch: int) -> None:
        super().__init__()
        self.embed, self.head, self.batch = nn.Embedding(50, 16), nn.Linear(16, 50), batch
        self.mix = nn.GRU(16, 16) if mix == "recurrent" else nn.MultiheadAttention(16, 2)
        self.scale = nn.Parameter(torch.full((16,), scale))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        ids, labels = (ids, labels) if self.batch == 1 else (ids.T, labels.T)
        x = self.embed(ids)
        mixed = self.mix(x) if isinstance(self.mix, nn.GRU) else self.mix(x, x, x)
        x = x + self.scale * mixed[0]
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e-5])
@pytest.mark.parametrize("mix", ["recurrent", "attention"])
def test_a_loss_that_hardly_depends_on_the_other_positions_does_not_make_them_samples(
    mix: str, scale: float, ignored: bool, batch: int
) -> None:
    torch.manual_seed(1)
    shape = (64, 8) if batch else (8, 64)
    ids, labels = torch.randint(50, shape), torch.randint(50, shape)
    if ignored:
        labels[torch.rand(shape) < 0.3] = -100
    model = Mixed(mix, scale, batch)
    found, note = find_batch(model, read_arguments(model, {"ids": ids, "labels": labels}))
    assert found == {"ids": batch, "labels": batch}
    assert bool(note) is (batch == 1)


class Centered(nn.Module):
    """Has no samples: subtracts the mean."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean()


class Attending(nn.Module):
    """Embeds whole numbers, and mixes the positions by an attention with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        mixed: Tensor = self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return mixed


@pytest.mark.parametrize(
    ("model", "inputs", "batch"),
    [
        (nn.GRU(4, 5), {"input": torch.zeros(7, 3, 4)}, {"input": 1}),
        (nn.GRU(4, 5), {"input": torch.ones(7, 1, 4)}, {"input": 1}),
        (nn.GRU(4, 5, batch_first=True), {"input": torch.zeros(1, 7, 4)}, {"input": 0}),
        (nn.GRU(4, 5, batch_first=True), {"input": torch.zeros(7, 1, 4)}, {"input": 0}),
        (
            Attending(),
            {"ids": torch.zeros(6, 6, dtype=torch.long), "mask": torch.zeros(6, 6)},
            {"ids": 0, "mask": None},
        ),
        (
            Attending(),
            {"ids": torch.randint(9, (1, 6)), "mask": torch.zeros(6, 6)},
            {"ids": 0, "mask": None},
        ),
        (nn.Conv2d(1, 4, 3), {"input": torch.zeros(1, 1, 8, 8)}, {"input": 0}),
        (
            nn.TransformerEncoderLayer(8, 2, 8),
            {"src": torch.ones(7, 3, 8)},
            {"src": 1},
        ),
        (Centered(), {"x": torch.arange(36.0).view(9, 1, 4)}, {"x": 0}),
    ],
)
def test_equal_samples_and_a_single_one_are_enough_to_find_the_batch(
    model: nn.Module, inputs: dict[str, Tensor], batch: dict[str, int | None]
) -> None:
    assert find_batch(model, read_arguments(model, inputs))[0] == batch
