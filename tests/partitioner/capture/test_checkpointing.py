"""Activation checkpointing of the author's is kept: the same calls, memory and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from asyncpipe.partitioner.capture import capture
from asyncpipe.partitioner.profile.profiler import profile_analytic
from asyncpipe.runtime.executor.loading import Pipe
from asyncpipe.tests.support.models import zoo
from asyncpipe.tests.support.oracles.generated_equality import assert_same, cut

WIDTH, DEPTH = 16, 4
X = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
MASK = torch.rand(5, 1, generator=torch.Generator().manual_seed(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        wide = torch.tanh(self.up(self.norm(hidden))) * mask
        return hidden + self.dropout(self.down(torch.sin(wide)))


class Blocks(nn.Module):
    """`how` says what is checkpointed, `options` how."""

    def __init__(self, how: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 3)
        self.how, self.options = how, options

    def pair(self, first: int, hidden: Tensor, mask: Tensor) -> Tensor:
        hidden = self.blocks[first](hidden, mask)
        return self.blocks[first + 1](hidden * 2, mask)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.relu(self.embed(x))
        for index, block in enumerate(self.blocks):
            if self.how == "none":
                hidden = block(hidden, mask)
            elif self.how == "block":
                hidden = checkpoint(block, hidden, mask, **self.options)
            elif self.how == "keywords":
                hidden = checkpoint(partial(block, mask=mask), hidden, **self.options)
            elif self.how == "lambda":
                hidden = checkpoint(lambda h, b=block: b(h, mask) * 0.5, hidden, **self.options)
            elif self.how == "method" and index % 2 == 0:
                hidden = checkpoint(self.pair, index, hidden, mask, **self.options)
            elif self.how == "nested":
                inner = partial(checkpoint, block, use_reentrant=False)
                hidden = checkpoint(inner, hidden, mask, **self.options)
        return self.head(hidden)


class Inside(nn.Module):
    """Blocks that checkpoint themselves, while training, as those of transformers do."""

    class Layer(Block):
        def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
            if self.training:
                return checkpoint(super().forward, hidden, mask, use_reentrant=False)
            return super().forward(hidden, mask)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.Layer() for _ in range(DEPTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
        self.layers = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.layers, 3, x, use_reentrant=False).sin()


@contextmanager
def saved_bytes(counts: list[int]) -> Iterator[None]:
    """Counts the bytes that autograd is given to keep, each storage once."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
    counts.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))


def kept_by(model: Any, *inputs: Any, **named: Any) -> int:
    counts: list[int] = []
    with saved_bytes(counts):
        model(*inputs, **named)
    return counts[0]


def texts(folder: Path, stages: int = 2) -> str:
    return "".join((folder / "cut" / f"stage_{j}.py").read_text() for j in range(stages))


def keeps_as_little(model: nn.Module, pipe: Pipe, inputs: dict[str, Any]) -> None:
    """The stages keep no more than the original, but what lies on the boundaries."""
    model.train()
    pipe.train()
    crossing = sum(boundary.tensor.requires_grad for boundary in pipe.plan.boundaries)
    # An input in a closure is not given to autograd to keep, as an argument is.
    given = sum(tensor.numel() * 4 for tensor in inputs.values())
    allowed = kept_by(model, **inputs) + crossing * X.numel() * 4 + given
    assert kept_by(pipe, **inputs) <= allowed


@pytest.mark.parametrize(
    ("how", "reentrant"),
    [
        ("block", False), ("block", True), ("keywords", False), ("lambda", False),
        ("lambda", True), ("method", False), ("nested", False),
    ],
)  # fmt: skip
def test_what_is_checkpointed_is_recomputed_with_the_same_gradients(
    how: str, reentrant: bool, tmp_path: Path
) -> None:
    model, inputs = Blocks(how, use_reentrant=reentrant), {"x": X, "mask": MASK}
    pipe = assert_same(model, inputs, tmp_path)
    keeps_as_little(model, pipe, inputs)
    assert kept_by(pipe, **inputs) < kept_by(Blocks("none"), **inputs) / 2
    assert f"use_reentrant={reentrant}" in texts(tmp_path)


def test_a_loop_of_checkpointed_blocks_stays_a_loop(tmp_path: Path) -> None:
    cut(Blocks("block", use_reentrant=False), {"x": X, "mask": MASK}, tmp_path)
    text = texts(tmp_path)
    assert "from torch.utils.checkpoint import checkpoint" in text
    assert "hidden = checkpoint(block, hidden, mask, use_reentrant=False)" in text
    assert text.count("checkpoint(block") <= 2


def test_a_checkpoint_that_keeps_no_random_state_says_so(tmp_path: Path) -> None:
    model = Blocks("block", use_reentrant=False, preserve_rng_state=False)
    for block in model.blocks:
        block.dropout.p = 0.0
    assert_same(model, {"x": X, "mask": MASK}, tmp_path)
    assert "preserve_rng_state=False" in texts(tmp_path)


