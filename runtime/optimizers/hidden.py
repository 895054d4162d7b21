"""A stage -> its hidden matrices: those that map activations to activations within the model.

Muon and SOAP treat a gradient as a linear map. That is for hidden layers; embeddings, the layer
that makes the model's output, norms and biases are AdamW's (Jordan, "Muon", 2024; Vyas et al.,
"SOAP", ICLR 2025, section 6; Jung et al., arXiv 2602.03515).
"""

from __future__ import annotations

from torch import nn

from ..plan import Plan


def hidden_matrices(plan: Plan, index: int, stage: nn.Module) -> list[nn.Parameter]:
    """The two-dimensional parameters of stage `index` that are neither an embedding's, nor the
    output layer's, nor held by another stage too.

    The output layer is the last matrix of the last stage that has parameters. What several stages
    hold is mostly an embedding tied to the output, and all of them have to step it alike, whatever
    it is to each.
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
    matrices = [parameter for parameter in parameters.values() if parameter.ndim == 2]
    if matrices and index == max(spec.index for spec in plan.stages if spec.parameters):
        outside.add(id(matrices[-1]))
    by_identity = {id(matrix): matrix for matrix in matrices}
    return [matrix for found, matrix in by_identity.items() if found not in outside]
