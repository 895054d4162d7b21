"""Sizes that forward uses stay free; values that decide are named by their line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.partitioner.capture import capture
from asyncpipe.partitioner.capture.fake_inputs import FakeWorld
from asyncpipe.runtime.errors import CaptureError
from asyncpipe.tests.support.models import zoo
from asyncpipe.tests.support.oracles.captures import (
    X,
    assert_graph_is_model,
    checked,
    node_of,
    other_sizes,
)

# Views of tensors with free sizes

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a row": lambda x: x[:, 1],
    "a part": lambda x: x[..., 1:3],
    "every other": lambda x: x[:, ::2],
    "transposed": lambda x: x.mT,
    "grown": lambda x: x[None].expand(3, -1, -1, -1),
    "a view of a view": lambda x: x[:, 1:].permute(2, 0, 1)[1:],
    "in one row": lambda x: x.view(x.shape[0], -1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_that_the_cache_knows_is_the_view_that_torch_makes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = FakeWorld(nn.Identity())
    with world.mode:
        x = world.input(torch.randn(2, 10, 6), {0: "batch", 1: "sequence"})
        first = VIEWS[name](x)
        monkeypatch.setattr(Tensor, "set_", None)  # torch's own way
        again = VIEWS[name](x)
    monkeypatch.undo()
    assert again is not first
    for view in (first, again):
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert (first.shape, first.stride(), first.storage_offset()) == (
        again.shape, again.stride(), again.storage_offset(),
    )  # fmt: skip
    assert (first.dtype, first.device) == (again.dtype, again.device)
    assert first.is_contiguous() == again.is_contiguous()


OTHER_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "of other bits": lambda x: x.view(torch.int32)[:, 1:],
    "of pairs": lambda x: torch.view_as_complex(x)[:, 1:],
    "conjugate": lambda x: torch.view_as_complex(x).conj()[:, 1:],
    "negative": lambda x: torch.view_as_complex(x).conj().imag[:, 1:],
}


@pytest.mark.parametrize("name", OTHER_VIEWS)
def test_views_as_other_numbers_are_torchs_own(name: str) -> None:
    world = FakeWorld(nn.Identity())
    with world.mode:
        x = world.input(torch.randn(3, 10, 2), {0: "batch", 1: "sequence"})
        first, again = (OTHER_VIEWS[name](x) for _ in range(2))
    assert (first.dtype, first.is_conj(), first.is_neg()) == (
        again.dtype, again.is_conj(), again.is_neg(),
    )  # fmt: skip
    assert (first.shape, first.stride()) == (again.shape, again.stride())


# Sizes that forward uses


class _Loops(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Any:
        if self.how == "len":
            return x.sum(0) / len(x)
        if self.how == "numel":
            return x.reshape(x.numel() // x.size(1), -1) * x.dim()
        if self.how == "ask":
            positions = torch.arange(x.shape[0])
            if (positions.diff() == 1).all():
                x = x * 2
            return x * torch.linspace(0, 1, 3)[1].item()
        if self.how == "iterate":
            return sum(row for row in x)
        if self.how == "range":
            return [x[i] for i in range(x.shape[0])]
        if self.how == "equal":
            return x * 2 if x.shape[0] == 4 else x
        if self.how == "short":
            positions = torch.arange(x.shape[0])
            return x * 2 if positions.max() < 6 else x
        raise ValueError(self.how)


@pytest.mark.parametrize("how", ["len", "numel", "ask"])
def test_sizes_stay_free(how: str) -> None:
    captured = checked(_Loops(how), x=X)
    assert str(captured.inputs[0]) == "f32[batch, 6]"


@pytest.mark.parametrize("how", ["iterate", "range", "equal"])
def test_a_pinned_batch_is_an_error_at_its_line(how: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(_Loops(how), {"x": X})
    assert "_Loops.forward at" in caught.value.what
    assert "test_capture_sizes.py:" in caught.value.what
    assert "batch would always be 4" in caught.value.what


def test_an_answer_that_differs_between_sizes_is_refused() -> None:
    with pytest.raises(CaptureError, match="depends on tensor values"):
        capture(_Loops("short"), {"x": X})


def test_a_pinned_length_is_fixed_with_a_note() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(20, 4)
            self.places = nn.Parameter(torch.randn(5, 4))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.words(tokens) + self.places

    captured = checked(Positions(), tokens=torch.arange(20).view(4, 5))
    assert captured.sizes == {"batch": 4}
    (note,) = captured.notes
    assert note.startswith("the sequence size is fixed") and "test_capture_sizes.py" in note
    with pytest.raises(CaptureError, match="sequence would always be 5"):
        capture(
            Positions(),
            {"tokens": torch.arange(20).view(4, 5)},
            dynamic={"tokens": {0: "batch", 1: "sequence"}},
        )


def test_a_batch_of_one_is_captured_as_two() -> None:
    model, inputs = zoo.mlp()
    single = {"x": inputs["x"][:1]}
    captured = capture(model, single)
    assert captured.sizes == {"batch": 1}
    assert str(captured.graph) == str(capture(model, inputs).graph)
    assert_graph_is_model(captured, single)


def test_an_input_that_forward_does_not_know_is_named() -> None:
    with pytest.raises(CaptureError, match="missing a required argument: 'x'"):
        capture(_Outer("none"), {"y": X})


# Values that decide


class _Decides(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Any:
        if self.how == "branch":
            if torch.rand(()) > x.mean() + 0.5:
                return x
        if self.how == "item":
            return x * int((x > 0).sum())
        if self.how == "numpy":
            return x * float(x.detach().numpy().sum())
        if self.how == "vmap":
            return torch.vmap(torch.sin)(x)
        return -x


class _Outer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.router = _Decides(how)

    def forward(self, x: Tensor) -> Any:
        return self.router(x)


def test_a_branch_on_a_random_number_and_an_input_is_an_error_at_its_line() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(_Decides("branch"), {"x": X})
    line = _Decides.forward.__code__.co_firstlineno + 2
    assert caught.value.what.startswith("cannot trace _Decides.forward at ")
    assert caught.value.what.endswith(
        f'test_capture_sizes.py:{line}: "if torch.rand(()) > x.mean() + 0.5:" '
        "depends on tensor values."
    )
    assert "a module of its own" in caught.value.cure and "torch.where" in caught.value.cure


def test_a_named_leaf_may_depend_on_values() -> None:
    captured = capture(_Outer("item"), {"x": X}, leaves=["_Decides"])
    assert_graph_is_model(captured, other_sizes(captured, {"x": X}, batch=7))
    assert str(captured.tensor_spec(node_of(captured, "router"))) == "f32[batch, 6]"
    captured = capture(_Router(), {"x": X}, leaves=["_Pick"])
    assert_graph_is_model(captured, other_sizes(captured, {"x": X}, batch=7))
    picked = node_of(captured, "pick")
    assert [str(captured.tensor_spec(user)) for user in picked.users] == [
        "f32[3*batch, 2]", "f32[batch + 1]",
    ]  # fmt: skip
    assert picked.meta["random"]


class _Pick(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += 1
        if x.sum() > 0 and self.seen.item() > 0:
            x = x + 1
        noise = torch.rand(len(x) + 1).tolist()
        return self.a(x.view(-1, 2)), torch.tensor(noise)


class _Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pick = _Pick()

    def forward(self, x: Tensor) -> Tensor:
        chosen, noise = self.pick(x)
        return chosen.sum() * noise


@pytest.mark.parametrize("how", ["item", "numpy"])
def test_a_value_taken_out_of_a_tensor_is_an_error(how: str) -> None:
    with pytest.raises(CaptureError, match=r"_Decides.forward at \S*test_capture_sizes.py:\d+"):
        capture(_Decides(how), {"x": X}, method="tracer")


def test_hooks_and_assigned_data_are_refused() -> None:
    class Hooks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            x.register_hook(lambda gradient: gradient * 2)
            return x

    class Data(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y.data = x[:, :1]
            return y

    with pytest.raises(CaptureError, match="hook"):
        capture(Hooks(), {"x": X.clone().requires_grad_()})
    with pytest.raises(CaptureError, match="assigns the data"):
        capture(Data(), {"x": X})


class Categories(nn.Module):
    """A column of categories beside a sequence: `squeeze` removes it only if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.words = nn.Embedding(3, 6), nn.Embedding(20, 6)

    def forward(self, kind: Tensor, words: Tensor) -> Tensor:
        parts = [self.kinds(kind.squeeze(-1)), self.words(words).mean(1)]
        return torch.cat(parts, dim=-1).tanh()


def test_a_single_column_that_forward_squeezes_away_stays_one() -> None:
    inputs = {"kind": torch.tensor([[0], [2], [1]]), "words": torch.randint(20, (3, 7))}
    captured = capture(Categories(), inputs)
    assert captured.sizes == {"batch": 3, "words_sequence": 7}
    assert "dimension 1 of kind is fixed at 1, as in the example" in captured.notes
