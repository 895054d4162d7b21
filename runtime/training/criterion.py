"""A criterion's name -> the function that turns a model's outputs and a target into a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..errors import DataError
from ..seeding import import_seeded
from ..user_code import names_object
from .settings import SettingsError

Criterion = Callable[[Any, Tensor], Tensor]


def cross_entropy(outputs: Any, target: Tensor) -> Tensor:
    """The mean over all targets; logits `f32[..., classes]`, target `i64[...]`.

    Raises DataError for targets that are not one for each row of logits.
    """
    logits = logits_of(outputs)
    rows = logits.flatten(0, -2) if logits.ndim > 1 else logits[None]
    if len(rows) != target.numel():
        raise DataError(
            f"cross_entropy takes the last dimension as the classes, so logits of shape "
            f"{tuple(logits.shape)} are {len(rows)} rows of {rows.shape[1]} classes, but the "
            f"targets of shape {tuple(target.shape)} are {target.numel()}.",
            "Let the model return its classes last, for example logits.movedim(1, -1), or give "
            "--criterion my_file.py:function, which may call torch's cross_entropy.",
        )
    return F.cross_entropy(rows, target.flatten())


def mse(outputs: Any, target: Tensor) -> Tensor:
    """The mean squared difference; both of one shape."""
    return F.mse_loss(logits_of(outputs), target)


def logits_of(outputs: Any) -> Tensor:
    """The one tensor of an output structure that a criterion judges."""
    if isinstance(outputs, Mapping):
        outputs = outputs["logits"] if "logits" in outputs else tuple(outputs.values())
    if isinstance(outputs, Tensor):
        return outputs
    return next(item for item in outputs if isinstance(item, Tensor))


CRITERIA: Mapping[str, Criterion] = {"cross_entropy": cross_entropy, "mse": mse}


def check_name(name: str) -> None:
    """Raises SettingsError for a name that is neither a built-in criterion's nor of the user's own
    code, which is not run."""
    if name not in CRITERIA and not names_object(name):
        raise SettingsError(
            f"--criterion {name} is not known.", f"{', '.join(CRITERIA)}, or my_file.py:function"
        )


def find_criterion(name: str, seed: int) -> Criterion:
    """A built-in criterion, or the user's own `module:function` of (outputs, target).

    `seed` is the run's. Raises SettingsError for a name that is neither.
    """
    if name in CRITERIA:
        return CRITERIA[name]
    check_name(name)
    found: Criterion = import_seeded(name, "--criterion", SettingsError, seed)
    return found
