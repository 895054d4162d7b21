"""Layers of real models are split over tensor ranks: the code, and that it computes the same.

A partition compares outputs and gradients of its stages on the tensor ranks with those of whole
stages, in float64 where needed; so a folder that exists is one that agrees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner import verify_parts as parts
from asyncpipe.partitioner.capture import capture
from asyncpipe.partitioner.tensor_parallel.derive import derive
from asyncpipe.partitioner.tensor_parallel.example_run import ExampleRun
from asyncpipe.partitioner.verify_parts import verify_parts
from asyncpipe.runtime.errors import PlanError
from asyncpipe.runtime.executor.loading import stage_builder
from asyncpipe.runtime.executor.tied_parameters import verify_tied_alike
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.runtime.tensor_parallel import TensorRanks, splits_of
from asyncpipe.runtime.tensor_parallel.threads import in_threads
from asyncpipe.tests.support.models.generated import CASES
from asyncpipe.tests.support.models.inplace import build, example


class Attention(nn.Module):
    """Fused queries, keys and values, with dropout, and a bias of the scores by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.zeros(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (y.view(batch, length, 4, 4).transpose(1, 2) for y in self.qkv(x).split(16, -1))
        scores = (q @ k.transpose(-2, -1) + self.bias).softmax(-1)
        scores = nn.functional.dropout(scores, 0.2, self.training)
        return self.out((scores @ v).transpose(1, 2).reshape(batch, length, 16))


class Grouped(nn.Module):
    """Fused queries, keys and values of fewer heads, taken apart by slices."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        q, k, v = qkv[..., :16], qkv[..., 16:24], qkv[..., 24:]
        heads = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Merged(nn.Module):
    """Heads and samples in one dimension, with a bias of the scores and dropout on it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            y.view(batch, length, 4, 4).transpose(1, 2).reshape(batch * 4, length, 4)
            for y in (self.q(x), self.k(x), self.v(x))
        )
        scores = torch.baddbmm(bias.reshape(batch * 4, 1, length), q, k.transpose(1, 2)).softmax(-1)
        y = nn.functional.dropout(scores, 0.2, self.training) @ v
        return self.out(y.view(batch, 4, length, 4).transpose(1, 2).flatten(2))


class EvenAttention(nn.Module):
    """Queries and keys that depend on all heads; with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, n, bias=False) for n in (16, 8, 8, 16))
        self.last = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (y / (1 + y.norm(dim=-1, keepdim=True)) for y in (self.q(x), self.k(x)))
        heads = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (q, k, self.v(x)))
        rate = 0.1 if self.training else 0.0
        y = nn.functional.scaled_dot_product_attention(*heads, dropout_p=rate, enable_gqa=True)
        return self.last(self.out(y.transpose(1, 2).flatten(2)))


class SharedDropout(nn.Module):
    """One dropout for hidden values, which ranks can divide, and for the whole result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.last = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.down(self.dropout(self.up(x).relu())))
        return self.last(x)


class Pictures(nn.Module):
    """Channels of convolutions with a batch norm, changed in place, and dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.norm, self.dropout = nn.BatchNorm2d(8), nn.Dropout(0.3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.dropout(self.relu(self.norm(self.first(x)))))


class Groups(nn.Module):
    """A norm over groups of channels, and a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1)
        self.norm, self.depthwise = nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.depthwise(self.norm(self.up(x)).relu()).relu())


class local(nn.Module):
    """Names of split layers, of their functions, and of a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16, bias=False)
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        parallel_input = self.up(x) * self.scale
        sum_over_ranks = self.down(parallel_input.view(x.shape[0], -1, 4, 6).flatten(2))
        return self.down(self.up(sum_over_ranks).relu())


class Read(nn.Module):
    """Weights of layers that are read and not called: all of one, a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.channels, self.step = nn.Conv1d(16, 16, 3, padding=1, groups=16), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.channels.weight.squeeze(1).unsqueeze(1)
        y = self.up(x).transpose(1, 2)
        y = nn.functional.conv1d(y, weight, self.channels.bias, padding=1, groups=16)
        scale = self.step.weight @ x.transpose(1, 2) + self.step.bias.float()[:, None]
        return self.down((y * scale).transpose(1, 2))


