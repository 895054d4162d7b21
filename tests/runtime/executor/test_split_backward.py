"""B and W together are an ordinary backward: to the last bit, and with what else autograd does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from asyncpipe.partitioner.profile.measure import counting
from asyncpipe.runtime.executor.split_backward import SplitBackward

Gradients = list[Tensor | None]


class Conv1D(nn.Module):
    """As in transformers: the weight is (in, out), and the bias comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6))
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, 8), self.weight).view(*x.shape[:-1], 6)


class Product(nn.Module):
    def __init__(self, *shape: int, transposed: bool = False) -> None:
        super().__init__()
        weight = torch.randn(*shape)
        self.weight = nn.Parameter(weight.t() if transposed else weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def images(channels: int, *sides: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(3, channels, *sides)


def rows(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def ids() -> Tensor:
    return torch.randint(0, 10, (3, 5))


SPLIT: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(8, 6), rows(5, 8)),
    "linear of three dimensions": (lambda: nn.Linear(8, 6), rows(3, 5, 8)),
    "linear of four dimensions": (lambda: nn.Linear(8, 6), rows(2, 3, 5, 8)),
    "linear of one dimension": (lambda: nn.Linear(8, 6), rows(8)),
    "linear without bias": (lambda: nn.Linear(8, 6, bias=False), rows(3, 5, 8)),
    "linear with a frozen weight": (
        lambda: freeze(nn.Linear(8, 6), "weight"), rows(3, 5, 8)),
    "linear with a frozen bias": (lambda: freeze(nn.Linear(8, 6), "bias"), rows(3, 5, 8)),
    "Conv1D": (Conv1D, rows(3, 5, 8)),
    "product": (lambda: Product(8, 6), rows(5, 8)),
    "product of three dimensions": (lambda: Product(8, 6), rows(3, 5, 8)),
    "product with a transposed weight": (lambda: Product(6, 8, transposed=True), rows(3, 5, 8)),
    "product with a column": (lambda: Product(8, 1), rows(3, 5, 8)),
    "embedding": (lambda: nn.Embedding(10, 4), ids),
    "embedding with padding": (lambda: nn.Embedding(10, 4, padding_idx=-2), ids),
    "embedding scaled by frequency": (lambda: nn.Embedding(10, 4, scale_grad_by_freq=True), ids),
    "sparse embedding": (lambda: nn.Embedding(10, 4, sparse=True), ids),
    "convolution": (lambda: nn.Conv2d(4, 6, 3), images(4, 9, 8)),
    "strided, padded, in groups": (
        lambda: nn.Conv2d(4, 6, 3, stride=2, padding=(1, 2), groups=2), images(4, 9, 8)),
    "dilated, without bias": (
        lambda: nn.Conv2d(4, 6, 3, dilation=2, bias=False, padding="same"), images(4, 9, 8)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding="valid"), images(4, 9, 8)),
    "channels last": (
        lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), images(4, 9, 8)),
    "convolution of one dimension": (lambda: nn.Conv1d(4, 6, 3, padding=1), images(4, 9)),
    "convolution of three dimensions": (lambda: nn.Conv3d(4, 6, 2, stride=2), images(4, 6, 5, 4)),
    "transposed convolution": (
        lambda: nn.ConvTranspose2d(4, 6, 3, 2, padding=1, output_padding=1, groups=2),
        images(4, 5, 4)),
    "transposed convolution of one dimension": (
        lambda: nn.ConvTranspose1d(4, 6, 3, dilation=2), images(4, 5)),
}  # fmt: skip

