"""Checks that stages whose layers several ranks share out compute what whole stages do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.executor.loading import run_stage, stage_builder
from ..runtime.executor.tied_parameters import verify_splits_alike
from ..runtime.plan.plan import Plan
from ..runtime.plan.structure import rebuilt
from ..runtime.tensor_parallel.ranks import Split, TensorRanks, splits_of
from ..runtime.tensor_parallel.threads import in_threads
from .capture import read_arguments
from .capture.check import (
    Differs,
    compare,
    detached,
    leaves_of,
    total_of,
)
from .capture.model_state import Noise, is_on_meta, seed_all, working_copies
from .verdict import MOST_BY_ROUNDING, TOLERANCE, TOLERANCE_IN_DOUBLE, doubled


@dataclass(frozen=True)
class _Parts:
    """The results of one tensor rank: outputs, gradients and buffers by stage and name, and its
    splits by stage."""

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    splits: Mapping[int, Mapping[str, Split]]


_BY_ROUNDING = 10
"""Sums in another order differ by at most so many times as much as rounded weights make."""
_MOST_WITH_GRADIENTS = 500_000_000
"""Parameters of models whose whole and divided gradients do not fit into memory together."""


def compares_gradients(model: nn.Module) -> bool:
    """True if `verify_parts` also compares the gradients of a model; otherwise outputs alone."""
    number = sum(parameter.numel() for parameter in model.parameters())
    return number < _MOST_WITH_GRADIENTS and not is_on_meta(model)


def compared_text(model: nn.Module, size: int) -> str:
    """The values that `verify_parts` compares, in words for the line of the phase."""
    what = "" if compares_gradients(model) else "shapes " if is_on_meta(model) else "outputs alone "
    return f"{what}on {size} tensor ranks too"


def verify_parts(
    model: nn.Module,
    plan: Plan,
    folder: Path,
    example_inputs: Mapping[str, Any],
    size: int,
    *,
    constants: Mapping[str, Tensor] | None = None,
) -> float:
    """The largest difference of the stages on `size` tensor ranks from the stages on one.

    Compares the outputs, the buffers and, if `compares_gradients`, all gradients of every rank,
    with equal seeds, in training mode, and the same without gradients in evaluation mode where the
    plan has it; in float64 if they differ in float32; shapes alone for a model on meta. Raises
    PlanError with the name of the first value that differs, and for tied parameters that stages
    divide in two ways.
    """
    given = read_arguments(model, example_inputs)
    if is_on_meta(model):
        inputs = {name: tensor.to("meta") for name, tensor in given.tensors.items()}
        return _Run(plan, folder, {}, inputs, gradients=False, device="meta").difference(size, 0)
    with working_copies(model, Noise.ALL), torch.no_grad():
        state = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
            **(constants or {}),
        }
        state = {name: tensor.detach().clone() for name, tensor in state.items()}
    train = _Run(plan, folder, state, given.tensors, compares_gradients(model))
    evaluate = [replace(train, gradients=False, training=False)] * (plan.mode == "both")
    return max(run.least_difference(size) for run in (train, *evaluate))


@dataclass(frozen=True)
class _Run:
    """One micro-batch through all stages, forward and backward.

    state: the whole parameters, buffers and constants by name
    inputs: the example inputs
    gradients: whether backward runs too
    device: where the stages are
    is_double: whether all tensors of floating point are in float64
    training: the mode
    """

    plan: Plan
    folder: Path
    state: Mapping[str, Tensor]
    inputs: Mapping[str, Any]
    gradients: bool
    device: str = "cpu"
    is_double: bool = False
    training: bool = True

    def least_difference(self, size: int) -> float:
        """The largest relative difference, in float64 if it is beyond the tolerance in float32."""
        try:
            return self.difference(size, TOLERANCE)
        except Differs as error:
            state, inputs = doubled(self.state), doubled(self.inputs)
            double = replace(self, state=state, inputs=inputs, is_double=True)
            try:
                return double.difference(size, TOLERANCE_IN_DOUBLE)
            except (RuntimeError, TypeError):  # The forward names float32.
                return self._rounded(size, error)

    def _rounded(self, size: int, error: Differs) -> float:
        """The largest relative difference, if one stage whose weights are moved by their rounding
        differs about as much. Raises `error` otherwise."""
        state = {
            name: torch.nextafter(each, torch.tensor(inf)) if each.dtype == torch.float32 else each
            for name, each in self.state.items()
        }
        by_rounding = self.difference(1, inf, replace(self, state=state))
        found = self.difference(size, inf)
        if found > min(_BY_ROUNDING * by_rounding, MOST_BY_ROUNDING):
            raise error
        return found

    def difference(self, size: int, tolerance: float, other: _Run | None = None) -> float:
        """The largest relative difference of this run, or of another one, on `size` tensor ranks
        from this run on one. Raises Differs for one beyond the tolerance."""
        with torch.random.fork_rng(devices=[]):
            (whole,) = in_threads(1, self._run)
            parts = in_threads(size, (other or self)._run)
        splits = {
            f"{stage} {name}": split
            for stage, own in parts[0].splits.items()
            for name, split in own.items()
        }
        where = f" (on {size} tensor ranks{'' if self.training else ', in evaluation mode'})"
        largest = 0.0
        for part in parts:
            gradients = _whole(part.gradients, [each.gradients for each in parts], splits)
            buffers = _whole(part.buffers, [each.buffers for each in parts], splits)
            largest = max(
                largest,
                compare(whole.outputs, part.outputs, tolerance, f"output{where}"),
                compare(whole.gradients, gradients, tolerance, f"gradient{where} of"),
                compare(whole.buffers, buffers, tolerance, f"buffer{where}"),
            )
        return largest

    def _run(self, ranks: TensorRanks) -> _Parts:
        stages: list[nn.Module] = []
        splits: dict[int, Mapping[str, Split]] = {}
        for spec in self.plan.stages:
            with torch.device(self.device):
                stage = stage_builder(self.folder, spec)()
            own = splits_of(stage)
            splits[spec.index] = own
            stages.append(self._filled(stage, own, ranks))
        verify_splits_alike(self.plan, splits)
        seed_all(1)
        with torch.set_grad_enabled(self.gradients):
            values = {**self.inputs}
            for spec, stage in zip(self.plan.stages, stages, strict=True):
                given = {name: _copy(values[name]) for name in spec.inputs}
                values |= run_stage(spec, stage, given)
            outputs = leaves_of(rebuilt(self.plan.outputs, values, self.plan.sizes))
            if torch.is_grad_enabled():
                torch.autograd.backward(total_of(outputs))
        gradients = {
            f"{spec.index} {name}": parameter.grad
            for spec, stage in zip(self.plan.stages, stages, strict=True)
            for name, parameter in stage.named_parameters()
            if parameter.grad is not None
        }
        buffers = {
            f"{spec.index} {name}": buffer
            for spec, stage in zip(self.plan.stages, stages, strict=True)
            for name, buffer in stage.named_buffers()
            if name in self.state
        }
        return _Parts(detached(outputs), gradients, buffers, splits)

    def _filled(
        self, stage: nn.Module, splits: Mapping[str, Split], ranks: TensorRanks
    ) -> nn.Module:
        """The stage with a rank's parts of the state, in its dtype."""
        if self.is_double:
            stage.double()
        tensors = (*stage.named_parameters(), *stage.named_buffers())
        with torch.no_grad():
            for name, tensor in tensors:
                if (whole := self.state.get(name)) is not None:
                    split = splits.get(name)
                    tensor.copy_(split.part(whole, ranks.rank, ranks.size) if split else whole)
        return stage.train(self.training)


def _copy(value: Any) -> Any:
    """A copy of a tensor, to which a stage may write."""
    return value.clone() if isinstance(value, Tensor) else value


def _whole(
    own: Mapping[str, Tensor], of_ranks: Sequence[Mapping[str, Tensor]], splits: Mapping[str, Split]
) -> dict[str, Tensor]:
    """A rank's tensors, with the whole ones of those that are divided."""
    return {
        key: splits[key].whole([tensors[key] for tensors in of_ranks]) if key in splits else tensor
        for key, tensor in own.items()
    }