def test_a_method_that_is_checkpointed_is_a_method_of_its_name(tmp_path: Path) -> None:
    cut(Blocks("method", use_reentrant=False), {"x": X, "mask": MASK}, tmp_path)
    text = texts(tmp_path)
    assert "def pair(self, hidden: Tensor, mask: Tensor) -> Tensor:" in text
    assert "checkpoint(self.pair, hidden, mask, use_reentrant=False)" in text


@pytest.mark.parametrize("stages", [2, 3])
def test_blocks_that_checkpoint_themselves_are_called_so(stages: int, tmp_path: Path) -> None:
    model, inputs = Inside(), {"x": X, "mask": MASK}
    pipe = assert_same(model, inputs, tmp_path, stages)
    keeps_as_little(model, pipe, inputs)
    assert "checkpoint(" in texts(tmp_path, stages)


def test_checkpoint_sequential_keeps_its_segments(tmp_path: Path) -> None:
    model = Chain()
    pipe = assert_same(model, {"x": X}, tmp_path)
    keeps_as_little(model, pipe, {"x": X})
    assert "checkpoint(" in texts(tmp_path)


def test_a_cut_through_a_checkpointed_block_leaves_two_that_are_recomputed(tmp_path: Path) -> None:
    class One(Blocks):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return checkpoint(self.all, self.embed(x), mask, use_reentrant=False)

        def all(self, hidden: Tensor, mask: Tensor) -> Tensor:
            for block in self.blocks:
                hidden = block(hidden, mask)
            return self.head(hidden)

    model, inputs = One("none"), {"x": X, "mask": MASK}
    pipe = assert_same(model, inputs, tmp_path, 3)
    keeps_as_little(model, pipe, inputs)
    assert texts(tmp_path, 3).count(", use_reentrant=False)") == 3


def test_a_selective_checkpoint_is_whole_and_noted(tmp_path: Path) -> None:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    keep = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    model = Blocks("block", use_reentrant=False, context_fn=keep)
    pipe = assert_same(model, {"x": X, "mask": MASK}, tmp_path)
    assert any("context_fn" in note for note in pipe.plan.notes)


@pytest.mark.parametrize("example", [zoo.gpt2, partial(zoo.t5, 1, 1)], ids=["gpt2", "t5"])
def test_models_of_transformers_keep_their_gradient_checkpointing(
    example: Callable[[], zoo.Example], tmp_path: Path
) -> None:
    model, inputs = example()
    plain = kept_by(model, **inputs)
    model.gradient_checkpointing_enable()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    pipe = assert_same(model, inputs, tmp_path, exact=False)
    checkpointed = kept_by(model.train(), **inputs)
    assert checkpointed < plain
    text = texts(tmp_path)
    assert "checkpoint(" in text
    assert kept_by(pipe.train(), **inputs) < (checkpointed + plain) / 2


def test_costs_count_what_is_computed_twice_and_not_what_is_forgotten() -> None:
    costs = []
    for how in ("none", "block"):
        model = Blocks(how, use_reentrant=False)
        captured = capture(model, {"x": X, "mask": MASK}, check=False)
        nodes = profile_analytic(captured, {"x": X, "mask": MASK}).nodes
        saved = {maker: count for cost in nodes.values() for maker, count in cost.saved.items()}
        costs.append((sum(cost.backward_ms for cost in nodes.values()), sum(saved.values())))
    (plain_ms, plain_bytes), (checkpointed_ms, checkpointed_bytes) = costs
    assert checkpointed_ms > 1.3 * plain_ms
    assert checkpointed_bytes < plain_bytes / 3


class Pair(nn.Module):
    """A function of several kinds under one checkpoint, between two layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.kind = kind

    def function(self, hidden: Tensor, mask: Tensor) -> Any:
        match self.kind:
            case "structure":
                return {"a": self.second(hidden), "b": [hidden * 2, (mask, 3)]}
            case "regions":
                with torch.no_grad():
                    other = self.first(hidden)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return (self.second(hidden + other) * mask).float()
            case "modes":
                return self.second(hidden) * 2 if self.training else self.first(hidden)
            case "dropout":
                dropped = nn.functional.dropout(hidden, 0.5, self.training)
                return nn.functional.dropout(self.second(dropped), 0.5, self.training)
            case "buffers":
                return self.norm(self.second(hidden))
            case "in place":
                value = self.second(hidden)
                value += 1
                value[:, 0] = 0
                return torch.relu_(value)
            case "sizes":
                return self.second(hidden.view(hidden.shape[0] * 2, -1).repeat(1, 2)) / len(mask)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        hidden = checkpoint(self.first, x, use_reentrant=False)
        return checkpoint(self.function, hidden, mask, use_reentrant=False)


@pytest.mark.parametrize(
    "kind", ["structure", "regions", "modes", "dropout", "buffers", "in place", "sizes"]
)
def test_a_checkpointed_function_may_do_what_forward_may(kind: str, tmp_path: Path) -> None:
    assert_same(Pair(kind), {"x": X, "mask": MASK}, tmp_path)
    assert "checkpoint(" in texts(tmp_path)
