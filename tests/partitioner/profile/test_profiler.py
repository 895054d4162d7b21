"""What one operation and a whole model are measured to cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from asyncpipe.partitioner.capture import Capture, capture
from asyncpipe.partitioner.profile.flops import flop_counter
from asyncpipe.partitioner.profile.measure import Operation, Repeats, estimate, measure
from asyncpipe.partitioner.profile.profiler import Profile, WholeTimes, profile, profile_analytic
from asyncpipe.partitioner.profile.roofline import DeviceSpec
from asyncpipe.tests.support.models.zoo import ZOO
from asyncpipe.tests.support.oracles.captures import of_zoo

CPU = torch.device("cpu")
QUICK = Repeats(enough_ms=0.1, most=2)


def operation(call, *tensors, module=None, parameters=()):
    """A call of `call(module or nothing, *tensors)` as the profiler would pass it on."""

    def again(own, made):
        return call(own, *made) if module is not None else call(*made)

    return Operation(again, module, tensors, tuple(i in parameters for i in range(len(tensors))))


def leaf(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta", requires_grad=True)


def test_a_linear_layer_saves_its_input_and_counts_its_flops():
    layer = nn.Linear(64, 32, device="meta")
    cost = measure(operation(lambda own, x: own(x), leaf(8, 64), module=layer), CPU, QUICK)
    assert cost.forward_flops == 2 * 8 * 64 * 32
    assert cost.backward_flops == 2 * cost.forward_flops
    assert cost.saved_arguments == (0,)
    assert not cost.saves_result and cost.internal_bytes == 0
    assert cost.forward_ms > 0 and cost.backward_ms > 0


def test_what_is_saved_is_told_by_where_it_comes_from():
    tanh = measure(operation(torch.tanh, leaf(8)), CPU, QUICK)
    assert tanh.saves_result and tanh.saved_arguments == ()
    dropout = measure(operation(lambda x: F.dropout(x, 0.5), leaf(1000)), CPU, QUICK)
    assert dropout.internal_bytes in (1000, 4000)  # the mask, of bytes or of floats
    product = measure(operation(torch.mul, leaf(8), leaf(8)), CPU, QUICK)
    assert product.saved_arguments == (0, 1)


def test_a_parameter_given_as_argument_is_not_saved_activation_of_its_own():
    call = operation(F.linear, leaf(8, 64), leaf(32, 64), parameters=(1,))
    assert measure(call, CPU, QUICK).saved_arguments == (0, 1)


def test_a_view_costs_nothing_and_a_change_in_place_does():
    view = measure(operation(lambda x: x.view(4, 2), leaf(8)), CPU, QUICK)
    assert view.is_view and (view.forward_ms, view.backward_ms) == (0.0, 0.0)
    in_place = measure(operation(lambda x: F.relu(x, inplace=True), leaf(8)), CPU, QUICK)
    assert not in_place.is_view and in_place.forward_ms > 0


def test_integer_arguments_are_valid_indices():
    tokens = torch.empty(2, 5, dtype=torch.long, device="meta")
    table = nn.Embedding(7, 3, device="meta")
    lookup = measure(operation(lambda own, x: own(x), tokens, module=table), CPU, QUICK)
    assert lookup.backward_ms > 0
    loss = measure(operation(F.cross_entropy, leaf(10, 7), tokens.view(-1)), CPU, QUICK)
    assert loss.forward_ms > 0


def test_the_module_that_is_measured_is_left_alone():
    norm = nn.BatchNorm1d(4)
    state = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    measure(operation(lambda own, x: own(x), leaf(8, 4), module=norm), CPU, QUICK)
    assert all(torch.equal(state[name], tensor) for name, tensor in norm.state_dict().items())
    assert norm.weight.grad is None


def test_flops_are_known_without_running_anything():
    layer = nn.Linear(64, 32, device="meta")
    call = operation(lambda own, x: own(x), leaf(8, 64), module=layer)
    assert estimate(call).forward_flops == 2 * 8 * 64 * 32
    assert estimate(call).forward_ms == 0


@cache
def measured(name: str) -> tuple[Capture, dict[str, torch.Tensor], Profile]:
    captured = of_zoo(name)
    inputs = captured.arguments.tensors
    return captured, inputs, profile(captured, inputs, threads=1, repeats=QUICK)


@pytest.mark.parametrize("name", ZOO)
def test_every_operation_of_the_zoo_is_measured(name):
    captured, _, found = measured(name)
    computed = [
        node
        for node in captured.graph.nodes
        if node.op not in ("placeholder", "get_attr", "output")
    ]
    assert found.nodes.keys() == {node.name for node in computed}
    assert found.unmeasured == ()
    assert found.distinct < len(computed)
    assert all(cost.forward_ms >= 0 and cost.backward_ms >= 0 for cost in found.nodes.values())
    assert found.forward_ms > 0 and found.backward_ms > 0


def test_equal_blocks_are_measured_once_and_cost_the_same():
    captured, _, found = measured("gpt2")
    layers = [node.name for node in captured.graph.nodes if str(node.target).endswith("ln_1")]
    assert len({found.nodes[name].forward_ms for name in layers[1:]}) == 1


def test_a_profile_leaves_the_model_as_it_was():
    model, inputs = ZOO["resnet"]()
    model.eval()
    captured = capture(model, inputs, check=False)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    profile(captured, inputs, threads=1, repeats=QUICK)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training and torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == 1


def test_parts_are_scaled_to_the_whole(monkeypatch):
    whole = WholeTimes(forward_ms=12.0, backward_ms=34.0)
    monkeypatch.setattr(
        "asyncpipe.partitioner.profile.profiler.time_whole",
        lambda *arguments, **options: whole,
        raising=True,
    )
    captured, inputs, _ = measured("mlp")
    found = profile(captured, inputs, repeats=QUICK)
    assert found.forward_ms == pytest.approx(12.0)
    assert found.backward_ms == pytest.approx(34.0)
    assert found.forward_scale != 1.0


def test_a_model_that_takes_long_is_not_timed_as_a_whole():
    captured, inputs, _ = measured("mlp")
    found = profile(captured, inputs, repeats=QUICK, whole_up_to_ms=0.0)
    assert (found.forward_scale, found.backward_scale) == (1.0, 1.0)


def test_an_operation_that_refuses_made_up_arguments_counts_as_free_and_is_named():
    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.cholesky(torch.diag_embed(x * 0 + 1)).sum(-1)

    captured = capture(Picky(), {"x": torch.randn(2, 3, requires_grad=False)}, check=False)
    found = profile(captured, {"x": torch.randn(2, 3)}, threads=1, repeats=QUICK)
    (cholesky,) = found.unmeasured
    assert found.nodes[cholesky].forward_ms == 0 and "cholesky" in cholesky


@dataclass
class FlopClock:
    """A clock on which a FLOP takes a nanosecond, and nothing else takes time."""

    mark: Callable[[], int]

    def ms(self, start: int, end: int) -> float:
        return 1e-6 * (end - start)


def test_what_is_timed_is_the_work_that_the_flops_count(monkeypatch):
    """GPT-2's shape in small, on a clock that FLOPs drive: of each operation, forward and backward
    are timed, once, on the captured shapes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=4096, n_positions=64, n_embd=128, n_layer=2, n_head=4)
    tokens = torch.zeros(2, 64, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens}
    captured = capture(GPT2LMHeadModel(config), inputs, check=False)
    counter = flop_counter()
    for module in ("measure", "profiler"):
        clock_of = f"asyncpipe.partitioner.profile.{module}.clock_of"
        monkeypatch.setattr(clock_of, lambda device: FlopClock(counter.get_total_flops))
    with counter:
        found = profile(captured, inputs, threads=1, repeats=QUICK, whole_up_to_ms=0.0)
    (head,) = (node.name for node in captured.graph.nodes if node.target == "lm_head")
    assert found.nodes[head].flops == 2 * 128 * 128 * 4096
    assert found.nodes[head].backward_flops == 2 * found.nodes[head].flops
    for cost in found.nodes.values():
        assert cost.forward_ms == pytest.approx(1e-6 * cost.flops)
        assert cost.backward_ms == pytest.approx(1e-6 * cost.backward_flops)


