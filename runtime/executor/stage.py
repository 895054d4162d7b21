"""A stage's module + its spec -> forward and backward of single micro-batches.

Inputs of a stage are detached from the sender's graph: boundary tensors that need a gradient become
leaves, and their `.grad` is sent back. Forward keeps these leaves and the outputs that receive a
gradient; backward frees them. A stage that recomputes keeps only the inputs of a second forward
(`recompute.py`), and runs it when the backward begins. A split backward (`split_backward.py`)
leaves the gradients of weights to its second part.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.stateless import _reparametrize_module

from ..errors import AsyncPipeError, TransportError
from ..plan.plan import StageSpec
from ..rng import GeneratorState, drawing_from
from ..staleness.weight_versions import Weights
from ..tensor_files import dtype_of
from ..tensor_parallel.ranks import reading_loss_alone
from ..user_code import own_line
from .precision import FULL, Precision
from .recompute import Buffers, ChangedTensors, MiniBatchNorm, WrittenArguments, nothing_saved
from .run import LossOf, Values, where_in_stage
from .split_backward import SplitBackward

Call = Callable[[tuple[Tensor, ...]], Any]
"""Arguments of a module -> its result."""


class Around(Protocol):
    """Makes a module's result, and may call it in part."""

    def __call__(self, arguments: tuple[Tensor, ...], call: Call) -> Any: ...

    def look_ahead(self, arguments: tuple[Tensor, ...], index: int) -> None:
        """Prepares for the call of a micro-batch to come; `index` is that of its action."""


class StageError(AsyncPipeError):
    """An exception in a stage's own code, with the stage and the micro-batch."""

    comes_again = False


@dataclass(frozen=True, slots=True)
class _ForwardInputs:
    """The inputs of a forward."""

    micro_batch: int
    leaves: dict[str, Tensor]
    """The leaves by input name."""
    arguments: tuple[Tensor, ...]
    fed: Values | None
    """The values of the feed; None where no loss is to be computed."""
    weights: Weights | None
    """The weights that the forward read, and reads again if it is recomputed."""
    split: SplitBackward | None


@dataclass(frozen=True, slots=True)
class _InFlight:
    """The inputs of a backward."""

    leaves: dict[str, Tensor]
    """The leaves by input name."""
    roots: dict[str, Tensor]
    """The outputs that receive a gradient, by name."""
    loss: Tensor | None
    weights: Weights | None
    """The weights in place of the module's."""
    split: SplitBackward | None
    """The delayed weight gradients."""


@dataclass(frozen=True, slots=True)
class _Repeatable:
    """The inputs of a recomputed forward."""

    forward_inputs: _ForwardInputs
    generator: GeneratorState | None
    """The state of the random generator at the start of the first forward."""
    buffers: dict[str, Tensor]
    """The buffers that the first forward found."""
    changed: list[Tensor]
    """The values of the parameters that forwards change."""


