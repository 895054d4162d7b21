"""Effects of forward besides arithmetic are the same in the generated files: regions, buffers,
autograd functions, random numbers. Every model is cut, imported and compared with itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncpipe.runtime.errors import PlanError
from asyncpipe.tests.support.models.semantics import Passes, ScaleAndAdd, SineWithContext
from asyncpipe.tests.support.oracles.generated_equality import assert_same, cut

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)


# Regions


class AutocastInAutocast(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.first(x)
            with torch.autocast("cpu", enabled=False):
                hidden = torch.relu(hidden.float()) @ self.second.weight
            hidden = self.second(hidden)
        return hidden.float()


class AutocastMethod(Base):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def inner(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).float() + x


class GradInNoGrad(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.first(x)
            with torch.enable_grad():
                hidden = hidden + self.second(x)
        return hidden * 2 + self.second(x).detach() + self.first(x)


class GradSetOff(Base):
    @torch.no_grad()
    def frozen(self, x: Tensor) -> Tensor:
        return self.first(x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(False):
            hidden = self.first(x)
        with torch.set_grad_enabled(True):
            hidden = self.second(hidden)
        torch.set_grad_enabled(False)
        other = self.first(x)
        torch.set_grad_enabled(True)
        return hidden + self.frozen(x) + other


class InferenceMode(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            hidden = self.first(x)
        return self.second(x) + hidden.clone()


class Detaches(Base):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden.detach()) + hidden


@pytest.mark.parametrize(
    "kind", [AutocastInAutocast, AutocastMethod, GradInNoGrad, GradSetOff, InferenceMode, Detaches]
)
def test_regions_of_precision_and_gradients_are_kept(kind: type[Base], tmp_path: Path) -> None:
    assert_same(kind(), {"x": X}, tmp_path)


# Buffers


class Counts(Base):
    count: Tensor
    mean: Tensor
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("hidden", torch.ones(8), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        value = self.first(x)
        if self.training:
            self.count += 1
            self.mean = 0.9 * self.mean + 0.1 * value.mean(0).detach()
        self.hidden.mul_(1.5)
        return self.second(value - self.mean) * self.hidden


class Normalises(Base):
    def __init__(self) -> None:
        super().__init__()
        self.running = nn.BatchNorm1d(8)
        self.average = nn.BatchNorm1d(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.average(self.second(self.running(self.first(x))))


@pytest.mark.parametrize("kind", [Counts, Normalises])
def test_buffers_change_as_in_the_original(kind: type[Base], tmp_path: Path) -> None:
    pipe = assert_same(kind(), {"x": X}, tmp_path)
    assert "hidden" not in pipe.state_dict() and "nothing" not in pipe.state_dict()


# Autograd functions


class OwnFunctions(Base):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        scaled, added = ScaleAndAdd.apply(self.first(x), self.weight, 2.5, "label")
        again, _ = ScaleAndAdd.apply(self.second(scaled), self.weight, 0.5, None)
        return SineWithContext.apply(again) + added + Passes.apply(added)


def test_autograd_functions_keep_their_own_gradients(tmp_path: Path) -> None:
    assert_same(OwnFunctions(), {"x": X}, tmp_path)
    text = "".join((tmp_path / "cut" / f"stage_{index}.py").read_text() for index in (0, 1))
    assert ', self.weight, 2.5, "label")' in text


def test_an_autograd_function_inside_a_function_is_refused(tmp_path: Path) -> None:
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] * 3

    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(Local.apply(self.first(x)))

    with pytest.raises(PlanError, match=r"'.*Local' of .*: generated code could not import it"):
        cut(Model(), {"x": X}, tmp_path)


# Random numbers


class Drops(Base):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Dropout(0.2)
        self.alpha = nn.AlphaDropout(0.2)
        self.feature = nn.FeatureAlphaDropout(0.2)
        self.leaky = nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.plain(self.first(x)), 0.3, self.training)
        hidden = F.alpha_dropout(self.alpha(hidden), 0.1, self.training)
        hidden = F.rrelu(self.leaky(hidden), training=self.training)
        return self.second(self.feature(hidden))


class Draws(Base):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + torch.rand_like(x) * 0.1 + torch.randn(x.shape) * 0.1
        hidden = hidden + torch.bernoulli(torch.full_like(x, 0.5))
        hidden = hidden * F.gumbel_softmax(self.second(hidden), tau=0.7, dim=-1)
        hidden = hidden + torch.normal(0.0, 1.0, size=(x.shape[0], 8))
        hidden = hidden + torch.randint(0, 3, (x.shape[0], 8))
        return hidden + torch.empty_like(x).uniform_(0, 1) + torch.zeros_like(x).bernoulli_(0.3)


class Picks(Base):
    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.multinomial(torch.softmax(self.first(x), -1), 3)
        order = torch.randperm(x.shape[0])
        return self.second(x)[order].gather(1, chosen)


class DropsChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.dropout = nn.Dropout2d(0.4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout2d(self.dropout(self.first(x)), 0.2, self.training)
        return self.second(hidden)


@pytest.mark.parametrize("kind", [Drops, Draws, Picks])
def test_random_numbers_are_drawn_in_the_same_order(kind: type[Base], tmp_path: Path) -> None:
    assert_same(kind(), {"x": X}, tmp_path)


def test_whole_channels_are_dropped_alike(tmp_path: Path) -> None:
    assert_same(DropsChannels(), {"x": torch.randn(4, 8, 6, 6)}, tmp_path)


# Sizes


class NeedsItsLength(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.first(torch.nn.functional.one_hot(tokens, 8).float())
        for position in range(tokens.shape[1]):
            hidden = hidden + hidden[:, position : position + 1]
        return self.second(hidden)


def test_a_size_that_is_fixed_is_said_in_the_header_the_readme_and_the_plan(
    tmp_path: Path,
) -> None:
    tokens = torch.arange(20).view(4, 5) % 8
    pipe = assert_same(NeedsItsLength(), {"tokens": tokens}, tmp_path)
    (note,) = [note for note in pipe.plan.notes if "sequence" in note]
    assert note.startswith("the sequence size is fixed: ") and "test_semantics.py" in note
    folder = tmp_path / "cut"
    assert "the sequence size is fixed" in (folder / "README.md").read_text()
    for stage in pipe.plan.stages:
        card = (folder / stage.file).read_text().split('"""')[1]
        assert "the sequence size is fixed" in " ".join(card.split())
    assert pipe(tokens=torch.zeros(9, 5, dtype=torch.long)).shape == (9, 5, 8)


def test_sizes_that_are_free_are_not_spoken_of(tmp_path: Path) -> None:
    pipe = cut(Detaches(), {"x": X}, tmp_path)
    assert "fixed" not in (tmp_path / "cut" / "stage_0.py").read_text()
    assert pipe(x=torch.randn(11, 8)).shape == (11, 8)


def test_an_input_that_needs_a_gradient_gets_it(tmp_path: Path) -> None:
    model = Detaches()
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    pipe = cut(model, {"x": x}, tmp_path)
    assert x.grad is None  # trying the stages leaves nothing behind
    model(x).square().sum().backward()
    pipe(y).square().sum().backward()
    assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)
