"""A stage's module + its spec -> forward and backward of single micro-batches.

What a stage receives is cut off from the sender's graph: boundary tensors that need a gradient
become leaves, and their `.grad` is what goes back. Forward keeps these leaves and the outputs
that a gradient will come for; backward frees them. A stage that recomputes keeps only what a
second forward needs (`replay.py`), and runs it when the backward begins. Where the backward is in
two parts (`split_backward.py`), the first leaves the gradients of weights to the second.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.stateless import _reparametrize_module

from .authors_line import where_in_stage
from .batch_norm import MiniBatchNorm
from .errors import AsyncPipeError
from .feed import LossOf, Values
from .plan import StageSpec
from .precision import FULL, Precision
from .random_state import GeneratorState
from .replay import Buffers, WrittenArguments, nothing_saved
from .seeding import drawing_from
from .split_backward import SplitBackward
from .versions import Weights


class StageError(AsyncPipeError):
    """An exception in a stage's own code, with the stage and the micro-batch."""

    comes_again = False


@dataclass(frozen=True, slots=True)
class _Passage:
    """What a forward was given: its micro-batch, leaves by input name, all arguments, what the feed
    gave, and the weights that it read, which what is recomputed has to read again."""

    micro_batch: int
    leaves: dict[str, Tensor]
    arguments: tuple[Tensor, ...]
    fed: Values
    weights: Weights | None
    split: SplitBackward | None


@dataclass(frozen=True, slots=True)
class _InFlight:
    """What backward needs: leaves by input name, roots by output name, the loss, the weights that
    stand in for the module's, and the part that is put off."""

    leaves: dict[str, Tensor]
    roots: dict[str, Tensor]
    loss: Tensor | None
    weights: Weights | None
    split: SplitBackward | None


@dataclass(frozen=True, slots=True)
class _Repeatable:
    """What a second forward needs: what the first one was given, where the random numbers began,
    and buffers."""

    passage: _Passage
    generator: GeneratorState | None
    buffers: dict[str, Tensor]


