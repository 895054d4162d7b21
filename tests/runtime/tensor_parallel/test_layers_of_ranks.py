"""Split layers on t ranks compute what the plain layers do: outputs, gradients, dropout."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.runtime.errors import PlanError
from asyncpipe.runtime.tensor_parallel import (
    ColumnLinear,
    RowLinear,
    Split,
    SplitDropout,
    TensorRanks,
    VocabEmbedding,
    local,
    on_one_rank,
    parallel_input,
    part_of,
    shared_module,
    split_module,
    split_parameter,
    splits_of,
    sum_over_ranks,
    whole_of,
)
from asyncpipe.runtime.tensor_parallel.ranks import Groups
from asyncpipe.runtime.tensor_parallel.threads import in_threads


class Mlp(nn.Module):
    """Split products with a batch norm and dropout of split channels between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnLinear(8, 12, groups=3)
        self.norm = split_module(nn.BatchNorm1d(12), groups=3)
        self.dropout = SplitDropout(0.5, 1, groups=3)
        self.down = RowLinear(12, 8, groups=3)
        self.weight = split_parameter(torch.empty(8, 6), dim=1, groups=(4, 2))
        self.back = split_parameter(torch.empty(6, 8), dim=0, groups=(4, 2))
        self.bias = nn.Parameter(torch.empty(8))

    def forward(self, x: Tensor) -> Tensor:
        x = parallel_input(x)
        x = self.down(self.dropout(self.norm(self.up(x)).tanh()))
        x = (parallel_input(x) @ self.weight).view(-1, local(6)).relu()
        return sum_over_ranks(torch.addmm(on_one_rank(self.bias), x, self.back))


class Positions(nn.Module):
    """Products whose ranks have parts of the positions in between, and of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = ColumnLinear(2, 12), RowLinear(12, 2, sequence=1)
        self.norm, self.dropout = shared_module(nn.LayerNorm(2)), SplitDropout(0.5, 1)
        self.words = VocabEmbedding(7, 2, sequence=1)
        self.weight = split_parameter(torch.empty(2, 6), dim=1)
        self.back = split_parameter(torch.empty(6, 2), dim=0)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(16).view(4, 4) % 7
        x = part_of(x.view(4, 4, 2), 1) + self.words(places)
        x = x + self.dropout(self.down(self.up(parallel_input(x, sequence=1)).tanh()))
        x = parallel_input(self.norm(x), sequence=1).tanh() @ self.weight
        return whole_of(sum_over_ranks(x @ self.back, sequence=1), dim=1).view(4, 8)


@cache
def state(kind: type[nn.Module]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in kind().state_dict().items()
    }


def trained(
    kind: type[nn.Module], ranks: TensorRanks
) -> tuple[dict[str, Split], dict[str, Tensor]]:
    """The splits; output, gradients of parameters and input."""
    module = kind()
    splits = splits_of(module)
    module.double()
    parts = {
        name: splits[name].part(tensor, ranks.rank, ranks.size) if name in splits else tensor
        for name, tensor in state(kind).items()
    }
    module.load_state_dict(parts)
    torch.manual_seed(1)  # as the initial weights of parts draw fewer numbers
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8).requires_grad_()
    output = module(x)
    (output * torch.linspace(0, 1, 32, dtype=torch.float64).view(4, 8)).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return splits, {"output": output.detach(), "x": x.grad, **gradients}


@pytest.mark.parametrize(("kind", "size"), [(Mlp, 2), (Positions, 2)])
def test_outputs_and_gradients_of_split_layers_equal_those_of_the_plain_ones(
    kind: type[nn.Module], size: int
) -> None:
    state(kind)
    _, plain = in_threads(1, partial(trained, kind))[0]
    results = in_threads(size, partial(trained, kind))
    for name, expected in plain.items():
        splits, parts = results[0][0], [found[name] for _, found in results]
        whole = splits[name].whole(parts) if name in splits else parts[0]
        torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)
        if name not in splits:
            assert all(part.equal(parts[0]) for part in parts)


@pytest.mark.parametrize("groups", [1, 3, (6, 4, 2)])
def test_parts_of_a_tensor_make_the_whole_again(groups: Groups) -> None:
    whole, split = torch.arange(24).view(2, 12), Split(1, groups)
    parts = [split.part(whole, rank, 2) for rank in range(2)]
    assert split.whole(parts).equal(whole)
    assert [part.shape for part in parts] == [(2, 6)] * 2


def test_a_size_that_the_ranks_do_not_divide_is_refused_with_both_numbers() -> None:
    with pytest.raises(PlanError, match=r"7 cannot be divided over 2 tensor ranks"):
        in_threads(2, lambda _: local(7))


def test_positions_that_the_ranks_do_not_divide_are_refused_with_both_numbers() -> None:
    with pytest.raises(PlanError, match=r"5 positions cannot be divided over 2 tensor ranks"):
        in_threads(2, lambda _: sum_over_ranks(torch.ones(3, 5, 4), sequence=1))


def test_blocks_that_make_another_length_are_refused_with_both_numbers() -> None:
    with pytest.raises(PlanError, match=r"blocks of 6, 4 and 2 make 12, not 16"):
        in_threads(2, lambda _: ColumnLinear(8, 16, groups=(6, 4, 2)))


def test_an_error_in_one_rank_ends_the_others() -> None:
    def work(ranks: TensorRanks) -> Tensor:
        if ranks.rank == 1:
            raise ValueError("rank 1 fails")
        return sum_over_ranks(torch.ones(2))

    with pytest.raises(ValueError, match="rank 1 fails"):
        in_threads(2, work)


def test_a_rank_that_sums_less_than_the_others_is_an_error() -> None:
    def work(ranks: TensorRanks) -> Tensor:
        return torch.ones(2) if ranks.rank == 1 else sum_over_ranks(torch.ones(2))

    with pytest.raises(RuntimeError, match="tensor rank 1 ends where another one exchanges"):
        in_threads(2, work)
