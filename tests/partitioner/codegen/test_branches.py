"""What forward does in one mode only is an `if self.training:` of the generated code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner.capture import capture
from asyncpipe.partitioner.codegen.layout import Code
from asyncpipe.partitioner.codegen.statements import Opener, Statement, write_lines

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))


class Both(nn.Module):
    """Other layers in each mode, then a branch of one mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            y = self.norm(self.second(x))
            x = x + y
            x.mul_(2)
        else:
            z = torch.relu(x)
            x = self.third(z) - x
        y = torch.tanh(x)
        if not self.training:
            y = y + torch.rand_like(y)
        return y


BOTH = """\
        x = self.first(x)  # f32[batch, 6]
        if self.training:
            y = self.norm(self.second(x))  # f32[batch, 6]
            x = x + y  # f32[batch, 6]
            x.mul_(2)  # f32[batch, 6]
        else:
            z = torch.relu(x)  # f32[batch, 6]
            x = self.third(z) - x  # f32[batch, 6]
        y = torch.tanh(x)  # f32[batch, 6]
        if not self.training:
            y = y + torch.rand_like(y)  # f32[batch, 6]
        return y
"""


class Counts(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.training:
            self.count += 1
        return x * self.count


COUNTS = """\
        x = self.linear(x)  # f32[batch, 6]
        if self.training:
            self.count += 1  # f32[]
        return x * self.count  # f32[batch, 6]
"""


class Keeps(nn.Module):
    """The value of one mode is an older one that later code still reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = x
        if self.training:
            with torch.no_grad():
                scale = x.abs().mean()
            y = self.second(x) * scale
        return x + y


KEEPS = """\
        x = self.first(x)  # f32[batch, 6]
        if self.training:
            with torch.no_grad():
                scale = x.abs().mean()  # f32[]
            y = self.second(x) * scale  # f32[batch, 6]
        else:
            y = x  # f32[batch, 6]
        return x + y  # f32[batch, 6]
"""


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.rand_like(x)


class Depth(nn.Module):
    """Stochastic depth, as vision models write it."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = torch.rand(x.shape[0], 1) + 0.5
        return x * keep.floor()


class Calls(nn.Module):
    """A module called in one mode only, and one that itself does nothing in a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.noise, self.path = nn.Linear(6, 6), Noise(), Depth()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            x = self.noise(x)
        return x + self.path(torch.tanh(x))


CALLS = """\
        x = self.first(x)  # f32[batch, 6]
        x = self.noise(x)  # f32[batch, 6]
        return x + self.path(torch.tanh(x))  # f32[batch, 6]
"""
DEPTH = """\
        if self.training:
            keep = torch.rand(batch, 1) + 0.5
            x = x * keep.floor()
        return x
"""


def test_a_module_that_works_in_one_mode_only_has_the_branch_inside(tmp_path: Path) -> None:
    asyncpipe.partition(Calls(), {"x": X}, stages=1, output=tmp_path / "cut", profile="analytic")
    text = (tmp_path / "cut" / "stage_0.py").read_text()
    assert text.endswith(CALLS) and DEPTH in text


@pytest.mark.parametrize(("build", "forward"), [(Both, BOTH), (Counts, COUNTS), (Keeps, KEEPS)])
def test_branches_read_as_the_author_wrote_them(
    build: type[nn.Module], forward: str, tmp_path: Path
) -> None:
    model = build()
    asyncpipe.partition(model, {"x": X}, stages=1, output=tmp_path / "cut", profile="analytic")
    assert (tmp_path / "cut" / "stage_0.py").read_text().endswith(forward)


@pytest.mark.parametrize("build", [Both, Counts, Keeps, Calls])
def test_branches_may_be_cut(build: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build()
    asyncpipe.partition(model, {"x": X}, stages=2, output=tmp_path / "cut", profile="analytic")
    pipe = asyncpipe.load(tmp_path / "cut")
    for training in (True, False):
        for stage in pipe.stages:
            stage.train(training)
        model.train(training)
        torch.manual_seed(1)
        expected = model(x=X)
        torch.manual_seed(1)
        torch.testing.assert_close(pipe(x=X), expected)


def test_only_the_branch_of_the_mode_runs() -> None:
    captured = capture(Both(), {"x": X})
    kinds = {
        str(node.target): [region.kind for region in node.meta["regions"]]
        for node in captured.graph.nodes
        if node.op == "call_module"
    }
    assert kinds == {
        "first": [], "second": ["training"], "norm": ["training"], "third": ["evaluation"],
    }  # fmt: skip


def test_xlnet_remembers_nothing_in_either_mode(tmp_path: Path) -> None:
    from transformers import XLNetConfig, XLNetLMHeadModel

    torch.manual_seed(0)
    config = XLNetConfig(vocab_size=61, d_model=16, n_layer=2, n_head=2, d_inner=24)
    tokens = torch.randint(3, 61, (2, 9))
    model = XLNetLMHeadModel(config).train()
    plan = asyncpipe.partition(
        model,
        {"input_ids": tokens, "labels": tokens},
        stages=2,
        output=tmp_path / "cut",
        profile="analytic",
    )
    assert list(plan.outputs) == ["loss", "logits"]
    assert config.use_mems_eval


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.linear(x)))


class Dropping(nn.Module):
    """Leaves out layers at random in training, as LayerDrop does."""

    def __init__(self, layerdrop: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.head = nn.Linear(6, 3)
        self.layerdrop = layerdrop

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training:
                dropout_probability = torch.rand([])
                if dropout_probability < self.layerdrop:
                    continue
            x = layer(x)
        return self.head(x)


DROPPING = """\
        if self.training:
            dropout_probability = torch.rand([])  # f32[]
            dropped = dropout_probability < 0.5  # bool[]
        if not (self.training and dropped):
            x = self.layers[0](x)  # f32[batch, 6]
"""


@pytest.mark.parametrize("stages", [1, 3])
def test_a_layer_that_training_leaves_out_at_random_is_an_if(stages: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Dropping()
    asyncpipe.partition(model, {"x": X}, stages=stages, output=tmp_path / "cut", profile="analytic")
    assert DROPPING in (tmp_path / "cut" / "stage_0.py").read_text()
    pipe = asyncpipe.load(tmp_path / "cut")
    seen = set()
    for training in (True, False):
        for module in (model, *pipe.stages):
            module.train(training)
        for seed in range(8):
            torch.default_generator.manual_seed(seed)
            expected = model(x=X)
            torch.default_generator.manual_seed(seed)
            torch.testing.assert_close(pipe(x=X), expected, rtol=0, atol=0)
            seen.add(round(float(expected.detach().sum()), 4))
    assert len(seen) > 6


class Chooses(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = self.layers[1](x) if torch.rand([]) < 0.5 else x.relu()
        return self.head(x)


CHOOSES = """\
        drawn = torch.rand([]) < 0.5  # bool[]
        if drawn:
            x = self.layers[1](x)  # f32[batch, 6]
        else:
            x = x.relu()  # f32[batch, 6]
"""


def test_a_random_way_that_does_other_work_is_an_else(tmp_path: Path) -> None:
    model = Chooses()
    asyncpipe.partition(model, {"x": X}, stages=1, output=tmp_path / "cut", profile="analytic")
    pipe = asyncpipe.load(tmp_path / "cut")
    assert CHOOSES in (tmp_path / "cut" / "stage_0.py").read_text()
    for training in (True, False):
        for module in (model, *pipe.stages):
            module.train(training)
        for seed in range(8):
            torch.default_generator.manual_seed(seed)
            expected = model(x=X)
            torch.default_generator.manual_seed(seed)
            torch.testing.assert_close(pipe(x=X), expected, rtol=0, atol=0)


def test_a_branch_after_an_else_opens_anew() -> None:
    training = Opener("training", "if self.training:", "evaluation")
    evaluation = Opener("evaluation", "if not self.training:", "training")
    blocks = (training, evaluation, training)
    statements = [Statement("", Code(f"f{i}()"), "", (block,)) for i, block in enumerate(blocks)]
    assert [line.strip() for line in write_lines(statements, headings=False)] == [
        "if self.training:", "f0()", "else:", "f1()", "if self.training:", "f2()",
    ]  # fmt: skip
