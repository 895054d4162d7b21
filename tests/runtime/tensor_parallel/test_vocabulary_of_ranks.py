"""Embeddings and losses over a vocabulary in parts equal the plain ones: values and gradients."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asyncpipe.runtime.tensor_parallel import (
    ColumnLinear,
    Split,
    TensorRanks,
    VocabEmbedding,
    parallel_input,
    split_cross_entropy,
    split_log_softmax,
    split_nll_loss,
    splits_of,
    whole_output,
)
from asyncpipe.runtime.tensor_parallel.ranks import reading_loss_alone
from asyncpipe.runtime.tensor_parallel.threads import in_threads

WORDS, WIDTH = 7, 4
OPTIONS = list(product(("mean", "sum", "none"), (False, True), (0.0, 0.3)))


def logits_and_targets(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Logits with the classes in dimension 1, and targets of which one is ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    targets = torch.randint(WORDS, (shape[0], *shape[2:]), generator=generator)
    targets.view(-1)[1] = -100
    return logits, targets


def loss_and_gradient(logits: Tensor, loss: Any, split: Split, ranks: TensorRanks) -> list[Tensor]:
    logits = logits.clone().requires_grad_()
    result = loss(split.part(logits, ranks.rank, ranks.size))
    (result * torch.linspace(0.5, 1, result.numel()).view(result.shape)).sum().backward()
    assert logits.grad is not None
    return [result.detach(), logits.grad]


@pytest.mark.parametrize("shape", [(10, WORDS), (2, WORDS, 5)])
@pytest.mark.parametrize("size", [2, 3])
def test_losses_of_logits_in_unequal_parts_are_those_of_the_whole(
    size: int, shape: tuple[int, ...]
) -> None:
    logits, targets = logits_and_targets(shape)
    weight = torch.linspace(0.1, 1, WORDS, dtype=torch.float64)
    for reduction, is_weighted, smoothing in OPTIONS:
        given = {"weight": weight if is_weighted else None, "reduction": reduction}

        def cross_entropy(x: Tensor, given: Any = given, smoothing: float = smoothing) -> Tensor:
            return split_cross_entropy(
                x, targets, **given, label_smoothing=smoothing, classes=WORDS
            )

        def of_logarithms(x: Tensor, given: Any = given) -> Tensor:
            x = split_log_softmax(x, 1)
            return split_nll_loss(x, targets, **given, classes=WORDS)

        for loss in (cross_entropy, of_logarithms)[: 1 if smoothing else 2]:

            def work(ranks: TensorRanks, loss: Any = loss) -> list[Tensor]:
                return loss_and_gradient(logits, loss, Split(1, length=WORDS), ranks)

            (plain,) = in_threads(1, work)
            results = in_threads(size, work)
            expected = F.cross_entropy(logits, targets, **given, label_smoothing=smoothing)
            torch.testing.assert_close(plain[0], expected)
            for value, _ in results:
                torch.testing.assert_close(value, plain[0], rtol=1e-13, atol=1e-13)
            total = torch.stack([gradient for _, gradient in results]).sum(0)
            torch.testing.assert_close(total, plain[1], rtol=1e-12, atol=1e-13)


class Tied(nn.Module):
    """An embedding whose weight is that of the head, with one word for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = VocabEmbedding(WORDS, WIDTH, padding_idx=-2)
        self.head = ColumnLinear(WIDTH, WORDS, uneven=True)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(parallel_input(self.embedding(words)))
        loss = split_cross_entropy(logits.flatten(0, 1), words.view(-1), classes=WORDS)
        return loss, whole_output(logits, 2, WORDS)


def trained(ranks: TensorRanks) -> tuple[dict[str, Split], dict[str, Tensor]]:
    module = Tied()
    splits = splits_of(module)
    module.double()
    for index, (name, parameter) in enumerate(module.named_parameters()):
        shape = splits[name].whole_shape(parameter.shape, ranks.size)
        numbers = torch.Generator().manual_seed(index)
        whole = torch.randn(shape, generator=numbers, dtype=torch.float64)
        parameter.data = splits[name].part(whole, ranks.rank, ranks.size)
    loss, logits = module(torch.arange(2 * WORDS).view(2, -1) % WORDS)
    (loss + (logits * torch.linspace(0, 1, logits.numel()).view(logits.shape)).sum()).backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return splits, {"loss": loss.detach(), "logits": logits.detach(), **gradients}


@pytest.mark.parametrize("size", [2, 3])
def test_a_tied_embedding_in_unequal_parts_has_the_gradients_of_the_whole(size: int) -> None:
    ((_, plain),) = in_threads(1, trained)
    results = in_threads(size, trained)
    for name, expected in plain.items():
        split, parts = results[0][0].get(name), [found[name] for _, found in results]
        whole = split.whole(parts) if split else parts[0]
        torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)


def test_outputs_stay_in_parts_where_the_loss_alone_is_read() -> None:
    def work(ranks: TensorRanks) -> tuple[torch.Size, torch.Size]:
        part = torch.ones(2, WORDS // 2 + (ranks.rank == 0))
        with reading_loss_alone():
            kept = whole_output(part, 1, WORDS)
        return kept.shape, whole_output(part, 1, WORDS).shape

    assert in_threads(2, work) == [((2, 4), (2, WORDS)), ((2, 3), (2, WORDS))]


@pytest.mark.parametrize("word", [-1, WORDS])
def test_a_word_that_no_rank_has_is_an_error_as_in_the_plain_layers(word: int) -> None:
    words = torch.tensor([0, word])
    with pytest.raises(RuntimeError, match="an embedding is not among its 7 rows"):
        in_threads(2, lambda _: VocabEmbedding(WORDS, WIDTH)(words))
    with pytest.raises(RuntimeError, match="a loss is not among its 7 rows"):
        in_threads(
            2, lambda r: split_cross_entropy(torch.ones(2, 4 - r.rank), words, classes=WORDS)
        )