class Stage:
    """One stage of a pipeline on its rank. Embeddings get dense gradients of the same values.

    - `loss_of`: computes the loss from the stage's outputs and the feed's values; only one stage
      has it
    - `precision`: the precision of the forward and of the loss
    - `batch_norm`: updates running statistics once a mini-batch
    - `loss_seed`: the seed of the criterion's random draws, which depend on it and on the
      micro-batch alone
    - `captured_dtypes`: the dtypes of the model's inputs when it was captured

    A stage without the loss whose outputs need no gradient has no backward: it keeps nothing and
    never recomputes.

    around: makes the module's result; None for a call of it
    loss_alone: nothing reads the outputs of the model but its loss
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
        captured_dtypes: Mapping[str, str] = MappingProxyType({}),
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
        self.around: Around | None = None
        self.loss_alone = False
        self._batch_norm = batch_norm
        self._loss_seed = loss_seed
        self._captured_dtypes = captured_dtypes
        self.has_backward = loss_of is not None or bool(self._grad_outputs)
        self._buffers = Buffers(module)
        self._changed = ChangedTensors(module, spec.changes)
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
        recompute: bool = False,
        split: bool = False,
        window: int = 0,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Runs the module; its outputs by name and the loss if it is made here, both detached.

        `inputs` are model inputs and boundary tensors by name, `fed` what the feed gave,
        `weights` what to read instead of the module's parameters, `generator` where its random
        numbers come from, `window` the mini-batch that batch norms count it in. With `recompute`
        only what a second forward needs is kept for the backward. With `split` a
        `weight_backward` follows the backward. Raises StageError.
        """
        leaves = {name: inputs[name].detach().requires_grad_() for name in self.grad_inputs}
        put_off = SplitBackward(weights) if split else None
        arguments = self._arguments({**inputs, **leaves})
        forward_inputs = _ForwardInputs(micro_batch, leaves, arguments, fed, weights, put_off)
        try:
            with self._counting(window), torch.enable_grad():  # code of the data may disable it
                outputs, loss = self._forward(micro_batch, forward_inputs, generator, recompute)
        except Exception as error:
            raise self._error("forward", micro_batch, error, fed) from error
        return _detached(outputs, loss)

    def evaluate(
        self, micro_batch: int, inputs: Values, fed: Values | None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """The same without gradients, for a micro-batch that has no backward; without `fed`, no
        loss is computed outside the model."""
        forward_inputs = _ForwardInputs(micro_batch, {}, self._arguments(inputs), fed, None, None)
        try:
            with torch.no_grad():
                return _detached(*self._run(forward_inputs, None))
        except Exception as error:
            raise self._error("forward", micro_batch, error, fed) from error

    def look_ahead(self, inputs: Values, index: int) -> None:
        """Prepares for the forward of a micro-batch to come, whose action has this index."""
        if self.around is not None:
            self.around.look_ahead(self._arguments(inputs), index)

    def _arguments(self, values: Values) -> tuple[Tensor, ...]:
        return tuple(values[name] for name in self.spec.inputs)

    def is_repeatable(self, micro_batch: int) -> bool:
        """True if a micro-batch's forward will be recomputed."""
        return isinstance(self._kept[micro_batch], _Repeatable)

    def recompute(self, micro_batch: int, *, weights: Weights | None = None) -> None:
        """Recomputes the forward of a micro-batch, if it kept only its inputs, with `weights`
        instead of the module's parameters. Raises StageError."""
        repeatable = self._kept[micro_batch]
        if isinstance(repeatable, _Repeatable):
            forward_inputs = replace(repeatable.forward_inputs, weights=weights)
            try:
                self._kept[micro_batch] = self._repeated(
                    replace(repeatable, forward_inputs=forward_inputs)
                )
            except Exception as error:
                raise self._error("second forward", micro_batch, error) from error

    def backward(
        self,
        micro_batch: int,
        gradients: Mapping[str, Sequence[Tensor]],
        *,
        loss_divisor: int | Fraction | None,
        loss_scale: float = 1.0,
        weights: Weights | None = None,
    ) -> dict[str, Tensor]:
        """Adds to the weights' `.grad`; returns the gradients of the boundary inputs that need one.

        `gradients` has, for each output that receives a gradient, one tensor from each stage that
        read it; they are added from the last stage to the first, in autograd's order. The loss is
        divided by `loss_divisor` and multiplied by `loss_scale`; without a divisor it is left out.
        An input that has no influence on the loss gets zeros. A pending recomputation reads
        `weights`. Raises StageError.
        """
        self.recompute(micro_batch, weights=weights)
        flight = self._kept.pop(micro_batch)
        assert isinstance(flight, _InFlight)
        try:
            roots = [(root, _sum(gradients[name])) for name, root in flight.roots.items()]
            loss = flight.loss
            if loss is not None and loss.requires_grad and loss_divisor is not None:
                scale = torch.full_like(loss, loss_scale * loss_divisor.denominator)
                roots.append((loss, scale / loss_divisor.numerator))
            if flight.split is not None:
                flight.split.open()
                self._put_off[micro_batch] = flight.split
            if roots:
                tensors, tensor_gradients = zip(*roots, strict=True)
                with self._reading(flight.weights):
                    backward_from(tensors, tensor_gradients)
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
        forward_inputs: _ForwardInputs,
        generator: GeneratorState | None,
        recompute: bool,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        if not recompute:
            with forward_inputs.split or nullcontext(), self._changed.saved_apart():
                outputs, loss = self._run(forward_inputs, generator)
            self._kept[micro_batch] = self._in_flight(forward_inputs, outputs, loss)
            return outputs, loss
        begin, changed = generator and generator.copy(), self._changed.values()
        earlier = (other.buffers for other in self._kept.values() if isinstance(other, _Repeatable))
        with self._buffers.remembered(earlier) as buffers, nothing_saved():
            outputs, loss = self._run(forward_inputs, generator)
        self._kept[micro_batch] = _Repeatable(forward_inputs, begin, buffers, changed)
        return outputs, loss

    def _repeated(self, repeatable: _Repeatable) -> _InFlight:
        with (
            torch.enable_grad(),
            self._counting(None),
            repeatable.forward_inputs.split or nullcontext(),
            self._changed.holding(repeatable.changed),
            self._changed.saved_apart(),
        ):
            outputs, loss = self._run(
                repeatable.forward_inputs, repeatable.generator, repeatable.buffers
            )
        return self._in_flight(repeatable.forward_inputs, outputs, loss)

    def _in_flight(
        self, forward_inputs: _ForwardInputs, outputs: Mapping[str, Tensor], loss: Tensor | None
    ) -> _InFlight:
        grad = (name for name in self._grad_outputs if outputs[name].requires_grad)
        roots = {name: outputs[name] for name in grad}
        return _InFlight(
            forward_inputs.leaves, roots, loss, forward_inputs.weights, forward_inputs.split
        )

    def _counting(self, window: int | None) -> AbstractContextManager[None]:
        """Within, batch norms count their inputs for a window, or for none."""
        return nullcontext() if self._batch_norm is None else self._batch_norm.counting(window)

    def _run(
        self,
        forward_inputs: _ForwardInputs,
        generator: GeneratorState | None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """The module's outputs by name and the loss; `buffers` stand in for the module's own."""
        with generator.drawing() if generator else nullcontext(), self.precision.computing():
            arguments = tuple(map(self.precision.argument, forward_inputs.arguments))
            call = partial(self._call, {**(forward_inputs.weights or {}), **(buffers or {})})
            alone = reading_loss_alone(self.loss_alone)
            with self._written.guarded(arguments) as arguments, alone:
                result = self.around(arguments, call) if self.around else call(arguments)
            outputs = self.spec.named_outputs(result)
            return outputs, self._loss(forward_inputs, outputs)

    def _loss(self, forward_inputs: _ForwardInputs, outputs: Values) -> Tensor | None:
        if self.loss_of is None or forward_inputs.fed is None:
            return None
        if self._loss_seed is None:
            return self.loss_of(outputs, forward_inputs.fed)
        with drawing_from(self._loss_seed, "criterion", forward_inputs.micro_batch):
            return self.loss_of(outputs, forward_inputs.fed)

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

    def _error(
        self, action: str, micro_batch: int, error: Exception, fed: Values | None = None
    ) -> AsyncPipeError:
        if isinstance(error, TransportError):  # of a sum over tensor ranks
            return error
        place = own_line(error)
        is_of_stage = place.rpartition(":")[0] == inspect.getfile(type(self.module))
        at = f" ({place})" if place and not is_of_stage else ""
        message, cure = f"{type(error).__name__}: {error}{at}", self._cure(fed or {})
        if isinstance(error, AsyncPipeError):
            message, cure = error.what, error.cure
        stage_error = StageError(
            f"stage {self.spec.index} failed in the {action} of micro-batch {micro_batch}: "
            f"{message}",
            cure,
        )
        # Kept with the error, since only its sentence may reach the terminal.
        detail = "".join(traceback.format_exception(error))
        stage_error.add_note("\n".join(filter(None, [where_in_stage(error, self.module), detail])))
        return stage_error

    def _cure(self, fed: Values) -> str:
        """The cure for inputs of another kind of number than the model was captured with."""
        for name, captured in self._captured_dtypes.items():
            if name not in fed:
                continue
            if fed[name].is_floating_point() != dtype_of(captured).is_floating_point:
                given = str(fed[name].dtype).removeprefix("torch.")
                return (
                    f"{name} of the data is {given}, but the model was partitioned with "
                    f"{captured}: convert it in the dataset."
                )
        return ""


def _detached(
    outputs: Mapping[str, Tensor], loss: Tensor | None
) -> tuple[dict[str, Tensor], Tensor | None]:
    detached = {name: output.detach() for name, output in outputs.items()}
    return detached, None if loss is None else loss.detach()


def _sum(gradients: Sequence[Tensor]) -> Tensor:
    total = gradients[-1]
    for gradient in reversed(gradients[:-1]):
        total = total + gradient
    return total


class _Seed(torch.autograd.Function):
    """A scalar whose gradient with respect to some tensors is given.

    `torch.autograd.backward` imports the compiler's symbols for gradients that it is given: 0.7
    seconds and 80 MiB of every rank, before the first gradient is sent.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *gradients


def backward_from(tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Accumulates the gradients of all leaves from those of the tensors."""
    with torch.enable_grad():
        seed: Tensor = _Seed.apply([*gradients], *tensors)  # type: ignore[no-untyped-call]
    torch.autograd.backward(seed)
