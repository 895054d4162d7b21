"""Generated stages == the original model: names, loss, outputs and every gradient.

The stages are imported from the files that were written, share the original's parameters, and
are chained as in a pipeline: each boundary tensor is detached, and gradients are passed back by
hand. Both run under equal seeds, so dropout draws the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.authors_line import where_in_stage
from ..runtime.errors import AsyncPipeError, PlanError
from ..runtime.loading import SkipRandomInit, load_stage_class
from ..runtime.pipe import run_stage
from ..runtime.plan import Plan, StageSpec
from ..runtime.structure import rebuilt
from .capture import Arguments, read_arguments
from .capture.check import MAX_PARAMETERS_WITH_GRADIENTS
from .capture.guards import is_refusal
from .capture.inputs import sizes_in
from .capture.restore import seed_all, unchanged, without_cache
from .capture.samples import (
    Attempted,
    Sample,
    Tensors,
    dynamic_of,
    first_taken,
    larger_sizes,
    nearby_sizes,
    refused_by_model,
    sizes_text,
    smaller_sizes,
    taken,
)
from .capture.working_copies import (
    Noise,
    UnfitNoise,
    WorkingCopies,
    verify_finite,
    working_copies,
)
from .differences import compare, detached, leaves_of, total_of
from .state_between_calls import state_between_calls

Refused = Callable[[Mapping[str, int]], str]
"""Why the stages refuse sizes; empty where they do not."""
_MANY = 100_000
"""Elements of inputs above which a large model is not run at larger sizes."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What was compared, at which sizes; `captured` are those of the capture.

    `gradients` is 0 when only shapes could be compared (a model on meta). `refused` is what the
    stages say of sizes well above the captured ones, if they refuse them.
    """

    sizes: Mapping[str, int]
    captured: Mapping[str, int]
    outputs: int
    gradients: int
    largest_difference: float
    noise: Noise = Noise.ALL
    refused: str = ""

    @property
    def summary(self) -> str:
        where = sizes_text(self.sizes, " at ")
        if self.sizes and self.sizes == self.captured:
            where += ", the captured sizes: the original took none of the others tried"
        if not self.gradients:
            return f"shapes of all outputs equal the original's{where} (no weights to run with)"
        return (
            f"loss, outputs and all {self.gradients} gradients equal the original's{where} "
            f"(largest difference {self.largest_difference:.0e}{_LESS_NOISE[self.noise]})"
            f"{'; ' if self.refused else ''}{self.refused}"
        )


_LESS_NOISE = {
    Noise.ALL: "",
    Noise.PARAMETERS: "; its buffers as they are: it does not compute with others",
    Noise.NONE: "; its weights as they are: it does not compute with others",
}


def verify(
    model: nn.Module,
    plan: Plan,
    folder: Path,
    example_inputs: Mapping[str, Any],
    *,
    sizes: Mapping[str, int] | None = None,
    tolerance: float = 1e-4,
    constants: Mapping[str, Tensor] | None = None,
    changing: Collection[str] | None = None,
    refused: Refused = lambda sizes: "",
) -> Verified:
    """Compares the stages in `folder` with `model` at `sizes`, by default at sizes that the model
    takes and that are not those of the capture.

    Train mode with equal seeds: outputs and gradients; eval mode: outputs. `constants` are tensors
    that the stages hold as buffers and that are no buffers of the model. The model is as before
    afterwards: it and the stages work on copies of its parameters and buffers, which are moved by
    noise where the model computes with such. `changing` are the parameters that forward changes,
    of which a large model needs copies too. `refused` says why stages refuse sizes, at which
    nothing is compared. Raises PlanError naming the first value that differs
    by more than `tolerance` (relative to the largest magnitude in it), and where the model itself
    does not run.
    """
    given = read_arguments(model, example_inputs)
    with unchanged(model):
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        with torch.device("meta" if on_meta else "cpu"), SkipRandomInit():
            stages = [load_stage_class(folder, spec)() for spec in plan.stages]
        verify_names(model, plan, stages)
        if on_meta:
            return _verify_shapes(model, plan, stages, given, sizes, refused)
        for noise in Noise:
            with working_copies(model, noise, changing) as copies:
                try:
                    return _verify_numbers(
                        model,
                        plan,
                        stages,
                        given,
                        sizes,
                        tolerance,
                        copies,
                        noise,
                        refused,
                        constants or {},
                    )
                except UnfitNoise:
                    continue
        raise AssertionError("without noise the model is what it is")


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


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a forward and backward in one mode do: results, gradients, and what has changed."""

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]


def _modes(plan: Plan) -> tuple[bool, ...]:
    """Whether it is training that is compared: evaluation, then training."""
    return (True,) if plan.mode == "train" else (False, True)


