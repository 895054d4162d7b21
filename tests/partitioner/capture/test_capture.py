"""A captured graph computes what the model computes, at sizes it was not captured at."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from asyncpipe.partitioner.capture import IfTraining, ModuleCall, Region, Size, capture, run
from asyncpipe.partitioner.capture.check import check_capture
from asyncpipe.runtime.errors import CaptureError
from asyncpipe.tests.support.models import zoo
from asyncpipe.tests.support.oracles.captures import (
    X,
    assert_graph_is_model,
    checked,
    node_of,
    of_zoo,
    other_sizes,
)

# The zoo


@pytest.mark.parametrize("name", zoo.ZOO)
def test_graph_equals_the_model_at_other_sizes(name: str) -> None:
    captured = of_zoo(name)
    inputs = captured.arguments.tensors
    captured.graph.lint()
    assert captured.notes == ()
    assert_graph_is_model(captured, inputs)
    lengths = {symbol: size + 2 for symbol, size in captured.sizes.items() if symbol != "batch"}
    assert_graph_is_model(captured, other_sizes(captured, inputs, batch=3, **lengths))


@pytest.mark.parametrize("name", ["gpt2", "resnet", "branches"])
def test_two_captures_are_the_same_text(name: str) -> None:
    again = capture(*zoo.ZOO[name](), check=False)
    assert str(again.graph) == str(of_zoo(name).graph)


def test_gpt2_on_meta_gives_the_graph_of_the_real_model() -> None:
    from transformers import GPT2LMHeadModel

    model, inputs = zoo.gpt2()
    with torch.device("meta"):
        empty = GPT2LMHeadModel(model.config)
    on_meta = {name: value.to("meta") for name, value in inputs.items()}
    assert str(capture(empty, on_meta).graph) == str(of_zoo("gpt2").graph)


def test_gpt2_reads_like_its_source() -> None:
    captured = of_zoo("gpt2")
    inside = [
        node.name
        for node in captured.graph.nodes
        if ModuleCall("transformer.h.0.attn", 0) in node.meta["calls"]
    ]
    for name in ("query_states", "key_states", "value_states", "attn_output"):
        assert name in inside
    assert "arange" in [node.name for node in captured.graph.nodes]
    attention = [n for n in captured.graph.nodes if n.target is F.scaled_dot_product_attention]
    # As the plain model runs it: causal by a flag, not by a mask of batch x sequence x sequence.
    assert all(node.kwargs["is_causal"] and not node.kwargs["attn_mask"] for node in attention)
    assert attention[0].kwargs["dropout_p"] == IfTraining(0.1, 0.0)
    source = node_of(captured, "transformer.h.0.ln_1").meta["source"]
    assert source[0] == "transformers/models/gpt2/modeling_gpt2.py"


def test_module_calls_carry_arguments_by_name() -> None:
    captured = of_zoo("gpt2")
    record = captured.calls[ModuleCall("transformer.h.1", 0)]
    assert record.type_name == "GPT2Block"
    assert record.arguments["hidden_states"].name.startswith("hidden_states")
    assert isinstance(record.result, fx.Node)
    attention = captured.calls[ModuleCall("transformer.h.1.attn", 0)]
    assert attention.arguments["hidden_states"].target == "transformer.h.1.ln_1"
    assert isinstance(attention.result, tuple) and attention.result[1] is None
    assert "" not in {call.path for call in captured.calls}


def test_leaves_are_modules_of_torch_only() -> None:
    captured = of_zoo("gpt2")
    called = {n.target for n in captured.graph.nodes if n.op == "call_module"}
    assert "transformer.h.0.ln_1" in called
    # transformers' Conv1D has parameters and no children: what it does is recorded.
    assert not any("c_attn" in str(target) for target in called)
    assert node_of(captured, "transformer.h.0.attn.c_attn.weight").op == "get_attr"


def test_a_named_class_is_kept_as_one_node() -> None:
    model, inputs = zoo.gpt2()
    captured = capture(
        model, inputs, check=False, leaves=["GPT2MLP", "transformer.h.0.attn.c_attn"]
    )
    called = {n.target for n in captured.graph.nodes if n.op == "call_module"}
    assert {"transformer.h.0.mlp", "transformer.h.2.mlp", "transformer.h.0.attn.c_attn"} <= called
    with pytest.raises(CaptureError, match="no module of GPT2LMHeadModel is called GPT2Mlp"):
        capture(model, inputs, leaves=["GPT2Mlp"])


def test_outputs_keep_the_models_names() -> None:
    captured = of_zoo("t5")
    output = node_of(captured, "output").args[0]
    assert list(output) == ["loss", "logits", "encoder_last_hidden_state"]
    captured = of_zoo("mlp")
    assert isinstance(node_of(captured, "output").args[0], fx.Node)


def test_sizes_are_expressions_of_named_symbols() -> None:
    captured = of_zoo("gpt2")
    assert captured.sizes == {"batch": 4, "sequence": 11}
    assert str(captured.inputs[0]) == "i64[batch, sequence]"
    sizes = {
        str(leaf)
        for node in captured.graph.nodes
        for leaf in torch.utils._pytree.tree_leaves((node.args, node.kwargs))
        if isinstance(leaf, Size)
    }
    assert {"batch", "sequence"} <= sizes
    node = next(n for n in captured.graph.nodes if n.target is torch.addmm)
    assert str(captured.tensor_spec(node)) == "f32[batch*sequence, 96]"
    assert captured.tensor_spec(node).requires_grad


def test_size_text_is_python() -> None:
    captured = checked(_Sizes(), x=X)
    texts = {
        str(leaf)
        for node in captured.graph.nodes
        for leaf in torch.utils._pytree.tree_leaves(node.args)
        if isinstance(leaf, Size)
    }
    assert texts == {"2*batch - 1", "(batch + 1)//2 + 1", "math.sqrt(float(batch))", "3*(batch//2)"}
    assert Size(next(iter(captured.graph.nodes)).meta["shape"][0].expr).evaluate({"batch": 9}) == 9


class _Sizes(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        batch = x.shape[0]
        scale = torch.sym_sqrt(batch)
        return (
            torch.zeros(2 * batch - 1),
            torch.ones((batch + 1) // 2 + 1),
            x / scale,
            x.new_zeros(batch // 2 * 3),
        )


# What is done to the model


def test_capture_leaves_the_model_as_it_was() -> None:
    model, inputs = zoo.branches()
    model.train()
    model.left.eval()
    before = copy.deepcopy(model.state_dict())
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    capture(model, inputs)
    assert model.training and not model.left.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert attributes == {name: set(vars(module)) for name, module in model.named_modules()}
    assert type(model.mean) is Tensor and torch.equal(model.mean, torch.zeros(16))
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_the_cache_switch_of_transformers_is_put_back() -> None:
    model, inputs = zoo.gpt2()
    assert model.config.use_cache
    captured = capture(model, inputs, check=False)
    assert model.config.use_cache
    assert list(node_of(captured, "output").args[0]) == ["loss", "logits"]


class _Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            self.state = self.inner(x)
            return x + self.state[:, :5]


def test_a_failing_forward_leaves_no_trace() -> None:
    methods = (
        nn.Module.__call__, nn.Module.__setattr__, torch.autograd.Function.__dict__["apply"],
        torch.autocast.__enter__, torch.autocast.__exit__,
    )  # fmt: skip
    model = _Fails()
    with pytest.raises(CaptureError, match=r"_Fails.forward at .*test_capture.py:\d+") as caught:
        capture(model, {"x": X})
    assert 'return x + self.state[:, :5]" raised' in caught.value.what
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert "state" not in vars(model)
    assert type(model.inner.weight) is nn.Parameter
    now = (
        nn.Module.__call__, nn.Module.__setattr__, torch.autograd.Function.__dict__["apply"],
        torch.autocast.__enter__, torch.autocast.__exit__,
    )  # fmt: skip
    assert methods == now and "__getattribute__" not in vars(type(torch.autograd.Function))
    assert torch.ones(2).add(1).sum() == 4


# The self-check is a check


@pytest.mark.parametrize("fault", ["constant", "operand", "missing", "mode"])
def test_a_planted_fault_is_caught(fault: str) -> None:
    model, inputs = zoo.branches()
    captured = capture(model, inputs)
    check_capture(captured, inputs)
    graph = captured.graph
    if fault == "constant":
        node = node_of(captured, "mul_")
        node.args = (node.args[0], 3)
    elif fault == "operand":
        node = node_of(captured, "leave")
        node.args = (node_of(captured, "right"),)
    elif fault == "missing":
        graph.erase_node(node_of(captured, "copy_"))
    else:
        node = node_of(captured, F.dropout)
        node.kwargs = {**node.kwargs, "training": False}
    with pytest.raises(CaptureError, match="the captured graph is not the model"):
        check_capture(captured, inputs)


def test_a_fault_that_only_gradients_show_is_caught() -> None:
    model, inputs = zoo.mlp()
    captured = capture(model, inputs)
    node_of(captured, torch.relu).meta["regions"] = (Region("no_grad"),)
    with pytest.raises(CaptureError, match="gradient of"):
        check_capture(captured, inputs)


# Running parts


def test_run_goes_stage_by_stage_and_through_a_hook() -> None:
    _, inputs = zoo.gpt2()
    captured = of_zoo("gpt2")
    whole = run(captured, inputs, training=False)
    nodes = list(captured.graph.nodes)
    half = len(nodes) // 2
    env: dict[fx.Node, Any] = {}
    seen = []

    def around(node: fx.Node, thunk: Callable[[], Any]) -> Any:
        seen.append(node)
        return thunk()

    assert run(captured, inputs, training=False, nodes=nodes[:half], env=env, around=around) is None
    parts = run(captured, inputs, training=False, nodes=nodes[half:], env=env, around=around)
    assert torch.equal(whole["loss"], parts["loss"])
    assert seen == [n for n in nodes if n.op.startswith("call_")]
    assert torch.equal(env[nodes[half]], env[nodes[half]])
