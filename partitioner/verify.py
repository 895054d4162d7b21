"""Checks that generated stages equal the original model: names, loss, outputs, all gradients.

The stages are imported from the written files, share the original's parameters, and are chained as
in a pipeline: each boundary tensor is detached, and gradients are passed back by hand. Both run
under equal seeds, so dropout draws the same numbers.
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

from ..runtime.errors import AsyncPipeError, PlanError
from ..runtime.executor.loading import SkipRandomInit, run_stage, stage_builder
from ..runtime.executor.run import where_in_stage
from ..runtime.plan.plan import Plan, StageSpec
from ..runtime.plan.structure import rebuilt
from .capture import Arguments, read_arguments, state_of
from .capture.check import (
    MAX_PARAMETERS_WITH_GRADIENTS,
    compare,
    detached,
    leaves_of,
    take_gradients,
    total_of,
)
from .capture.graph import is_refusal
from .capture.model_state import (
    Noise,
    UnfitNoise,
    WorkingCopies,
    seed_all,
    unchanged,
    verify_finite,
    without_cache,
    working_copies,
)
from .capture.sizes import (
    Attempted,
    Sample,
    Tensors,
    accepted,
    dynamic_of,
    first_accepted,
    larger_sizes,
    nearby_sizes,
    refused_by_model,
    sizes_in,
    sizes_text,
    smaller_sizes,
)
from .stage_timing import adopt
from .verdict import (
    TOLERANCE,
    TOLERANCE_IN_DOUBLE,
    Verified,
    attributes_of,
    doubled,
    follow,
    gradients_asked,
    not_repeatable,
    rounding_or_defect,
    state_between_calls,
)

Refused = Callable[[Mapping[str, int]], str]
"""The reason why the stages refuse sizes; empty if they accept them."""
_MANY = 100_000
"""The number of input elements above which a large model is not run at larger sizes."""


def verify(
    model: nn.Module,
    plan: Plan,
    folder: Path,
    example_inputs: Mapping[str, Any],
    *,
    sizes: Mapping[str, int] | None = None,
    constants: Mapping[str, Tensor] | None = None,
    changing: Collection[str] | None = None,
    refused: Refused = lambda sizes: "",
) -> Verified:
    """Compares the stages in `folder` with `model` at `sizes`, by default at sizes that the model
    accepts and that differ from those of the capture.

    Train mode with equal seeds: outputs and gradients; eval mode: outputs. `constants` are tensors
    that the stages hold as buffers and that are not buffers of the model. The model is unchanged
    afterwards: it and the stages work on copies of its parameters and buffers, which noise moves
    where the model can compute with moved ones. `changing` are the parameters that forward
    changes; even a large model needs copies of these. `refused` gives the reason why stages refuse
    sizes; nothing is compared at such sizes. Raises PlanError with the name of the first value
    that differs by more than `TOLERANCE` (relative to the largest magnitude in it), unless it is
    rounding, and where the model itself fails.
    """
    given = read_arguments(model, example_inputs)
    with unchanged(model):
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        with torch.device("meta" if on_meta else "cpu"), SkipRandomInit():
            stages = [stage_builder(folder, spec)() for spec in plan.stages]
        verify_names(model, plan, stages)
        pair = _Pair(model, plan, stages, given, constants or {}, refused)
        if on_meta:
            return _verify_shapes(pair, sizes)
        compared = partial(_verified, pair, sizes, changing)
        return rounding_or_defect(
            model, compared, partial(_verified_in_double, pair, sizes, changing)
        )


def _verified_in_double(
    pair: _Pair, sizes: Mapping[str, int] | None, changing: Collection[str] | None
) -> Verified:
    """Compares with a model that is in float64, with inputs in float64."""
    for stage in pair.stages:
        follow(stage, pair.model)
    given = replace(pair.given, tensors=doubled(pair.given.tensors))
    return _verified(replace(pair, given=given, tolerance=TOLERANCE_IN_DOUBLE), sizes, changing)


def _verified(
    pair: _Pair, sizes: Mapping[str, int] | None, changing: Collection[str] | None
) -> Verified:
    """Compares with as much noise as the model can compute with."""
    for noise in Noise:
        with working_copies(pair.model, noise, changing) as copies:
            try:
                return _Comparison(pair, copies, noise).verified(sizes)
            except UnfitNoise:
                continue
    raise AssertionError("without noise the model is what it is")


def verify_names(model: nn.Module, plan: Plan, stages: list[nn.Module]) -> None:
    """Checks that the stages' state_dicts split the model's: keys and shapes, apart from ties."""
    expected = {name: tensor.shape for name, tensor in state_of(model).items()}
    actual = {name: tensor.shape for stage in stages for name, tensor in stage.state_dict().items()}
    tied = {name for shared in plan.shared for name in shared.names}
    unused = expected.keys() - actual.keys() - tied - set(plan.unused)
    if unused or not actual.keys() <= expected.keys():
        wrong = sorted(unused | (actual.keys() - expected.keys()))
        raise PlanError(f"the generated stages and {plan.name} differ in {', '.join(wrong[:5])}.")
    for name, shape in actual.items():
        if shape != expected[name]:
            raise PlanError(
                f"{name} is {tuple(shape)} in the generated stage, {tuple(expected[name])} in "
                f"{plan.name}."
            )


@dataclass(frozen=True, slots=True)
class _Seen:
    """The outputs, gradients, buffers, changed parameters and inputs after a run in one mode, and
    whether the run has set attributes of the model."""

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    sets_attributes: bool = False


def _modes(plan: Plan) -> tuple[bool, ...]:
    """The modes to compare, True for training: evaluation first, then training."""
    return (True,) if plan.mode == "train" else (False, True)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A model and its stages.

    given: the model's example inputs
    constants: tensors that the stages hold as buffers and that are not buffers of the model
    refused: gives the reason why the stages refuse sizes
    tolerance: the relative difference that is allowed
    """

    model: nn.Module
    plan: Plan
    stages: list[nn.Module]
    given: Arguments
    constants: Mapping[str, Tensor]
    refused: Refused
    tolerance: float = TOLERANCE

    def sample(
        self, sizes: Mapping[str, int] | None, attempt: Callable[[Tensors], Attempted]
    ) -> Sample[Attempted]:
        """Inputs at `sizes`, by default at sizes that differ from the captured ones, with which
        `attempt` runs and which the stages accept."""
        plan, dims = self.plan, dynamic_of(self.plan.inputs)

        def attempted(inputs: Tensors) -> Attempted:
            if why := self.refused(sizes_in(inputs, dims)):
                raise PlanError(why)
            return attempt(inputs)

        choices = (smaller_sizes(plan.sizes), nearby_sizes(plan.sizes)) if sizes is None else ()
        wanted = plan.sizes if sizes is None else sizes
        try:
            return first_accepted(attempted, self.given.tensors, dims, wanted, choices)
        except Exception as error:
            raise PlanError(*refused_by_model(self.model, wanted, error)) from error


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A model and its stages with one kind of noise in the copies of the model's values.

    pair: the model, its stages and its inputs
    copies: the copies that both run with
    noise: the values that noise moved; without noise a failure is the stages' own
    """

    pair: _Pair
    copies: WorkingCopies
    noise: Noise

    def verified(self, sizes: Mapping[str, int] | None) -> Verified:
        """Compares at `sizes`; without these also at larger ones."""
        plan, sample = self.pair.plan, self._sample(sizes)
        trained = sample.result[True]
        sets = any(seen.sets_attributes for seen in sample.result.values())
        if sets and (why := self._memory(sample.inputs)):
            raise PlanError(*why)
        verified = Verified(
            sample.sizes,
            plan.sizes,
            len(trained.outputs),
            len(trained.gradients),
            self._largest_difference(sample),
            self.noise,
        )
        return self._at_larger_sizes(verified) if sizes is None else verified

    def _sample(self, sizes: Mapping[str, int] | None) -> Sample[dict[bool, _Seen]]:
        """The results of the model. Raises UnfitNoise if it cannot compute with the noise."""
        try:
            sample = self.pair.sample(sizes, self._original)
        except PlanError as error:
            if self.noise is Noise.NONE:
                raise
            raise UnfitNoise from error
        if self.noise is not Noise.NONE:
            for seen in sample.result.values():
                verify_finite((*seen.outputs.values(), *seen.gradients.values()))
        return sample

    def _largest_difference(self, sample: Sample[dict[bool, _Seen]]) -> float:
        """The largest difference of the stages from the original."""
        self.copies.reset()
        for stage in self.pair.stages:
            adopt(stage, self.pair.model, self.pair.constants)
        largest = 0.0
        for training, expected in sample.result.items():
            for stage in self.pair.stages:
                stage.train(training)
            try:
                actual = self._run_stages(sample, training)
            except PlanError as error:
                if self.noise is Noise.NONE:
                    raise
                raise UnfitNoise from error  # a guard, perhaps: other numbers take another branch
            buffers = {name: expected.buffers[name] for name in actual.buffers}
            for kind, theirs, ours in (
                ("output", expected.outputs, actual.outputs),
                ("gradient of", expected.gradients, actual.gradients),
                ("buffer", buffers, actual.buffers),
                ("parameter", expected.parameters, actual.parameters),
                ("input", expected.inputs, actual.inputs),
            ):
                try:
                    largest = max(largest, compare(theirs, ours, self.pair.tolerance, kind))
                except PlanError as error:
                    raise self._explained(sample.inputs, error) from error.__cause__
        return largest

    def _at_larger_sizes(self, verified: Verified) -> Verified:
        """The result with that of a comparison at sizes above the captured ones, where the model
        and the stages accept some."""
        model, plan = self.pair.model, self.pair.plan
        dims, modes = dynamic_of(plan.inputs), _modes(plan)
        is_small = sum(p.numel() for p in model.parameters()) < MAX_PARAMETERS_WITH_GRADIENTS
        for larger in larger_sizes(plan.sizes, all_of_them=is_small):
            if refusal := self.pair.refused(larger):
                verified = replace(verified, refused=verified.refused or refusal)
                continue
            elements = sum(math.prod(spec.resolve(larger)) for spec in plan.inputs)
            if larger == verified.sizes or (elements > _MANY and not is_small):
                continue
            attempt = partial(self._original, modes=modes if is_small else modes[:1])
            if (further := accepted(attempt, self.pair.given.tensors, dims, larger)) is not None:
                try:
                    difference = self._largest_difference(further)
                except (PlanError, UnfitNoise) as error:
                    if not is_refusal(error):
                        raise
                    continue  # Other values may take another branch, at any size.
                return replace(
                    verified, largest_difference=max(verified.largest_difference, difference)
                )
        return verified

    def _original(
        self, inputs: Tensors, modes: tuple[bool, ...] | None = None
    ) -> dict[bool, _Seen]:
        """The results of the model, by mode."""
        with unchanged(self.pair.model):
            self.copies.reset()
            return {mode: self._run_model(inputs, mode) for mode in modes or _modes(self.pair.plan)}

    def _results(
        self, inputs: Tensors, training: bool, gradients: bool | None, is_first: bool = True
    ) -> Tensors:
        """The outputs, and an empty tensor for each gradient, whose rounding may differ."""
        if is_first:
            self.copies.reset()
        seen = self._run_model(inputs, training, gradients)
        return {**{name: torch.empty(0) for name in seen.gradients}, **seen.outputs}

    def _memory(self, inputs: Tensors) -> tuple[str, str] | None:
        """The error and its cure, if attributes change the results of the next training pass."""

        def call(is_first: bool) -> Tensors:
            return self._results(inputs if is_first else others, True, None, is_first)

        others = {n: 0.99 * v if v.is_floating_point() else v for n, v in inputs.items()}
        return state_between_calls(self.pair.model, call)

    def _explained(self, inputs: Tensors, error: PlanError) -> PlanError:
        """The error, or its cause: the model differs from itself, remembers what it computed in
        training, or asks about gradients."""
        model = self.pair.model
        first, second = (self._original(inputs) for _ in range(2))
        for mode, seen in first.items():
            if why := not_repeatable(model, seen.outputs, second[mode].outputs):
                return PlanError(*why)
        why = self._memory(inputs)
        if not why and False in first:
            why = gradients_asked(model, partial(self._results, inputs, False))
        return PlanError(*why) if why else error

    def _run_model(
        self, inputs: Mapping[str, Tensor], training: bool, gradients: bool | None = None
    ) -> _Seen:
        model = self.pair.model
        take_gradients(model)  # the caller's
        own = detached(inputs)  # A model may change its inputs.
        before = attributes_of(model.train(training))
        seed_all(1)
        gradients = training if gradients is None else gradients
        with torch.set_grad_enabled(gradients), without_cache(model):
            outputs = leaves_of(self.pair.given.call(model, own))
        if training:
            torch.autograd.backward(total_of(outputs))
        buffers = detached(dict(model.named_buffers(remove_duplicate=False)))
        seen = _Seen(detached(outputs), take_gradients(model), buffers, self.copies.changed(), own)
        return replace(seen, sets_attributes=before != attributes_of(model))

    def _run_stages(self, sample: Sample[Any], training: bool) -> _Seen:
        plan, stages = self.pair.plan, self.pair.stages
        take_gradients(self.pair.model)
        seed_all(1)
        inputs, sizes = detached(sample.inputs), sample.sizes
        values: dict[str, Tensor] = dict(inputs)
        leaves: dict[str, list[Tensor]] = {}  # for each value one leaf a reader

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
        model = self.pair.model
        own = dict(model.named_buffers(remove_duplicate=False))
        buffers = {
            name: buffer
            for stage in stages
            for name, buffer in stage.named_buffers()
            if name in own
        }
        changed = self.copies.changed
        return _Seen(detached(outputs), take_gradients(model), buffers, changed(), inputs)


def _run_stage(
    spec: StageSpec, stage: nn.Module, values: Mapping[str, Any], sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Runs a stage. Raises PlanError with the line where it raises and the original did not."""
    try:
        return run_stage(spec, stage, values)
    except AsyncPipeError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise PlanError(
            f"stage {spec.index} raises {type(error).__name__}{sizes_text(sizes, ' at ')}, where "
            f"the original does not: {reason} ({where_in_stage(error, stage)})",
            "Keep the module that it comes from as one node (--leaf Class), and please report "
            "the model.",
        ) from error