def _sample_of(
    model: nn.Module,
    plan: Plan,
    given: Arguments,
    sizes: Mapping[str, int] | None,
    attempt: Callable[[Tensors], Attempted],
    refused: Refused,
) -> Sample[Attempted]:
    """Inputs at `sizes`, by default at others than the captured that `attempt` takes and the
    stages do not refuse."""

    def attempted(inputs: Tensors) -> Attempted:
        if why := refused(sizes_in(inputs, dynamic_of(plan.inputs))):
            raise PlanError(why)
        return attempt(inputs)

    choices = (smaller_sizes(plan.sizes), nearby_sizes(plan.sizes)) if sizes is None else ()
    wanted = plan.sizes if sizes is None else sizes
    try:
        return first_taken(attempted, given.tensors, dynamic_of(plan.inputs), wanted, choices)
    except Exception as error:
        raise PlanError(*refused_by_model(model, wanted, error)) from error


def _verify_numbers(
    model: nn.Module,
    plan: Plan,
    stages: list[nn.Module],
    given: Arguments,
    sizes: Mapping[str, int] | None,
    tolerance: float,
    copies: WorkingCopies,
    noise: Noise,
    refused: Refused,
    constants: Mapping[str, Tensor],
) -> Verified:
    def original(inputs: Tensors, modes: tuple[bool, ...] = _modes(plan)) -> dict[bool, _Seen]:
        with unchanged(model):
            copies.reset()
            return {mode: _run_model(model, given, inputs, mode, copies) for mode in modes}

    def compared(sample: Sample[dict[bool, _Seen]]) -> float:
        """The largest difference of the stages from the original."""
        copies.reset()
        for stage in stages:
            adopt(stage, model, constants)
        largest = 0.0
        for training, expected in sample.result.items():
            for stage in stages:
                stage.train(training)
            try:
                actual = _run_stages(plan, stages, sample, model, training, copies)
            except PlanError as error:
                if is_own:
                    raise
                raise UnfitNoise from error  # a guard, perhaps: other numbers go another way
            buffers = {name: expected.buffers[name] for name in actual.buffers}
            for what, theirs, ours in (
                ("output", expected.outputs, actual.outputs),
                ("gradient of", expected.gradients, actual.gradients),
                ("buffer", buffers, actual.buffers),
                ("parameter", expected.parameters, actual.parameters),
                ("input", expected.inputs, actual.inputs),
            ):
                largest = max(largest, compare(theirs, ours, tolerance, what))
        return largest

    is_own = noise is Noise.NONE
    try:
        sample = _sample_of(model, plan, given, sizes, original, refused)
    except PlanError as error:
        if is_own:
            raise
        raise UnfitNoise from error
    if not is_own:
        for seen in sample.result.values():
            verify_finite((*seen.outputs.values(), *seen.gradients.values()))
    if why := _state_between_calls(model, plan, given, sample.inputs, copies):
        raise PlanError(*why)
    trained = sample.result[True]
    verified = Verified(
        sample.sizes,
        plan.sizes,
        len(trained.outputs),
        len(trained.gradients),
        compared(sample),
        noise,
    )
    if sizes is not None:
        return verified
    is_small = sum(p.numel() for p in model.parameters()) < MAX_PARAMETERS_WITH_GRADIENTS
    for larger in larger_sizes(plan.sizes, all_of_them=is_small):
        if refusal := refused(larger):
            verified = replace(verified, refused=verified.refused or refusal)
            continue
        if not is_small and sum(math.prod(it.resolve(larger)) for it in plan.inputs) > _MANY:
            continue
        attempt = partial(original, modes=_modes(plan) if is_small else _modes(plan)[:1])
        dims = dynamic_of(plan.inputs)
        if (further := taken(attempt, given.tensors, dims, larger)) is not None:
            try:
                difference = max(verified.largest_difference, compared(further))
            except (PlanError, UnfitNoise) as error:
                if not is_refusal(error):
                    raise
                continue  # Other values may go another way, which is no matter of sizes.
            return replace(verified, largest_difference=difference)
    return verified


def _state_between_calls(
    model: nn.Module, plan: Plan, given: Arguments, inputs: Tensors, copies: WorkingCopies
) -> tuple[str, str] | None:
    def call() -> Mapping[str, Tensor]:
        copies.reset()
        return _run_model(model, given, inputs, _modes(plan)[0], copies).outputs

    with unchanged(model):
        return state_between_calls(model, call)


def _run_model(
    model: nn.Module,
    given: Arguments,
    inputs: Mapping[str, Tensor],
    training: bool,
    copies: WorkingCopies,
) -> _Seen:
    own = _copied(inputs)  # A model may change what it is given.
    model.train(training)
    seed_all(1)
    with torch.set_grad_enabled(training), without_cache(model):
        outputs = leaves_of(given.call(model, own))
    if training:
        torch.autograd.backward(total_of(outputs))
    buffers = _copied(dict(model.named_buffers(remove_duplicate=False)))
    return _Seen(detached(outputs), _take_gradients(model), buffers, copies.changed(), own)


