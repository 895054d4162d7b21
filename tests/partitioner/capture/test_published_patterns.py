"""Patterns of published models that once were refused for another reason, or stopped with a
traceback: the smallest model of each, exact or refused with its cause."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner.capture import capture, run
from asyncpipe.runtime.errors import CaptureError
from asyncpipe.runtime.executor.stage import Stage

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.relu(self.a(x)))


class SpatialTransformer(Two):
    """PointNet makes its identity with torch.autograd.Variable."""

    def forward(self, x: Tensor) -> Tensor:
        start = torch.from_numpy(np.array([1, 0, 0], dtype=np.float32))
        start = torch.autograd.Variable(start).view(1, 3).repeat(x.size(0), 1)
        return super().forward(x) + torch.autograd.Variable(start)


class Registered(nn.Module):
    """DGCNN has its batch norms as attributes, in a list and in its layers."""

    def __init__(self, through_list: bool) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        self.bns = nn.ModuleList([self.bn1, self.bn2])
        self.conv1 = nn.Sequential(nn.Linear(6, 6), self.bn1, nn.ReLU())
        self.last = nn.Linear(6, 3)
        self.through_list = through_list

    def forward(self, x: Tensor) -> Tensor:
        second = self.bns[1] if self.through_list else self.bn2
        return self.last(second(self.conv1(x)))


class Parallel(Two):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.DataParallel(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))  # type: ignore[assignment]


class Grids(nn.Module):
    """YOLOv5's head keeps a grid for each scale in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.grid = [torch.zeros(1)] * 2

    def forward(self, x: Tensor) -> Tensor:
        scales = [self.conv(x)]
        scales.append(self.down(scales[0]))
        found = []
        for place, scale in enumerate(scales):
            if self.grid[place].shape[-2:] != scale.shape[-2:]:
                rows, columns = scale.shape[-2:]
                self.grid[place] = torch.arange(columns).expand(1, 1, rows, columns).float()
            found.append((scale.sigmoid() + self.grid[place]).flatten(2))
        return torch.cat(found, 2)


class Router(Two):
    """Routers of transformers make sure of their dtype in forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.b = self.b.to(torch.float32)
        return super().forward(x)


def replaced_forward() -> nn.Module:
    model = Two()
    original = model.a.forward

    def doubled(_: nn.Module, x: Tensor) -> Tensor:
        return 2 * original(x)

    model.a.forward = MethodType(doubled, model.a)  # type: ignore[method-assign]
    return model


def quantized() -> nn.Module:
    from torch.ao import quantization

    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantization.prepare_qat(model)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 8, sparse=True, mode="sum")
        self.words, self.last = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(torch.relu(self.bag(tokens) + self.words(tokens).sum(1)))


class AllRows(Two):
    """CaiT asks the built-in `all` of a tensor, sample by sample."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if all(h.mean(1) > -100) and not any(h.mean(1) > 100):
            h = h * 2
        return self.b(h)


IMAGE, TOKENS = torch.randn(2, 3, 8, 8), torch.randint(0, 20, (4, 5))


@pytest.mark.parametrize(
    ("build", "given"),
    [
        (SpatialTransformer, X),
        (lambda: Registered(False), X),
        (lambda: Registered(True), X),
        (Parallel, X),
        (Grids, IMAGE),
        (Router, X),
        (replaced_forward, X),
        (quantized, X),
        (Sparse, TOKENS),
        (AllRows, X),
    ],
    ids=[
        "variable",
        "twice",
        "list",
        "parallel",
        "grids",
        "router",
        "replaced",
        "qat",
        "sparse",
        "all",
    ],  # fmt: skip
)
def test_it_is_exact(build: Callable[[], nn.Module], given: Tensor, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build()
    asyncpipe.partition(model, (given,), stages=2, output=tmp_path / "cut", profile="analytic")
    pipe = asyncpipe.load(tmp_path / "cut")
    state = model.state_dict()
    assert list(pipe.state_dict()) == list(state)
    pipe.load_state_dict({name: value.clone() for name, value in state.items()})
    for training in (True, False):
        for module in (model, *pipe.stages):
            module.train(training)
        torch.testing.assert_close(pipe(given), model(given), rtol=0, atol=0)
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=0)


