"""A captured graph computes what the model computes, at sizes it was not captured at."""

from __future__ import annotations

import copy
import functools
import importlib.util
import operator
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from asyncpipe.partitioner.capture import (
    Capture,
    IfTraining,
    LocalDevice,
    ModuleCall,
    Region,
    Size,
    capture,
    colocated,
    in_order,
    run,
)
from asyncpipe.partitioner.capture.check import check_capture
from asyncpipe.partitioner.capture.inputs import resized
from asyncpipe.partitioner.capture.restore import without_cache
from asyncpipe.partitioner.capture.structure import plain_structure, tensors_in
from asyncpipe.runtime.errors import CaptureError


def _load_zoo() -> Any:
    path = Path(__file__).with_name("zoo.py")
    spec = importlib.util.spec_from_file_location("capture_zoo", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["capture_zoo"] = module
    spec.loader.exec_module(module)
    return module


zoo = _load_zoo()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def other_sizes(captured: Capture, inputs: dict[str, Any], **sizes: int) -> dict[str, Any]:
    dims = {
        spec.name: {dim: size for dim, size in enumerate(spec.shape) if isinstance(size, str)}
        for spec in captured.inputs
    }
    return resized(inputs, dims, {**captured.sizes, **sizes})


def observe(
    model: nn.Module, training: bool, forward: Callable[[], Any]
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Outputs, gradients of the loss or of a weighted sum of outputs, and buffers after it."""
    model.train(training)
    torch.manual_seed(5)
    with without_cache(model):
        output = plain_structure(forward())
    outputs = list(tensors_in(output))
    model.zero_grad(set_to_none=True)
    loss = output["loss"] if isinstance(output, dict) and "loss" in output else None
    if loss is None:
        loss = sum(
            (o * torch.arange(o.numel()).cos().view(o.shape)).sum()
            for o in outputs
            if o.requires_grad
        )
    if isinstance(loss, Tensor):
        loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return [o.detach() for o in outputs], gradients, buffers


def assert_graph_is_model(captured: Capture, inputs: dict[str, Any]) -> None:
    """To the last bit: outputs, gradients and buffers, in both modes."""
    for training in (True, False):
        plain, traced = copy.deepcopy(captured.model), captured.model
        before = copy.deepcopy(traced.state_dict())
        given = [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}
            for _ in range(2)
        ]
        expected = observe(plain, training, lambda: plain(**given[0]))  # noqa: B023
        found = observe(traced, training, lambda: run(captured, given[1], training=training))  # noqa: B023
        assert len(expected[0]) == len(found[0])
        for one, other in zip(expected[0], found[0], strict=True):
            assert torch.equal(one, other)
        for one_by_name, other_by_name in zip(expected[1:], found[1:], strict=True):
            assert one_by_name.keys() == other_by_name.keys()
            for name, value in one_by_name.items():
                assert torch.equal(value, other_by_name[name]), name
        traced.load_state_dict(before)


def checked(model: nn.Module, **inputs: Any) -> Capture:
    """The capture of a model, compared with the model at its own and at another batch size."""
    captured = capture(model, inputs)
    assert_graph_is_model(captured, inputs)
    assert_graph_is_model(captured, other_sizes(captured, inputs, batch=7))
    return captured


@functools.cache
def of_zoo(name: str) -> Capture:
    """The capture of a zoo model, made once for the tests that only look at it."""
    return capture(*zoo.ZOO[name](), check=False)


def targets(captured: Capture) -> list[Any]:
    return [node.target for node in captured.graph.nodes]


def node_of(captured: Capture, target: Any) -> fx.Node:
    (node,) = [node for node in captured.graph.nodes if node.target == target]
    return node


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


# The zoo


@pytest.mark.parametrize("name", zoo.ZOO)
def test_graph_equals_the_model_at_other_sizes(name: str) -> None:
    model, inputs = zoo.ZOO[name]()
    captured = capture(model, inputs, check=False)
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
    assert methods[:2] + methods[3:] == now[:2] + now[3:]
    assert methods[2].__func__ is now[2].__func__
    assert torch.ones(2).add(1).sum() == 4


# Regions


class _Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)

    @torch.no_grad()
    def table(self, x: Tensor) -> Tensor:
        return self.b(x).cos()

    def forward(self, x: Tensor) -> Tensor:
        fixed = self.table(x)
        with torch.no_grad():
            mean = self.a(x).mean(0)
            with torch.enable_grad():
                extra = self.a(fixed)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.a(x - mean)
            with torch.autocast("cpu", enabled=False):
                high = self.b(low.float())
        return fixed + extra + high


def test_grad_and_autocast_regions_are_kept() -> None:
    captured = checked(_Regions(), x=X)
    regions = [n.meta["regions"] for n in captured.graph.nodes if n.op == "call_module"]
    half = Region("autocast", LocalDevice(), torch.bfloat16)
    off = Region("autocast", LocalDevice(), regions[4][1].dtype, enabled=False)
    no_grad, enable = Region("no_grad"), Region("enable_grad")
    assert regions == [(no_grad,), (no_grad,), (enable,), (half,), (half, off)]


# Autograd functions and recomputation


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class _Applies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return _Double.apply(self.a(x)) + 1


def test_an_autograd_function_is_one_call() -> None:
    captured = checked(_Applies(), x=X)
    assert _Double.apply in targets(captured)
    assert node_of(captured, _Double.apply).target.__self__ is _Double


_stored_apply = _Double.apply


class _StoredApply(_Applies):
    def forward(self, x: Tensor) -> Tensor:
        return _stored_apply(self.a(x)) + 1


def test_a_stored_apply_is_a_call_of_its_class() -> None:
    captured = checked(_StoredApply(), x=X)
    assert node_of(captured, _Double.apply).target.__self__ is _Double


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_blocks_are_recorded(use_reentrant: bool) -> None:
    class Recomputes(_Applies):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return checkpoint(self._block, h, use_reentrant=use_reentrant)

        def _block(self, h: Tensor) -> Tensor:
            return torch.tanh(self.a(h))

    captured = checked(Recomputes(), x=X)
    assert torch.tanh in targets(captured)


# State


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        old = self.mean
        self.steps.add_(1)
        self.mean = 0.5 * self.mean + x.mean(0)
        self.mean *= 2
        return self.a(x - self.mean) + old


def test_assigned_buffers_are_written_after_the_last_reader_of_the_old() -> None:
    captured = checked(_Counts(), x=X)
    write = node_of(captured, "copy_")
    assert write.args[0].target == "mean"
    nodes = list(captured.graph.nodes)
    assert nodes.index(write) > nodes.index(node_of(captured, operator.imul))
    group = next(group for group in colocated(captured) if write in group)
    assert {n.target for n in group} == {"copy_", operator.mul, operator.add}


class _Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.table = torch.linspace(0, 1, 6)

    def forward(self, x: Tensor) -> Tensor:
        import numpy

        made = torch.tensor([1.0, 2, 3, 4, 5, 6])
        return x * self.inner.table + made + _GLOBAL + torch.from_numpy(numpy.ones(6, "float32"))


_GLOBAL = torch.full((6,), 0.25)


def test_plain_tensors_are_constants() -> None:
    captured = checked(_Attributes(), x=X)
    assert list(captured.constants) == ["inner.table", "constant_1", "constant_2"]
    assert captured.constants["inner.table"] is captured.model.inner.table
    assert torch.tensor in targets(captured)


class _Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [nn.Linear(6, 6)]

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[0](x)


def test_a_parameter_that_is_not_registered_is_refused() -> None:
    with pytest.raises(CaptureError, match="is no parameter of the model"):
        capture(_Hidden(), {"x": X})


# In-place operations, aliases, pruning


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y += 1
        y.add_(2)
        z = y.clone()
        z.view(-1)[::2].mul_(3)
        z[:, 0] = 7
        given = torch.empty(y.shape)
        torch.add(y.detach(), 1, out=given)
        joined = y.new_empty(y.shape[0], 12)
        joined[:, :6].copy_(y)
        joined[:, 6:].copy_(given)
        F.relu(y, inplace=True)
        unused = torch.zeros_like(y)
        unused.add_(1)
        wasted = y.exp()
        wasted.sin()
        return y * z * joined[:, 3:9]


def test_in_place_statements_survive_and_dead_ones_do_not() -> None:
    captured = checked(_InPlace(), x=X)
    found = targets(captured)
    assert operator.iadd in found and "add_" in found and operator.setitem in found
    assert "exp" not in found and torch.zeros_like not in found
    assert node_of(captured, operator.setitem).users == {}
    assert colocated(captured) == []
    pairs = set(in_order(captured))
    made, last = node_of(captured, "a"), node_of(captured, F.relu)
    assert (made, node_of(captured, operator.iadd)) in pairs
    assert any(later is last for _, later in pairs)


class _Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        kept = self.drop(h)
        F.dropout(h, 0.5, self.training)
        kept += 1
        return kept.relu() * F.dropout(h, 0.3, self.training)


def test_a_dead_random_draw_stays_and_shared_memory_of_evaluation_counts() -> None:
    captured = checked(_Drops(), x=X)
    dropouts = [n for n in captured.graph.nodes if n.target is F.dropout]
    assert [len(node.users) for node in dropouts] == [0, 1]
    assert all(n.meta["random"] for n in [*dropouts, node_of(captured, "drop")])
    assert not node_of(captured, "relu").meta["random"]
    # In evaluation mode dropout returns its argument, so that `kept += 1` changes h.
    group = next(g for g in colocated(captured) if node_of(captured, operator.iadd) in g)
    assert node_of(captured, "drop") in group


def test_a_resnet_may_be_cut_anywhere() -> None:
    captured = of_zoo("resnet")
    assert len([n for n in captured.graph.nodes if n.target is operator.iadd]) == 4
    assert colocated(captured) == []


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(self.norm(x)))


def test_calls_that_change_one_buffer_stay_together() -> None:
    captured = checked(_Twice(), x=X)
    calls = [n for n in captured.graph.nodes if n.target == "norm"]
    assert colocated(captured) == [frozenset(calls)]


def test_parts_of_a_tuple_stay_with_their_maker() -> None:
    captured = of_zoo("branches")
    chunk = node_of(captured, "chunk")
    assert frozenset([chunk, *chunk.users]) in colocated(captured)
    assert [user.name for user in chunk.users] == ["low", "high"]


def test_changed_inputs_are_changed() -> None:
    class Changes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x[:, 0] = 5
            return x * 2

    captured = checked(Changes(), x=X.clone())
    assert operator.setitem in targets(captured)
    assert colocated(captured) == []
    (pair,) = in_order(captured)
    assert [n.target for n in pair] == [operator.setitem, operator.mul]


# Leaves of torch with insides


@pytest.mark.parametrize(
    "leaf",
    [
        nn.MultiheadAttention(6, 2, batch_first=True),
        nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
        nn.LSTM(6, 6, batch_first=True, num_layers=2, dropout=0.1),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_modules_of_torch_are_one_node(leaf: nn.Module) -> None:
    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = leaf

        def forward(self, x: Tensor) -> Tensor:
            x = x[:, None, :].expand(-1, 3, -1)
            if isinstance(leaf, nn.MultiheadAttention):
                return self.leaf(x, x, x, need_weights=False)[0]
            result = self.leaf(x)
            return result[0] if isinstance(result, tuple) else result

    captured = checked(Wraps(), x=X)
    node = node_of(captured, "leaf")
    assert node.op == "call_module"
    assert node.meta["random"] == (not isinstance(leaf, nn.MultiheadAttention))


# Sizes that forward uses


class _Loops(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Any:
        if self.how == "len":
            return x.sum(0) / len(x)
        if self.how == "numel":
            return x.reshape(x.numel() // x.size(1), -1) * x.dim()
        if self.how == "ask":
            positions = torch.arange(x.shape[0])
            if (positions.diff() == 1).all():
                x = x * 2
            return x * torch.linspace(0, 1, 3)[1].item()
        if self.how == "iterate":
            return sum(row for row in x)
        if self.how == "range":
            return [x[i] for i in range(x.shape[0])]
        if self.how == "equal":
            return x * 2 if x.shape[0] == 4 else x
        if self.how == "short":
            positions = torch.arange(x.shape[0])
            return x * 2 if positions.max() < 6 else x
        raise ValueError(self.how)


@pytest.mark.parametrize("how", ["len", "numel", "ask"])
def test_sizes_stay_free(how: str) -> None:
    captured = checked(_Loops(how), x=X)
    assert str(captured.inputs[0]) == "f32[batch, 6]"


@pytest.mark.parametrize("how", ["iterate", "range", "equal"])
def test_a_pinned_batch_is_an_error_at_its_line(how: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(_Loops(how), {"x": X})
    assert "_Loops.forward at" in caught.value.what and "test_capture.py:" in caught.value.what
    assert "batch would always be 4" in caught.value.what


def test_an_answer_that_differs_between_sizes_is_refused() -> None:
    with pytest.raises(CaptureError, match="depends on tensor values"):
        capture(_Loops("short"), {"x": X})


def test_a_pinned_length_is_fixed_with_a_note() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(20, 4)
            self.places = nn.Parameter(torch.randn(5, 4))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.words(tokens) + self.places

    captured = checked(Positions(), tokens=torch.arange(20).view(4, 5))
    assert captured.sizes == {"batch": 4}
    (note,) = captured.notes
    assert note.startswith("the sequence size is fixed") and "test_capture.py" in note
    with pytest.raises(CaptureError, match="sequence would always be 5"):
        capture(
            Positions(),
            {"tokens": torch.arange(20).view(4, 5)},
            dynamic={"tokens": {0: "batch", 1: "sequence"}},
        )


def test_a_batch_of_one_is_captured_as_two() -> None:
    model, inputs = zoo.mlp()
    single = {"x": inputs["x"][:1]}
    captured = capture(model, single)
    assert captured.sizes == {"batch": 1}
    assert str(captured.graph) == str(capture(model, inputs).graph)
    assert_graph_is_model(captured, single)


def test_an_input_that_forward_does_not_know_is_named() -> None:
    with pytest.raises(CaptureError, match="missing a required argument: 'x'"):
        capture(_Outer("none"), {"y": X})


# Values that decide


class _Decides(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Any:
        if self.how == "branch":
            if torch.rand(()) > 0.5:
                return x
        if self.how == "item":
            return x * int((x > 0).sum())
        if self.how == "numpy":
            return x * float(x.detach().numpy().sum())
        if self.how == "vmap":
            return torch.vmap(torch.sin)(x)
        return -x


class _Outer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.router = _Decides(how)

    def forward(self, x: Tensor) -> Any:
        return self.router(x)


def test_a_branch_on_a_random_number_is_an_error_at_its_line() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(_Decides("branch"), {"x": X})
    line = _Decides.forward.__code__.co_firstlineno + 2
    assert caught.value.what.startswith("cannot trace _Decides.forward at ")
    assert caught.value.what.endswith(
        f'test_capture.py:{line}: "if torch.rand(()) > 0.5:" depends on tensor values.'
    )
    assert "a module of its own" in caught.value.cure and "torch.where" in caught.value.cure


def test_a_named_leaf_may_depend_on_values() -> None:
    captured = capture(_Outer("item"), {"x": X}, leaves=["_Decides"])
    assert_graph_is_model(captured, other_sizes(captured, {"x": X}, batch=7))
    assert str(captured.tensor_spec(node_of(captured, "router"))) == "f32[batch, 6]"
    captured = capture(_Router(), {"x": X}, leaves=["_Pick"])
    assert_graph_is_model(captured, other_sizes(captured, {"x": X}, batch=7))
    picked = node_of(captured, "pick")
    assert [str(captured.tensor_spec(user)) for user in picked.users] == [
        "f32[3*batch, 2]", "f32[batch + 1]",
    ]  # fmt: skip
    assert picked.meta["random"]


class _Pick(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += 1
        if x.sum() > 0 and self.seen.item() > 0:
            x = x + 1
        noise = torch.rand(len(x) + 1).tolist()
        return self.a(x.view(-1, 2)), torch.tensor(noise)


class _Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pick = _Pick()

    def forward(self, x: Tensor) -> Tensor:
        chosen, noise = self.pick(x)
        return chosen.sum() * noise


@pytest.mark.parametrize("how", ["item", "numpy"])
def test_a_value_taken_out_of_a_tensor_is_an_error(how: str) -> None:
    with pytest.raises(CaptureError, match=r"_Decides.forward at \S*test_capture.py:\d+"):
        capture(_Decides(how), {"x": X}, method="tracer")


def test_hooks_and_assigned_data_are_refused() -> None:
    class Hooks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            x.register_hook(lambda gradient: gradient * 2)
            return x

    class Data(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y.data = x
            return y

    with pytest.raises(CaptureError, match="hook"):
        capture(Hooks(), {"x": X.clone().requires_grad_()})
    with pytest.raises(CaptureError, match="assigns the data"):
        capture(Data(), {"x": X})


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
    with pytest.raises(CaptureError, match="forward does other work in training") as caught:
        capture(_Modes("output"), {"x": X})
    assert "test_capture.py:" in caught.value.what


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