def test_a_model_on_meta_is_measured_without_being_materialised():
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=2)
        )
    tokens = torch.zeros(2, 16, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens}
    captured = capture(model, inputs)
    found = profile(captured, inputs, threads=1, repeats=QUICK)
    assert found.unmeasured == () and found.forward_ms > 0
    assert (found.forward_scale, found.backward_scale) == (1.0, 1.0)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_sizes_are_those_of_the_inputs_not_of_the_capture():
    captured, inputs, _ = measured("gpt2")
    wide = {name: tensor.repeat(2, 1) for name, tensor in inputs.items()}
    small = profile_analytic(captured, inputs)
    large = profile_analytic(captured, wide)
    assert large.sizes["batch"] == 2 * small.sizes["batch"]
    assert large.flops == 2 * small.flops


@pytest.mark.parametrize("name", ["gpt2", "resnet", "bert"])
def test_the_analytic_profile_agrees_with_the_measured_one_on_flops_and_memory(name):
    captured, inputs, found = measured(name)
    predicted = profile_analytic(captured, inputs)
    assert predicted.flops == found.flops
    assert predicted.nodes.keys() == found.nodes.keys()
    saved = [sum(sum(c.saved.values()) for c in p.nodes.values()) for p in (predicted, found)]
    assert saved[0] == pytest.approx(saved[1], rel=0.05)


def test_an_analytic_profile_is_the_roofline_of_each_call():
    captured, inputs, _ = measured("mlp")
    slow = profile_analytic(
        captured, inputs, DeviceSpec("slow", {"float32": 1e6}, 1e18, 2**30, 0.0)
    )
    (head,) = (node.name for node in captured.graph.nodes if node.target == "head")
    assert slow.nodes[head].forward_ms == pytest.approx(1e3 * slow.nodes[head].flops / 1e6)


def test_a_random_operation_is_measured_without_touching_the_random_state():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    captured, inputs, _ = measured("mlp")
    torch.manual_seed(3)
    profile(captured, inputs, threads=1, repeats=QUICK)
    assert torch.equal(torch.rand(2), expected)
