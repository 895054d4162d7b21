"""Where the tracer cannot see, Dynamo's graph is captured, and what comes of it is as usual."""

from __future__ import annotations

import gc
import logging
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner.capture import Capture, IfTraining, Region, capture, dynamo
from asyncpipe.partitioner.codegen import generate
from asyncpipe.runtime.errors import CaptureError
from asyncpipe.tests.support.models import dynamo_cases as unseen
from asyncpipe.tests.support.models import zoo
from asyncpipe.tests.support.oracles import stage_chain
from asyncpipe.tests.support.oracles.captures import of_zoo
from asyncpipe.tests.support.oracles.stage_chain import HEADER, stages_at
from asyncpipe.tests.test_cli import run


def cut(model: nn.Module, inputs: dict[str, Any], folder: Path, **options: Any) -> str:
    """The text of two stages, which were compared with the model."""
    plan = asyncpipe.partition(
        model, inputs, stages=2, output=folder, profile="analytic", **options
    )
    text = "".join((folder / stage.file).read_text() for stage in plan.stages)
    return "\n".join([*plan.notes, text])


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        (unseen.Script, "torch.relu("),
        (unseen.Blocks, "F.dropout(hidden, p=0.2, training=self.training)"),
        (unseen.Recomputed, "class Block(nn.Module):"),
        (unseen.Vmap, "torch.linalg.vector_norm("),
        (unseen.Slopes, ".cos()"),
        (unseen.Numpy, "torch.sqrt("),
        (unseen.NumpyMask, "torch.greater("),
        (unseen.Number, ".detach().to(torch.int64)"),
        (unseen.State, "self.mean.copy_("),
        (unseen.Noisy, "with torch.no_grad():"),
        (unseen.StoredUnseen, "Cube.apply("),
    ],
)
def test_stages_equal_the_model(kind: type[nn.Module], written: str, tmp_path: Path) -> None:
    model, inputs = unseen.example(kind)
    assert written in cut(model, inputs, tmp_path / "2p", capture="dynamo")


