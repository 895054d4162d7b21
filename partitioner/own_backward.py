"""An exception while a model is profiled or verified -> whether its own backward is the cause."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..runtime.errors import AsyncPipeError, CaptureError
from ..runtime.user_code import is_own_file, own_line
from .capture import read_arguments
from .capture.restore import without_cache
from .capture.structure import plain_structure

_FRAME = re.compile(r'File "(.+?)", line (\d+)')


@contextmanager
def own_failure_told(model: nn.Module, example_inputs: Mapping[str, Any]) -> Iterator[None]:
    """Within, an exception leaves as CaptureError where the model's own backward fails too, with
    the line of the author's forward that autograd cannot differentiate."""
    try:
        yield
    except Exception as error:
        is_refusal = isinstance(error, AsyncPipeError) and error.__cause__ is None
        if is_refusal or any(parameter.is_meta for parameter in model.parameters()):
            raise
        if (told := backward_failure(model, example_inputs)) is None:
            raise
        raise CaptureError(*told) from error


def backward_failure(model: nn.Module, example_inputs: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why the model as its author wrote it cannot go backward on its example inputs, and a cure;
    None where it can, or where already its forward fails. Its gradients are set to None."""
    name = type(model).__name__
    given = read_arguments(model, example_inputs)
    inputs = {key: tensor.clone() for key, tensor in given.tensors.items()}
    with warnings.catch_warnings(record=True) as caught, torch.enable_grad():
        warnings.simplefilter("always")
        with torch.autograd.set_detect_anomaly(True, check_nan=False), without_cache(model):
            try:
                outputs = pytree.tree_leaves(plain_structure(given.call(model.train(), inputs)))
            except Exception:
                return None
            roots = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
            if not roots:
                return (
                    f"{name} cannot be trained: none of its outputs has a gradient, because each "
                    "is detached, is not a floating-point number, or depends on no parameter that "
                    "requires one.",
                    "Return a loss or logits that are computed from the parameters without "
                    "detach(), no_grad() or argmax().",
                )
            try:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            except Exception as error:
                what = str(error).split("Hint:")[0].strip().split("\n")[0]
                place = own_line(error) or _place([str(each.message) for each in caught])
                at = f" at {place}" if place else ""
                return (
                    f"the backward of {name} itself fails{at}: {type(error).__name__}: {what}",
                    "Make loss.backward() of the model run. An operation in place (add_, relu_, "
                    "x += 1) may not change a tensor that the backward reads: use add, relu or "
                    "x = x + 1.",
                )
            finally:
                model.zero_grad(set_to_none=True)
    return None


def _place(messages: list[str]) -> str:
    """The author's last line in what anomaly detection tells of the forward."""
    frames = [found for message in messages for found in _FRAME.findall(message)]
    own = [f"{file}:{line}" for file, line in frames if is_own_file(file)]
    return own[-1] if own else ""
