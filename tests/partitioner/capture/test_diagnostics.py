"""Errors for a forward that cannot be captured: the line, its text, the ways out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.partitioner.capture import capture
from asyncpipe.runtime.errors import CaptureError

HERE = r"test_diagnostics.py:\d+"


class Inner(nn.Module):
    def __init__(self, work: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.work = work

    def forward(self, x: Tensor) -> Any:
        return self.work(self, x)


class Outer(nn.Module):
    def __init__(self, work: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.inner = Inner(work)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


ONES = torch.ones(3, 4)


def refusal_of(model: nn.Module, **inputs: Any) -> CaptureError:
    with pytest.raises(CaptureError) as caught:
        capture(model, inputs or {"x": ONES}, check=False)
    return caught.value


def branches(module: Any, x: Tensor) -> Tensor:
    # So for three samples of ones, and not for two.
    if x.sum() > 10:
        return module.linear(x)
    return x


class Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        return module(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def passes_a_module(module: Any, x: Tensor) -> Any:
    return Applied.apply(x, module.linear)


def counts(module: Any, x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = x / 2
    return x


def repeats(module: Any, x: Tensor) -> Tensor:
    for _ in range(int(x.sum())):
        x = module.linear(x)
    return x


VALUES = [
    (branches, "if x.sum() > 10:"),
    (counts, "while x.norm() > 1:"),
    (repeats, "for _ in range(int(x.sum())):"),
]


@pytest.mark.parametrize(("work", "text"), VALUES)
def test_a_line_that_depends_on_values_is_quoted_with_the_ways_out(work: Any, text: str) -> None:
    error = refusal_of(Inner(work))
    assert f'"{text}" depends on tensor values' in error.what
    assert f"cannot trace {work.__name__} at " in error.what
    assert "move it into a module of its own" in error.cure and "torch.where" in error.cure


@pytest.mark.parametrize(("work", "text"), VALUES)
def test_a_module_of_its_own_is_kept_whole_with_a_note_that_quotes_it(work: Any, text: str) -> None:
    (note,) = capture(Outer(work), {"x": ONES}, check=False).notes
    assert note.startswith("Inner is kept as one operation: ") and f'"{text}"' in note


def test_a_module_as_an_argument_of_a_function_is_named_and_its_owner_kept_whole() -> None:
    line = '"return Applied.apply(x, module.linear)" passes a module (Linear) to a function'
    error = refusal_of(Inner(passes_a_module))
    assert line in error.what and "--leaf" in error.cure
    (note,) = capture(Outer(passes_a_module), {"x": ONES}).notes
    assert note.startswith("Inner is kept as one operation: ") and line in note


class Sized(nn.Module):
    """No attribute holds the argument of its constructor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return branches(self, x)


class Halves(Sized):
    """A property has the name of an argument and another value."""

    def __init__(self, width: int, modes: int = 8) -> None:
        super().__init__(width)
        self.width, self._modes = width, modes // 2

    @property
    def modes(self) -> int:
        return self._modes


def test_a_module_is_not_built_with_what_a_property_has_made_of_an_argument() -> None:
    error = refusal_of(nn.Sequential(Halves(4), nn.Linear(4, 4)), input=ONES)
    assert "store the arguments of Halves.__init__ as attributes of their names" in error.cure


def test_a_module_whose_arguments_are_lost_has_to_store_them_before_it_is_a_leaf() -> None:
    error = refusal_of(nn.Sequential(Sized(4), nn.Linear(4, 4)), input=ONES)
    assert "store the arguments of Sized.__init__ as attributes of their names" in error.cure


def loops_over_samples(module: Any, x: Tensor) -> Tensor:
    return torch.stack([module.linear(row) for row in x])


def makes_a_list(module: Any, x: Tensor) -> Tensor:
    return module.linear(x) * x[:, 0].tolist()[0]


@pytest.mark.parametrize("work", [loops_over_samples, makes_a_list])
def test_a_loop_over_the_samples_is_told_with_its_line(work: Any) -> None:
    error = refusal_of(Inner(work))
    assert "works for one batch size only: batch would always be 3" in error.what
    assert "loop over samples" in error.cure or "a loop over samples" in error.cure


def calls_backward(module: Any, x: Tensor) -> Tensor:
    loss = module.linear(x).sum()
    loss.backward()
    return loss