@pytest.mark.parametrize("assigned", [False, True])
def test_einsum_is_traced_without_opt_einsum(
    monkeypatch: pytest.MonkeyPatch, assigned: bool
) -> None:
    """Where it is installed, it reads each size as a number. An assignment to the flag, which torch
    documents, hides the flag from torch's own context manager."""
    seen = []

    class Product(Two):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.backends.opt_einsum.enabled)
            return super().forward(x)

    switch = torch.backends.opt_einsum.m
    monkeypatch.setattr(switch, "is_available", lambda: True)
    monkeypatch.setattr(switch, "enabled", True)
    if assigned:
        monkeypatch.setitem(vars(torch.backends.opt_einsum), "enabled", True)
    capture(Product(), {"x": X})
    assert set(seen) == {False, True}  # traces, and the model itself
    assert torch.backends.opt_einsum.enabled


CONTRACT = """
import torch

def contract(equation, *operands):
    rows = {letter: int(size) for letter, size in zip("bi", operands[0].shape)}
    columns = int("4")
    product = torch.einsum("ij,jk->ik", *operands[1:]) if rows["b"] < columns else operands[1]
    result = torch.einsum("bi,ij->bj", operands[0], product)
    return result if rows["b"] < columns else torch.einsum("bj,jk->bk", result, operands[2])
"""


def test_an_order_of_contractions_that_opt_einsum_chooses_by_numbers_is_that_of_the_example(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = ModuleType("opt_einsum.contract")
    exec(CONTRACT, vars(package))
    monkeypatch.setitem(sys.modules, "opt_einsum.contract", package)

    class Contracted(Two):
        def forward(self, x: Tensor) -> Tensor:
            first = super().forward(x)
            return vars(package)["contract"]("bi,ij,jk->bk", first, torch.eye(3), torch.ones(3, 4))

    model, options = Contracted(), {"output": tmp_path / "cut", "profile": "analytic"}
    asyncpipe.partition(model, (X,), stages=2, capture="tracer", **options)
    assert vars(package).get("int") is None
    pipe = asyncpipe.load(tmp_path / "cut")
    for batch in (2, 3, 9):
        x = torch.randn(batch, *X.shape[1:])
        torch.testing.assert_close(pipe(x), model(x))


class Indexed(nn.Module):
    """neuraloperator calls one module for each layer of lists that it has, by their number."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.skips = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
            self.mlps = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])

        def forward(self, x: Tensor, index: int) -> Tensor:
            skip = self.skips[index](x)
            x = self.mlps[index](x) + skip
            return torch.relu(x) if index < 2 else x

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.Layers()

    def forward(self, x: Tensor) -> Tensor:
        for index in range(3):
            x = self.layers(x, index)
        return x


@pytest.mark.parametrize("cut", ["mlps.0", "skips.1", "mlps.1", "skips.2", "mlps.2"])
def test_stages_have_their_layers_of_a_module_that_is_called_by_number(
    cut: str, tmp_path: Path
) -> None:
    model, folder = Indexed(), tmp_path / "cut"
    options: dict[str, Any] = {"profile": "analytic", "output": folder}
    asyncpipe.partition(model, (X,), stages=2, cut_at=(f"layers.{cut}",), **options)
    torch.testing.assert_close(asyncpipe.load(folder)(X[:3]), model(X[:3]), rtol=0, atol=0)


class WithSettings(Two):
    """Adds its settings to the state_dict, as the models of neuraloperator do."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state["_metadata"] = {"width": 4}
        return state


def test_settings_in_a_state_dict_are_no_weights(tmp_path: Path) -> None:
    model = WithSettings()
    plan = asyncpipe.partition(model, (X,), stages=2, output=tmp_path / "cut", profile="analytic")
    assert set(plan.state_keys) == dict(model.named_parameters()).keys()
    pipe = asyncpipe.load(tmp_path / "cut")
    assert pipe.load_state_dict(model.state_dict()) == ([], [])
    torch.testing.assert_close(pipe(X), model(X), rtol=0, atol=0)


class OwnGenerator(Two):
    def __init__(self) -> None:
        super().__init__()
        self.rng = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(x.shape, generator=self.rng))


class Accuracy(Two):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, float]]:
        out = super().forward(x)
        return F.cross_entropy(out, out.argmax(1)), {"mean": out.mean().item()}


