"""The result of a comparison of generated stages with their model, and a second one in float64.

In float32, rounding alone may differ by more than the tolerance: a batch norm over two samples
divides by almost nothing. In float64 rounding is 1e9 times smaller, and a defect is as large as
before.

`state_between_calls` finds state that forward keeps in attributes. A stage has parameters and
buffers, but no other memory: if the next call has other results because of attributes that a call
has set, the model has other memory. `gradients_asked` finds a forward that computes something else
where gradients are recorded.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..runtime.errors import PlanError
from .capture.check import Differs, compare
from .capture.model_state import (
    MOST_BYTES,
    SMALL,
    Noise,
    attributes_kept,
    device_of,
    plain_tensors,
    seed_all,
    unchanged,
)
from .capture.patches import CURE as GRADIENTS_CURE
from .capture.sizes import sizes_text
from .capture.source_lines import is_user_file, place

TOLERANCE = 1e-4
MOST_BY_ROUNDING = 100 * TOLERANCE
TOLERANCE_IN_DOUBLE = 1e-8


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of a comparison at `sizes`; `captured` are the sizes of the capture.

    gradients: the number of gradients; 0 when only shapes were compared (a model on meta)
    noise: the values that noise moved before the comparison
    refused: the message of the stages about sizes well above the captured ones, if they refuse them
    rounding: a difference in float32 above the tolerance; the others are in float64 then
    """

    sizes: Mapping[str, int]
    captured: Mapping[str, int]
    outputs: int
    gradients: int
    largest_difference: float
    noise: Noise = Noise.ALL
    refused: str = ""
    rounding: float = 0.0

    @property
    def summary(self) -> str:
        where = sizes_text(self.sizes, " at ")
        if self.sizes and self.sizes == self.captured:
            where += " as captured (the original accepts no other size that was tried)"
        if not self.gradients:
            return f"shapes of all outputs match the original model{where} (no weights to run)"
        rounded = (
            f" in float64; {self.rounding:.0e} in float32 by rounding" if self.rounding else ""
        )
        return (
            f"loss, outputs and all {self.gradients} gradients match the original model{where} "
            f"(largest difference {self.largest_difference:.0e}{rounded}{_LESS_NOISE[self.noise]})"
            f"{'; ' if self.refused else ''}{self.refused}"
        )


_LESS_NOISE = {
    Noise.ALL: "",
    Noise.PARAMETERS: "; compared with the original buffers, since the model fails with others",
    Noise.NONE: "; compared with the original weights, since the model fails with others",
}


def rounding_or_defect(
    model: nn.Module, compared: Callable[[], Verified], repeat: Callable[[], Verified]
) -> Verified:
    """The result of `compared`, or if something differs there, of `repeat`, which compares with a
    model in float64. Raises what differs if it is no rounding: the difference is too large for it,
    or remains in float64, or the model has no float64. No difference of a gradient is too large: it
    may be a sum of large terms that is almost zero.
    """
    try:
        return _with_equal_draws(model, compared)
    except Differs as differs:
        error = differs
    if error.difference > MOST_BY_ROUNDING and not error.is_of_gradient:
        raise error
    try:
        with in_double(model):
            verified = repeat()
    except Exception as other:
        raise error from other
    return replace(verified, rounding=error.difference)


def _with_equal_draws(model: nn.Module, compared: Callable[[], Verified]) -> Verified:
    """The result of `compared`. A GPU has several kernels of attention, which draw different
    dropout from equal seeds; torch chooses one by the mask, among others. Where something differs
    there, model and stages are compared again with the kernel of plain matrix products."""
    try:
        return compared()
    except Differs:
        if device_of(model).type != "cuda":
            raise
        with sdpa_kernel(SDPBackend.MATH):
            return compared()


def not_repeatable(
    model: nn.Module, outputs: Mapping[str, Tensor], again: Mapping[str, Tensor]
) -> tuple[str, str] | None:
    """The error and its cure for a model whose outputs differ in two runs from equal seeds."""
    try:
        compare(outputs, again, TOLERANCE, "output")
    except PlanError:
        return (
            f"{type(model).__name__} itself gives other outputs when it runs again from the same "
            "seeds, so nothing can be compared with it.",
            "Draw random numbers from the default generators of torch, Python and NumPy, without "
            "a new seed in forward (torch.seed()).",
        )
    return None


_DOUBLE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


@contextmanager
def in_double(model: nn.Module) -> Iterator[None]:
    """Gives all tensors of the model in single precision double precision for the block. Raises
    TypeError for a model that needs too much memory for it, or whose tensors share memory."""
    tensors = {id(each): each for each in (*model.parameters(), *plain_tensors(model))}
    tensors |= {id(each): each for each in model.buffers()}
    own = [(each, each.data) for each in tensors.values() if each.dtype in _DOUBLE]
    if len({each.untyped_storage()._cdata for each, _ in own}) < len(own):
        raise TypeError("tensors of the model share memory")
    if sum(2 * each.untyped_storage().nbytes() for each, _ in own) > MOST_BYTES:
        raise TypeError("the model is too large for float64")
    with patch.object(torch.autocast, "__enter__", _entered):
        try:
            for tensor, data in own:
                tensor.data = data.to(_DOUBLE[data.dtype])
            yield
        finally:
            for tensor, data in own:
                tensor.data = data


