"""The graph by module: folded modules, named modules, and the machine-readable form."""

from __future__ import annotations

import json

from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner.capture import capture
from asyncpipe.partitioner.outline import outline_of
from asyncpipe.tests.support.models import zoo


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.shared = Layer()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.shared(self.shared(x)) * 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x)


def test_equal_blocks_and_repeated_calls_are_one_line() -> None:
    import torch

    captured = capture(Wave(), {"x": torch.randn(2, 8)}, check=False)
    lines = str(outline_of(captured, "wave")).splitlines()
    assert lines[0] == "wave (Wave) · 13 operations"
    assert lines[1] == "  x f32[batch, 8]"
    assert lines[2] == "layers.0 (Layer) · 2 operations"
    assert lines[3].split() == [
        "norm", "LayerNorm", "norm", "f32[batch,", "8]",
        f"test_outline.py:{Layer.forward.__code__.co_firstlineno + 1}",
    ]  # fmt: skip
    assert "layers.1 .. layers.3 as layers.0 · 6 operations" in lines
    assert "shared (Layer) · 2 operations" in lines
    assert "shared, call 2 as shared · 2 operations" in lines


def test_blocks_that_differ_are_shown_each() -> None:
    model, inputs = zoo.t5()
    text = str(asyncpipe.outline(model, inputs))
    # The first block of a T5 stack computes the position bias that the others use.
    assert "encoder.block.0 (T5Block)" in text
    assert "encoder.block.1 (T5Block)" in text


def test_the_list_for_programs_has_every_operation_and_its_costs() -> None:
    model, inputs = zoo.gpt2()
    outline = asyncpipe.outline(model, inputs, profile="analytic")
    facts = json.loads(outline.to_json())
    captured = capture(model, inputs, check=False)
    names = [node.name for node in captured.graph.nodes if node.op.startswith("call")]
    assert [operation["name"] for operation in facts["operations"]] == names
    assert all(operation["forward_ms"] >= 0 for operation in facts["operations"])
    assert facts["sizes"].keys() == {"batch", "sequence"}
    logits = next(item for item in facts["operations"] if item["name"] == "logits")
    assert logits["does"] == "Linear lm_head" and logits["module"] == ""
    assert " ms" in str(outline)
