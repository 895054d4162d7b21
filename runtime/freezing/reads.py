"""A stage with frozen blocks -> the tensors of these blocks that the rest of the stage reads.

The stage runs on fake tensors, once as it is and once without its frozen blocks up to one of them.
The tensors that these would return are marked then, and every operation passes the marks of what it
reads on to what it makes. The marks that arrive at the stage's outputs are the tensors that must be
known to leave these blocks out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..errors import AsyncPipeError
from ..executor.loading import run_stage
from ..executor.precision import running_on_fake_tensors
from ..plan.plan import Plan, StageSpec
from .blocks import Blocks
from .marks import DRAWN, INPUT, TRAINED, Leaf, Marks
from .stages import freeze_stage, is_called

WRITES = -1
"""The number in a leaf that stands for an input that the block writes to."""


class NotCachedError(AsyncPipeError):
    """The reason why what a stage's frozen blocks compute cannot be kept."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Where a tensor has the values of a sample.

    dim: the dimension that counts samples
    each: the rows of a sample in it
    """

    dim: int
    each: int


class StageReads:
    """The leaves of its frozen blocks that the rest of a stage reads.

    paths: the frozen blocks that the stage calls, by number, in order
    rows: where each leaf has its samples; None for one that is the same for all samples
    outputs: the leaves that the stage returns if it is frozen as a whole; otherwise ()
    whole: the block number of leaves that no block has returned
    constants: the leaves that are the same for all inputs

    Arguments:
    plan: the plan at this depth
    build: the constructor of the stage

    Raises NotCachedError where frozen blocks cannot be left out.
    """

    def __init__(
        self,
        plan: Plan,
        spec: StageSpec,
        build: Callable[[], nn.Module],
        blocks: Blocks,
        depth: int,
        is_whole: bool,
    ) -> None:
        self._plan, self._spec, self._build = plan, spec, build
        self._blocks, self._depth, self._is_whole = blocks, depth, is_whole
        self._trained = {b.tensor.name for b in spec.receives if b.tensor.requires_grad}
        self._kept: dict[int, tuple[Leaf, ...]] = {}
        if spec.changes:
            raise NotCachedError(f"its forward writes to {spec.changes[0]}")
        samples = plan.sizes.get("batch")
        if samples is None:
            raise NotCachedError("its micro-batches have no dimension of samples")
        first, twice = (self._recorded(plan, samples * times) for times in (1, 2))
        self.paths = {number: blocks.paths[number] for number in first.calls}
        if not is_whole and not self.paths:
            raise NotCachedError("it calls none of its frozen blocks as a module")
        self.outputs, self.whole = first.outputs, len(blocks)
        self.rows = {
            leaf: _rows_of(tensor.shape, twice.leaves[leaf].shape, samples)
            for leaf, tensor in first.leaves.items()
            if leaf in twice.leaves
        }
        self._marks, self._steering = first.marks_of, first.steering
        self.constants = frozenset(
            leaf for leaf, rows in self.rows.items() if rows is None and not first.marks_of[leaf]
        )

    @property
    def last(self) -> int:
        """The last frozen block; the number of all blocks if the stage returns more than that."""
        last = max(self.paths, default=INPUT)
        whole = max((leaf.block for leaf in self.outputs), default=last)
        return max(last, whole)

    def kept(self, last: int) -> tuple[Leaf, ...]:
        """The leaves that must be known to leave out the frozen blocks up to one of them. Raises
        NotCachedError."""
        if last not in self._kept:
            self._kept[last] = self._checked(self._find(last))
        return self._kept[last]

    @property
    def inputs(self) -> frozenset[int]:
        """The places of the inputs on whose values the kept leaves depend."""
        marks = self._steering.union(*(self._marks[leaf] for leaf in self.kept(self.last)))
        return frozenset(mark.number for mark in marks if mark.block == INPUT)

    def _find(self, last: int) -> set[Leaf]:
        if self._is_whole and last == self.last:
            return set(self.outputs)
        modes = (True,) if self._plan.mode == "train" else (True, False)
        return set[Leaf]().union(*(self._read_without(last, mode) for mode in modes))

    def _checked(self, read: set[Leaf]) -> tuple[Leaf, ...]:
        for leaf in read:
            name = self.paths.get(leaf.block, "the stage")
            if leaf.number == WRITES:
                raise NotCachedError(f"{name} writes to its input, which is read afterwards")
            if TRAINED in self._marks[leaf]:
                raise NotCachedError(f"{name} reads what still trains")
            if DRAWN in self._marks[leaf] or self._spec.draws_numbers:
                raise NotCachedError(f"{name} reads random numbers")
            if leaf not in self.rows:
                raise NotCachedError(f"what {name} returns depends on the number of samples")
            if self.rows[leaf] is None and leaf not in self.constants:
                raise NotCachedError(f"{name} returns a tensor for all samples together")
        if all(self.rows[leaf] is None for leaf in read):
            raise NotCachedError("nothing reads what its frozen blocks return")
        return tuple(sorted(read))

    def _recorded(self, plan: Plan, samples: int) -> _Recorded:
        plan = replace(plan, sizes={**plan.sizes, "batch": samples})
        with self._running(plan, training=True) as (module, given, marks):
            for number, name in enumerate(self._spec.inputs):
                trained = {TRAINED} if name in self._trained else set()
                marks.add(given[name], {Leaf(INPUT, number)} | trained)
            for tensor in _changing(module):
                marks.add(tensor, {TRAINED})
            recorded = _Recorded(marks, self._called(module))
            before = _state_of(module)
            with replaced(recorded.forwards()), marks:
                outputs = run_stage(self._spec, module, given)
            if self._is_whole and before != _state_of(module):
                raise NotCachedError("it changes its buffers in evaluation mode")
            if self._is_whole:
                recorded.end(len(self._blocks), list(outputs.values()))
            if list(recorded.calls) != sorted(recorded.calls):
                raise NotCachedError("its blocks run in another order than the model lists them")
        return recorded

    def _read_without(self, last: int, training: bool) -> set[Leaf]:
        """The marks that arrive at the outputs without the frozen blocks up to one of them."""
        with self._running(self._plan, training) as (module, given, marks):
            called = self._called(module)
            recorded = _Recorded(Marks(), called)
            with replaced(recorded.forwards()):
                run_stage(self._spec, module, given)
            left_out = {number: part for number, part in called.items() if number <= last}
            stand_ins = {part: recorded.stand_in(n, marks) for n, part in left_out.items()}
            with replaced(stand_ins), marks:
                outputs = run_stage(self._spec, module, given)
            read = marks.steering.union(*(marks.of(value) for value in outputs.values()))
            return {leaf for leaf in read if leaf.block != INPUT}

    def _called(self, module: nn.Module) -> dict[int, nn.Module]:
        return called_blocks(module, self._blocks, self._depth)

    @contextmanager
    def _running(
        self, plan: Plan, training: bool
    ) -> Iterator[tuple[nn.Module, dict[str, Tensor], Marks]]:
        specs = {tensor.name: tensor for tensor in (*plan.inputs, *plan.values)}
        with running_on_fake_tensors(plan), nullcontext() if training else torch.no_grad():
            module = self._build()
            freeze_stage(module, self._spec, self._blocks, self._depth)
            if not training:
                module.eval()
            given = {
                name: torch.empty(
                    specs[name].resolve(plan.sizes), dtype=getattr(torch, specs[name].dtype)
                )
                for name in self._spec.inputs
            }
            try:
                yield module, given, Marks()
            except AsyncPipeError:
                raise
            except Exception as error:
                raise NotCachedError(
                    f"it cannot run on fake tensors: {type(error).__name__}: {error}"
                ) from error


def called_blocks(module: nn.Module, blocks: Blocks, depth: int) -> dict[int, nn.Module]:
    """The frozen blocks of a stage that are modules with code of their own, by number."""
    return {
        number: module.get_submodule(path)
        for number, path in enumerate(blocks.paths[:depth])
        if is_called(module, path)
    }


@contextmanager
def replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Inside, modules have other forwards."""
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.__dict__["forward"]


