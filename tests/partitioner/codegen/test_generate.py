"""What generated code looks like: classes, loops, names, constructors, headers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from torch import Tensor, nn

from asyncpipe.partitioner.capture import capture
from asyncpipe.partitioner.capture.leaf_modules import construct
from asyncpipe.partitioner.codegen import extra_tensors, generate
from asyncpipe.partitioner.codegen.constants import rebuild, write_constant, write_size
from asyncpipe.partitioner.codegen.layout import Code, call, lay_out
from asyncpipe.partitioner.split.split import split
from asyncpipe.runtime.errors import PlanError
from asyncpipe.tests.support.models import zoo
from asyncpipe.tests.support.models.codegen_cases import HARD
from asyncpipe.tests.support.oracles.stage_chain import HEADER, cut, stages_at


def files_of(model: nn.Module, inputs: dict[str, Any], *cuts: float) -> dict[str, str]:
    captured = capture(model, inputs, check=False)
    return generate(*cut(captured, stages_at(captured, cuts)), HEADER)


# --- structure ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2() -> dict[str, str]:
    model, inputs = zoo.gpt2()
    captured = capture(model, inputs, check=False)
    stage = 0
    stage_of = {}
    for node in captured.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        paths = [call.path for call in node.meta["calls"]]
        stage = max(stage, int(any(path == "transformer.h.1" for path in paths)))
        stage_of[node] = stage
    return generate(captured, split(captured, stage_of), HEADER)


def test_whole_blocks_are_one_class_and_a_loop(gpt2: dict[str, str]) -> None:
    text = gpt2["stage_1.py"]
    assert text.count("class GPT2Block(nn.Module):") == 1
    blocks = "nn.ModuleDict({str(index): GPT2Block() for index in range(1, 3)})"
    assert f"self.h = {blocks}" in text
    assert "for block in self.transformer.h.values():" in text
    assert "            hidden_states = block(hidden_states)" in text


def test_a_list_from_its_first_item_on_stays_a_list(gpt2: dict[str, str]) -> None:
    assert "self.h = nn.ModuleList([GPT2Block()])" in gpt2["stage_0.py"]


def test_a_block_reads_as_its_author_wrote_it(gpt2: dict[str, str]) -> None:
    forward = """\
    def forward(self, hidden_states: Tensor) -> Tensor:
        attn_output = self.attn(self.ln_1(hidden_states))
        hidden_states = attn_output + hidden_states
        return hidden_states + self.mlp(self.ln_2(hidden_states))
