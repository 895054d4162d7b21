"""What forward decides by sizes holds for other sizes too, or refuses them with the line."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import asyncpipe
from asyncpipe.partitioner.capture import Capture, capture, run
from asyncpipe.partitioner.capture.check import check_capture
from asyncpipe.partitioner.capture.graph import must_fit
from asyncpipe.partitioner.verify import verify
from asyncpipe.runtime.errors import CaptureError, PlanError
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.tests.support.oracles.captures import of_zoo

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


class _Decides(nn.Module):
    """Ways to decide by the number of samples, each with the samples that agree with four."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(6, 6), how

    def forward(self, x: Tensor) -> Tensor:
        x, batch = self.linear(x), x.shape[0]
        if self.how == "if":
            return x * 2 if batch > 8 else x
        if self.how == "least":
            return x[: min(batch, 5)]
        if self.how == "most":
            return x.sum(0) / max(batch, 3)
        if self.how == "int":
            return x.topk(int(0.7 * batch), 0).values
        if self.how == "int of a quotient":
            return x[: int(batch / 2)]
        if self.how == "chunks":
            return torch.stack([part.mean() for part in x.chunk(math.ceil(batch / 3))])
        if self.how == "range":
            return sum(x[i] for i in range(batch // 2)) + x.mean()
        if self.how == "divides":
            return x.view(batch // 2, -1) if batch % 2 == 0 else x
        if self.how == "in":
            return -x if batch in (3, 5) else x
        if self.how == "between":
            return x * 3 if 2 < batch < 7 else x
        if self.how == "last":
            last = x[-5:]
            return last.sum(0) / last.shape[0]
        if self.how == "training":
            return x + 1 if self.training and batch > 6 else x
        if self.how == "evaluation":
            return x + 1 if not self.training and batch > 6 else x
        if self.how == "same size":
            longer = x.new_zeros(torch.sym_max(batch, 5), 6)
            return x * 2 if x.is_same_size(longer) else x
        if self.how == "attention":
            q = x[None]
            return F.scaled_dot_product_attention(q, q, q, is_causal=batch > 3)
        if self.how == "imported attention without names":
            q = x[None]
            return scaled_dot_product_attention(q, q, q, None, 0.0, batch > 3)
        if self.how == "asserted":
            assert batch <= 5
            return x
        raise ValueError(self.how)


_AGREE = {
    "if": range(2, 9), "least": range(2, 6), "most": range(3, 20), "int": (3, 4),
    "int of a quotient": (4, 5), "chunks": (4, 5, 6), "range": (4, 5),
    "divides": range(2, 20, 2), "in": (2, 4, *range(6, 20)), "between": range(3, 7),
    "last": range(2, 5), "training": range(2, 7), "evaluation": range(2, 7),
    "same size": range(2, 5), "attention": range(4, 20),
    "imported attention without names": range(4, 20), "asserted": range(2, 6),
}  # fmt: skip


def _samples(count: int, columns: int = 6) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count))


def _runs(captured: Capture, x: Tensor, training: bool) -> bool:
    """True if the graph equals the model for these inputs; otherwise it has to refuse them."""
    model = captured.model.train(training)
    try:
        expected = model(x)
    except Exception as error:
        expected = error
    try:
        found = run(captured, {"x": x}, training=training)
    except RuntimeError as error:
        assert "make the plan again" in str(error) or isinstance(expected, Exception), error
        return False
    assert isinstance(expected, Tensor), f"the model raises {expected!r} at {len(x)}"
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return True


@pytest.mark.parametrize("how", _AGREE)
def test_sizes_that_decide_otherwise_are_refused_and_all_others_are_exact(how: str) -> None:
    captured = capture(_Decides(how), {"x": X}, method="tracer")
    modes = {"training": (True,), "evaluation": (False,)}.get(how, (True, False))
    for training in (True, False):
        ran = [size for size in range(2, 20) if _runs(captured, _samples(size), training)]
        assert ran == list(_AGREE[how] if training in modes else range(2, 20))


@pytest.mark.parametrize("how", ["if", "int"])
def test_a_note_and_the_refusal_have_the_line_and_the_sizes(how: str) -> None:
    captured = capture(_Decides(how), {"x": X})
    line = _Decides.forward.__code__.co_firstlineno + {"if": 3, "int": 9}[how]
    condition = {"if": "batch <= 8", "int": "int(0.7*float(batch)) == 2"}[how]
    (note,) = captured.notes
    assert f"(test_size_decisions.py:{line}) takes the branch of the example inputs" in note
    assert condition in note
    with pytest.raises(RuntimeError) as caught:
        run(captured, {"x": _samples(11)}, training=False)
    assert str(caught.value).startswith(
        f"captured for {condition} (test_size_decisions.py:{line}), not for batch 11: "
    )


def test_a_size_that_the_author_refuses_has_no_note() -> None:
    assert capture(_Decides("asserted"), {"x": X}).notes == ()


def test_a_size_that_decides_in_the_other_branch_of_a_random_decision_is_checked() -> None:
    class Sometimes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if random.random() < 0.5:
                return (x.relu() + 1).sin().cos()
            if x.shape[0] > 8:
                return x * 2
            return x + 1

    captured = capture(Sometimes(), {"x": X})
    assert any("batch <= 8" in note for note in captured.notes)
    with pytest.raises(RuntimeError, match="captured for batch <= 8"):
        run(captured, {"x": _samples(11)}, training=False)


def test_an_equation_that_only_the_example_solves_is_an_error_at_its_line() -> None:
    class Squares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * int(1.5 * x.shape[0])

    with pytest.raises(CaptureError, match=r"test_size_decisions.py:\d+.* batch size only"):
        capture(Squares(), {"x": X}, method="tracer")
    x = _samples(11)  # Dynamo computes the number from the size.
    assert torch.equal(run(capture(Squares(), {"x": X}), {"x": x}, training=False), 16 * x)


class _Window(nn.Module):
    """Attends to the last keys only, when there are more than eight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.out = nn.Embedding(20, 8), nn.Linear(8, 24), nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.words(x)).chunk(3, -1)
        if x.size(1) > 8:
            key, value = key[:, -8:], value[:, -8:]
        return self.out((query @ key.transpose(1, 2)).softmax(-1) @ value)


def test_generated_stages_refuse_what_was_decided_otherwise(tmp_path: Path) -> None:
    model, tokens = _Window().eval(), torch.arange(60).view(3, 20) % 20
    told: dict[str, str] = {}
    plan = asyncpipe.partition(
        model,
        (tokens[:, :6],),
        stages=2,
        output=tmp_path / "window",
        profile="analytic",
        on_phase=lambda step, text, *_: told.setdefault(step, text),
    )
    assert "; captured for sequence <= 8 " in told["verify"]
    (note,) = plan.notes
    assert note.startswith('"if x.size(1) > 8:"')
    pipe = asyncpipe.load(tmp_path / "window").eval()
    for length in (2, 5, 8):
        torch.testing.assert_close(pipe(tokens[:, :length]), model(tokens[:, :length]))
    with pytest.raises(RuntimeError, match=r"captured for sequence <= 8 .*, not for sequence 9: "):
        pipe(tokens[:, :9])
    (file,) = [each for each in tmp_path.rglob("stage_*.py") if "raise" in each.read_text()]
    code = file.read_text()
    assert "if sequence > 8:" in code
    file.write_text(code.replace("sequence > 8", "sequence > 800"))
    with pytest.raises(PlanError, match="differs from the original's"):
        verify(model, read_plan(tmp_path / "window"), tmp_path / "window", {"x": tokens[:, :6]})


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "llama", "hf_resnet", "resnet", "vit"])
def test_published_models_have_no_guards(name: str) -> None:
    captured = of_zoo(name)
    assert not captured.graph.find_nodes(op="call_function", target=must_fit)
    assert captured.notes == ()


def test_sizes_that_are_rounded_cross_a_boundary(tmp_path: Path) -> None:
    class Third(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)[: math.ceil(x.shape[0] / 3)].relu()
            return self.second(x)

    model = Third()
    plan = asyncpipe.partition(
        model, (X,), stages=2, output=tmp_path / "third", profile="analytic", cut_at=["second"]
    )
    assert [boundary.tensor.shape for boundary in plan.boundaries] == [("math.ceil(batch/3)", 6)]
    pipe = asyncpipe.load(tmp_path / "third")
    for size in (1, 3, 4, 10):
        torch.testing.assert_close(pipe(_samples(size)), model(_samples(size)))


# Functions of sizes at random


_numbers = st.integers(1, 9)
_sizes = st.recursive(
    st.sampled_from(["n", "x.shape[1]"]),
    lambda inner: st.one_of(
        st.tuples(inner, _numbers).map(lambda it: f"({it[0]} + {it[1]})"),
        st.tuples(inner, _numbers).map(lambda it: f"({it[0]} // {it[1]})"),
        st.tuples(inner, _numbers).map(lambda it: f"({it[0]} % {it[1]})"),
        st.tuples(inner, _numbers).map(lambda it: f"min({it[0]}, {it[1]})"),
        st.tuples(inner, _numbers).map(lambda it: f"max({it[0]}, {it[1]})"),
        st.tuples(inner, _numbers).map(lambda it: f"int({it[0]} * 0.{it[1]})"),
        st.tuples(inner, _numbers).map(lambda it: f"math.ceil({it[0]} / {it[1]})"),
        st.tuples(inner, inner).map(lambda it: f"({it[0]} * {it[1]})"),
    ),
    max_leaves=3,
)
_lines = st.one_of(
    st.tuples(_sizes, st.sampled_from(["<", "<=", "==", "!=", ">", ">="]), _numbers).map(
        lambda it: f"if {it[0]} {it[1]} {it[2]}: x = x * 2"
    ),
    _sizes.map(lambda size: f"x = x + {size}"),
    _sizes.map(lambda size: f"x = x[: max({size}, 1)]"),
    _sizes.map(lambda size: f"x = torch.stack([part.sum(0) for part in x.chunk(max({size}, 1))])"),
    _sizes.map(lambda size: f"x = torch.cat([x, x.new_ones(min({size}, 3), x.shape[1])])"),
    st.just("n = x.shape[0]"),
    st.just("x = x.view(-1, x.shape[1])"),
)


class _Written(nn.Module):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        body = "\n".join(f"    {line}" for line in ["n = x.shape[0]", *lines, "return x"])
        scope: dict[str, Any] = {"torch": torch, "math": math}
        exec(f"def forward(x):\n{body}", scope)
        self.function = scope["forward"]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@settings(max_examples=20)
@given(st.lists(_lines, min_size=1, max_size=4), st.integers(2, 7))
def test_a_function_of_sizes_is_exact_or_refuses(lines: list[str], size: int) -> None:
    try:
        captured = capture(_Written(lines), {"x": _samples(size, 3)}, method="tracer")
    except CaptureError:
        return  # It works for one size only, or not at all.
    for training in (True, False):
        for other in (2, 3, 4, 5, 6, 8, 9, 13, 20):
            _runs(captured, _samples(other, 3), training)


# The sizes 1 and twice the captured ones


class _AtOne(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.scale = factor, nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return x * self.factor if x.shape[0] == 1 else x


def test_one_sample_is_refused_where_it_goes_another_way_and_only_there() -> None:
    captured = capture(_AtOne(1.0), {"x": X})
    assert captured.notes == () and _runs(captured, _samples(1), training=True)
    captured = capture(_AtOne(2.0), {"x": X})
    assert captured.notes[0].startswith("a batch size of 1 takes another branch in forward")
    with pytest.raises(RuntimeError, match="captured for batch >= 2, not for batch 1"):
        run(captured, {"x": _samples(1)}, training=True)
    assert _runs(captured, _samples(2), training=True)
    with pytest.raises(CaptureError, match="a batch size of 1, as in the example"):
        capture(_AtOne(2.0), {"x": X[:1]})


def test_a_graph_that_is_wrong_for_larger_sizes_is_no_capture() -> None:
    captured = capture(_Decides("if"), {"x": X})
    check_capture(captured, {"x": X})
    for guard in captured.graph.find_nodes(op="call_function", target=must_fit):
        captured.graph.erase_node(guard)
    with pytest.raises(CaptureError, match="differs in training mode at batch 9"):
        check_capture(captured, {"x": X})