class _Recorded:
    """The results of frozen blocks on fake tensors.

    calls: the numbers of the blocks, in the order of their calls
    leaves: the tensors that they return
    marks_of: the marks of each leaf: inputs of the stage, and TRAINED
    outputs: the leaves that the stage returns
    """

    def __init__(self, marks: Marks, parts: Mapping[int, nn.Module]) -> None:
        self._marks, self._parts = marks, parts
        self.calls: dict[int, tuple[list[Any], Any]] = {}
        self.leaves: dict[Leaf, Tensor] = {}
        self.marks_of: dict[Leaf, frozenset[Leaf]] = {}
        self.outputs: tuple[Leaf, ...] = ()
        self._written: dict[int, list[int]] = {}
        self._versions: dict[Leaf, int] = {}

    @property
    def steering(self) -> frozenset[Leaf]:
        """The marks of what the program has read the values of."""
        return frozenset(self._marks.steering)

    def forwards(self) -> dict[nn.Module, Callable[..., Any]]:
        """The forwards that record."""
        return {part: self._recording(number, part) for number, part in self._parts.items()}

    def take(self, block: int, values: Sequence[Any]) -> None:
        """Records the tensors among the values that a block returns."""
        for number, value in enumerate(values):
            if isinstance(value, Tensor):
                leaf = Leaf(block, number)
                self.leaves[leaf] = value
                self._versions[leaf] = value._version
                self.marks_of[leaf] = frozenset(self._marks.of(value))

    def end(self, whole: int, outputs: Sequence[Tensor]) -> None:
        """Records what the stage returns, as far as it is not what a block has returned."""
        made = {
            id(tensor): leaf
            for leaf, tensor in self.leaves.items()
            if tensor._version == self._versions[leaf]
        }
        self.take(whole, [None if id(value) in made else value for value in outputs])
        self.outputs = tuple(
            made.get(id(value), Leaf(whole, number)) for number, value in enumerate(outputs)
        )

    def stand_in(self, block: int, marks: Marks) -> Callable[..., Any]:
        """A forward that returns marked tensors of the same shapes, and marks the inputs that the
        block would write to."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = tree_leaves((args, kwargs))
            for place in self._written.get(block, ()):
                marks.add(given[place], {Leaf(block, WRITES)})
            if block not in self.calls:
                raise NotCachedError(f"block {block} runs only at times")
            values, structure = self.calls[block]
            made = [torch.empty_like(v) if isinstance(v, Tensor) else v for v in values]
            for number, value in enumerate(made):
                if isinstance(value, Tensor):
                    marks.add(value, {Leaf(block, number)})
            return tree_unflatten(made, structure)

        return forward

    def _recording(self, block: int, part: nn.Module) -> Callable[..., Any]:
        own = type(part).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if block in self.calls:
                raise NotCachedError(f"block {block} runs more than once")
            given, state = tree_leaves((args, kwargs)), _state_of(part)
            before = [_version(value) for value in given]
            result = own(part, *args, **kwargs)
            if state != _state_of(part):
                raise NotCachedError(f"block {block} changes its buffers in evaluation mode")
            self._written[block] = [
                at for at, value in enumerate(given) if _version(value) != before[at]
            ]
            values, structure = tree_flatten(result)
            self.calls[block] = values, structure
            self.take(block, values)
            return result

        return forward


def _changing(module: nn.Module) -> Iterator[Tensor]:
    """The state of a stage that steps or forwards change."""
    for part in module.modules():
        yield from (each for each in part.parameters(recurse=False) if each.requires_grad)
        if isinstance(part, _BatchNorm) and part.training:
            yield from part.buffers(recurse=False)


def _state_of(module: nn.Module) -> list[tuple[int, int]]:
    """The identity of each buffer, and how often it was written to."""
    return [(id(buffer), buffer._version) for buffer in module.buffers()]


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _rows_of(shape: Sequence[int], twice: Sequence[int], samples: int) -> Rows | None:
    """Where a tensor has the values of a sample, from its shape and that for twice the samples."""
    other = [dim for dim, (one, two) in enumerate(zip(shape, twice, strict=True)) if one != two]
    if not other:
        return None
    dim = other[0]
    if len(other) > 1 or twice[dim] != 2 * shape[dim] or shape[dim] % samples:
        raise NotCachedError("a result of a block has no dimension of samples")
    return Rows(dim, shape[dim] // samples)