"""
    assert forward in gpt2["stage_0.py"]
    assert "query_states, key_states, value_states = x.split(32, dim=2)" in gpt2["stage_0.py"]


def test_instances_that_differ_in_numbers_share_a_class(gpt2: dict[str, str]) -> None:
    text = gpt2["stage_0.py"]
    assert text.count("class Conv1D(nn.Module):") == 1
    assert "def __init__(self, nf: int, nx: int) -> None:" in text
    assert "self.weight = nn.Parameter(torch.empty(nx, nf))" in text
    assert "self.c_attn = Conv1D(96, 32)" in text


def test_no_import_of_transformers_is_needed(gpt2: dict[str, str]) -> None:
    for text in gpt2.values():
        assert not re.search(r"^(from|import) (?!torch|math|typing|\.)", text, re.MULTILINE)


def test_a_block_that_is_cut_is_written_out_with_shapes_and_lines() -> None:
    model, inputs = zoo.gpt2()
    text = files_of(model, inputs, 0.45)["stage_1.py"]
    assert "        # transformer.h.1, modeling_gpt2.py:" in text
    assert 'block = cast(GPT2BlockPart, self.transformer.h["1"])' in text
    assert "# f32[batch, sequence, 32]" in text


def test_a_sequential_in_one_stage_is_a_sequential() -> None:
    model, inputs = HARD["widths"]()
    text = files_of(model, inputs)["stage_0.py"]
    assert "self.body = nn.Sequential(" in text
    assert "self.body(self.stem(x))" in text
    assert text.count("class Conv(nn.Module):") == 1


def test_a_module_called_in_two_ways_is_written_out() -> None:
    model, inputs = HARD["patterns"]()
    text = files_of(model, inputs)["stage_0.py"]
    assert "self.twice = OptionalPart()" in text
    assert "self.positions(sequence)" in text


def test_one_tensor_under_two_names_is_tied_again() -> None:
    model, inputs = HARD["shared"]()
    text = files_of(model, inputs)["stage_0.py"]
    assert "self.second[0] = self.first" in text
    assert "self.out.weight = cast(Layer, self.layers[1]).linear.weight" in text


def test_in_place_operations_stay_statements() -> None:
    model, inputs = zoo.branches()
    text = files_of(model, inputs)["stage_0.py"]
    for statement in ("self.calls += 1", "head.mul_(2)", "joined[:, 5] = 0", "self.mean.copy_("):
        assert f"        {statement}" in text


def test_what_depends_on_the_mode_follows_it() -> None:
    model, inputs = zoo.gpt2()
    assert "dropout_p=0.1 if self.training else 0.0," in files_of(model, inputs)["stage_0.py"]
    model, inputs = zoo.branches()
    assert "p=0.2, training=self.training)" in files_of(model, inputs)["stage_0.py"]
    model, inputs = HARD["modes"]()
    text = files_of(model, inputs)["stage_0.py"]
    assert "        if self.training:\n" in text and "        else:\n" in text


class Names(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        l = y * 2  # noqa: E741
        y = l - y
        z = y.exp() + x
        return z * y


def test_a_name_is_used_again_when_its_value_is_dead() -> None:
    text = files_of(Names(), {"x": torch.randn(4, 3)})["stage_0.py"]
    lines = [line.partition("  #")[0].strip() for line in text.partition("forward(")[2].split("\n")]
    assert lines[2:6] == ["y = x + 1", "y = y * 2 - y", "z = y.exp() + x", "return z * y"]


def test_the_header_says_what_goes_in_and_out() -> None:
    model, inputs = zoo.mlp()
    text = files_of(model, inputs, 0.5)["stage_1.py"]
    header = text.split('"""')[1]
    assert header.startswith("Stage 1 of model (stages 0-1). Generated by asyncpipe 0.1.0.")
    assert re.search(r"\nreceives   \w+ +f32\[batch, 24\]  from stage 0\n", header)
    assert re.search(r"\nreturns    \w+  f32\[batch, 5\]  output of the model\n", header)


# --- what cannot be written -----------------------------------------------------------------


class Opaque(nn.Module):
    def __init__(self, secret: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(secret))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_a_leaf_without_a_constructor_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Opaque(3))
    captured = capture(model, {"input": torch.randn(4, 3)}, leaves=["Opaque"], check=False)
    graphs = split(captured, stages_at(captured, ()))
    with pytest.raises(PlanError, match=r"constructor for 1 \(Opaque\)"):
        generate(captured, graphs, HEADER)


class Scaled(nn.Module):
    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.width = width
        self.scale = scale
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.scale


def test_a_leaf_of_the_user_is_imported() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Scaled(3, 0.5))
    captured = capture(model, {"input": torch.randn(4, 3)}, leaves=["Scaled"], check=False)
    text = generate(captured, split(captured, stages_at(captured, ())), HEADER)["stage_0.py"]
    assert f"from {__name__} import Scaled\n" in text
    assert "Scaled(3, scale=0.5)" in text


