"""Parameters of an optimizer: hidden matrices for Muon and SOAP, several optimizers as one, loss
scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..plan.plan import Plan


def hidden_matrices(plan: Plan, index: int, stage: nn.Module) -> list[nn.Parameter]:
    """The two-dimensional parameters of stage `index` that belong neither to an embedding, nor to
    the output layer, nor to another stage too.

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
    matrices = [parameter for parameter in parameters.values() if parameter.ndim == 2]
    if matrices and index == max(spec.index for spec in plan.stages if spec.parameters):
        outside.add(id(matrices[-1]))
    by_identity = {id(matrix): matrix for matrix in matrices}
    return [matrix for found, matrix in by_identity.items() if found not in outside]


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


INITIAL = 2.0**16
GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000


class LossScale:
    """The scale of a float16 run's loss, and whether this step's gradients overflowed on this rank.

    In float16 small gradients would be zero, so the loss is multiplied by a scale for the backward,
    and the gradients are divided by it in float32. If one is NaN or inf the step is skipped and the
    scale halved; after 2000 steps without, it is doubled. Micikevicius et al., "Mixed Precision
    Training" (2018), section 3.2; the numbers and the kernels are those of torch.amp.GradScaler.
    GradScaler itself looks for overflows optimizer by optimizer. Here the stages of all ranks step
    together or not at all, so all of them learn of an overflow before the scale changes, and the
    scale is the same everywhere.
    """

    def __init__(self, initial: float = INITIAL, *, interval: int = INTERVAL) -> None:
        self._scale = torch.tensor([initial], dtype=torch.float32)
        self._steps_since_change = torch.zeros(1, dtype=torch.int32)
        self._interval = interval
        self._found: Tensor | None = None
        self.value = initial
        """The scale of the current step."""
        self.skipped = 0
        """The number of skipped steps."""

    def state(self) -> dict[str, float]:
        """The state that determines the scale of the next steps."""
        since = int(self._steps_since_change)
        return {"scale": self.value, "steps_since_change": since, "skipped": self.skipped}

    def load(self, state: Mapping[str, float]) -> None:
        """Restores a `state`."""
        self.value = float(state["scale"])
        self._scale.fill_(self.value)
        self._steps_since_change.fill_(int(state["steps_since_change"]))
        self.skipped = int(state["skipped"])

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divides gradients by the scale, and detects those that are NaN or inf."""
        if not gradients:
            return
        device = gradients[0].device
        if self._found is None:
            self._found = torch.zeros(1, device=device)
        inverse = self._scale.double().reciprocal().float().to(device)
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), self._found, inverse)

    def overflowed(self) -> bool:
        """True if this rank found an overflow since the last `update`."""
        return self._found is not None and bool(self._found)

    def update(self, *, overflowed: bool) -> None:
        """Ends a step, with the result of all ranks."""
        found = torch.full((1,), float(overflowed))
        torch._amp_update_scale_(
            self._scale, self._steps_since_change, found, GROWTH, BACKOFF, self._interval
        )
        self._found = None
        self.value = float(self._scale)
        self.skipped += overflowed
