"""A stage's module + its spec -> forward and backward of single micro-batches.

What a stage receives is cut off from the sender's graph: boundary tensors that need a gradient
become leaves, and their `.grad` is what goes back. Forward keeps these leaves and the outputs
that a gradient will come for; backward frees them. A stage that recomputes keeps only what a
second forward needs (`replay.py`), and runs it when the backward begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.stateless import _reparametrize_module

from .errors import AsyncPipeError
from .feed import LossOf, Values
from .plan import StageSpec
from .precision import FULL, Precision
from .random_state import GeneratorState
from .replay import Buffers, nothing_saved
from .versions import Weights


class StageError(AsyncPipeError):
    """An exception in a stage's own code, with the stage and the micro-batch."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """What backward needs: roots by output name and the loss."""

    roots: dict[str, Tensor]
    loss: Tensor | None


@dataclass(frozen=True, slots=True)
class _Passage:
    """What a forward was given: leaves by input name, all arguments, what the feed gave, and the
    weights that it read, which what is recomputed has to read again."""

    leaves: dict[str, Tensor]
    arguments: tuple[Tensor, ...]
    fed: Values
    weights: Weights | None


@dataclass(frozen=True, slots=True)
class _Repeatable:
    """What a second forward needs beside: where the random numbers began, and buffers."""

    generator: GeneratorState | None
    buffers: dict[str, Tensor]


class Stage:
    """One stage of a pipeline on its rank.

    `loss_of` makes the loss from the stage's outputs and what the feed gave; only one stage has it.
    Both are computed in `precision`.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: StageSpec,
        *,
        loss_of: LossOf | None = None,
        precision: Precision = FULL,
    ) -> None:
        self.module = module
        self.spec = spec
        self.loss_of = loss_of
        self.precision = precision
        self.grad_inputs = tuple(b.tensor.name for b in spec.receives if b.tensor.requires_grad)
        self._grad_outputs = tuple(b.tensor.name for b in spec.sends if b.tensor.requires_grad)
        self._buffers = Buffers(module)
        self._passages: dict[int, _Passage] = {}
        self._kept: dict[int, _InFlight | _Repeatable] = {}

    @property
    def in_flight(self) -> int:
        """Micro-batches that went forward and not yet backward."""
        return len(self._passages)

    def forward(
        self,
        micro_batch: int,
        inputs: Values,
        fed: Values,
        *,
        weights: Weights | None = None,
        generator: GeneratorState | None = None,
        training: bool = True,
        recompute: bool = False,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Runs the module; its outputs by name and the loss if it is made here, both detached.

        `inputs` are model inputs and boundary tensors by name, `fed` what the feed gave,
        `weights` what to read instead of the module's parameters, `generator` where its random
        numbers come from. Without `training` nothing is kept for a backward, with `recompute`
        only what a second forward needs. Raises StageError.
        """
        leaves = {
            name: inputs[name].detach().requires_grad_() for name in self.grad_inputs if training
        }
        values = {**inputs, **leaves}
        passage = _Passage(leaves, tuple(values[name] for name in self.spec.inputs), fed, weights)
        kept: _InFlight | _Repeatable
        try:
            if training and recompute:
                begin = generator and GeneratorState(generator.device, generator.state)
                earlier = (
                    other.buffers for other in self._kept.values() if isinstance(other, _Repeatable)
                )
                with self._buffers.remembered(earlier) as found, nothing_saved():
                    outputs, loss = self._run(passage, generator)
                kept = _Repeatable(begin, found)
            else:
                with torch.set_grad_enabled(training):
                    outputs, loss = self._run(passage, generator)
                kept = self._roots(outputs, loss)
        except Exception as error:
            raise self._error("forward", micro_batch, error) from error
        if training:
            self._passages[micro_batch], self._kept[micro_batch] = passage, kept
        detached = {name: output.detach() for name, output in outputs.items()}
        return detached, None if loss is None else loss.detach()

    def backward(
        self,
        micro_batch: int,
        gradients: Mapping[str, Sequence[Tensor]],
        *,
        loss_divisor: int,
        loss_scale: float = 1.0,
    ) -> dict[str, Tensor]:
        """Adds to the weights' `.grad`; returns the gradients of the boundary inputs that need one.

        `gradients` has, for each output that a gradient comes for, one tensor of each stage that
        read it; they are added from the last stage to the first, as autograd would. The loss is
        divided by `loss_divisor` and multiplied by `loss_scale`. An input that does not reach the
        loss gets zeros. Raises StageError.
        """
        passage, kept = self._passages.pop(micro_batch), self._kept.pop(micro_batch)
        try:
            flight = self._repeated(passage, kept) if isinstance(kept, _Repeatable) else kept
            roots = [(root, _sum(gradients[name])) for name, root in flight.roots.items()]
            if flight.loss is not None and flight.loss.requires_grad:
                scale = torch.full_like(flight.loss, loss_scale)
                roots.append((flight.loss, scale / loss_divisor))
            if roots:
                tensors, tensor_gradients = zip(*roots, strict=True)
                with self._reading(passage.weights):
                    torch.autograd.backward(tensors, tensor_gradients)
        except Exception as error:
            raise self._error("backward", micro_batch, error) from error
        return {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for name, leaf in passage.leaves.items()
        }

    def _run(
        self,
        passage: _Passage,
        generator: GeneratorState | None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """The module's outputs by name and the loss; `buffers` stand in for the module's own."""
        with generator.drawing() if generator else nullcontext(), self.precision.computing():
            arguments = tuple(map(self.precision.argument, passage.arguments))
            result = self._call({**(passage.weights or {}), **(buffers or {})}, arguments)
            outputs = self.spec.named_outputs(result)
            return outputs, self.loss_of(outputs, passage.fed) if self.loss_of else None

    def _repeated(self, passage: _Passage, kept: _Repeatable) -> _InFlight:
        return self._roots(*self._run(passage, kept.generator, kept.buffers))

    def _roots(self, outputs: Mapping[str, Tensor], loss: Tensor | None) -> _InFlight:
        grad = (name for name in self._grad_outputs if outputs[name].requires_grad)
        return _InFlight({name: outputs[name] for name in grad}, loss)

    def _call(self, tensors: Mapping[str, Tensor], arguments: tuple[Tensor, ...]) -> Any:
        if not tensors:
            return self.module(*arguments)
        return functional_call(self.module, dict(tensors), arguments)

    def _reading(self, weights: Weights | None) -> AbstractContextManager[None]:
        """Within, the module has these weights instead of its own."""
        if weights is None:
            return nullcontext()
        bound: AbstractContextManager[None] = _reparametrize_module(
            self.module, dict(weights), tie_weights=True
        )
        return bound

    def _error(self, action: str, micro_batch: int, error: Exception) -> StageError:
        return StageError(
            f"Stage {self.spec.index} failed in the {action} of micro-batch {micro_batch}: "
            f"{type(error).__name__}: {error}"
        )


def _sum(gradients: Sequence[Tensor]) -> Tensor:
    total = gradients[-1]
    for gradient in reversed(gradients[:-1]):
        total = total + gradient
    return total