# --- constructors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (nn.Linear(3, 4), [3, 4]),
        (nn.Linear(3, 4, bias=False), [3, 4, "bias=False"]),
        (nn.Linear(3, 4, dtype=torch.bfloat16), [3, 4, "dtype=torch.bfloat16"]),
        (nn.LayerNorm((768,), eps=1e-12), [768, "eps=1e-12"]),
        (nn.LayerNorm((4, 4), elementwise_affine=False), [(4, 4), "elementwise_affine=False"]),
        (nn.Conv2d(3, 8, 7, stride=2, padding=3), [3, 8, "kernel_size=7", "stride=2", "padding=3"]),
        (nn.Conv2d(3, 3, (1, 3), groups=3), [3, 3, "kernel_size=(1, 3)", "groups=3"]),
        (nn.BatchNorm1d(6, affine=False), [6, "affine=False"]),
        (nn.Embedding(10, 4, padding_idx=0), [10, 4, "padding_idx=0"]),
        (nn.Dropout(0.1), ["0.1"]),
        (nn.GELU("tanh"), ["approximate=tanh"]),
        (nn.MaxPool2d(3, 2, 1), [3, "stride=2", "padding=1"]),
        (nn.LSTM(8, 16, 2, batch_first=True), [8, 16, "num_layers=2", "batch_first=True"]),
        (nn.MultiheadAttention(8, 2, kdim=4, bias=False), [8, 2, "bias=False", "kdim=4"]),
        (nn.TransformerEncoderLayer(8, 2, activation="gelu"), [8, 2, "activation=gelu"]),
        (nn.Upsample(scale_factor=2, mode="bilinear"), ["scale_factor=2.0", "mode=bilinear"]),
        (nn.Identity(), []),
    ],
    ids=str,
)
def test_constructors_leave_out_defaults(module: nn.Module, arguments: list[Any]) -> None:
    made = construct(module, "path")
    written = [
        str(argument.value) if argument.is_positional else f"{argument.name}={argument.value}"
        for argument in made.arguments
        if not argument.is_default
    ]
    assert written == list(map(str, arguments))


# --- small parts ----------------------------------------------------------------------------


def test_long_calls_are_exploded_with_a_trailing_comma() -> None:
    code = call("function", tuple(Code(f"argument_{index}") for index in range(9)))
    lines = lay_out("x = ", code, indent=8, comment="f32[2]").split("\n")
    assert lines[0] == "        x = function("
    assert lines[1] == "            argument_0,"
    assert lines[-1] == "        )  # f32[2]"


@pytest.mark.parametrize(
    ("value", "text"),
    [(np.float64(0.5), "0.5"), (np.int64(-3), "-3"), (np.bool_(True), "True")],
)
def test_numbers_of_numpy_are_written_as_python(value: np.generic, text: str) -> None:
    assert write_constant(value).flat == text


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("batch*sequence", "batch * sequence"),
        ("2*batch - 1", "2 * batch - 1"),
        ("batch*(sequence + 1)", "batch * (sequence + 1)"),
        ("floor(sequence/2)", "sequence // 2"),
        ("Max(4, sequence)", "max(sequence, 4)"),
        ("(batch + 1)**2", "(batch + 1) ** 2"),
    ],
)
def test_sizes_are_written_as_python(expression: str, text: str) -> None:
    symbols = {
        name: sympy.Symbol(name, integer=True, positive=True) for name in ("batch", "sequence")
    }
    size = sympy.sympify(expression, locals=symbols)
    assert write_size(size, Code).flat == text


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.arange(5), "torch.arange(5)"),
        (torch.arange(5).unsqueeze(0), "torch.arange(5).unsqueeze(0)"),
        (torch.zeros(2, 3), "torch.zeros(2, 3)"),
        (torch.ones(3, dtype=torch.bool), "torch.ones(3, dtype=torch.bool)"),
        (
            torch.ones(4, 4, dtype=torch.bool).tril().view(1, 1, 4, 4),
            "torch.ones(4, 4, dtype=torch.bool).tril().view(1, 1, 4, 4)",
        ),
        (torch.tensor(-1e9), "torch.tensor(-1000000000.0)"),
        (torch.tensor([0.5, 2.0]), "torch.tensor([0.5, 2.0])"),
        (
            1.0 / (10000.0 ** (torch.arange(0, 8, 2).float() / 8)),
            "1.0 / (10000.0 ** (torch.arange(0, 8, 2).float() / 8))",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_simple_buffers_are_made_again(tensor: Tensor, text: str) -> None:
    code = rebuild(tensor)
    assert code is not None
    assert code.flat == text
    assert torch.equal(eval(code.flat, {"torch": torch}), tensor)


def test_other_buffers_are_carried() -> None:
    model, inputs = HARD["names"]()
    captured = capture(model, inputs, check=False)
    extra = extra_tensors(captured, split(captured, stages_at(captured, ())))
    assert list(extra) == ["random"]
    assert torch.equal(extra["random"], model.get_buffer("random"))
