"""The scale of the loss under float16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

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
        self._found_inf: Tensor | None = None
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
        if self._found_inf is None:
            self._found_inf = torch.zeros(1, device=device)
        inverse = self._scale.double().reciprocal().float().to(device)
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), self._found_inf, inverse)

    def overflowed(self) -> bool:
        """True if this rank found an overflow since the last `update`."""
        return self._found_inf is not None and bool(self._found_inf)

    def update(self, *, overflowed: bool) -> None:
        """Ends a step, with the result of all ranks."""
        found_inf = torch.full((1,), float(overflowed))
        torch._amp_update_scale_(
            self._scale, self._steps_since_change, found_inf, GROWTH, BACKOFF, self._interval
        )
        self._found_inf = None
        self.value = float(self._scale)
        self.skipped += overflowed