class IntOfSizes(nn.Module):
    """Python makes a number of each size, as einx does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        batch, width = tuple(int(size) for size in x.shape)
        return self.b(self.a(x).view(batch, 2, width).flatten(1)) / float(batch)


def test_a_batch_that_int_would_fix_is_free_for_dynamo(tmp_path: Path) -> None:
    model = IntOfSizes()
    text = cut(model, {"x": torch.randn(4, 8)}, tmp_path)
    assert "captured with Dynamo: " in text
    x = torch.randn(6, 8)
    torch.testing.assert_close(asyncpipe.load(tmp_path)(x), model(x))


@pytest.mark.parametrize("kind", [unseen.Script, unseen.NumpyMask])
def test_the_fallback_is_chosen_and_says_so(kind: type[nn.Module], tmp_path: Path) -> None:
    model, inputs = unseen.example(kind)
    text = cut(model, inputs, tmp_path / "2p")
    place = f"{kind.__name__}.forward"
    assert text.startswith(f"captured with Dynamo: cannot trace {place}")
    assert "dynamo_cases.py:" in text.partition("\n")[0]
    with pytest.raises(CaptureError, match=place):
        capture(model, inputs, method="tracer")


def test_blocks_are_a_loop_with_names_and_lines(tmp_path: Path) -> None:
    text = cut(*unseen.example(unseen.Blocks), tmp_path / "2p")
    assert text.count("class Block(nn.Module):") == 2
    assert "for block in self.blocks:" in text
    assert "def forward(self, states: Tensor) -> Tensor:" in text
    assert "normed = self.norm(states)" in text
    assert "self.drop(hidden) * 0.5" in text


def test_a_stored_apply_is_a_call_of_its_class(tmp_path: Path) -> None:
    text = cut(*unseen.example(unseen.Stored), tmp_path / "2p", capture="tracer")
    assert "Cube.apply(" in text and "captured with Dynamo" not in text


def test_modes_regions_and_sizes_are_as_the_tracer_has_them() -> None:
    captured = capture(*unseen.example(unseen.Blocks))
    sources = [node.meta["source"] for node in captured.graph.nodes if node.op == "call_module"]
    assert all(file.endswith("dynamo_cases.py") for file, _ in sources)
    dropouts = [node for node in captured.graph.nodes if node.name.startswith("hidden")]
    assert IfTraining(True, False) in [node.kwargs.get("training") for node in dropouts]
    assert captured.inputs[0].shape == ("batch", 8)
    assert {call.path for call in captured.calls} == {f"blocks.{index}" for index in range(4)}
    regions = {
        region.kind
        for node in capture(*unseen.example(unseen.Noisy)).graph.nodes
        for region in node.meta.get("regions", ())
    }
    assert regions == {"no_grad", "autocast"} and Region("no_grad").kind in regions


@cache
def with_both(name: str) -> tuple[Capture, Capture]:
    """A model of the zoo, T5 with one layer in a stack, as the tracer and as Dynamo capture it."""
    if name == "t5":
        return capture(*zoo.t5(1, 1), check=False), capture(*zoo.t5(1, 1), method="dynamo")
    return of_zoo(name), capture(*zoo.ZOO[name](), method="dynamo")


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_transformers_come_out_as_with_the_tracer(name: str) -> None:
    with_tracer, with_dynamo = with_both(name)
    assert kinds(with_dynamo) == kinds(with_tracer)
    assert list(with_dynamo.calls) == list(with_tracer.calls)
    assert leaves(with_dynamo) == leaves(with_tracer)
    # Without values Dynamo cannot know that a mask masks nothing; the tracer can.
    assert 1.0 <= len(with_dynamo.graph.nodes) / len(with_tracer.graph.nodes) < 1.2


def test_classes_are_written_as_with_the_tracer() -> None:
    classes = [
        [
            line
            for text in generate(*stage_chain.cut(found, stages_at(found, (0.5,))), HEADER).values()
            for line in text.splitlines()
            if line.startswith(("class ", "    for "))
        ]
        for found in with_both("bert")
    ]
    assert classes[0] == classes[1]


def kinds(captured: Capture) -> list[str]:
    return [record.type_name for record in captured.calls.values()]


def leaves(captured: Capture) -> list[str]:
    return [str(node.target) for node in captured.graph.nodes if node.op == "call_module"]


class Bounds(NamedTuple):
    low: Tensor
    high: Tensor


class Bounded(nn.Module):
    def forward(self, x: Tensor) -> Bounds:
        return Bounds(x - 1, x + 1)


def test_a_named_tuple_stays_one() -> None:
    captured = capture(Bounded(), {"x": torch.randn(4, 3)}, method="dynamo")
    (output,) = captured.graph.find_nodes(op="output")
    assert isinstance(output.args[0], Bounds)


def test_one_tensor_for_two_inputs_stays_two_inputs() -> None:
    model, inputs = unseen.example(unseen.Pair)
    captured = capture(model, {"x": inputs["x"], "y": inputs["x"]})
    assert [len(node.users) for node in captured.graph.find_nodes(op="placeholder")] == [1, 2]


def test_a_model_on_meta_is_captured() -> None:
    with torch.device("meta"):
        model = unseen.Blocks()
    captured = capture(model, {"x": torch.randn(4, 8)})
    real = capture(*unseen.example(unseen.Blocks))
    assert str(captured.graph) == str(real.graph)


def test_the_public_export_of_dynamo_does_too(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = str(capture(*unseen.example(unseen.Blocks)).graph)
    monkeypatch.delattr("torch.export._trace._export_to_torch_ir")
    assert str(capture(*unseen.example(unseen.Blocks)).graph) == usual


def test_an_unknown_way_is_named() -> None:
    with pytest.raises(CaptureError, match="Known: auto, tracer, dynamo"):
        capture(*unseen.example(unseen.Script), method="fx")


def test_nothing_is_left_behind() -> None:
    from torch._dynamo import trace_rules

    model, inputs = unseen.example(unseen.Noisy)
    model.first.register_forward_hook(lambda module, args, output: output * 2)
    text = str(capture(model, inputs).graph)
    gc.collect()
    before = snapshot(model), set(trace_rules._allowed_callable_ids())
    assert text == str(capture(model, inputs).graph)
    gc.collect()
    assert snapshot(model) == before[0]
    assert set(trace_rules._allowed_callable_ids()) <= before[1]
    assert not trace_rules.is_callable_allowed(unseen.Cube)
    assert torch.is_grad_enabled()


def snapshot(model: nn.Module) -> list[Any]:
    return [
        *(sorted(vars(module)) for module in model.modules()),
        *(len(module._forward_hooks) for module in model.modules()),
        unseen._lock,
        logging.getLogger("torch._dynamo").level,
        torch._dynamo.config.ignore_logging_functions,
    ]


def test_a_length_that_forward_pins_is_fixed_with_a_note() -> None:
    positions = unseen.Positions()
    captured = capture(positions, {"tokens": torch.arange(20).view(4, 5)}, method="dynamo")
    assert captured.sizes == {"batch": 4}
    (note,) = captured.notes
    assert note.startswith("the sequence size is fixed: ") and "dynamo_cases.py:" in note


def test_if_both_fail_the_error_is_the_tracers_and_says_both() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(*unseen.example(unseen.Decides))
    assert caught.value.what.startswith("cannot trace Decides.forward at ")
    assert 'gated(self.first(x), x)"' in caught.value.what
    assert "TorchDynamo cannot capture it either: " in caught.value.cure
    assert "Data-dependent branching" in caught.value.cure


def test_a_model_that_does_not_run_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("Dynamo was asked")

    monkeypatch.setattr(dynamo, "torch_graph", never)
    monkeypatch.setattr("asyncpipe.partitioner.capture.modes.torch_graph", never)
    with pytest.raises(CaptureError, match="Wrong.forward") as caught:
        capture(*unseen.example(unseen.Wrong))
    assert "Dynamo" not in str(caught.value)


def test_the_command_line_says_how_a_model_was_captured(tmp_path: Path) -> None:
    file = Path(unseen.__file__)
    result = run(
        tmp_path, "partition", "--model", f"{file}:build", "--stages", "2", "--profile", "analytic",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    words = " ".join(result.stdout.split())
    assert "captured with Dynamo: cannot trace Block.forward at" in words