class Stage:
    """One stage of a pipeline on its rank.

    `loss_of` makes the loss from the stage's outputs and what the feed gave; only one stage has it.
    Both are computed in `precision`. Embeddings get dense gradients of the same numbers. With
    `batch_norm` running statistics are updated once a mini-batch. With a `loss_seed` what the
    criterion draws depends on it and on the micro-batch alone.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: StageSpec,
        *,
        loss_of: LossOf | None = None,
        precision: Precision = FULL,
        batch_norm: MiniBatchNorm | None = None,
        loss_seed: int | None = None,
    ) -> None:
        for part in module.modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag):
                part.sparse = False  # Clipping, exchanges and most optimizers need dense gradients.
        self.module = module
        self.spec = spec
        self.loss_of = loss_of
        self.precision = precision
        self.grad_inputs = tuple(b.tensor.name for b in spec.receives if b.tensor.requires_grad)
        self._grad_outputs = tuple(b.tensor.name for b in spec.sends if b.tensor.requires_grad)
        self._batch_norm = batch_norm
        self._loss_seed = loss_seed
        self._buffers = Buffers(module)
        self._written = WrittenArguments(spec.inputs)
        self._kept: dict[int, _InFlight | _Repeatable] = {}
        self._put_off: dict[int, SplitBackward] = {}

    @property
    def in_flight(self) -> int:
        """Micro-batches that went forward, and whose backward is not over."""
        return len(self._kept) + len(self._put_off)

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
        split: bool = False,
        window: int = 0,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Runs the module; its outputs by name and the loss if it is made here, both detached.

        `inputs` are model inputs and boundary tensors by name, `fed` what the feed gave,
        `weights` what to read instead of the module's parameters, `generator` where its random
        numbers come from, `window` the mini-batch that batch norms count it in. Without
        `training` nothing is kept for a backward, with `recompute` only what a second forward
        needs. With `split` a `weight_backward` follows the backward. Raises StageError.
        """
        leaves = {
            name: inputs[name].detach().requires_grad_() for name in self.grad_inputs if training
        }
        values = {**inputs, **leaves}
        arguments = tuple(values[name] for name in self.spec.inputs)
        put_off = SplitBackward(weights) if split else None
        passage = _Passage(micro_batch, leaves, arguments, fed, weights, put_off)
        try:
            if training:
                with self._counting(window):
                    outputs, loss = self._forward(micro_batch, passage, generator, recompute)
            else:
                with torch.no_grad():
                    outputs, loss = self._run(passage, generator)
        except Exception as error:
            raise self._error("forward", micro_batch, error) from error
        detached = {name: output.detach() for name, output in outputs.items()}
        return detached, None if loss is None else loss.detach()

    def is_repeatable(self, micro_batch: int) -> bool:
        """Whether a micro-batch's forward is to run a second time."""
        return isinstance(self._kept[micro_batch], _Repeatable)

    def recompute(self, micro_batch: int, *, weights: Weights | None = None) -> None:
        """Runs the second forward of a micro-batch, if it kept only what that takes; it reads
        `weights` instead of the module's parameters. Raises StageError."""
        kept = self._kept[micro_batch]
        if isinstance(kept, _Repeatable):
            passage = replace(kept.passage, weights=weights)
            try:
                self._kept[micro_batch] = self._repeated(replace(kept, passage=passage))
            except Exception as error:
                raise self._error("second forward", micro_batch, error) from error

    def backward(
        self,
        micro_batch: int,
        gradients: Mapping[str, Sequence[Tensor]],
        *,
        loss_divisor: int | Fraction,
        loss_scale: float = 1.0,
        weights: Weights | None = None,
    ) -> dict[str, Tensor]:
        """Adds to the weights' `.grad`; returns the gradients of the boundary inputs that need one.

        `gradients` has, for each output that a gradient comes for, one tensor of each stage that
        read it; they are added from the last stage to the first, as autograd would. The loss is
        divided by `loss_divisor` and multiplied by `loss_scale`. An input that does not reach the
        loss gets zeros. A second forward that is still to run reads `weights`. Raises StageError.
        """
        self.recompute(micro_batch, weights=weights)
        flight = self._kept.pop(micro_batch)
        assert isinstance(flight, _InFlight)
        try:
            roots = [(root, _sum(gradients[name])) for name, root in flight.roots.items()]
            if flight.loss is not None and flight.loss.requires_grad:
                scale = torch.full_like(flight.loss, loss_scale * loss_divisor.denominator)
                roots.append((flight.loss, scale / loss_divisor.numerator))
            if flight.split is not None:
                flight.split.open()
                self._put_off[micro_batch] = flight.split
            if roots:
                tensors, tensor_gradients = zip(*roots, strict=True)
                with self._reading(flight.weights):
                    torch.autograd.backward(tensors, tensor_gradients)
        except Exception as error:
            raise self._error("backward", micro_batch, error) from error
        return {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for name, leaf in flight.leaves.items()
        }

    def weight_backward(self, micro_batch: int) -> None:
        """Adds what a split backward put off to the weights' `.grad`. Raises StageError."""
        try:
            self._put_off.pop(micro_batch).backward()
        except Exception as error:
            raise self._error("weights' backward", micro_batch, error) from error

    def finish_window(self, window: int) -> None:
        """All forwards of a mini-batch are over."""
        if self._batch_norm is not None:
            self._batch_norm.finish(window)

    def _forward(
        self,
        micro_batch: int,
        passage: _Passage,
        generator: GeneratorState | None,
        recompute: bool,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        if not recompute:
            with passage.split or nullcontext():
                outputs, loss = self._run(passage, generator)
            self._kept[micro_batch] = self._in_flight(passage, outputs, loss)
            return outputs, loss
        begin = generator and generator.copy()
        earlier = (other.buffers for other in self._kept.values() if isinstance(other, _Repeatable))
        with self._buffers.remembered(earlier) as found, nothing_saved():
            outputs, loss = self._run(passage, generator)
        self._kept[micro_batch] = _Repeatable(passage, begin, found)
        return outputs, loss

    def _repeated(self, kept: _Repeatable) -> _InFlight:
        with self._counting(None), kept.passage.split or nullcontext():
            outputs, loss = self._run(kept.passage, kept.generator, kept.buffers)
        return self._in_flight(kept.passage, outputs, loss)

    def _in_flight(
        self, passage: _Passage, outputs: Mapping[str, Tensor], loss: Tensor | None
    ) -> _InFlight:
        grad = (name for name in self._grad_outputs if outputs[name].requires_grad)
        roots = {name: outputs[name] for name in grad}
        return _InFlight(passage.leaves, roots, loss, passage.weights, passage.split)

    def _counting(self, window: int | None) -> AbstractContextManager[None]:
        """Within, batch norms count their inputs for a window, or for none."""
        return nullcontext() if self._batch_norm is None else self._batch_norm.counting(window)

    def _run(
        self,
        passage: _Passage,
        generator: GeneratorState | None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """The module's outputs by name and the loss; `buffers` stand in for the module's own."""
        with generator.drawing() if generator else nullcontext(), self.precision.computing():
            arguments = tuple(map(self.precision.argument, passage.arguments))
            with self._written.guarded(arguments) as arguments:
                result = self._call({**(passage.weights or {}), **(buffers or {})}, arguments)
            outputs = self.spec.named_outputs(result)
            return outputs, self._loss(passage, outputs)

    def _loss(self, passage: _Passage, outputs: Values) -> Tensor | None:
        if self.loss_of is None:
            return None
        if self._loss_seed is None:
            return self.loss_of(outputs, passage.fed)
        with drawing_from(self._loss_seed, "criterion", passage.micro_batch):
            return self.loss_of(outputs, passage.fed)

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
        what, cure = f"{type(error).__name__}: {error}", ""
        if isinstance(error, AsyncPipeError):
            what, cure = error.what, error.cure
        told = StageError(
            f"Stage {self.spec.index} failed in the {action} of micro-batch {micro_batch}: {what}",
            cure,
        )
        # Kept with the error, since only its sentence may reach the terminal.
        detail = "".join(traceback.format_exception(error))
        told.add_note("\n".join(filter(None, [where_in_stage(error, self.module), detail])))
        return told


def _sum(gradients: Sequence[Tensor]) -> Tensor:
    total = gradients[-1]
    for gradient in reversed(gradients[:-1]):
        total = total + gradient
    return total
