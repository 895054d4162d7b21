"""Split weights that the optimizer steps as wholes -> their owners among the tensor ranks.

Muon and SOAP step products of a whole matrix, and Adafactor means over its rows and columns. So
each such weight has an owner among the tensor ranks of its stage, which alone has the optimizer's
state of it. Before a step the ranks put together their parts of the weight and of its gradient; the
owner steps the whole, and all take their parts of the result. Between steps nothing is whole but
the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..config.settings import RunConfig
from ..optimizers.facts import facts_of
from ..optimizers.param_groups import hidden_matrices
from ..plan.plan import Plan
from ..tensor_parallel.functions import gathered
from ..tensor_parallel.ranks import ONE_RANK, TensorRanks, split_of, whole_shape
from .owners import owners_of, state_numbers
from .shards import Shards


@dataclass(frozen=True, eq=False)
class WholeMatrices:
    """The weights of a stage that are stepped as wholes.

    owners: the tensor rank that owns each of them.
    own: what this rank steps in the place of those that it owns; empty between steps.
    ranks: the tensor ranks.
    """

    owners: Mapping[Tensor, int] = field(default_factory=dict)
    own: Mapping[Tensor, nn.Parameter] = field(default_factory=dict)
    ranks: TensorRanks = ONE_RANK

    def stepped(self, parameter: Tensor) -> Tensor | None:
        """The tensor that this rank's optimizer steps for a parameter; None on other tensor
        ranks."""
        return self.own.get(parameter) if parameter in self.owners else parameter

    def steps(self, parameter: Tensor) -> bool:
        """True if this rank's optimizer steps a parameter, or the matrix that stands for it."""
        return self.stepped(parameter) is not None

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within it, what this rank steps has the whole weights and gradients; after it, all ranks
        have their parts of the new weights. Collective among the tensor ranks."""
        given = [parameter for parameter in self.owners if parameter.grad is not None]
        for parameter in given:
            weight, gradient = self._whole(parameter, parameter), self._whole(parameter)
            if (own := self.own.get(parameter)) is not None:
                own.data, own.grad = weight, gradient
        yield
        for parameter in given:
            own = self.own.get(parameter)
            self._take_part(parameter, own)
            if own is not None:
                own.data, own.grad = _nothing_like(own), None

    def _whole(self, parameter: Tensor, part: Tensor | None = None) -> Tensor:
        split, part = split_of(parameter), parameter.grad if part is None else part
        assert split is not None and part is not None
        shape = whole_shape(parameter, self.ranks.size)
        return gathered(part.detach(), shape, split, self.ranks)

    @torch.no_grad()
    def _take_part(self, parameter: Tensor, own: Tensor | None) -> None:
        split, ranks = split_of(parameter), self.ranks
        assert split is not None
        if own is None:
            own = parameter.new_empty(()).expand(whole_shape(parameter, ranks.size))
        whole = ranks.broadcast(own, self.owners[parameter])
        parameter.copy_(split.part(whole, ranks.rank, ranks.size))


NO_MATRICES = WholeMatrices()
"""A stage whose weights are stepped number by number, or by ranks that have them whole."""


def share_out_matrices(
    plan: Plan,
    modules: Mapping[int, nn.Module],
    config: RunConfig,
    ranks: TensorRanks,
    shards: Mapping[int, Shards],
) -> dict[int, WholeMatrices]:
    """The weights of each stage that the optimizer of the options steps as wholes, of those that
    this replica steps; the same owners on all tensor ranks."""
    facts = facts_of(config.optimizer)
    if ranks.size == 1 or facts.elementwise:
        return dict.fromkeys(modules, NO_MATRICES)
    found: list[tuple[int, nn.Parameter, int]] = []
    for stage, module in modules.items():
        hidden = {id(matrix) for matrix in hidden_matrices(plan, stage, module)}
        for each in module.parameters():
            is_whole = id(each) in hidden if facts.hidden_matrices_only else True
            if each.requires_grad and split_of(each) and is_whole and shards[stage].owns(each):
                shape = whole_shape(each, ranks.size)
                size = state_numbers(config.optimizer, shape, is_hidden=True)
                found.append((stage, each, max(shape.numel(), size)))
    owners = owners_of([size for *_, size in found], ranks.size)
    of_stage: dict[int, dict[Tensor, int]] = {stage: {} for stage in modules}
    for (stage, parameter, _), owner in zip(found, owners, strict=True):
        of_stage[stage][parameter] = owner
    return {
        stage: WholeMatrices(owned, _stand_ins(owned, ranks), ranks)
        for stage, owned in of_stage.items()
    }


def _stand_ins(owners: Mapping[Tensor, int], ranks: TensorRanks) -> dict[Tensor, nn.Parameter]:
    return {
        parameter: nn.Parameter(_nothing_like(parameter))
        for parameter, owner in owners.items()
        if owner == ranks.rank
    }


def _nothing_like(tensor: Tensor) -> Tensor:
    """No numbers, in as many dimensions."""
    return tensor.detach().new_empty((0,) * tensor.dim())
