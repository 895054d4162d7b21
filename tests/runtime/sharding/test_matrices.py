"""Split weights that an optimizer steps as wholes, each on one of the tensor ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.runtime.optimizers.param_groups import hidden_matrices
from asyncpipe.runtime.sharding.matrices import share_out_matrices
from asyncpipe.runtime.sharding.shards import WHOLE
from asyncpipe.runtime.tensor_parallel import ColumnLinear, RowLinear, TensorRanks, splits_of
from asyncpipe.runtime.tensor_parallel.functions import gathered
from asyncpipe.runtime.tensor_parallel.threads import in_threads
from asyncpipe.runtime.training.stage_optimizer import StageOptimizer
from asyncpipe.tests.support.models.plans import plan_by_hand, stage_by_hand
from asyncpipe.tests.support.run_configs import run_config

STEPS = 4


class Net(nn.Module):
    """Split weights of which some ranks have one more row, and whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnLinear(4, 18, groups=3)
        self.down = RowLinear(18, 5)
        self.words = ColumnLinear(5, 7, uneven=True)
        self.head = nn.Linear(7, 2)


def trained(optimizer: str, ranks: TensorRanks) -> tuple[dict[str, Tensor], set[str]]:
    """The whole weights after some steps by given gradients, and the weights whose optimizer state
    this rank has."""
    torch.manual_seed(3)
    net, generator = Net(), torch.Generator().manual_seed(5)
    splits = splits_of(net) if ranks.size > 1 else {}
    parameters = dict(net.named_parameters())
    shapes = {
        name: splits[name].whole_shape(each.shape, ranks.size) if name in splits else each.shape
        for name, each in parameters.items()
    }

    def own(name: str) -> Tensor:
        whole = torch.randn(shapes[name], generator=generator)
        return splits[name].part(whole, ranks.rank, ranks.size) if name in splits else whole

    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(own(name))
    stage = stage_by_hand(0, inputs=("x",), outputs=("y",), parameters=tuple(parameters))
    facts = {"sizes": {}, "inputs": (), "values": (), "outputs": "y", "loss": None}
    plan = plan_by_hand("net", stages=(stage,), state_keys=(), **facts)
    config = run_config(optimizer=optimizer, lr=0.1, weight_decay=0.25, momentum=0.9)
    owned = share_out_matrices(plan, {0: net}, config, ranks, {0: WHOLE})[0]
    hidden = hidden_matrices(plan, 0, net)
    steps = StageOptimizer(net, config, hidden=hidden, matrices=owned)
    for _ in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = own(name)
        steps.step()
    has_state = {name for name, each in parameters.items() if steps.state_of(each)}
    wholes = {
        name: gathered(each.detach(), shapes[name], splits[name], ranks)
        if name in splits
        else each.detach()
        for name, each in parameters.items()
    }
    return wholes, has_state


@pytest.mark.parametrize("optimizer", ["muon", "soap", "adafactor"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_matrices_have_the_bits_of_one_rank(optimizer: str, ranks: int) -> None:
    plain, names = trained(optimizer, TensorRanks())
    results = in_threads(ranks, lambda own: trained(optimizer, own))
    for weights, _ in results:
        assert all(weights[name].equal(plain[name]) for name in plain if plain[name].dim() > 1)
        # AdamW steps parts of vectors, which processors may round as the ends of longer ones.
        assert all(torch.allclose(weights[name], plain[name], rtol=1e-5) for name in plain)
    assert set.union(*(has_state for _, has_state in results)) == names