NOT_SPLIT: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "layer norm": (lambda: nn.LayerNorm(8), rows(5, 8)),
    "batch norm": (lambda: nn.BatchNorm1d(8), rows(5, 8)),
    "recurrent": (lambda: First(nn.LSTM(8, 6)), rows(3, 5, 8)),
    "attention": (lambda: Attention(8), rows(3, 5, 8)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 6)), rows(5, 8)),
    "linear of transposed matrices": (
        lambda: nn.Linear(8, 6),
        lambda: torch.randn(8, 5, 3).permute(2, 1, 0),
    ),
    "padded on one side": (lambda: nn.Conv2d(4, 6, 2, padding="same"), images(4, 9, 8)),
    "an image without a batch": (lambda: nn.Conv2d(4, 6, 3), rows(4, 9, 8)),
    "an embedding of bounded norm": (lambda: nn.Embedding(10, 4, max_norm=1.0), ids),
    "a hook on the weight": (lambda: hooked(nn.Linear(8, 6)), rows(5, 8)),
    "checkpointed": (lambda: Checkpointed(nn.Linear(8, 6)), rows(5, 8)),
    "compiled": (lambda: torch.compile(nn.Linear(8, 6), backend="aot_eager"), rows(5, 8)),
    "vectorised": (lambda: Vectorised(nn.Linear(8, 6)), rows(5, 8)),
}


def freeze(module: nn.Module, name: str) -> nn.Module:
    module.get_parameter(name).requires_grad_(False)
    return module


def hooked(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)
    return module


class First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Attention(nn.MultiheadAttention):
    def __init__(self, width: int) -> None:
        super().__init__(width, 2)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x)[0]


class Checkpointed(First):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Vectorised(First):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.inner)(x)


def outcome(
    module: nn.Module,
    inputs: Iterator[Tensor],
    *,
    split: bool,
    rounds: int = 3,
    loss_of: Callable[[nn.Module, Tensor], Tensor] = lambda module, x: module(x).tanh().sum(),
) -> tuple[Gradients, int]:
    """The gradients of inputs and parameters after some micro-batches, and how many calls of all
    were put off; W comes two micro-batches after its B."""
    module.zero_grad()
    leaves, open_ones, put_off = [], [], 0
    for _ in range(rounds):
        x = next(inputs)
        leaves.append(x.requires_grad_() if x.is_floating_point() else x)
        part = SplitBackward()
        if split:
            with part:
                loss = loss_of(module, x)
            part.open()
        else:
            loss = loss_of(module, x)
        loss.backward()
        put_off += len(part._put_aside)
        open_ones.append(part)
        if len(open_ones) > 2:
            open_ones.pop(0).backward()
    for part in open_ones:
        part.backward()
        assert not part._put_aside
    grads = [leaf.grad for leaf in leaves] + [p.grad for p in module.parameters()]
    return grads, put_off


def draws(make: Callable[[], Tensor]) -> Iterator[Tensor]:
    torch.manual_seed(5)
    while True:
        yield make()


def assert_same(found: Gradients, expected: Gradients) -> None:
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert one.layout == other.layout and one.stride() == other.stride() or one.is_sparse
        assert torch.equal(one.to_dense(), other.to_dense())


@pytest.mark.parametrize("name", SPLIT)
def test_gradients_equal_those_of_autograd_to_the_last_bit(name: str) -> None:
    build, make = SPLIT[name]
    torch.manual_seed(0)
    module = build()
    expected, _ = outcome(module, draws(make), split=False)
    found, put_off = outcome(module, draws(make), split=True)
    assert_same(found, expected)
    assert put_off == 3


@pytest.mark.parametrize("name", NOT_SPLIT)
def test_what_has_no_rule_gets_its_gradient_with_the_inputs(name: str) -> None:
    build, make = NOT_SPLIT[name]
    torch.manual_seed(0)
    module = build()
    expected, _ = outcome(module, draws(make), split=False)
    found, put_off = outcome(module, draws(make), split=True)
    assert_same(found, expected)
    assert put_off == 0


