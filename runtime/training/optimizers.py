"""A stage's parameters + Settings -> its optimizer, and the learning rate of a step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    without parameters steps too, and does nothing. `hidden`, `shared` and `refresh_every` are as
    for `make_optimizer`. `clip_factor` is that of `Steps`; without it nothing is clipped.
    """

    def __init__(
        self,
        stage: nn.Module,
        settings: Settings,
        *,
        hidden: Sequence[Tensor] = (),
        shared: Mapping[str, Tensor] | None = None,
        refresh_every: int | None = None,
        clip_factor: Callable[[Sequence[Tensor], float], float] | None = None,
    ) -> None:
        trainable = [parameter for parameter in stage.parameters() if parameter.requires_grad]
        self._settings = settings
        self._clip_factor = clip_factor
        self.optimizer = (
            make_optimizer(
                trainable, settings, hidden=hidden, shared=shared, refresh_every=refresh_every
            )
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

    def clip_factor(self, gradients: Sequence[Tensor], scale: float) -> float:
        """The factor by which the coming step would clip gradients that are `scale` times these."""
        return 1.0 if self._clip_factor is None else self._clip_factor(gradients, scale)

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """What the optimizer keeps of a parameter from step to step."""
        state = self.optimizer.state.get(parameter, {}) if self.optimizer is not None else {}
        return {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def load(self, states: Mapping[Tensor, Mapping[str, Tensor]], steps: int) -> None:
        """Goes on after so many steps, from what `state_of` gave of each parameter; what is of
        another optimizer is left.

        torch's `load_state_dict` would cast the numbers too to the dtype of the weights.
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
                state = states.get(parameter, {})
                if state.keys() >= _kept_by(self.optimizer, group):
                    self.optimizer.state[parameter] = {
                        key: value.to(parameter.device if counts_there else "cpu", copy=True)
                        if key in _NUMBERS
                        else value.to(parameter.device, parameter.dtype, copy=True)
                        for key, value in state.items()
                    }

    def step(self, lr_scale: float = 1.0, shared: Mapping[str, float] | None = None) -> None:
        """One optimizer step, at the scheduled learning rate times `lr_scale`, or for a shared
        parameter times what `shared` has."""
        if self.optimizer is None:
            return
        groups = self.optimizer.param_groups
        scheduled = [group["lr"] for group in groups]
        for group, lr in zip(groups, scheduled, strict=True):
            scale = (shared or {}).get(group.get("shared", ""), lr_scale)
            if scale != 1.0:
                group["lr"] = lr * scale
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


_NUMBERS = ("step", "mu_product")
"""What optimizers keep that is not as large as the weights."""


def _kept_by(optimizer: Optimizer, group: Mapping[str, Any]) -> set[str]:
    """What the optimizer keeps of every parameter of a group that it has stepped."""
    parts = optimizer.parts if isinstance(optimizer, Joint) else (optimizer,)
    (part,) = (part for part in parts if any(each is group for each in part.param_groups))
    if isinstance(part, SGD | Sutskever | Muon):
        return {"momentum_buffer"}
    of_nadam = {"mu_product"} if isinstance(part, NAdam) else set[str]()
    return {"step", "exp_avg", "exp_avg_sq"} | of_nadam


def make_optimizer(
    parameters: Iterable[Tensor],
    settings: Settings,
    *,
    hidden: Sequence[Tensor] = (),
    shared: Mapping[str, Tensor] | None = None,
    refresh_every: int | None = None,
) -> Optimizer:
    """The optimizer of that name, with weight decay for matrices and without for vectors.

    Of Muon and SOAP the `hidden` matrices are stepped so, everything else by AdamW. Each of the
    `shared`, by name, has a group of its own, whose option `shared` is that name. `refresh_every`
    is in steps, by default that of the settings.
    """
    given, apart = list(parameters), shared or {}
    if settings.optimizer not in ("muon", "soap"):
        return _plain(given, settings, str(settings.optimizer), apart)
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
        parts.append(_plain(others, settings, "adamw", apart))
    return parts[0] if len(parts) == 1 else uncompiled(Joint)(parts)


def _plain(
    parameters: Sequence[Tensor], settings: Settings, name: str, shared: Mapping[str, Tensor]
) -> Optimizer:
    """An optimizer of all parameters alike but for the weight decay."""
    name_of = {id(parameter): own for own, parameter in shared.items()}
    own = [parameter for parameter in parameters if id(parameter) not in name_of]
    decay = settings.weight_decay or 0.0
    groups: list[dict[str, Any]] = [
        {"params": [each for each in own if each.ndim >= 2], "weight_decay": decay},
        {"params": [each for each in own if each.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    groups += [
        {
            "params": [parameter],
            "weight_decay": decay if parameter.ndim >= 2 else 0.0,
            "shared": name_of[id(parameter)],
        }
        for parameter in parameters
        if id(parameter) in name_of
    ]
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