def asks_for_a_gradient(module: Any, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    return torch.autograd.grad(module.linear(x).sum(), x)[0]


def assigns_data(module: Any, x: Tensor) -> Tensor:
    module.linear.weight.data = module.linear.weight.data.double()
    return module.linear(x)


def registers_a_hook(module: Any, x: Tensor) -> Tensor:
    y = module.linear(x)
    y.register_hook(lambda gradient: 2 * gradient)
    return y


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (calls_backward, "calls backward inside forward"),
        (asks_for_a_gradient, "computes a gradient inside forward"),
        (assigns_data, "assigns the data or the gradient of a tensor"),
        (registers_a_hook, "registers a hook"),
    ],
)
def test_what_no_graph_can_hold_is_told_with_its_line(work: Any, text: str) -> None:
    error = refusal_of(Outer(work))
    assert text in error.what and "test_diagnostics.py:" in error.what
    assert error.cure


def test_inputs_that_forward_does_not_take_are_told_with_what_it_takes() -> None:
    error = refusal_of(Outer(branches), y=torch.randn(3, 4))
    assert "the example inputs do not fit Outer.forward" in error.what
    assert error.cure == "It takes x: 'Tensor'; given: y."


def test_inputs_of_a_wrong_shape_are_told_with_it_and_nothing_is_logged(
    capfd: pytest.CaptureFixture[str],
) -> None:
    error = refusal_of(nn.Sequential(nn.Linear(4, 4)), input=torch.randn(3, 5))
    assert "must have same reduction dim" in error.what
    assert error.cure == "Does it run on inputs like these? input f32[3, 5]"
    assert capfd.readouterr().err == ""


def fails(module: Any, x: Tensor) -> Tensor:
    return module.missing(x)


def test_an_exception_of_the_model_is_told_with_its_line_and_the_inputs() -> None:
    error = refusal_of(Outer(fails))
    assert '"return module.missing(x)" raised AttributeError' in error.what
    assert "x f32[3, 4]" in error.cure and "--leaf Inner" in error.cure


def returns_nothing(module: Any, x: Tensor) -> None:
    module.linear(x)


def test_a_forward_that_returns_nothing_is_told() -> None:
    assert refusal_of(Outer(returns_nothing)).what == "Outer.forward returns no tensor."


class Cached(nn.Module):
    """Makes a table for the inputs that it meets first, as convit's attention does."""

    def __init__(self, empty: Tensor, persistent: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", empty, persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.table.shape[0] != x.shape[1] or self.table.dtype != x.dtype:
            self.table = torch.arange(4.0) / 4
        return self.linear(x + self.table)


EMPTY = pytest.mark.parametrize(
    ("empty", "kind"),
    [(torch.zeros(1), "float32 [1]"), (torch.zeros(4, dtype=torch.int64), "int64 [4]")],
)


@EMPTY
def test_a_buffer_that_the_first_call_makes_is_made_before_the_capture(
    empty: Tensor, kind: str
) -> None:
    model = Cached(empty)
    weight = model.linear.weight.detach().clone()
    captured = capture(model, {"x": ONES})  # which compares the graph with the model
    assert model.table.tolist() == [0, 0.25, 0.5, 0.75] and torch.equal(model.linear.weight, weight)
    assert any("one call of the model made table" in note for note in captured.notes), kind


@EMPTY
def test_a_saved_buffer_that_becomes_another_kind_of_tensor_is_told_with_a_cure_that_works(
    empty: Tensor, kind: str
) -> None:
    model = Cached(empty, persistent=True)
    error = refusal_of(model, x=ONES)
    assert f"the buffer table ({kind}) by another kind of tensor (float32 [4])" in error.what
    assert "Cached.forward at " in error.what and "call the model once" in error.cure
    model(ONES)
    capture(model, {"x": ONES})


def test_a_buffer_that_grows_at_each_call_is_told() -> None:
    class Grows(Cached):
        def forward(self, x: Tensor) -> Tensor:
            self.table = torch.cat([self.table, x[0, :1]])
            return self.linear(x + self.table.mean())

    assert "replaces the buffer table" in refusal_of(Grows(torch.zeros(1)), x=ONES).what


class Weighted(nn.Module):
    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("weights", weights)

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(self.weights, self.linear(x))


@pytest.mark.parametrize(
    ("model", "x", "words"),
    [
        (Weighted(torch.eye(3).to_sparse()), ONES, "the buffer weights has the layout sparse_coo"),
        (nn.Linear(4, 4), ONES.to_sparse(), "the input input has the layout sparse_coo"),
        (
            Inner(lambda self, x: self.linear(x).to_sparse()),
            ONES,
            r"the result of to_sparse \(.*HERE\) has the layout sparse_coo",
        ),
        (
            Inner(lambda self, x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()),
            ONES,
            "HERE reads a quantized tensor",
        ),
    ],
)
def test_a_tensor_that_is_not_dense_is_told_where_it_is_held_given_or_made(
    model: nn.Module, x: Tensor, words: str
) -> None:
    name = "input" if isinstance(model, nn.Linear) else "x"
    with pytest.raises(CaptureError, match=words.replace("HERE", HERE)):
        capture(model, {name: x})