class Shared(nn.Module):
    """One weight is used twice, once as a table, the other four times: the sum of two is the same
    in either order."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.inner = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        for _ in range(4):
            hidden = self.norm(torch.relu_(self.inner(hidden)))
        return F.linear(hidden, self.table.weight)


def test_a_weight_of_several_uses_gets_the_sum_in_autograds_order() -> None:
    torch.manual_seed(0)
    module = Shared()
    expected, _ = outcome(module, draws(ids), split=False)
    found, put_off = outcome(module, draws(ids), split=True)
    assert_same(found, expected)
    assert put_off == 3 * 6


class InPlace(nn.Module):
    """Results that are written to in place: views and others, with and without a graph before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.detach())
        x += 1
        x = F.relu(self.second(x), inplace=True)
        y = self.third(x)
        y[0] = 0
        return y


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8)])
def test_results_may_be_written_to_in_place(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = InPlace()
    expected, _ = outcome(module, draws(rows(*shape)), split=False)
    found, put_off = outcome(module, draws(rows(*shape)), split=True)
    assert_same(found[3:], expected[3:])
    assert put_off == 9


def test_an_input_written_to_after_it_was_read_is_an_error_as_in_autograd() -> None:
    class Spoilt(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            out = super().forward(x)
            x += 1
            return out

    module = Spoilt(8, 6)
    for split in (False, True):
        with pytest.raises(RuntimeError, match="in.?place"):
            outcome(module, draws(rows(5, 8)), split=split)


def test_a_step_between_forward_and_backward_is_an_error_as_in_autograd() -> None:
    module, x = nn.Linear(8, 6), torch.randn(5, 8, requires_grad=True)
    with SplitBackward() as part:
        loss = module(x).sum()
    with torch.no_grad():
        module.weight += 1
    part.open()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_products_are_made_in_its_dtype_and_gradients_in_the_weights(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), Product(16, 6))

    def loss_of(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return module(x).float().square().sum()

    expected, _ = outcome(module, draws(rows(3, 5, 8)), split=False, loss_of=loss_of)
    found, put_off = outcome(module, draws(rows(3, 5, 8)), split=True, loss_of=loss_of)
    assert_same(found, expected)
    assert put_off == 6
    assert all(parameter.grad.dtype is torch.float32 for parameter in module.parameters())


def test_of_a_weight_with_an_autocast_copy_that_two_calls_share_the_sum_is_cast_once() -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 8)

    def loss_of(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(module(x)).float().sum()

    expected, _ = outcome(module, draws(rows(3, 8)), split=False, loss_of=loss_of)
    found, _ = outcome(module, draws(rows(3, 8)), split=True, loss_of=loss_of)
    assert_same(found, expected)


def test_gradients_taken_inside_the_forward_are_refused() -> None:
    module = nn.Linear(8, 1)
    x = torch.randn(5, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="choose a schedule without W"), SplitBackward():
        torch.autograd.grad(module(x).sum(), x, create_graph=True)


def test_the_graph_of_the_stage_is_gone_after_b_and_all_the_rest_after_w() -> None:
    import weakref

    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))
    kept: list[weakref.ref[Tensor]] = []
    module[1].register_forward_hook(lambda _, __, out: kept.append(weakref.ref(out)))
    with SplitBackward() as part:
        loss = module(torch.randn(5, 8, requires_grad=True)).sum()
    part.open()
    loss.backward()
    del loss
    assert kept[0]() is None
    assert len(part._put_aside) == 2
    part.backward()
    assert part._put_aside == []


def test_w_holds_one_fresh_gradient_at_a_time() -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    x = torch.randn(2, 64)
    layers(x).sum().backward()
    parts = SplitBackward(dict(layers.named_parameters()))
    with parts:
        result = layers(x).sum()
    parts.open()
    result.backward()
    gradients = [weight.grad for weight in layers.parameters()]
    with counting(torch.device("cpu"), [x, *layers.parameters(), *gradients]) as counted:
        parts.backward()
    assert counted.peak <= 1.1 * layers[0].weight.nbytes


def test_a_lost_gradient_would_be_seen() -> None:
    """Negative control of the comparisons above."""
    torch.manual_seed(0)
    module, x = nn.Linear(8, 6), torch.randn(5, 8, requires_grad=True)
    with SplitBackward() as part:
        loss = module(x).sum()
    part.open()
    loss.backward()
    assert module.weight.grad is None and x.grad is not None
    with pytest.raises(AssertionError):
        assert_same([module.weight.grad], [torch.zeros(6, 8)])