class Stacks(Two):
    def __init__(self) -> None:
        super().__init__()
        self.stacks = [[nn.Linear(6, 6)], [nn.Linear(6, 6)]]

    def forward(self, x: Tensor) -> Tensor:
        for stack in self.stacks:
            for layer in stack:
                x = layer(x)
        return super().forward(x)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (OwnGenerator, r"OwnGenerator.forward at .*:\d+ draws from its own torch.Generator"),
        (Accuracy, r"forward of Accuracy returns a Python number"),
        (Stacks, r"a module that self.stacks holds in a plain list[^\n]*\n.*ModuleList"),
    ],
)
def test_it_is_refused_with_its_cause(build: type[nn.Module], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(build(), {"x": X})


def test_a_sparse_embedding_trains_with_dense_gradients(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Sparse().train()
    plan = asyncpipe.partition(
        model, (TOKENS,), stages=1, output=tmp_path / "cut", profile="analytic"
    )
    module = asyncpipe.load(tmp_path / "cut").train().stages[0]
    stage = Stage(module, plan.stages[0], loss_of=lambda outputs, _: sum(outputs.values()).mean())
    stage.forward(0, {"tokens": TOKENS}, {})
    stage.backward(0, {}, loss_divisor=1)
    model(TOKENS).mean().backward()
    for mine, own in zip(module.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None and own.grad is not None and not mine.grad.is_sparse
        torch.testing.assert_close(mine.grad, own.grad.to_dense())


class Slopes(Two):
    """ALiBi: a bias that is kept once it has been made of other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.rand(6), persistent=False)
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            self.register_buffer("bias", self.slopes * torch.arange(6), persistent=False)
        return self.b(self.a(x) + self.bias)


def test_a_buffer_that_is_made_of_another_once_is_exact(tmp_path: Path) -> None:
    model = Slopes()
    model(X)
    asyncpipe.partition(model, (X,), stages=2, output=tmp_path / "cut", profile="analytic")
    torch.testing.assert_close(asyncpipe.load(tmp_path / "cut")(X), model(X), rtol=0, atol=0)


class Spelling(Two):
    """A model of speech that makes its own loss, as the ForCTC classes of transformers do."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction
        self.ctc = nn.CTCLoss(zero_infinity=True)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = super().forward(x).log_softmax(-1).transpose(0, 1)
        there = labels > 0
        lengths = torch.full((x.size(0),), x.size(1))
        if self.reduction == "none":
            sure = labels.clamp(min=1)
            return F.ctc_loss(scores, sure, lengths, there.sum(-1), reduction="none")
        loss = self.ctc if self.reduction == "module" else F.ctc_loss
        return loss(scores, labels.masked_select(there), lengths, there.sum(-1))


@pytest.mark.parametrize("reduction", ["mean", "none", "module"])
def test_a_ctc_loss_in_forward_is_exact(reduction: str, tmp_path: Path) -> None:
    sound = torch.randn(4, 9, 6)
    labels = torch.tensor([[1, 2, 0], [2, 1, 2], [1, 0, 0], [2, 2, 1]])
    asyncpipe.partition(
        Spelling(reduction),
        {"x": sound, "labels": labels},
        stages=2,
        output=tmp_path / "made",
        profile="analytic",
    )


class NumbersOfNumPy(nn.Module):
    """What NumPy computes in forward is out of sight; its module is one node."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.a(x)
        if np.abs(h.detach().numpy()).max() > 1e9:
            h = h * 2
        return {"h": h, "both": (h * 2, h.sum(-1))}


class HasNumPy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), NumbersOfNumPy(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(self.first(x))
        result: Tensor = self.last(found["h"] + found["both"][0])
        return result * found["both"][1].unsqueeze(-1)


def test_a_leaf_that_reads_values_in_numpy_and_returns_a_dict_is_exact(tmp_path: Path) -> None:
    asyncpipe.partition(
        HasNumPy(),
        {"x": X},
        stages=2,
        output=tmp_path / "made",
        profile="analytic",
        leaves=["NumbersOfNumPy"],
    )


class Longest(Two):
    """torchaudio's Conformer masks up to the longest sample."""

    def __init__(self, converted: bool) -> None:
        super().__init__()
        self.converted = converted

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        longest = int(lengths.max().item()) if self.converted else lengths.max().item()
        mask = torch.arange(longest).expand(x.size(0), longest) < lengths.unsqueeze(1)  # type: ignore[arg-type]
        return super().forward(x * mask)


def test_a_size_that_values_tell_is_exact_as_item_says(tmp_path: Path) -> None:
    lengths = torch.tensor([6, 2, 3, 6])
    with pytest.raises(CaptureError, match=r"or write \.item\(\) without int\(\)"):
        capture(Longest(converted=True), {"x": X, "lengths": lengths})
    asyncpipe.partition(
        Longest(converted=False),
        {"x": X, "lengths": lengths},
        stages=2,
        output=tmp_path / "made",
        profile="analytic",
    )


def test_numpy_in_forward_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match=r"NumbersOfNumPy.forward .*to NumPy") as error:
        capture(NumbersOfNumPy(), {"x": X})
    assert "--leaf" in str(error.value)


class Counter(nn.Module):
    """Performer counts calls in a module that is never called, and redraws a projection."""

    calls: Tensor

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.register_buffer("calls", torch.tensor(0))

    @torch.no_grad()
    def count(self) -> None:
        if self.training and self.calls >= 3:
            self.attention.projection.copy_(torch.randn(6, 6))  # type: ignore[union-attr, operator]
            self.calls.zero_()
        elif self.training:
            self.calls += 1


class Attention(nn.Module):
    projection: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.register_buffer("projection", torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.a(x) @ self.projection)


class Performer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = Attention(), nn.Linear(6, 6)
        self.counter = Counter(self.attention)

    def forward(self, x: Tensor) -> Tensor:
        self.counter.count()
        return self.last(self.attention(x))


def test_a_count_of_calls_that_decides_is_exact_in_the_module_that_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Performer(), nn.Linear(6, 3))
    with pytest.raises(
        CaptureError, match=r"depends on tensor values, those of .*\.calls"
    ) as error:
        capture(model, {"input": X})
    assert "--leaf Performer" in str(error.value)
    asyncpipe.partition(
        model,
        {"input": X},
        stages=2,
        output=tmp_path / "made",
        profile="analytic",
        leaves=["Performer"],
    )
    pipe = asyncpipe.load(tmp_path / "made").train()
    for seed in range(9):  # Of these, two draw another projection.
        torch.manual_seed(seed)
        expected = model(X)
        torch.manual_seed(seed)
        torch.testing.assert_close(pipe(X), expected)


class Attending(Two):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(self.a(x), (6,))[:, None]
        return self.b(F.gelu(self.attention(x, x, x, need_weights=False)[0][:, 0]))


def halved(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def half(*args: Any, **kwargs: Any) -> Tensor:
        return function(*args, **kwargs) / 2

    return half


@pytest.mark.parametrize(
    ("place", "name", "user"),
    [
        (nn.Linear, "forward", "nn.Linear"),
        (F, "linear", "nn.Linear"),
        (F, "scaled_dot_product_attention", "nn.MultiheadAttention"),
        (F, "layer_norm", "layer_norm"),  # recorded under the name of what replaces it
    ],
)
def test_code_in_the_place_of_torchs_own_is_refused_where_ranks_would_not_run_it(
    place: Any, name: str, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"x": torch.randn(4, 6)}
    capture(Attending(), given)
    monkeypatch.setattr(place, name, halved(getattr(place, name)))
    with pytest.raises(CaptureError, match=rf"{user} runs {name} of test_published_patterns\.py:"):
        capture(Attending(), given)


class Called:
    """Stands for linear, and is no function."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return (x @ weight.t() + bias) / 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return (x @ weight.t() + bias) * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, None


@pytest.mark.parametrize(
    ("place", "name", "other", "told"),
    [
        (F, "linear", Called(), "nn.Linear runs another linear in place"),
        (F, "linear", Doubled.apply, "nn.Linear runs another linear in place"),
        (F, "relu", F.silu, "nn.ReLU runs another relu in place"),
        (nn.ReLU, "forward", nn.Tanh.forward, "nn.ReLU runs the forward of Tanh in place"),
    ],
)
def test_another_object_in_the_place_of_torchs_own_is_refused_too(
    place: Any, name: str, other: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    monkeypatch.setattr(place, name, other)
    with pytest.raises(CaptureError, match=told):
        capture(model, {"input": torch.randn(4, 6)})


def test_a_replaced_function_that_forward_calls_itself_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(F, "gelu", halved(F.gelu))
    model, given = Attending().eval(), {"x": torch.randn(4, 6)}
    captured, expected = capture(model, given), model(**given)
    monkeypatch.undo()
    assert torch.equal(run(captured, given, training=False), expected)
    assert not torch.equal(model(**given), expected)