def _run_stages(
    plan: Plan,
    stages: list[nn.Module],
    sample: Sample[Any],
    model: nn.Module,
    training: bool,
    copies: WorkingCopies,
) -> _Seen:
    seed_all(1)
    inputs, sizes = _copied(sample.inputs), sample.sizes
    values: dict[str, Tensor] = dict(inputs)
    leaves: dict[str, list[Tensor]] = {}  # of each value, one leaf a reader

    def read(name: str) -> Tensor:
        copy = values[name].detach().requires_grad_(values[name].requires_grad)
        leaves.setdefault(name, []).append(copy)
        return copy

    with torch.set_grad_enabled(training):
        for spec, stage in zip(plan.stages, stages, strict=True):
            values |= _run_stage(spec, stage, {name: read(name) for name in spec.inputs}, sizes)
        result = rebuilt(plan.outputs, {name: read(name) for name in values}, sizes)
        outputs = leaves_of(result)
    if training:
        torch.autograd.backward(total_of(outputs))
        for spec in reversed(plan.stages):
            pairs = [(values[name], _sum_of_gradients(leaves[name])) for name in spec.outputs]
            ready = [(value, gradient) for value, gradient in pairs if gradient is not None]
            torch.autograd.backward(
                [value for value, _ in ready], [gradient for _, gradient in ready]
            )
    own = dict(model.named_buffers(remove_duplicate=False))
    buffers = {
        name: buffer for stage in stages for name, buffer in stage.named_buffers() if name in own
    }
    return _Seen(detached(outputs), _take_gradients(model), buffers, copies.changed(), inputs)


def _run_stage(
    spec: StageSpec, stage: nn.Module, values: Mapping[str, Any], sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Raises PlanError with the line where a stage raises what the original did not."""
    try:
        return run_stage(spec, stage, values)
    except AsyncPipeError:
        raise
    except Exception as error:
        told = str(error).strip().split("\n")[0]
        raise PlanError(
            f"stage {spec.index} raises {type(error).__name__}{sizes_text(sizes, ' at ')}, where "
            f"the original does not: {told} ({where_in_stage(error, stage)})",
            "Keep the module that it comes from as one node (--leaf Class), and please report "
            "the model.",
        ) from error


def _copied(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _sum_of_gradients(copies: list[Tensor]) -> Tensor | None:
    gradients = [copy.grad for copy in copies if copy.grad is not None]
    return torch.stack(gradients).sum(0) if gradients else None


def _take_gradients(model: nn.Module) -> dict[str, Tensor]:
    taken = {
        name: parameter.grad.to_dense()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    for parameter in model.parameters():
        parameter.grad = None
    return taken


def _verify_shapes(
    model: nn.Module,
    plan: Plan,
    stages: list[nn.Module],
    given: Arguments,
    sizes: Mapping[str, int] | None,
    refused: Refused,
) -> Verified:
    """On meta only shapes and dtypes of the outputs can be compared."""

    def original(inputs: Tensors) -> dict[str, Tensor]:
        return leaves_of(
            given.call(model, {name: each.to("meta") for name, each in inputs.items()})
        )

    with torch.no_grad():
        sample = _sample_of(model, plan, given, sizes, original, refused)
        values: dict[str, Any] = {name: each.to("meta") for name, each in sample.inputs.items()}
        for spec, stage in zip(plan.stages, stages, strict=True):
            values |= _run_stage(spec, stage.train(model.training), values, sample.sizes)
    actual = leaves_of(rebuilt(plan.outputs, values, sample.sizes))
    for name, wanted in sample.result.items():
        if actual[name].shape != wanted.shape or actual[name].dtype != wanted.dtype:
            raise PlanError(
                f"the output {name} is {tuple(wanted.shape)} in the original, "
                f"{tuple(actual[name].shape)} in the stages."
            )
    return Verified(sample.sizes, plan.sizes, len(sample.result), 0, 0.0)


def adopt(stage: nn.Module, model: nn.Module, constants: Mapping[str, Tensor]) -> None:
    """Gives the stage the model's own parameters and copies of its buffers and constants."""
    for name, _ in list(stage.named_parameters(remove_duplicate=False)):
        path, _, leaf = name.rpartition(".")
        setattr(stage.get_submodule(path), leaf, model.get_parameter(name))
    given = {**dict(model.named_buffers(remove_duplicate=False)), **constants}
    with torch.no_grad():
        for name, buffer in list(stage.named_buffers()):
            if name not in given:  # its constructor makes it
                continue
            if buffer.shape != given[name].shape:  # a forward has made it anew
                path, _, leaf = name.rpartition(".")
                setattr(stage.get_submodule(path), leaf, given[name].clone())
            else:
                buffer.copy_(given[name])
