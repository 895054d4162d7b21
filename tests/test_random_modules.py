"""The standing search for wrong cuts: its judge sees what is wrong, and its modules are exact."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import asyncpipe
from asyncpipe.runtime.errors import PlanError
from asyncpipe.runtime.executor.loading import Pipe

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(FOLDER)
    yield pytest.importorskip("trials")


@pytest.fixture
def random_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(FOLDER)
    yield pytest.importorskip("random_modules")


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6)
        self.drop, self.last = torch.nn.Dropout(0.5), torch.nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(self.first(x)).relu()))


def small_case(trials: ModuleType) -> Any:
    def inputs() -> tuple[torch.Tensor]:
        return (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),)

    return trials.Case("here", "small", Small, (inputs,))


def scaled(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda pipe, *inputs: call(pipe, *inputs) * 1.001


def detached(call: Callable[..., Any]) -> Callable[..., Any]:
    def changed(pipe: Pipe, *inputs: torch.Tensor) -> torch.Tensor:
        output = call(pipe, *inputs)
        return output.detach() + 0 * output

    return changed


def drawing(call: Callable[..., Any]) -> Callable[..., Any]:
    def changed(pipe: Pipe, *inputs: torch.Tensor) -> Any:
        torch.rand(1)
        return call(pipe, *inputs)

    return changed


def counting(call: Callable[..., Any]) -> Callable[..., Any]:
    def changed(pipe: Pipe, *inputs: torch.Tensor) -> Any:
        for stage in pipe.stages:
            for buffer in stage.buffers():
                buffer.add_(1)
        return call(pipe, *inputs)

    return changed


def writing(call: Callable[..., Any]) -> Callable[..., Any]:
    def changed(pipe: Pipe, x: torch.Tensor) -> Any:
        output = call(pipe, x)
        if not torch.is_grad_enabled():
            x.add_(1)
        return output

    return changed


def always_training(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda pipe, *inputs: call(pipe.train(), *inputs)


@pytest.mark.parametrize("fault", [scaled, detached, drawing, counting, writing, always_training])
def test_the_judge_sees_a_planted_fault(
    trials: ModuleType, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pipe, "__call__", fault(Pipe.__call__))
    assert trials.outcome(trials.judge, small_case(trials), 2).startswith("wrong: ")


def test_the_judge_sees_weights_that_are_not_the_model_s(
    trials: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = asyncpipe.load

    def other(folder: Path) -> Pipe:
        pipe = load(folder)
        with torch.no_grad():
            next(pipe.parameters()).add_(1e-3)
        return pipe

    monkeypatch.setattr(asyncpipe, "load", other)
    assert "written with another" in trials.outcome(trials.judge, small_case(trials), 2)


def test_a_cut_that_is_right_is_exact(trials: ModuleType) -> None:
    assert trials.outcome(trials.judge, small_case(trials), 2) == "exact"


@pytest.mark.parametrize("seed", range(6))
def test_a_random_module_is_exact_or_refused_with_its_cause(
    random_modules: ModuleType, seed: int
) -> None:
    row = random_modules.examine(seed)
    for outcome in row.values():
        assert not outcome.startswith(("wrong", "traceback", "unclear")), row


@pytest.mark.parametrize(
    ("what", "cure", "kind"),
    [
        ("the captured graph is not the model: output 0 differs.", "", "unclear"),
        ("stage 0 raises NameError, where the original does not: h", "", "unclear"),
        ("the output x of the generated stages differs from the original's by 1.", "", "unclear"),
        ("forward depends on tensor values.", "Or report the model: a defect of it.", "refused"),
    ],
)
def test_an_error_is_classified_by_its_sentence(
    trials: ModuleType, what: str, cure: str, kind: str
) -> None:
    def fails() -> None:
        raise PlanError(what, cure)

    assert trials.outcome(fails).startswith(f"{kind}: ")
