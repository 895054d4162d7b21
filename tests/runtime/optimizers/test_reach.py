"""The reach of an optimizer, found by trying it: torch's and small ones of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from asyncpipe.runtime.optimizers.reach import Reach, reach_of

SHAPES = ((64, 32), (32,), (8, 4, 3, 3), (16, 64), (16,))


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]


class Own(torch.optim.SGD):
    """SGD whose gradients are divided by what `divisor_of` makes of them; keeps it beside its
    groups."""

    def __init__(self, params: Any, divisor_of: Callable[[list[Tensor]], list[Tensor]]) -> None:
        super().__init__(params, lr=0.1)
        self.divisor_of = divisor_of

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            gradients = [each.grad for each in group["params"]]
            for gradient, divisor in zip(gradients, self.divisor_of(gradients), strict=True):
                gradient /= divisor
        super().step()


def joint_norm(gradients: list[Tensor]) -> list[Tensor]:
    return [torch.nn.utils.get_total_norm(gradients).clamp(min=1.0)] * len(gradients)


def norm_of_each(gradients: list[Tensor]) -> list[Tensor]:
    return [gradient.norm() for gradient in gradients]


def norm_of_rows(gradients: list[Tensor]) -> list[Tensor]:
    return [gradient.norm(dim=-1, keepdim=True) for gradient in gradients]


def random_sizes(gradients: list[Tensor]) -> list[Tensor]:
    return [1 + torch.rand_like(gradient) for gradient in gradients]


@pytest.mark.parametrize(
    "name",
    ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop"]
    + ["Rprop", "SGD"],
)
def test_most_optimizers_of_torch_step_each_number_by_itself(name: str) -> None:
    assert reach_of(getattr(torch.optim, name)(weights(), lr=0.01)) is Reach.NUMBER


def test_others_step_whole_parameters() -> None:
    assert reach_of(torch.optim.Adafactor(weights(torch.bfloat16))) is Reach.PARAMETER
    matrices = [each for each in weights() if each.ndim == 2]
    assert reach_of(torch.optim.Muon(matrices, lr=0.01)) is Reach.PARAMETER


@pytest.mark.parametrize(
    ("divisor_of", "reach"),
    [
        (joint_norm, Reach.PARAMETERS),
        (norm_of_each, Reach.PARAMETER),
        (norm_of_rows, Reach.PARAMETER),
        (random_sizes, Reach.NUMBER),
    ],
)
def test_the_largest_reach_is_found(
    divisor_of: Callable[[list[Tensor]], list[Tensor]], reach: Reach
) -> None:
    assert reach_of(Own(weights(), divisor_of)) is reach
    assert reach_of(Own([{"params": weights()}, {"params": weights()}], divisor_of)) is reach


class Estimating(torch.optim.Optimizer):
    """Sign descent whose step grows with the largest distance from the start, as in Prodigy."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 1.0, "estimate": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            inner, size = 0.0, 0.0
            for each in group["params"]:
                start = self.state[each].setdefault("start", each.clone())
                inner += float((each.grad * (start - each)).sum())
                size += float(each.grad.abs().sum())
                each -= group["lr"] * group["estimate"] * each.grad.sign()
            group["estimate"] = max(group["estimate"], group["estimate"] + inner / size)


def test_an_estimate_over_all_parameters_is_found_though_it_begins_small() -> None:
    assert reach_of(Estimating(weights())) is Reach.PARAMETERS
    assert reach_of(Estimating(weights()[:1])) is Reach.PARAMETER


class Marked(torch.optim.SGD):
    """Divides by the joint norm the gradients of those parameters alone that have a mark."""

    def step(self, closure: Any = None) -> None:
        marked = [each.grad for each in self.param_groups[0]["params"] if hasattr(each, "mark")]
        for gradient in marked:
            gradient /= torch.nn.utils.get_total_norm(marked)
        super().step()


def test_marks_of_parameters_are_seen() -> None:
    given = weights()
    optimizer = Marked(given, lr=0.1)
    assert reach_of(optimizer) is Reach.NUMBER
    for each in given:
        each.mark = True
    assert reach_of(optimizer) is Reach.PARAMETERS


def test_the_rate_of_a_warm_up_hides_nothing_and_the_optimizer_stays_as_it_was() -> None:
    given, called = weights(), []
    optimizer = torch.optim.Adafactor(given, lr=0.1)
    LambdaLR(optimizer, lambda step: step / 4)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    for each in given:
        each.grad = torch.ones_like(each)
    optimizer.step()
    kept = [optimizer.state[each]["step"].item() for each in given]
    random = torch.get_rng_state()
    called.clear()
    assert reach_of(optimizer) is None  # its state has means of the rows that it was given
    assert reach_of(torch.optim.Adafactor(given, lr=0.0)) is Reach.PARAMETER
    assert not called
    assert torch.equal(torch.get_rng_state(), random)
    assert [optimizer.state[each]["step"].item() for each in given] == kept
    assert all(torch.equal(each, torch.ones_like(each)) for each in given)
    assert all(torch.equal(each.grad, torch.ones_like(each)) for each in given)


def test_an_optimizer_that_has_stepped_is_tried_too() -> None:
    given = weights()
    for kind in (torch.optim.AdamW, torch.optim.Adagrad):
        optimizer = kind(given, lr=0.0)
        for each in given:
            each.grad = torch.ones_like(each)
        optimizer.step()
        assert reach_of(optimizer) is Reach.NUMBER


class OfSinglePrecision(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        if self.param_groups[0]["params"][0].dtype is not torch.float32:
            raise SystemExit("of single precision")
        super().step()


def test_nothing_is_said_where_a_copy_fails() -> None:
    assert reach_of(OfSinglePrecision(weights(), lr=0.1)) is None
    assert reach_of(torch.optim.SparseAdam(weights())) is None
    assert reach_of(torch.optim.LBFGS(weights())) is None


def test_no_parameters_and_complex_ones_are_no_failure() -> None:
    assert reach_of(torch.optim.SGD([{"params": []}], lr=0.1)) is Reach.NUMBER
    assert reach_of(torch.optim.AdamW(weights(torch.complex64))) is Reach.NUMBER
    assert reach_of(Own(weights(torch.complex64), joint_norm)) is Reach.PARAMETERS
    assert reach_of(torch.optim.AdamW([nn.Parameter(torch.ones(())), *weights()])) is Reach.NUMBER
