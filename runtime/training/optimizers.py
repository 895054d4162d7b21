"""A stage's parameters + Settings -> its optimizer from torch, and the learning rate of a step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .settings import Settings
from .uncompiled import uncompiled


def lr_factor(
    step: int, *, steps: int, warmup: int = 0, decay: str = "none", final_ratio: float = 0.0
) -> float:
    """What the learning rate is multiplied by at `step`, counted from 0.

    It rises over `warmup` steps, then falls to `final_ratio` at `steps` in a line or half a
    cosine, or stays.

    >>> [round(lr_factor(s, steps=10, warmup=2, decay="linear"), 3) for s in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    if decay == "linear":
        return 1 + (final_ratio - 1) * done
    if decay == "cosine":
        return final_ratio + (1 - final_ratio) * (1 + math.cos(math.pi * done)) / 2
    return 1.0


class StageOptimizer:
    """The optimizer and the learning-rate schedule of one stage, stepped together.

    Weight decay is for matrices: not for biases, scales of norms and other vectors. A stage
    without parameters steps too, and does nothing.
    """

    def __init__(self, stage: nn.Module, settings: Settings) -> None:
        trainable = [parameter for parameter in stage.parameters() if parameter.requires_grad]
        self._lr = float(settings.lr or 0.0)
        self.optimizer = make_optimizer(trainable, settings) if trainable else None
        if self.optimizer is not None:
            self._scheduler = LambdaLR(
                self.optimizer,
                lambda step: lr_factor(
                    step,
                    steps=settings.steps,
                    warmup=settings.warmup or 0,
                    decay=settings.decay or "none",
                    final_ratio=settings.final_lr_ratio or 0.0,
                ),
            )

    def step(self, lr_scale: float = 1.0) -> None:
        """One optimizer step, at the scheduled learning rate times `lr_scale`."""
        if self.optimizer is None:
            return
        groups = self.optimizer.param_groups
        scheduled = [group["lr"] for group in groups]
        if lr_scale != 1.0:
            for group, lr in zip(groups, scheduled, strict=True):
                group["lr"] = lr * lr_scale
        self.optimizer.step()
        for group, lr in zip(groups, scheduled, strict=True):
            group["lr"] = lr
        self._scheduler.step()

    def skip(self) -> None:
        """Leaves a step out; the learning rate goes on, as in a loop that steps its scheduler."""
        if self.optimizer is None:
            return
        with warnings.catch_warnings():
            # Of a scheduler that steps before the optimizer ever did.
            warnings.simplefilter("ignore", UserWarning)
            self._scheduler.step()


def make_optimizer(parameters: Iterable[Tensor], settings: Settings) -> Optimizer:
    """SGD, Adam or AdamW over two groups: matrices with weight decay, vectors without."""
    given = list(parameters)
    groups: list[dict[str, Any]] = [
        {
            "params": [parameter for parameter in given if parameter.ndim >= 2],
            "weight_decay": settings.weight_decay or 0.0,
        },
        {"params": [parameter for parameter in given if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    lr = float(settings.lr or 0.0)
    if settings.optimizer == "sgd":
        # Fused SGD fails when a parameter has its first gradient later than others, as a tied
        # one has in an asynchronous run.
        return uncompiled(SGD)(groups, lr=lr, momentum=settings.momentum or 0.0)
    fused = all(_can_fuse(parameter) for parameter in given)
    kind = AdamW if settings.optimizer == "adamw" else Adam
    return uncompiled(kind)(groups, lr=lr, betas=settings.betas, fused=fused)


def _can_fuse(parameter: Tensor) -> bool:
    return parameter.device.type in ("cpu", "cuda") and torch.is_floating_point(parameter)
