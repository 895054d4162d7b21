"""Regions, autograd functions, state and in-place operations are captured as they are."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from asyncpipe.partitioner.capture import Capture, LocalDevice, Region, capture, colocated, in_order
from asyncpipe.runtime.errors import CaptureError
from asyncpipe.tests.support.oracles.captures import (
    X,
    checked,
    node_of,
    of_zoo,
    targets,
)

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


def applied(captured: Capture) -> list[Any]:
    """The classes of the autograd functions that the graph calls."""
    owners = [getattr(target, "__self__", None) for target in targets(captured)]
    return [owner for owner in owners if isinstance(owner, type)]


def test_an_autograd_function_is_one_call() -> None:
    assert applied(checked(_Applies(), x=X)) == [_Double]


class _Above(torch.autograd.Function):
    """The values above a limit, and where they are."""

    @staticmethod
    def forward(x: Tensor, limit: float = 0.5) -> tuple[Tensor, Tensor]:
        above = (x > limit).float()
        return x * above, above

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0] * 5, None


class _DoubleInPlace(_Double):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class _InPlaceApart(_Double):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mul_(2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_dirty(inputs[0])


_double, _above = _Double.apply, _Above.apply
_double_in_place, _in_place_apart = _DoubleInPlace.apply, _InPlaceApart.apply


class _StoredApply(_Applies):
    of_class = _Double.apply

    def __init__(self) -> None:
        super().__init__()
        self.function = _Double.apply

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        above, where = _above(_double(x) + self.function(x), 0.1)
        changed = _in_place_apart(_double_in_place(x.sin()) + 1)
        with torch.no_grad():
            known = _double(x)
        return above * where + changed + self.of_class(x) * known


def test_a_stored_apply_is_a_call_of_its_class() -> None:
    captured = checked(_StoredApply(), x=X)
    assert not captured.notes  # as TorchDynamo's captures have
    assert applied(captured) == [
        *(_Double, _Double, _Above, _DoubleInPlace, _InPlaceApart, _Double, _Double),
    ]


class _Asks(_Applies):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return x + (1 if _above(x)[1].requires_grad else 2)


def test_a_result_of_a_stored_apply_that_has_no_gradient_says_so() -> None:
    captured = checked(_Asks(), x=X)
    assert node_of(captured, operator.add).args[1] == 2


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
    with pytest.raises(CaptureError, match="self.parts holds in a plain list"):
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
