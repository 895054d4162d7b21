"""Stages redraw the random numbers of Python and NumPy in a forward, or the capture is refused."""

from __future__ import annotations

import math
import operator
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from random import random as drawn
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import asyncpipe
from asyncpipe.partitioner.capture import capture, random_numbers, source_lines
from asyncpipe.partitioner.capture.check import check_capture
from asyncpipe.partitioner.capture.model_state import seed_all
from asyncpipe.runtime.errors import CaptureError
from asyncpipe.runtime.executor.executor import Executor
from asyncpipe.runtime.executor.mailbox import forward_edges, gradient_edges
from asyncpipe.runtime.rng import micro_batch_seed, number_state
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.schedule.dependencies import lower
from asyncpipe.runtime.transports.protocol import LocalHub, run_together

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


class Layers(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(depth)])
        self.head = nn.Linear(6, 3)
        self.rng: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(self.changed(x)))
        return self.head(x)

    def changed(self, x: Tensor) -> Tensor:
        return x


class LayerDropout(Layers):
    """As x-transformers writes `layer_dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, [torch.relu] * 4, strict=True):
            if self.training and drawn() < 0.05:
                continue
            residual = x
            x = norm(layer(x)) + residual
        return self.head(x)


class Kept(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if np.random.rand() > 0.4:
                x = x + torch.relu(layer(x))
        return self.head(x)


class Chosen(Layers):
    """As vit-pytorch writes it: all decisions come before all layers."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in [each for each in self.layers if not (self.training and drawn() < 0.3)]:
            x = torch.relu(layer(x)) + x
        return self.head(x)


class Scaled(Layers):
    def changed(self, x: Tensor) -> Tensor:
        noise = random.gauss(0, 1) if self.training else 0.0
        return x * random.choice([0.5, 1.0, 2.0]) + noise + np.random.randint(3)


