"""Training and evaluation, devices and names in a captured graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, is_grad_enabled, nn

from asyncpipe import partition
from asyncpipe.partitioner.capture import IfTraining, LocalDevice, ModuleCall, Region, capture
from asyncpipe.runtime.errors import CaptureError, PlanError
from asyncpipe.tests.support.oracles.captures import (
    X,
    checked,
    node_of,
)

# Modes, devices, names


class _Path(nn.Module):
    """Stochastic depth, as vision models write it."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = torch.rand(x.shape[0], 1) + 0.5
        output = x * keep.floor()
        return output


class _Depth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.path = _Path()

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.path(self.a(x))
        return h + self.path(torch.tanh(self.a(h)))


def test_work_of_one_mode_is_chosen_by_the_mode() -> None:
    captured = checked(_Depth(), x=X)
    chosen = [n for n in captured.graph.nodes if n.args and n.args[-1] == IfTraining(0, 1)]
    assert [node.target for node in chosen] == [operator.getitem] * 2
    assert [node.name for node in chosen] == ["output_1", "output_3"]
    assert [node.args[0][1].target for node in chosen] == ["a", torch.tanh]
    assert captured.calls[ModuleCall("path", 1)].result is chosen[1]
    assert ModuleCall("path", 1) in chosen[1].meta["calls"]


class _Tracks(nn.Module):
    """State that training alone changes, in three ways, and that both modes read."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("size", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            self.steps += 1
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.size = 0.5 * self.size + h.detach().abs().mean(0)
            h = h - h.mean(0)
        else:
            h = h - self.mean
        return h / self.size + self.steps


def test_state_that_training_changes_stays_in_evaluation() -> None:
    captured = checked(_Tracks(), x=X)
    writes = [n for n in captured.graph.nodes if n.target == "copy_"]
    assert [str(node.args[0].target) for node in writes] == ["size"]
    changes = [node for node in captured.graph.nodes if node.meta.get("mutates")]
    assert all(node.meta["regions"][0] == Region("training") for node in changes)


class _Modes(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("table", torch.zeros(6))

    def forward(self, x: Tensor) -> Any:
        if self.how == "random" and not self.training:
            x = x * torch.rand(x.shape)
        if self.how == "part" and self.training:
            self.table[:2] += 1
        if self.how == "output" and self.training:
            return x, x + 1
        return x + self.table


@pytest.mark.parametrize("how", ["random", "part"])
def test_one_mode_alone_may_draw_random_numbers_and_change_part_of_a_buffer(how: str) -> None:
    checked(_Modes(how), x=X)


def test_modes_that_return_other_structures_are_named() -> None:
    both = r"_Modes.forward returns \(a tensor, a tensor\) in training and a tensor in evaluation"
    with pytest.raises(CaptureError, match=both):
        capture(_Modes("output"), {"x": X})


def test_devices_and_names_like_pythons_are_kept_out() -> None:
    class Places(nn.Module):
        def forward(self, input: Tensor, scale: float) -> Tensor:
            made = torch.arange(6, device=input.device).to(torch.float32)
            print_ = made.to(input.device) * scale
            return input + print_

    captured = checked(Places(), input=X, scale=0.5)
    assert node_of(captured, torch.arange).kwargs["device"] == LocalDevice()
    assert next(iter(captured.graph.nodes)).name == "input"
    assert captured.inputs[0].name == "input"
    captured.graph.lint()


def test_names_come_from_the_frame_that_made_the_value() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            first, (second, third) = x + 1, (x + 2, x + 3)
            chosen = x * 4 if x.dim() == 2 else x
            return self.inner(torch.tanh(chosen)) + first + second + third

    class Inner(nn.Module):
        def forward(self, parameter: Tensor) -> Tensor:
            doubled = parameter * 2
            result: Tensor = doubled - 1
            return result

    captured = checked(Named(), x=X)
    names = [node.name for node in captured.graph.nodes]
    assert names[:9] == [
        "x", "first", "second", "third", "chosen", "tanh", "doubled", "result", "add",
    ]  # fmt: skip


def test_a_size_of_one_mode_alone_stays_free() -> None:
    """In the example both modes take two samples, which is half of them in evaluation only."""

    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[: 2 if self.training else x.shape[0] // 2].sum(0)

    checked(Half(), x=X)


def _by_default(asks: Callable[[], bool] = torch.is_grad_enabled) -> bool:
    return asks()


class _AsksForGradients(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.way, self.asks = nn.Linear(6, 6), way, torch.is_grad_enabled

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.way == "mode" and torch.is_grad_enabled():
            h = h + 1
        if self.way == "by name" and is_grad_enabled():
            h = h + 1
        if self.way == "attribute" and self.asks():
            h = h + 1
        if self.way == "torch._C" and torch._C.is_grad_enabled():
            h = h + 1
        if self.way == "tensor" and h.requires_grad:
            h = h + 1
        if self.way == "leaf" and not h.is_leaf:
            h = h + 1
        if self.way == "history" and h.grad_fn is not None:
            h = h + 1
        if self.way == "default" and _by_default():
            h = h + 1
        if self.way == "nothing" and torch.is_grad_enabled() and h.dim() > 5:
            h = h + 1
        with torch.no_grad():
            if self.way == "region" and not torch.is_grad_enabled():
                h = h + 1
        return h.tanh()


@pytest.mark.parametrize(
    "way", ["mode", "by name", "attribute", "torch._C", "tensor", "leaf", "history"]
)
def test_a_forward_that_asks_whether_gradients_are_recorded_is_refused(way: str) -> None:
    with pytest.raises(CaptureError, match=r"_AsksForGradients.forward at .*no_grad") as error:
        capture(_AsksForGradients(way), {"x": X})
    assert "self.training" in str(error.value)
    assert torch.is_grad_enabled is torch._C.is_grad_enabled is is_grad_enabled


def test_a_question_about_gradients_that_no_patch_reaches_is_seen_in_the_results(
    tmp_path: Path,
) -> None:
    with pytest.raises(PlanError, match=r"_by_default at .*no_grad"):
        partition(
            _AsksForGradients("default"), {"x": X}, stages=2, output=tmp_path, profile="analytic"
        )


@pytest.mark.parametrize("way", ["nothing", "region"])
def test_an_answer_about_gradients_that_changes_nothing_is_no_matter(way: str) -> None:
    checked(_AsksForGradients(way), x=X)


class _AnotherWay(nn.Module):
    """Median by a sort where gradients are recorded, else by kthvalue; `gate` starts at zero."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.way, self.gate = nn.Linear(6, 6), way, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if torch.is_grad_enabled():
            middle = h.sort(-1).values[..., 3]
            if self.way == "gate":
                middle = middle + self.gate
        else:
            middle = h.kthvalue(4, -1).values
        return h - middle[..., None]


def test_another_way_to_the_same_results_without_gradients_is_captured() -> None:
    checked(_AnotherWay("same"), x=X)


def test_a_gate_of_zero_does_not_hide_that_results_differ_without_gradients() -> None:
    with pytest.raises(CaptureError, match=r"_AnotherWay.forward at .*no_grad"):
        capture(_AnotherWay("gate"), {"x": X})
