"""A stage's parameters + Settings -> its optimizer, and the learning rate of a step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon, NAdam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..optimizers.joint import Joint
from ..optimizers.soap import Soap
from ..optimizers.sutskever import Sutskever
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
    without parameters steps too, and does nothing. `hidden` and `refresh_every` are as for
    `make_optimizer`.
    """

    def __init__(
        self,
        stage: nn.Module,
        settings: Settings,
        *,
        hidden: Sequence[Tensor] = (),
        refresh_every: int | None = None,
    ) -> None:
        trainable = [parameter for parameter in stage.parameters() if parameter.requires_grad]
        self._settings = settings
        self.optimizer = (
            make_optimizer(trainable, settings, hidden=hidden, refresh_every=refresh_every)
            if trainable
            else None
        )
        if self.optimizer is not None:
            self._scheduler = LambdaLR(self.optimizer, self._factor)

    def _factor(self, step: int) -> float:
        return lr_factor(
            step,
            steps=self._settings.steps,
            warmup=self._settings.warmup or 0,
            decay=self._settings.decay or "none",
            final_ratio=self._settings.final_lr_ratio or 0.0,
        )

    def future_lr(self, steps: int) -> tuple[float, ...]:
        """What the base learning rate is multiplied by in each of the next `steps` optimizer
        steps, the coming one first; none of a stage without parameters."""
        if self.optimizer is None:
            return ()
        done = self._scheduler.last_epoch
        return tuple(self._factor(done + ahead) for ahead in range(steps))

    @property
    def annealing_steps(self) -> int:
        """The steps over which `pipemare-rate` comes back to the scheduled learning rate."""
        return self._settings.annealing_steps or 1

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """What the optimizer keeps of a parameter from step to step."""
        state = self.optimizer.state.get(parameter, {}) if self.optimizer is not None else {}
        return {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def load(self, states: Mapping[Tensor, Mapping[str, Tensor]], steps: int) -> None:
        """Goes on after so many steps, from what `state_of` gave of each parameter.

        torch's `load_state_dict` would cast all that is kept to the dtype of the weights.
        """
        if self.optimizer is None:
            return
        self._scheduler.last_epoch = steps
        for group, base_lr in zip(
            self.optimizer.param_groups, self._scheduler.base_lrs, strict=True
        ):
            group["lr"] = base_lr * self._factor(steps)
            counts_there = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                if state := states.get(parameter):
                    self.optimizer.state[parameter] = {
                        # Numbers, such as the count of steps, stay with the processor.
                        key: value.to(parameter.device if value.ndim or counts_there else "cpu")
                        for key, value in state.items()
                    }

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


def make_optimizer(
    parameters: Iterable[Tensor],
    settings: Settings,
    *,
    hidden: Sequence[Tensor] = (),
    refresh_every: int | None = None,
) -> Optimizer:
    """The optimizer of that name, with weight decay for matrices and without for vectors.

    Of Muon and SOAP the `hidden` matrices are stepped so, everything else by AdamW. `refresh_every`
    is in steps, by default that of the settings.
    """
    given = list(parameters)
    if settings.optimizer not in ("muon", "soap"):
        return _plain(given, settings, str(settings.optimizer))
    own = {id(matrix) for matrix in hidden}
    matrices = [parameter for parameter in given if id(parameter) in own]
    others = [parameter for parameter in given if id(parameter) not in own]
    parts = []
    if matrices and settings.optimizer == "muon":
        parts.append(
            uncompiled(Muon)(
                matrices,
                lr=float(settings.lr or 0.0),
                momentum=settings.momentum or 0.0,
                weight_decay=settings.weight_decay or 0.0,
                # Steps as large as AdamW's, so that one learning rate is right for both.
                adjust_lr_fn="match_rms_adamw",
            )
        )
    elif matrices:
        parts.append(
            uncompiled(Soap)(
                matrices,
                lr=float(settings.lr or 0.0),
                betas=settings.betas,
                weight_decay=settings.weight_decay or 0.0,
                refresh_every=refresh_every or settings.refresh_every or 10,
            )
        )
    if others:
        parts.append(_plain(others, settings, "adamw"))
    return parts[0] if len(parts) == 1 else uncompiled(Joint)(parts)


def _plain(parameters: Sequence[Tensor], settings: Settings, name: str) -> Optimizer:
    """An optimizer of all parameters alike but for the weight decay."""
    groups: list[dict[str, Any]] = [
        {
            "params": [parameter for parameter in parameters if parameter.ndim >= 2],
            "weight_decay": settings.weight_decay or 0.0,
        },
        {
            "params": [parameter for parameter in parameters if parameter.ndim < 2],
            "weight_decay": 0.0,
        },
    ]
    groups = [group for group in groups if group["params"]]
    lr = float(settings.lr or 0.0)
    if name in ("sgd", "sutskever"):
        # Fused SGD fails when a parameter has its first gradient later than others, as a tied
        # one has in an asynchronous run.
        kind = SGD if name == "sgd" else Sutskever
        return uncompiled(kind)(groups, lr=lr, momentum=settings.momentum or 0.0)
    if name == "nadam":
        return uncompiled(NAdam)(groups, lr=lr, betas=settings.betas, decoupled_weight_decay=True)
    fused = all(_can_fuse(parameter) for parameter in parameters)
    return uncompiled(AdamW if name == "adamw" else Adam)(
        groups, lr=lr, betas=settings.betas, fused=fused
    )


def _can_fuse(parameter: Tensor) -> bool:
    return parameter.device.type in ("cpu", "cuda") and torch.is_floating_point(parameter)