class Mixed(Layers):
    def changed(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        share = np.random.beta(0.2, 0.2)
        return share * x + (1 - share) * x[torch.randperm(x.size(0))]


class Teacher(nn.Module):
    """A decoder that is given the truth, or what it has said itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.cell = nn.Linear(6, 6), nn.GRUCell(6, 6)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = given = torch.zeros_like(x)
        said = []
        for step in range(4):
            hidden = self.cell(given, hidden)
            said.append(self.dropout(hidden))
            forced = self.training and random.random() < 0.5
            given = self.inside(x * step) if forced else torch.tanh(said[-1])
        return torch.stack(said, 1)


class Constants(Layers):
    """Decisions about numbers, of which one is made in training only."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 0.5 if self.training and random.random() < 0.5 else 2.0
        x = self.layers[0](x)
        x *= scale
        dim = -1 if np.random.rand() < 0.5 else 0
        return self.head(x.softmax(dim))


class Between(Layers):
    """A call that both branches of a decision share stands between two that one branch has."""

    def forward(self, x: Tensor) -> Tensor:
        negative = random.random() < 0.5
        if negative:
            x = self.layers[0](x)
        total = x.sum()
        if negative:
            x = x.relu()
        return self.head(x) + total


class Asked(Layers):
    """Questions to torch's generator, as authors write them."""

    def forward(self, x: Tensor) -> Tensor:
        for layer, kept in zip(self.layers, torch.empty(4).uniform_() > 0.5, strict=True):
            if kept:
                x = layer(x)
        if self.training and torch.rand(1).item() >= 0.5:
            x = x.relu()
        if torch.randint(0, 2, (1,)) == 1:
            x = -x
        return self.head(x)


class OneStays(Layers):
    """As vit-pytorch writes it: if all layers were left out, one drawn at random stays."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            dropped = torch.zeros(2).uniform_(0, 1) < 0.5
            if all(dropped):
                dropped[random.randrange(2)] = False
            for layer in [one for one, left in zip(self.layers, dropped, strict=False) if not left]:
                x = torch.relu(layer(x)) + x
        return self.head(x)


class Places(Layers):
    """Reads and writes at places that are drawn, or read from a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = x * x[:, random.randrange(6)].unsqueeze(1) + x.select(1, np.random.randint(6)).sum()
        x[:, [random.randrange(6), 0]] = x[:, :1] * 2
        row = torch.randint(0, 2, ())
        return self.head(x + x[row] + x[row.item(), [row]])


def _assert_same(model: nn.Module, pipe: Any, seeds: int = 20) -> int:
    """Equal bits, and equal generators afterwards; the number of different results in training."""
    seen = set()
    for training in (True, False):
        for module in (model, *pipe.stages):
            module.train(training)
        for seed in range(seeds):
            seed_all(seed)
            expected = model(X)
            state = number_state()
            seed_all(seed)
            torch.testing.assert_close(pipe(X), expected, rtol=0, atol=0)
            assert torch.equal(number_state(), state)
            if training:
                seen.add(round(float(expected.detach().sum()), 5))
    return len(seen)


@pytest.mark.parametrize(
    "build",
    [
        LayerDropout,
        Kept,
        Chosen,
        Scaled,
        Mixed,
        Teacher,
        Constants,
        Between,
        Asked,
        OneStays,
        Places,
    ],  # fmt: skip
)
def test_numbers_are_drawn_anew(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    random.seed(5)
    model, before = build(), number_state()
    plan = asyncpipe.partition(model, (X,), stages=2, output=tmp_path / "cut", profile="analytic")
    assert torch.equal(number_state(), before)  # The caller's generators.
    assert any(stage.draws_numbers for stage in plan.stages) is (build is not Asked)
    assert _assert_same(model, asyncpipe.load(tmp_path / "cut")) > 1


DROPPED = """\
        if self.training:
            dropped = random.random() < 0.05
        if not (self.training and dropped):
            x = torch.relu(self.layers[0](x)) + x  # f32[batch, 6]
"""


def test_a_dropped_layer_reads_as_its_author_wrote_it(tmp_path: Path) -> None:
    asyncpipe.partition(LayerDropout(), (X,), stages=1, output=tmp_path / "cut", profile="analytic")
    text = (tmp_path / "cut" / "stage_0.py").read_text()
    assert "import random\n\nimport torch" in text and DROPPED in text


class Certain(Layers):
    """Stochastic depth that starts at 1: without the first layer, shapes would not fit."""

    def __init__(self, is_kept: Callable[[], Any]) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 12)
        self.narrow = nn.Linear(12, 6)
        self.is_kept = is_kept

    def forward(self, x: Tensor) -> Tensor:
        kept = x
        if self.is_kept():
            kept = self.wide(x)
        return super().forward(self.narrow(kept)) * random.random()


@pytest.mark.parametrize(
    "is_kept",
    [
        lambda: np.linspace(1, 0.5, 4)[0] > random.random(),
        lambda: random.uniform(0, 1) <= 1.0,
        lambda: not np.random.rand() < 0.0,
        lambda: not random.random() >= 1.5,
        lambda: np.random.uniform() != -1,
        lambda: torch.rand(()) < 1.0,
        lambda: torch.rand(1).item() >= 0,
    ],
)
def test_a_comparison_that_no_number_decides_has_one_way(
    is_kept: Callable[[], Any], tmp_path: Path
) -> None:
    model = Certain(is_kept)
    asyncpipe.partition(model, (X,), stages=2, output=tmp_path / "cut", profile="analytic")
    assert _assert_same(model, asyncpipe.load(tmp_path / "cut"), seeds=3) > 1


@given(
    st.sampled_from([operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]),
    st.sampled_from([-1.0, -0.0, 0, 5e-324, 0.5, 0.999, 1, 1.5, math.inf, math.nan]),
)
def test_a_comparison_has_one_way_if_all_numbers_give_it(
    relation: Callable[..., bool], bound: float
) -> None:
    drawn = fx.Graph().call_function(random_numbers.Draw("random.random", random.random))
    condition = drawn.graph.call_function(relation, (drawn, bound))
    numbers = [0.0, 0.25, 0.5, 0.9999, *([bound] if 0 <= bound < 1 else [])]
    answers = {relation(number, bound) for number in numbers}
    known = random_numbers.same_answer(condition)
    assert answers == {known} if known is not None else len(answers) == 2 or math.isnan(bound)


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_the_generators_travel_with_their_micro_batch(recompute: str, tmp_path: Path) -> None:
    """Two ranks, whose forwards come in another order than those of the loop over micro-batches."""
    torch.manual_seed(0)
    model = Scaled().train()
    plan = asyncpipe.partition(
        model, (X,), stages=2, output=tmp_path / "cut", profile="analytic", recompute=recompute
    )
    assert [stage.draws_numbers for stage in plan.stages] == [True, True]
    batches = [{"x": X * (i + 1), "target": torch.zeros(4, 3)} for i in range(4)]
    losses = []
    for index, batch in enumerate(batches):
        seed_all(micro_batch_seed(7, index))
        loss = nn.functional.mse_loss(model(batch["x"]), batch["target"])
        (loss / 4).backward()
        losses.append(float(loss.detach()))
    outside, hub, seen = number_state(), LocalHub(2), {}
    stages = asyncpipe.load(tmp_path / "cut").train().stages
    schedule = lower(
        make_schedule("1f1b", stages=2, micro_batches=4),
        forward_edges(plan),
        grad_edges=gradient_edges(plan),
    )
    ranks = [
        Executor(plan, {j: stages[j]}, hub.transport(j), criterion=nn.functional.mse_loss, seed=7)
        for j in range(2)
    ]

    def feed(index: int) -> dict[str, Tensor]:
        return batches[index]

    reports = run_together([rank.steps(schedule, feed, step=False) for rank in ranks])
    assert torch.equal(number_state(), outside)
    for report in reports:
        seen.update(report.losses)
    assert [seen[index] for index in range(4)] == losses
    own = dict(model.named_parameters())
    for stage in stages:
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, own[name].grad)