def _sum_of_gradients(copies: list[Tensor]) -> Tensor | None:
    gradients = [copy.grad for copy in copies if copy.grad is not None]
    return torch.stack(gradients).sum(0) if gradients else None


def _verify_shapes(pair: _Pair, sizes: Mapping[str, int] | None) -> Verified:
    """Compares shapes and dtypes of the outputs, the only values on meta."""
    model, plan = pair.model, pair.plan

    def original(inputs: Tensors) -> dict[str, Tensor]:
        return leaves_of(
            pair.given.call(model, {name: tensor.to("meta") for name, tensor in inputs.items()})
        )

    with torch.no_grad():
        sample = pair.sample(sizes, original)
        values: dict[str, Any] = {name: each.to("meta") for name, each in sample.inputs.items()}
        for spec, stage in zip(plan.stages, pair.stages, strict=True):
            values |= _run_stage(spec, stage.train(model.training), values, sample.sizes)
    actual = leaves_of(rebuilt(plan.outputs, values, sample.sizes))
    for name, wanted in sample.result.items():
        if actual[name].shape != wanted.shape or actual[name].dtype != wanted.dtype:
            raise PlanError(
                f"the output {name} is {tuple(wanted.shape)} in the original, "
                f"{tuple(actual[name].shape)} in the stages."
            )
    return Verified(sample.sizes, plan.sizes, len(sample.result), 0, 0.0)
