"""Parameters of an optimizer: hidden matrices for Muon and SOAP, and several optimizers as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..plan.plan import Plan

APART = "apart"
"""The option of a parameter group that may have another learning rate than the rest of its stage:
the name of the shared parameter in it, or `NOT_HIDDEN`."""
NOT_HIDDEN = "not hidden"
"""The groups of AdamW under an optimizer of hidden matrices."""


def hidden_matrices(plan: Plan, index: int, stage: nn.Module) -> list[nn.Parameter]:
    """The two-dimensional parameters of stage `index` that are real and belong neither to an
    embedding, nor to the output layer, nor to another stage too.

    Muon and SOAP treat a gradient as a linear map, which suits hidden layers; embeddings, the
    output layer, norms and biases are AdamW's (Jordan, "Muon", 2024; Vyas et al., "SOAP", ICLR
    2025, section 6; Jung et al., arXiv 2602.03515). The output layer is the last matrix of the last
    stage that has parameters. A parameter of several stages is usually an embedding tied to the
    output, and all of them must step it alike.
    """
    outside = {
        id(parameter)
        for module in stage.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }
    parameters = dict(stage.named_parameters(remove_duplicate=False))
    outside |= {
        id(parameters[name])
        for shared in plan.shared
        if len(shared.stages) > 1
        for holder, name in shared.holders
        if holder == index
    }
    matrices = [
        parameter
        for parameter in parameters.values()
        if parameter.ndim == 2 and not parameter.is_complex()
    ]
    if matrices and index == max(spec.index for spec in plan.stages if spec.parameters):
        outside.add(id(matrices[-1]))
    by_identity = {id(matrix): matrix for matrix in matrices}
    return [matrix for identity, matrix in by_identity.items() if identity not in outside]


class Joint(Optimizer):
    """Steps the optimizers `parts` one after the other. Its `param_groups` are theirs in order, and
    its `state` holds theirs: the same objects, so that a learning rate set here is the part's, and
    a state dict is complete."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch ends the loading of a state dict here too, with new groups and states.
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every part."""
        for part in self.parts:
            part.step()