class Own(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def changed(self, x: Tensor) -> Tensor:
        return x * self.rng.random()


class OwnPython(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(0)

    def changed(self, x: Tensor) -> Tensor:
        return x * self.rng.uniform(1, 2)


class Many(Layers):
    def changed(self, x: Tensor) -> Tensor:
        return x * torch.from_numpy(np.random.rand(6)).float()


class Shuffled(Layers):
    def changed(self, x: Tensor) -> Tensor:
        order = list(range(6))
        random.shuffle(order)
        return x[:, order]


class Reference(Layers):
    """What no patch reaches is seen in the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = [random.random]

    def changed(self, x: Tensor) -> Tensor:
        return x * self.rng[0]()


class Seeds(Layers):
    def changed(self, x: Tensor) -> Tensor:
        random.seed(0)
        return x * random.random()


class Restores(Layers):
    def changed(self, x: Tensor) -> Tensor:
        torch.set_rng_state(torch.get_rng_state())
        return x


class AsksSeed(Layers):
    def changed(self, x: Tensor) -> Tensor:
        return x * torch.initial_seed()


class System(Layers):
    def changed(self, x: Tensor) -> Tensor:
        return x * random.SystemRandom().random()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Own, r"Own.changed at .*test_random_numbers.py:\d+ draws random numbers from self.rng"),
        (OwnPython, r"OwnPython.changed at .*:\d+ draws random numbers from a random.Random"),
        (Many, r"Many.changed at .*:\d+ draws more than a number"),
        (Shuffled, r"Shuffled.changed at .*:\d+ draws more than a number"),
        (Reference, r"through a stored reference"),
        (Seeds, r"Seeds.changed at .*:\d+ sets the generator"),
        (Restores, r"Restores.changed at .*:\d+ sets the state of torch's random generator"),
        (AsksSeed, r"AsksSeed.changed at .*:\d+ reads the seed of torch's random generator"),
        (System, r"System.changed at .*:\d+ draws random numbers from the operating system"),
    ],
)
def test_other_draws_are_refused_at_their_line(build: type[nn.Module], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(build(), {"x": X})


def test_a_fault_of_either_way_of_a_random_decision_is_seen() -> None:
    class Either(Layers):
        def changed(self, x: Tensor) -> Tensor:
            if self.training and random.random() < 0.5:
                return torch.sin(x)
            return torch.cos(x) if self.training else x

    for wrong in (torch.sin, torch.cos):
        captured = capture(Either(depth=1), {"x": X}, check=False)
        (node,) = captured.graph.find_nodes(op="call_function", target=wrong)
        node.target = torch.tanh
        with pytest.raises(CaptureError, match="is not the model: output 0 differs in training"):
            check_capture(captured, {"x": X})


def test_a_module_kept_whole_draws_by_itself(tmp_path: Path) -> None:
    model = Outer()
    plan = asyncpipe.partition(
        model, (X,), stages=2, output=tmp_path / "cut", profile="analytic", leaves=["Inner"]
    )
    assert any(stage.draws_numbers for stage in plan.stages)
    pipe = asyncpipe.load(tmp_path / "cut")
    pipe.load_state_dict(model.state_dict())
    assert _assert_same(model, pipe) > 2


class Root(Layers):
    def changed(self, x: Tensor) -> Tensor:
        return x * math.sqrt(random.random())


class Nested(Layers):
    def changed(self, x: Tensor) -> Tensor:
        if random.random() < 0.5 and random.random() < 0.5:
            return x.relu()
        return x


class Shared(Layers):
    def changed(self, x: Tensor) -> Tensor:
        shift = 1.0 if random.random() < 0.5 else 2.0
        return x * (2.0 if random.random() < 0.5 else 3.0) + shift


class Together(nn.Module):
    """Only a forward that drops all layers shows the last addition."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        kept = 0
        for layer in self.layers:
            if not self.training or random.random() > 0.1:
                x = x + layer(x).relu()
                kept += 1
        return self.head(x if kept else x + 1)


@pytest.mark.parametrize("depth", [2, 5])
def test_decisions_that_work_together_are_refused(depth: int) -> None:
    with pytest.raises(CaptureError, match="decides at random in a way .* together with another"):
        capture(Together(depth), {"x": X}, check=False)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Shared, r"decides at random in a way .* about a value that another one makes"),
        (Root, r"depends on a number drawn at random, by more than an if"),
        (Nested, r"decides at random in a way that cannot be an if with an else: within"),
    ],
)
def test_what_no_stage_could_draw_is_told(build: type[nn.Module], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(build(), {"x": X})


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.Random(random.randrange(100)).random() + np.random.rand()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.inner, self.b = nn.Linear(6, 6), Inner(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.inner(self.a(x)))


@pytest.mark.parametrize(
    ("file", "is_library"),
    [
        ("lib/python3.12/tempfile.py", True),
        ("lib/python3.12/site-packages/x_transformers/x_transformers.py", False),
        ("lib/python3/dist-packages/mine.py", False),
    ],
)
def test_a_package_within_the_standard_library_s_folder_is_the_user_s(
    file: str, is_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a system's Python has its packages, or a target folder has sympy."""
    monkeypatch.setattr(source_lines, "_LIBRARIES", (os.sep + "lib" + os.sep,))
    monkeypatch.setattr(random_numbers, "_SYMPY", os.sep + os.path.join("elsewhere", "sympy", ""))
    namespace: dict[str, Any] = {}
    source = "import sys\ndef frame():\n    return sys._getframe()\n"
    exec(compile(source, os.sep + file, "exec"), namespace)
    assert random_numbers._is_library(namespace["frame"]()) is is_library
    exec(compile(source, os.path.join(os.sep, "elsewhere", "sympy", "a.py"), "exec"), namespace)
    assert random_numbers._is_library(namespace["frame"]())


def test_a_library_is_searched_again_when_it_has_another_global(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library: Any = ModuleType("library")
    library.__file__ = os.path.join(os.sep, "lib", "site-packages", "library.py")
    monkeypatch.setitem(sys.modules, "library", library)
    for name in ("first", "second"):
        with source_lines.exchanged(Layers(), lambda *_: len, {id(library)}):
            pass
        setattr(library, name, library)
        with source_lines.exchanged(Layers(), lambda *_: len, {id(library)}):
            assert getattr(library, name) is len
        delattr(library, name)


class Lazy(ModuleType):
    """Imports what it stands for at the first question, as those of SpeechBrain do."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"{self.__name__} needs a package that is not installed")


def test_a_module_that_is_imported_at_the_first_question_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    capture(Layers(), {"x": X})


def checked(kind: type[Layers]) -> type[nn.Module]:
    """The class with a forward that looks at an item of its arguments that it draws, as beartype
    writes it: the generator's function is a default, and the code has no file."""
    source = (
        "def forward(self, x, *, drawn=drawn, forward=forward):\n"
        "    assert (x,)[drawn(32) % 1] is x\n"
        "    return forward(self, x)\n"
    )
    names: dict[str, Any] = {"drawn": random.getrandbits, "forward": kind.forward}
    exec(compile(source, f"<@beartype({kind.__name__}.forward) at 0x7f00>", "exec"), names)
    return type(kind.__name__, (kind,), {"forward": names["forward"]})


class Once(Layers):
    def changed(self, x: Tensor) -> Tensor:
        return x * random.random()


@pytest.mark.parametrize("kind", [Layers, Once])
def test_draws_of_checks_of_types_are_none_of_forward(
    kind: type[Layers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "beartype", ModuleType("beartype"))
    captured = capture(checked(kind)(), {"x": X}, check=False)
    assert len(captured.graph.nodes) == len(capture(kind(), {"x": X}).graph.nodes)


def written(self: Any, x: Tensor) -> Tensor:
    return x * eval("self.rng[0]()")  # code without a file, as of torch.fx


@pytest.mark.parametrize("changed", [Reference.changed, written])
def test_a_stored_reference_is_seen_beside_checks_of_types(
    changed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "beartype", ModuleType("beartype"))
    monkeypatch.setattr(Reference, "changed", changed)
    with pytest.raises(CaptureError, match="through a stored reference"):
        capture(checked(Reference)(), {"x": X})
