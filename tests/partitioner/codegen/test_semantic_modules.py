"""Modules that are more than their forward: shared, parametrized, with hooks, with state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from asyncpipe.partitioner.capture import capture
from asyncpipe.runtime.errors import CaptureError
from asyncpipe.tests.support.oracles.generated_equality import assert_same, cut

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
WORDS = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.relu(self.first(x)))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class WithInner(Base):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.inner(self.first(x)))


# Shared


class CalledAgain(Base):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(3):
            hidden = torch.relu(self.second(hidden))
        return self.first(hidden)


class TiedWeights(Base):
    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(8, 8)
        self.third.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.relu(super().forward(x)))


class TiedModules(Base):
    def __init__(self) -> None:
        super().__init__()
        self.chain = nn.Sequential(self.first, nn.ReLU(), self.second, self.first)

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(self.second(self.chain(x)))


class Frozen(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.requires_grad_(False)
        self.third = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.third(x))


class ReadsAPart(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.second(self.first(x)), self.first.weight)


@pytest.mark.parametrize("kind", [CalledAgain, TiedWeights, TiedModules, Frozen, ReadsAPart])
@pytest.mark.parametrize("stages", [2, 3])
def test_what_is_shared_or_frozen_stays_so(kind: type[Base], stages: int, tmp_path: Path) -> None:
    model = kind()
    pipe = assert_same(model, {"x": X}, tmp_path, stages)
    trained = {name for name, p in pipe.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}


# Parametrized


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def own(module: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", Symmetric())


@pytest.mark.parametrize(
    "change",
    [
        weight_norm, spectral_norm, own, parametrizations.weight_norm,
        parametrizations.spectral_norm, parametrizations.orthogonal,
    ],
)  # fmt: skip
def test_parametrized_weights_are_computed(change: Any, tmp_path: Path) -> None:
    model = Base()
    change(model.first)
    assert_same(model, {"x": X}, tmp_path)


# Hooks


def with_hook(kind: str) -> nn.Module:
    model = WithInner(Inner())
    place = {"leaf": model.first, "inner": model.inner, "model": model}[kind.split()[0]]
    if "before" in kind:
        place.register_forward_pre_hook(lambda module, args: (args[0] * 2 + 1,))
    if "keyword" in kind:
        place.register_forward_hook(
            lambda module, args, kwargs, output: output * 3 + args[0], with_kwargs=True
        )
    if "after" in kind:
        place.register_forward_hook(lambda module, args, output: output * 3)
    return model


@pytest.mark.parametrize(
    "kind",
    ["leaf before", "leaf after", "leaf keyword", "inner before after", "inner keyword",
     "model before", "model after"],
)  # fmt: skip
def test_hooks_of_forward_are_part_of_it(kind: str, tmp_path: Path) -> None:
    assert_same(with_hook(kind), (X,), tmp_path)


def test_hooks_of_backward_are_refused() -> None:
    model = WithInner(Inner())
    handle = model.inner.register_full_backward_hook(lambda *given: None)
    with pytest.raises(CaptureError, match="inner has a backward hook"):
        capture(model, {"x": X})
    handle.remove()
    model.first.register_full_backward_pre_hook(lambda *given: None)
    with pytest.raises(CaptureError, match="first has a backward hook"):
        capture(model, {"x": X})
    model = Base()
    model.first.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(CaptureError, match=r"the parameter first\.weight has a hook"):
        capture(model, {"x": X})


# State


class WithState(Inner):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_state_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(CaptureError, match="inner has extra state .get_extra_state of WithState"):
        capture(WithInner(WithState()), {"x": X})


def test_a_state_dict_with_names_of_its_own_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"inner\.linear\.weight, which is neither"):
        capture(WithInner(checkpoint_wrapper(Inner())), {"x": X})


class Deep(Base):
    def __init__(self) -> None:
        super().__init__()
        inner = Inner()
        inner.register_buffer("kept", torch.ones(8))
        inner.register_buffer("forgotten", torch.full((8,), 2.0), persistent=False)
        inner.register_buffer("nothing", None)
        self.branches = nn.ModuleDict({"left": nn.ModuleList([inner]), "right": Inner()})
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        inner: Any = self.branches["left"][0]  # type: ignore[index]
        hidden = inner(self.first(x)) * inner.kept + inner.forgotten
        return self.second(self.branches["right"](hidden))


def test_nested_state_is_that_of_the_original_and_is_read_back(tmp_path: Path) -> None:
    model = Deep()
    pipe = assert_same(model, {"x": X}, tmp_path)
    other = Deep()
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    pipe.load_state_dict(other.state_dict())
    assert torch.equal(pipe.eval()(X), other.eval()(X))
    assert list(pipe.state_dict()) == list(other.state_dict())


# Modules of torch


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8))
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weights = self.attention(x, x, x)
        return self.decoder(self.encoder(hidden), x), weights


class Recurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.2, bidirectional=True)
        self.gru = nn.GRU(16, 8, batch_first=True)
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, (state, _) = self.lstm(x)
        hidden, _ = self.gru(hidden)
        first, second = self.cell(hidden[:, 0])
        return hidden + first[:, None], state, second


@pytest.mark.parametrize("kind", [Attends, Recurs])
def test_attention_and_recurrence_of_torch(kind: type[nn.Module], tmp_path: Path) -> None:
    model = kind()
    for module in model.modules():
        module.register_buffer("unused_here", None)
    inputs = {"x": WORDS}
    pipe = cut(model, inputs, tmp_path)
    for training in (True, False):
        model.train(training)
        pipe.train(training)
        torch.manual_seed(1)
        expected = model(WORDS)
        torch.manual_seed(1)
        # In evaluation torch has a fast path of its own through an encoder.
        torch.testing.assert_close(pipe(WORDS), expected, rtol=1e-5, atol=1e-6)


def doubled(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return 2 * output


CHANGES: dict[str, Callable[[Any], Any]] = {
    "activation": lambda layer: setattr(layer, "activation", nn.LeakyReLU(0.2)),
    "function": lambda layer: setattr(layer, "activation", torch.tanh),
    "norm": lambda layer: setattr(layer, "norm1", nn.RMSNorm(8)),
    "dropout": lambda layer: setattr(layer, "dropout1", nn.AlphaDropout(0.1)),
    "factors": lambda layer: setattr(
        layer, "linear1", nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 16))
    ),
    "parametrization": lambda layer: parametrizations.weight_norm(layer.self_attn.out_proj),
    "hook": lambda layer: layer.linear2.register_forward_hook(doubled),
}


class Layered(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        # Without batch_first torch has no fast path, which would ignore the changes.
        self.layer = kind(8, 2, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if isinstance(self.layer, nn.TransformerDecoderLayer):
            return self.layer(hidden, hidden)
        return self.layer(hidden)


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
@pytest.mark.parametrize("change", CHANGES)
def test_an_attention_layer_with_other_parts_is_captured_part_by_part(
    kind: type[nn.Module], change: str, tmp_path: Path
) -> None:
    model = Layered(kind)
    CHANGES[change](model.layer)
    pipe = cut(model, {"x": WORDS}, tmp_path)
    for training in (True, False):
        torch.manual_seed(1)
        expected = model.train(training)(WORDS)
        torch.manual_seed(1)
        torch.testing.assert_close(pipe.train(training)(WORDS), expected, rtol=1e-5, atol=1e-6)


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.middle = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.middle(self.words(ids))))


def grown(model: Any) -> None:
    model.words.weight = nn.Parameter(torch.cat([model.words.weight.data, torch.randn(4, 8)]))


def cut_short(model: Any) -> None:
    model.head.weight = nn.Parameter(model.head.weight.data[:5])
    model.head.bias = nn.Parameter(model.head.bias.data[:5])


def pruned(model: Any) -> None:
    """After `remove` the bias comes before the weight."""
    prune.l1_unstructured(model.middle, "weight", 0.5)
    prune.remove(model.middle, "weight")


def with_a_buffer(model: Any) -> None:
    model.norm.register_buffer("calibrated", torch.ones(3))


@pytest.mark.parametrize("change", [grown, cut_short, pruned, with_a_buffer])
def test_a_module_of_torch_with_other_tensors_is_written_as_it_is(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    model = Sized()
    change(model)
    assert_same(model, {"ids": torch.randint(10, (3, 5))}, tmp_path)


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lstm = nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.linear(x), lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]


def test_packed_sequences_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"Packs\.forward at .*packs a padded sequence"):
        capture(Packs(), {"x": WORDS, "lengths": torch.tensor([5, 4, 3, 2])})
    packed = nn.utils.rnn.pack_sequence([WORDS[0], WORDS[1]])
    with pytest.raises(CaptureError, match="the input x is a PackedSequence"):
        capture(Inner(), {"x": packed})


class Pads(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, **options)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padded)


def test_an_encoder_that_skips_padding_in_evaluation_is_refused(tmp_path: Path) -> None:
    padded = torch.zeros(WORDS.shape[:2], dtype=torch.bool)
    padded[:, -2:] = True
    inputs = {"x": WORDS, "padded": padded}
    with pytest.raises(CaptureError, match=r"Pads\.forward at .* skips the masked positions"):
        capture(Pads(), inputs)
    model = Pads(enable_nested_tensor=False)
    pipe = cut(model, inputs, tmp_path)
    for training in (True, False):
        model.train(training)
        pipe.train(training)
        torch.testing.assert_close(pipe(**inputs), model(**inputs), rtol=1e-5, atol=1e-6)


class Differs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.gradient(self.first(x), dim=1)[0])


def test_finite_differences_are_not_taken_for_gradients(tmp_path: Path) -> None:
    model = Differs()
    pipe = cut(model, {"x": X}, tmp_path, batch_dim=None)
    torch.testing.assert_close(pipe(X), model(X))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.up(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Repeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack, self.head = Stack(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.stack(x)
        return self.head(x)


def test_a_stage_calls_a_module_and_loops_over_its_layers_where_it_has_only_those_of_a_call(
    tmp_path: Path,
) -> None:
    assert_same(Repeats(), {"x": X}, tmp_path, 4)
    written = (tmp_path / "cut/stage_0.py").read_text()
    assert "self.stack(" in written and "for layer in self.stack.layers:" in written


# Containers and attributes


class Holds(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8) * i) for i in (1, 2, 3)])
        self.named = nn.ParameterDict(
            {"up": nn.Parameter(torch.ones(8)), "v": nn.Parameter(torch.zeros(8))}
        )
        self.layers = nn.ModuleDict({"act": nn.ReLU(), "linear": nn.Linear(8, 8)})

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for scale in self.scales:
            hidden = hidden * scale
        hidden = self.layers["act"](hidden) + self.named["up"]
        return self.second(self.layers["linear"](hidden)) + self.named["v"]


class KeepsFunctions(Base):
    def __init__(self) -> None:
        super().__init__()
        self.activation = partial(F.leaky_relu, negative_slope=0.3)
        self.shift = lambda value: value * 2 + 1
        self.norm = partial(nn.LayerNorm, eps=1e-6)(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.shift(self.activation(self.first(x)))))


class WasLazy(Base):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(8)
        self.lazy(X)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.lazy(self.first(x)))


def test_a_lazy_module_without_a_shape_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4))
    with pytest.raises(CaptureError, match=r"1\.weight has no shape yet"):
        capture(model, {"input": X})


class InFrequencies(Base):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = torch.fft.rfft(self.first(x)) * self.filter
        return self.second(torch.fft.irfft(spectrum, n=8)), torch.view_as_real(spectrum)


@pytest.mark.parametrize("kind", [Holds, KeepsFunctions, WasLazy, InFrequencies])
def test_parts_of_every_kind(kind: type[Base], tmp_path: Path) -> None:
    assert_same(kind(), {"x": X}, tmp_path)


def test_a_compiled_module_is_the_module_that_was_compiled(tmp_path: Path) -> None:
    assert_same(WithInner(torch.compile(Inner(), backend="eager")), {"x": X}, tmp_path / "whole")
    inner = Inner()
    inner.compile(backend="eager")
    assert_same(WithInner(inner), {"x": X}, tmp_path / "in_place")


def test_a_scripted_module_is_refused() -> None:
    inner = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    with pytest.raises(CaptureError, match=r"inner is a module of torch\.jit"):
        capture(WithInner(inner), {"x": X})