class Feed(nn.Sequential):
    """A block of two products, with the shapes of its input."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


class Sign(nn.Module):
    """A module that reads a value, which only tensors with data have."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else -x


class Transposed(nn.Module):
    """Two products of weights that are transposed before."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.ones(16, 8)), nn.Parameter(torch.ones(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.up.t()) @ self.down.t()


class Changed(nn.Module):
    """Whole values that are taken in parts, and changed through a view or their base in between."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.norm, self.up = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.norm(self.whole(x)) + 1
        view, heads = whole[:, 2:5], whole.view(-1, 4, 4)
        y = (self.up(x) + whole).view(-1, 4, 4) + heads
        view.zero_()
        y = (y + heads).flatten(1) + whole
        whole += 1
        return self.down((y.view(-1, 4, 4) + heads).flatten(1))


class Coincidence(nn.Module):
    """Operations whose results on parts are right for the example alone: a bias of zeros, and a
    condition that is false everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 16)
        self.third, self.weight = nn.Linear(16, 8), nn.Parameter(torch.ones(16, 8))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + torch.addmm(bias, self.first(x).relu(), self.weight)
        y = self.second(x)
        x = x + self.third(torch.where((y > 50).any(-1, keepdim=True), -y, y))
        return x + self.down(self.up(x).relu())


class Counted(nn.Module):
    """A buffer of the split width that a layer changes, and one that a layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(nn.Linear(8, 16))
        self.down, self.first, self.last = nn.Linear(16, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("seen", torch.zeros(16, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        with torch.no_grad():
            self.seen += y.double().mean(0)
        return self.last(self.first(self.down(y)).relu())


class Words(nn.Module):
    """A vocabulary that two ranks cannot divide equally, in an embedding and a head that may share
    its weight; a loss of a module, and the logits as a result."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(33, 8, padding_idx=0), nn.Linear(8, 33)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=3)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        x = self.embed(words)
        logits = self.head(x + self.down(torch.relu(self.up(x))))
        return {"loss": self.loss(logits.view(-1, 33), words.view(-1)), "logits": logits}


class Logarithms(Words):
    """The losses of logarithms of probabilities, which are the result too."""

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        logarithms = torch.log_softmax(self.head(self.embed(words)), -1)
        loss = nn.functional.nll_loss(logarithms.transpose(1, 2), words, reduction="sum")
        return {"loss": loss, "logarithms": logarithms}


class Logits(Words):
    """No loss."""

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(words))
        return logits


class ReadsAll(Words):
    """An embedding whose tied weight is read whole elsewhere."""

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        mean = self.embed.weight.mean(0)
        return {"y": self.down(torch.relu(self.up(self.embed(words) + mean)))}


def split(
    folder: Path, model: nn.Module, inputs: dict[str, Any], size: int = 2, **options: Any
) -> str:
    """The text of the stages of a folder for `size` tensor ranks."""
    options = {"stages": 1, "profile": "analytic", **options}
    plan = asyncpipe.partition(
        model, inputs, output=folder, tensor_parallel=size, force=True, **options
    )
    assert plan.tensor_parallel == size
    return "".join((folder / stage.file).read_text() for stage in plan.stages)


def share(folder: Path, size: int = 2) -> float:
    """The share of the parameters that the tensor ranks share out."""
    whole, parts = (in_threads(number, lambda _: parameters_of(folder))[0] for number in (1, size))
    return sum(count for is_split, count in parts if is_split) * size / sum(n for _, n in whole)


def parameters_of(folder: Path) -> list[tuple[bool, int]]:
    """For each parameter of all stages whether it is split, and its size on this rank."""
    found = []
    for stage in (kind() for kind in classes_of(folder)):
        splits = splits_of(stage)
        found += [(name in splits, p.numel()) for name, p in stage.named_parameters()]
    return found


def classes_of(folder: Path) -> list[type[nn.Module]]:
    return [stage_builder(folder, spec) for spec in read_plan(folder).stages]


def test_fused_attention_is_split_by_heads_with_its_dropout_and_bias(tmp_path: Path) -> None:
    x = torch.randn(2, 5, 16)
    text = split(tmp_path / "net", Attention(), {"x": x})
    assert "ColumnLinear(16, 48, groups=3)" in text
    assert "RowLinear(16, 16)" in text
    assert "split_dropout(" in text
    assert "local(4)" in text
    assert "split_parameter(torch.empty(4, 1, 1), dim=0)" in text
    assert share(tmp_path / "net") > 0.95


def test_fused_blocks_of_unequal_width_are_split_each(tmp_path: Path) -> None:
    text = split(tmp_path / "net", Grouped(), {"x": torch.randn(2, 5, 16)})
    assert "ColumnLinear(16, 32, groups=(16, 8, 8))" in text
    assert "qkv[..., local(16) : local(24)]" in text
    assert share(tmp_path / "net") > 0.95


def test_heads_that_are_one_dimension_with_samples_are_split(tmp_path: Path) -> None:
    inputs = {"x": torch.randn(3, 5, 16), "bias": torch.randn(3, 4, 5)}
    text = split(tmp_path / "net", Merged(), inputs)
    assert "reshape(local(4 * batch), 5, 4)" in text
    assert ", 1, 5), 0, batch)" in text
    assert "dim=0, groups=batch)" in text
    assert share(tmp_path / "net") > 0.95


def test_convolutions_are_split_by_channels_with_their_batch_norm(tmp_path: Path) -> None:
    text = split(tmp_path / "net", Pictures(), {"x": torch.randn(4, 3, 6, 6)})
    assert "ColumnConv2d(3, 8, kernel_size=3, padding=1)" in text
    assert "split_module(nn.BatchNorm2d(8))" in text
    assert "RowConv2d(8, 3, kernel_size=3, padding=1)" in text
    assert "SplitDropout(0.3, 1)" in text


def test_groups_of_channels_are_split(tmp_path: Path) -> None:
    text = split(tmp_path / "net", Groups(), {"x": torch.randn(4, 3, 6, 6)})
    assert "SplitGroupNorm(4, 8)" in text
    assert "GroupConv2d(8, 8, kernel_size=3, padding=1, groups=8)" in text
    assert share(tmp_path / "net") > 0.95


def test_names_of_a_model_that_are_those_of_split_layers_stay_apart(tmp_path: Path) -> None:
    text = split(tmp_path / "net", local(), {"x": torch.randn(4, 16)})
    assert share(tmp_path / "net") == 1.0
    assert "import (" in text or "import ColumnLinear" in text


def test_weights_of_layers_that_are_read_and_not_called_are_split(tmp_path: Path) -> None:
    text = split(tmp_path / "net", Read(), {"x": torch.randn(2, 5, 8)})
    assert "split_module(\n            nn.Conv1d(16, 16" in text
    assert "part_of(self.step.weight, 0)" in text


def test_weights_that_are_transposed_follow_the_parts_that_they_meet(tmp_path: Path) -> None:
    split(tmp_path / "net", Transposed(), {"x": torch.randn(5, 8)})
    assert share(tmp_path / "net") == 1.0


def test_a_part_of_a_whole_value_that_changes_is_taken_again(tmp_path: Path) -> None:
    text = split(tmp_path / "net", Changed(), {"x": torch.randn(4, 8)})
    assert text.count("part_of(heads, 1)") == 3


def test_what_holds_for_the_values_of_the_example_alone_is_computed_whole(tmp_path: Path) -> None:
    inputs = {"x": torch.randn(4, 8), "bias": torch.zeros(8)}
    text = split(tmp_path / "net", Coincidence(), inputs)
    assert "up = ColumnLinear(8, 16)" in text and text.count("ColumnLinear(") == 1


def test_attention_that_does_not_depend_on_the_example_is_tried_with_other_values(
    tmp_path: Path,
) -> None:
    model, x = EvenAttention(), torch.randn(2, 5, 16)
    split(tmp_path / "net", model, {"x": 1e-3 * x})  # every position attends to all alike
    verify_parts(model, read_plan(tmp_path / "net"), tmp_path / "net", {"x": 10 * x}, 2)


def test_a_dropout_of_parts_and_of_a_whole_value_keeps_its_layers_whole(tmp_path: Path) -> None:
    text = split(tmp_path / "net", SharedDropout(), {"x": torch.randn(4, 8)})
    assert "nn.Dropout(0.3)" in text and "up = nn.Linear" in text and "ColumnLinear(8, 24)" in text
    assert any(
        "dropout is also applied to other values" in n for n in read_plan(tmp_path / "net").notes
    )


def test_a_buffer_that_changes_and_weights_with_parametrizations_stay_whole(
    tmp_path: Path,
) -> None:
    text = split(tmp_path / "net", Counted(), {"x": torch.randn(4, 8)})
    assert "up = ParametrizedLinear()" in text and "down = ColumnLinear(16, 8)" in text


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet"])
def test_published_models_in_two_stages_compute_the_same_on_two_ranks(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    split(tmp_path / "net", case.build(), dict(case.example_inputs), stages=2)
    assert share(tmp_path / "net") > 0.3


def words() -> dict[str, Tensor]:
    return {"words": torch.randint(1, 33, (2, 5), generator=torch.Generator().manual_seed(0))}


def test_a_tied_vocabulary_is_divided_into_unequal_parts_in_all_stages(tmp_path: Path) -> None:
    text = split(tmp_path / "net", Words(), words(), stages=2)
    assert "VocabEmbedding(33, 8, padding_idx=0)" in text
    assert "ColumnLinear(8, 33, uneven=True)" in text
    assert "view(-1, local(33, uneven=True))" in text
    assert "whole_logits = whole_output(logits, 2, 33)" in text
    assert "classes=33" in text and "label_smoothing=0.1" in text
    plan = read_plan(tmp_path / "net")
    assert [shared.stages for shared in plan.shared] == [(0, 1)]
    first = {"embed.weight": 17 * 8, "up": 8 * 8 + 8, "down": 8 * 8 + 8}
    last = {"head.weight": 17 * 8, "head.bias": 17}
    total = sum(stage.param_bytes for stage in plan.stages)
    assert total == 4 * (sum(first.values()) + sum(last.values()))


def test_logarithms_of_probabilities_are_divided_by_classes(tmp_path: Path) -> None:
    text = split(tmp_path / "net", Logarithms(is_tied=False), words())
    assert "split_log_softmax(" in text and "split_nll_loss(" in text


def test_logits_of_a_model_without_a_loss_are_gathered(tmp_path: Path) -> None:
    text = split(tmp_path / "net", Logits(), {"words": words()["words"][:1]})
    assert "return whole_output(logits, 2, 33)" in text


def test_a_vocabulary_that_is_read_whole_stays_whole_with_a_note(tmp_path: Path) -> None:
    text = split(tmp_path / "net", ReadsAll(), words())
    assert "VocabEmbedding" not in text
    notes = read_plan(tmp_path / "net").notes
    assert any("embed whole: its weights are also read whole" in note for note in notes)


def test_a_tied_weight_that_stages_divide_in_two_ways_is_refused(tmp_path: Path) -> None:
    model, folder = Words(), tmp_path / "net"
    split(folder, model, words(), stages=2)
    plan, path = read_plan(folder), tmp_path / "net" / "stage_1.py"
    verify_tied_alike(folder, plan, [0], TensorRanks(size=2))
    path.write_text(
        path.read_text().replace("ColumnLinear(8, 33, uneven=True)", "nn.Linear(8, 33)")
    )
    message = (
        r"embed\.weight of stage 0 and head\.weight of stage 1 are one tied parameter, but over "
        r"the tensor ranks the first is divided along dimension 0.* and the second whole"
    )
    with pytest.raises(PlanError, match=message):
        verify_tied_alike(folder, plan, [0], TensorRanks(size=2))
    with pytest.raises(PlanError, match=message):
        verify_parts(model, plan, folder, words(), 2)


def test_heads_that_the_ranks_do_not_divide_stay_whole_with_a_note(tmp_path: Path) -> None:
    model = nn.Sequential(Attention(), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    plan = asyncpipe.partition(
        model,
        {"input": torch.randn(2, 5, 16)},
        output=tmp_path / "net",
        tensor_parallel=8,
        stages=1,
        profile="analytic",
    )
    assert any("0.qkv whole: 8 ranks cannot share out 4 (of 4 x 4)" in note for note in plan.notes)


def test_a_model_without_a_layer_to_split_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    with pytest.raises(PlanError, match="no layer can be shared out over 2 tensor ranks"):
        split(tmp_path / "net", model, {"input": torch.ones(2, 4)})


def test_a_model_on_meta_is_split_like_one_with_weights(tmp_path: Path) -> None:
    inputs = dict(CASES["gpt2"].example_inputs)
    split(tmp_path / "own", CASES["gpt2"].build(), inputs, stages=2)
    split(tmp_path / "meta", CASES["gpt2"].build().to("meta"), inputs, stages=2)
    own, on_meta = (
        [splits_of(kind()) for kind in classes_of(tmp_path / x)] for x in ("own", "meta")
    )
    assert on_meta == own
    assert any(own)


def test_equal_blocks_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run, runs = ExampleRun.call, list[int]()
    monkeypatch.setattr(ExampleRun, "call", lambda *given: (runs.append(1), run(*given))[1])

    def cost(blocks: int) -> int:
        runs.clear()
        model = nn.Sequential(*(Feed() for _ in range(blocks))).to("meta")
        inputs = {"input": torch.randn(4, 8)}
        assert len(derive(capture(model, inputs), inputs, 2).decisions) == 3 * blocks
        return len(runs)

    assert cost(2) == cost(6)


def test_layers_beside_a_module_that_reads_values_are_split(tmp_path: Path) -> None:
    model = nn.Sequential(Feed(), Sign(), Feed())
    split(tmp_path / "net", model, {"input": torch.randn(4, 8)}, leaves=["Sign"])
    assert share(tmp_path / "net") > 0.9


def test_a_sum_over_the_ranks_that_is_left_out_is_seen(tmp_path: Path) -> None:
    model, x = Pictures(), torch.randn(4, 3, 6, 6)
    split(tmp_path / "net", model, {"x": x})
    plan = read_plan(tmp_path / "net")
    assert verify_parts(model, plan, tmp_path / "net", {"x": x}, 2) < 1e-4
    path = tmp_path / "net" / "stage_0.py"
    path.write_text(path.read_text().replace("RowConv2d(8, 3", "Summand(8, 3") + SUMMAND)
    with pytest.raises(PlanError, match=r"output \(on 2 tensor ranks\) .* differs"):
        verify_parts(model, plan, tmp_path / "net", {"x": x}, 2)


def test_stages_may_write_to_their_inputs(tmp_path: Path) -> None:
    plan = asyncpipe.partition(
        build("InputAsSkip"), example(), stages=2, tensor_parallel=2, output=tmp_path / "2p_2t",
        prefer_modules=0.0, profile="analytic", no_cache=True,
    )  # fmt: skip
    assert plan.tensor_parallel == 2


@pytest.mark.parametrize("share_of_limit", [0.6, 0.9, 1.1])
def test_both_sides_of_the_comparison_have_gradients_or_neither(
    share_of_limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Attention(), torch.randn(2, 5, 16)
    count = sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(parts, "_MOST_WITH_GRADIENTS", count / share_of_limit)
    split(tmp_path / "net", model, {"x": x})
    assert parts.compares_gradients(model) == (share_of_limit < 1)


SUMMAND = """

class Summand(RowConv2d):
    def forward(self, input):
        return self._conv_forward(input, self.weight, self.bias)
"""
