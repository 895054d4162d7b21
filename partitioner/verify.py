"""Generated stages == the original model: names, loss, outputs and every gradient.

The stages are imported from the files that were written, share the original's parameters, and
are chained as in a pipeline: each boundary tensor is detached, and gradients are passed back by
hand. Both run under equal seeds, so dropout draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..runtime.errors import PlanError
from ..runtime.loading import SkipRandomInit, load_stage_class
from ..runtime.pipe import run_stage
from ..runtime.plan import Plan, TensorSpec
from ..runtime.structure import rebuilt
from .capture import Arguments, read_arguments
from .capture.inputs import other_sizes as sizes_unlike
from .capture.restore import without_cache
from .capture.structure import plain_structure


@dataclass(frozen=True, slots=True)
class Verified:
    """What was compared; `gradients` is 0 when only shapes could be (a model on meta)."""

    sizes: Mapping[str, int]
    outputs: int
    gradients: int
    largest_difference: float

    @property
    def summary(self) -> str:
        sizes = " × ".join(f"{size} {name}" for name, size in self.sizes.items())
        if not self.gradients:
            return f"shapes of all outputs equal the original's at {sizes} (no weights to run with)"
        return (
            f"loss, outputs and all {self.gradients} gradients equal the original's at {sizes} "
            f"(largest difference {self.largest_difference:.0e})"
        )


def verify(
    model: nn.Module,
    plan: Plan,
    folder: Path,
    example_inputs: Mapping[str, Any],
    *,
    sizes: Mapping[str, int] | None = None,
    tolerance: float = 1e-4,
    constants: Mapping[str, Tensor] | None = None,
) -> Verified:
    """Compares the stages in `folder` with `model` at `sizes`, by default not those of the capture.

    Train mode with equal seeds: outputs and gradients; eval mode: outputs. `constants` are tensors
    that the stages hold as buffers and that are no buffers of the model. The original's
    gradients, buffers and mode are as before afterwards. Raises PlanError naming the first value
    that differs by more than `tolerance` (relative to the largest magnitude in it).
    """
    given = read_arguments(model, example_inputs)
    with _state_kept(model):
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        with torch.device("meta" if on_meta else "cpu"), SkipRandomInit():
            stages = [load_stage_class(folder, spec)() for spec in plan.stages]
        verify_names(model, plan, stages)
        sizes = other_sizes(plan) if sizes is None else sizes
        if on_meta:
            return _verify_shapes(model, plan, stages, given, sizes)
        held = constants or {}
        return _verify_numbers(model, plan, stages, given, sizes, tolerance, held)


def verify_names(model: nn.Module, plan: Plan, stages: list[nn.Module]) -> None:
    """The stages' state_dicts are a split of the model's: its keys and shapes, tied names apart."""
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    got = {name: tensor.shape for stage in stages for name, tensor in stage.state_dict().items()}
    tied = {name for shared in plan.shared for name in shared.names}
    unused = wanted.keys() - got.keys() - tied - set(plan.unused)
    if unused or not got.keys() <= wanted.keys():
        wrong = sorted(unused | (got.keys() - wanted.keys()))
        raise PlanError(f"the generated stages and {plan.name} differ in {', '.join(wrong[:5])}.")
    for name, shape in got.items():
        if shape != wanted[name]:
            raise PlanError(
                f"{name} is {tuple(shape)} in the generated stage, {tuple(wanted[name])} in "
                f"{plan.name}."
            )


def other_sizes(plan: Plan) -> dict[str, int]:
    """Small sizes that differ from the captured ones and from each other."""
    return sizes_unlike(plan.sizes)


def resize(example: Tensor, spec: TensorSpec, sizes: Mapping[str, int]) -> Tensor:
    """The example repeated or cut to the sizes that `spec` has for `sizes`."""
    for dim, size in enumerate(spec.resolve(sizes)):
        if example.shape[dim] != size:
            index = torch.arange(size, device=example.device) % example.shape[dim]
            example = example.index_select(dim, index)
    return example


def _verify_numbers(
    model: nn.Module,
    plan: Plan,
    stages: list[nn.Module],
    given: Arguments,
    sizes: Mapping[str, int],
    tolerance: float,
    constants: Mapping[str, Tensor],
) -> Verified:
    for stage in stages:
        adopt(stage, model, constants)
    inputs = {spec.name: resize(given.tensors[spec.name], spec, sizes) for spec in plan.inputs}
    largest = 0.0
    for training in (False, True):
        for module in (model, *stages):
            module.train(training)
        # A model may change what it is given.
        theirs, ours = ({name: value.clone() for name, value in inputs.items()} for _ in range(2))
        expected, expected_gradients = _run_model(model, given, theirs, training)
        actual, actual_gradients = _run_stages(plan, stages, ours, model, sizes, training)
        for pair, what in (
            ((expected, actual), "output"),
            ((expected_gradients, actual_gradients), "gradient of"),
            (_buffers(model, stages), "buffer"),
            ((theirs, ours), "input"),
        ):
            largest = max(largest, compare(*pair, tolerance, what))
    return Verified(sizes, len(expected), len(expected_gradients), largest)


def _run_model(
    model: nn.Module, given: Arguments, inputs: Mapping[str, Tensor], training: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(1)
    with torch.set_grad_enabled(training), without_cache(model):
        outputs = _leaves(given.call(model, inputs))
    if training:
        torch.autograd.backward(_total(outputs))
    return _detached(outputs), _take_gradients(model)


def _run_stages(
    plan: Plan,
    stages: list[nn.Module],
    inputs: Mapping[str, Tensor],
    model: nn.Module,
    sizes: Mapping[str, int],
    training: bool,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(1)
    values: dict[str, Tensor] = dict(inputs)
    copies: dict[str, list[Tensor]] = {}  # of each value, one leaf a reader

    def read(name: str) -> Tensor:
        copy = values[name].detach().requires_grad_(values[name].requires_grad)
        copies.setdefault(name, []).append(copy)
        return copy

    with torch.set_grad_enabled(training):
        for spec, stage in zip(plan.stages, stages, strict=True):
            values |= run_stage(spec, stage, {name: read(name) for name in spec.inputs})
        result = rebuilt(plan.outputs, {name: read(name) for name in values}, sizes)
        outputs = _leaves(result)
    if training:
        torch.autograd.backward(_total(outputs))
        for spec in reversed(plan.stages):
            pairs = [(values[name], _sum_of_gradients(copies[name])) for name in spec.outputs]
            ready = [(value, gradient) for value, gradient in pairs if gradient is not None]
            torch.autograd.backward(
                [value for value, _ in ready], [gradient for _, gradient in ready]
            )
    return _detached(outputs), _take_gradients(model)


def _sum_of_gradients(copies: list[Tensor]) -> Tensor | None:
    gradients = [copy.grad for copy in copies if copy.grad is not None]
    return torch.stack(gradients).sum(0) if gradients else None


def _leaves(outputs: Any) -> dict[str, Tensor]:
    """Every tensor and number in an output structure by its path; None entries are left out."""
    paths, _ = pytree.tree_flatten_with_path(plain_structure(outputs))
    return {
        pytree.keystr(path) or "output": leaf if isinstance(leaf, Tensor) else torch.tensor(leaf)
        for path, leaf in paths
        if isinstance(leaf, (Tensor, int, float))
    }


def _total(outputs: Mapping[str, Tensor]) -> Tensor:
    """The loss, or a weighted sum of all outputs when there is none."""
    for path, value in outputs.items():
        if "loss" in path and value.dim() == 0 and value.requires_grad:
            return value
    return torch.stack(
        [
            (value.double() * torch.linspace(0.5, 1.5, value.numel()).view_as(value)).mean()
            for value in outputs.values()
            if value.requires_grad
        ]
    ).sum()


def _detached(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {path: value.detach() for path, value in outputs.items()}


def _take_gradients(model: nn.Module) -> dict[str, Tensor]:
    taken = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    for parameter in model.parameters():
        parameter.grad = None
    return taken


def compare(
    expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], tolerance: float, what: str
) -> float:
    """The largest relative difference; raises PlanError naming the first value beyond tolerance."""
    if expected.keys() != actual.keys():
        name = sorted(expected.keys() ^ actual.keys())[0]
        where = "the original" if name in expected else "the stages"
        raise PlanError(f"only {where} has the {what} {name}.")
    largest, floor = 0.0, 1e-6
    if what.startswith("gradient"):
        # One that is zero but for rounding, as a key's bias before a softmax, has no scale itself.
        floor = max([floor, *(1e-4 * _magnitude(wanted) for wanted in expected.values())])
    for name, wanted in expected.items():
        got = actual[name]
        if wanted.shape != got.shape or wanted.dtype != got.dtype:
            raise PlanError(
                f"the {what} {name} is {wanted.dtype} {tuple(wanted.shape)} in the original, "
                f"{got.dtype} {tuple(got.shape)} in the stages."
            )
        if wanted.numel() == 0:
            continue
        if not wanted.is_floating_point() and not wanted.is_complex():
            wanted, got = wanted.double(), got.double()
        scale = max(_magnitude(wanted), floor)
        difference = _magnitude(wanted - got) / scale
        if not difference <= tolerance:
            raise PlanError(
                f"the {what} {name} of the generated stages differs from the original's by "
                f"{difference:.1e} of its largest magnitude; {tolerance:.0e} is allowed."
            )
        largest = max(largest, difference)
    return largest


def _magnitude(value: Tensor) -> float:
    """The largest absolute value, nan if there is one; in one pass, where torch can."""
    if not value.numel():
        return 0.0
    if value.is_complex():
        return float(value.abs().max())
    least, most = torch.aminmax(value.detach())
    return float(torch.maximum(-least, most))


def _verify_shapes(
    model: nn.Module,
    plan: Plan,
    stages: list[nn.Module],
    given: Arguments,
    sizes: Mapping[str, int],
) -> Verified:
    """On meta only shapes and dtypes of the outputs can be compared."""
    values: dict[str, Any] = {
        spec.name: resize(given.tensors[spec.name], spec, sizes).to("meta") for spec in plan.inputs
    }
    with torch.no_grad():
        expected = _leaves(given.call(model, values))
        for spec, stage in zip(plan.stages, stages, strict=True):
            values |= run_stage(spec, stage.train(model.training), values)
    actual = _leaves(rebuilt(plan.outputs, values, sizes))
    for name, wanted in expected.items():
        if actual[name].shape != wanted.shape or actual[name].dtype != wanted.dtype:
            raise PlanError(
                f"the output {name} is {tuple(wanted.shape)} in the original, "
                f"{tuple(actual[name].shape)} in the stages."
            )
    return Verified(sizes, len(expected), 0, 0.0)


def adopt(stage: nn.Module, model: nn.Module, constants: Mapping[str, Tensor]) -> None:
    """Gives the stage the model's own parameters and copies of its buffers and constants."""
    for name, _ in list(stage.named_parameters(remove_duplicate=False)):
        path, _, leaf = name.rpartition(".")
        setattr(stage.get_submodule(path), leaf, model.get_parameter(name))
    given = {**dict(model.named_buffers(remove_duplicate=False)), **constants}
    with torch.no_grad():
        for name, buffer in stage.named_buffers():
            if name in given:  # else its constructor makes it
                buffer.copy_(given[name])


def _buffers(
    model: nn.Module, stages: list[nn.Module]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The stages' buffers beside the model's of the same names, after both ran."""
    own = dict(model.named_buffers(remove_duplicate=False))
    actual = {
        name: buffer for stage in stages for name, buffer in stage.named_buffers() if name in own
    }
    return {name: own[name] for name in actual}, actual


@contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Puts buffers, mode, random state and gradients back as they were."""
    modes = {module: module.training for module in model.modules()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    random = torch.get_rng_state()
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for name, buffer in buffers.items():
                model.get_buffer(name).copy_(buffer)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        torch.set_rng_state(random)