_enter = torch.autocast.__enter__


def _entered(region: Any) -> Any:
    """Refuses autocast, which leaves float64 as it is, so that the comparison would not see it."""
    if region._enabled:
        raise TypeError("the model uses autocast")
    return _enter(region)  # type: ignore[no-untyped-call]


def follow(stage: nn.Module, model: nn.Module) -> None:
    """Gives buffers double precision that have it in the model. A tensor that forward itself makes
    stays as forward makes it."""
    for name, buffer in list(stage.named_buffers()):
        path, _, leaf = name.rpartition(".")
        with suppress(AttributeError):
            dtype = getattr(model.get_submodule(path), leaf).dtype
            if dtype in _DOUBLE.values():
                setattr(stage.get_submodule(path), leaf, buffer.to(dtype))


def doubled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with those of single precision in double precision."""
    return {name: each.to(_DOUBLE.get(each.dtype, each.dtype)) for name, each in tensors.items()}


_OWN = frozenset({"training", "_parameters", "_buffers", "_modules"})


def state_between_calls(
    model: nn.Module, call: Callable[[bool], Mapping[str, Tensor]]
) -> tuple[str, str] | None:
    """The error and its cure, if attributes that one call sets change the results of the next.

    `call` makes the results, with equal random numbers, from equal parameters and buffers, or with
    False from those that the last call left and other inputs of floating point. Between the two
    calls the weights move, as in training. The model is unchanged afterwards.
    """

    def next_results(forgets: bool, moves: bool) -> Mapping[str, Tensor]:
        """The results of a second call, with or without the attributes that the first sets."""
        with unchanged(model):
            with attributes_kept(model) if forgets else nullcontext():
                call(True)
            try:
                with _moved_weights(model) if moves else nullcontext():
                    return call(False)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # as of a backward through the graph of the first call
                return {}

    with unchanged(model):
        before = attributes_of(model)
        call(True)
        after = attributes_of(model)
    names = [name for name, value in after.items() if before.get(name) != value]
    if not names:
        return None
    for moves in (True, False):
        forgotten = next_results(True, moves)
        if forgotten:
            break
    kept = next_results(False, moves)
    if _are_equal(forgotten, kept):
        return None
    where = next(filter(None, (_line(model, name) for name in names)), "")
    return (
        f"{type(model).__name__} stores a result of one call in self.{names[0]}{where} and reads "
        "it in the next call, whose results differ because of it: a stage has no such memory.",
        "Make it an argument and a result of forward, or, if it is independent of the batch, a "
        "buffer: self.register_buffer(name, tensor).",
    )


@contextmanager
def _moved_weights(model: nn.Module) -> Iterator[None]:
    """Moves the trainable parameters by about 1% for the block, but for large ones."""
    parameters = [
        (parameter, parameter.detach().clone())
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.numel() <= SMALL
    ]
    with torch.no_grad():
        seed_all(2)
        for parameter, value in parameters:
            size = 0.01 * (float(value.abs().mean()) + 0.01) if value.numel() else 0.0
            parameter.add_(size * torch.randn_like(value))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in parameters:
                parameter.copy_(value)


def attributes_of(model: nn.Module) -> dict[str, Any]:
    """The identity of each attribute by name; for containers the identities of their items."""
    return {
        f"{path}.{name}" if path else name: _identity(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OWN
    }


def _identity(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, (int, float, str)):
        return value
    if isinstance(value, dict):
        return [(id(key), id(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set)) or hasattr(value, "maxlen"):
        return [id(item) for item in value]
    return id(value)


def _line(model: nn.Module, name: str) -> str:
    """The line where forward writes to an attribute, as ` (nets.py:12)`, if it can be found."""
    path, _, attribute = name.rpartition(".")
    kind = type(model.get_submodule(path))
    try:
        lines, start = inspect.getsourcelines(kind)
        file = inspect.getsourcefile(kind) or ""
    except (OSError, TypeError):
        return ""
    writes = re.compile(rf"\bself\.{re.escape(attribute)}\b(?:\[.*\])?(?:\s*[-+*/]?=[^=]|\.)")
    writing = [number for number, line in enumerate(lines) if writes.search(line)]
    return f" ({Path(file).name}:{start + writing[-1]})" if writing else ""


def gradients_asked(
    model: nn.Module, call: Callable[[bool], Mapping[str, Tensor]]
) -> tuple[str, str] | None:
    """The error and its cure, if results with gradients differ from those without.

    `call` makes the results from equal parameters, buffers and random numbers, with gradients or
    under `torch.no_grad()`. The model is unchanged afterwards.
    """
    places_asked: list[str] = []

    def watch(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function is torch.is_grad_enabled:
            if is_user_file(frame.f_code.co_filename):
                places_asked.append(place(frame, frame.f_lineno))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        with unchanged(model):
            recorded = call(True)
    finally:
        sys.setprofile(before)
    with unchanged(model):
        plain = call(False)
    if _are_equal(recorded, plain):
        return None
    where = places_asked[0] if places_asked else f"forward of {type(model).__name__}"
    return (
        f"{where} computes other results with gradients than under torch.no_grad().",
        GRADIENTS_CURE,
    )


def _are_equal(results: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return results.keys() == others.keys() and all(
        torch.equal(value, others[name]) or bool(value.isnan().any())
        for name, value in results.items()
    )
