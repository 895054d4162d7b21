"""Losses, gradient norms and loss scales of a run -> the sentence that ends it when they fail."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..errors import AsyncPipeError
from .settings import Settings


class LossError(AsyncPipeError):
    """A loss or a gradient that is no number any more."""


class Finite:
    """Looks at each step's numbers, and remembers the last good ones.

    `loss` is the last one. Every check raises LossError.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._norm = ""
        self._step = 0
        self.loss = math.nan

    def check_loss(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            last = f" (it was {self.loss:.3f} at step {self._step}{self._norm})"
            raise LossError(
                f"the loss is {loss} at step {step}{last if self._step else ''}. Stopped.",
                self._cure,
            )
        self.loss, self._step = loss, step

    def check_norm(self, step: int, norm: float, by_stage: Mapping[int, float]) -> None:
        """`norm` is that of all gradients in question, `by_stage` tells the stages to blame."""
        if not math.isfinite(norm):
            wrong = [str(stage) for stage, own in by_stage.items() if not math.isfinite(own)]
            stages = f"stage{'s' if len(wrong) > 1 else ''} {', '.join(wrong)}"
            raise LossError(
                f"the gradient norm of {stages} is {norm} at step {step}, where the loss is "
                f"{self.loss:.3f}. Stopped before the weights changed.",
                self._cure,
            )
        self._norm = f", the gradient norm {norm:.2g} before"

    def note_norm(self, step: int, norm: float) -> None:
        """The norm of the gradients of this rank's stages, where nothing is clipped by it."""
        self._norm = f", the gradient norm of this rank's stages {norm:.2g} at step {step}"

    def check_scale(self, step: int, scale: float) -> None:
        if scale < 1:
            raise LossError(
                f"gradients overflow in float16 at step {step}, though the loss scale went down to "
                "1. Stopped.",
                "--precision bfloat16",
            )

    @property
    def _cure(self) -> str:
        lr = self._settings.lr or 0.0
        other = "--precision bfloat16, or " if self._settings.is_scaled else ""
        clip = "" if self._settings.clip else ", or --clip 1"
        start = ", or --sync-start 5%" if self._settings.is_async else ""
        return f"{other}--lr {lr / 3:.1g} instead of {lr:.1g}, or a longer --warmup{clip}{start}."
