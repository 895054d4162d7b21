"""Checks that a plan that was read agrees with itself.

Its types are already checked (`serialization.py`). Here: stages are numbered and in files of their
own folder, each reads values that exist by then, every tensor has a size, and no cost is negative.
A plan that passes can be scheduled, simulated and shown; whether its code may run is the concern of
`trust.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ..errors import PlanError
from ..formatting import hiding_in
from .structure import is_structure, names_in

if TYPE_CHECKING:
    from .plan import Plan, StageSpec, TensorSpec
    from .targets import CountedTargets

_MOST_RANKS = 1 << 16
_LARGEST_SIZE = 1 << 40
_LARGEST_TENSOR = 1 << 50
_FLOATS = ("float32", "float64", "bfloat16", "float16")
COMMAND = "asyncpipe-partition"
_SENTENCES = ("notes", "explanation", "findings", "model_args", "arguments")
"""Fields whose texts may have several lines."""


def contradiction(plan: Plan) -> str:
    """The first contradiction of a plan, as a clause; "" if there is none."""
    return next(_contradictions(plan), "")


def is_command(text: str) -> bool:
    """True if a text is a single call of asyncpipe-partition, so that it may be shown as a command
    to type."""
    try:
        words = shlex.split(text)
    except ValueError:
        return False
    return words[:1] == [COMMAND] and shlex.join(words) == text


def with_option(command: str, flag: str, value: object = None) -> str:
    """A command with another value of an option, or without the option if there is no value.

    >>> with_option("asyncpipe-partition --model gpt2 --seq=32 --stages 2", "--seq", 48)
    'asyncpipe-partition --model gpt2 --stages 2 --seq 48'
    """
    words = shlex.split(command) or [COMMAND, ".."]
    kept = [
        word
        for before, word in zip(("", *words), words, strict=False)
        if flag not in (before, word) and not word.startswith(f"{flag}=")
    ]
    return shlex.join(kept if value is None else [*kept, flag, str(value)])


def _contradictions(plan: Plan) -> Iterator[str]:
    for field in fields(plan):
        if field.name not in _SENTENCES:
            yield from _broken(getattr(plan, field.name), field.name)
    if not plan.stages:
        yield "it has no stages"
    if plan.command and not is_command(plan.command):
        yield f"its command is not a call of {COMMAND}"
    yield from _sizes(plan.sizes)
    for spec in _tensors(plan):
        yield from _shape(spec, plan.sizes)
    yield from _negative(plan)
    yield from _negative(plan.setting)
    if plan.setting.micro_batches < 1:
        yield "it has less than one micro-batch"
    if plan.default_dtype not in _FLOATS:
        yield f"its default dtype is {plan.default_dtype}"
    if plan.tensor_parallel < 1:
        yield "it has less than one tensor rank"
    for place, stage in enumerate(plan.stages):
        yield from _stage(plan, stage, place)
    ranks = sorted({rank for stage in plan.stages for rank in stage.ranks})
    if ranks != list(range(len(ranks))) or len(ranks) > _MOST_RANKS:
        yield "its ranks are not numbered from 0"
    if not is_structure(plan.outputs) or not is_structure(plan.arguments):
        yield "its arguments or outputs have no structure"
        return
    known = {spec.name for spec in (*plan.inputs, *plan.values)}
    yield from _unknown("its outputs name", names_in(plan.outputs), known)
    yield from _unknown("its loss is", [plan.loss] if plan.loss is not None else [], known)
    inputs = {spec.name for spec in plan.inputs}
    if not inputs:
        yield "it has no inputs"
    if plan.targets is not None:
        yield from _targets(plan, plan.targets)
    yield from _unknown("its arguments name", names_in(plan.arguments or {}), inputs)
    for shared in plan.shared:
        if not shared.holders or not all(0 <= j < len(plan.stages) for j in shared.stages):
            yield f"{' and '.join(shared.names) or 'a shared parameter'} is held by no stage of it"
            continue
        for index, name in shared.holders:
            names = (*plan.stages[index].parameters, *plan.stages[index].buffers)
            yield from _unknown(f"stage {index} shares", [name], names)


def _targets(plan: Plan, targets: CountedTargets) -> Iterator[str]:
    inputs = plan.inputs
    yield from _unknown("its loss counts", [targets.input], [spec.name for spec in inputs])
    makers = [stage for stage in plan.stages if plan.loss in stage.outputs]
    buffers = {name for stage in makers for name in stage.buffers}
    yield from _unknown("its loss has the weights", filter(None, [targets.class_weights]), buffers)
    dims = [len(spec.shape) for spec in inputs if spec.name == targets.input]
    if targets.moved is not None and dims and not 0 <= targets.moved < dims[0]:
        yield f"its loss moves {targets.input} in dimension {targets.moved}"


def _broken(value: Any, place: str) -> Iterator[str]:
    """Names with line breaks or hidden characters: names appear in tables, comments and scripts."""
    if isinstance(value, str):
        if "\n" in value or "\t" in value or hiding_in(value):
            yield f"{place} has a line break or an invisible character in {value[:40]!r}"
    elif is_dataclass(value):
        for field in fields(value):
            yield from _broken(getattr(value, field.name), f"{place}.{field.name}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _broken(key, place)
            yield from _broken(item, f"{place}.{key}")
    elif isinstance(value, Sequence):
        for item in value:
            yield from _broken(item, place)


def _sizes(sizes: Mapping[str, int]) -> Iterator[str]:
    for name, size in sizes.items():
        if not name.isidentifier() or not 1 <= size < _LARGEST_SIZE:
            yield f"its size {name} is {size}"


def _tensors(plan: Plan) -> Iterator[TensorSpec]:
    yield from (*plan.inputs, *plan.values)
    for boundary in (*plan.boundaries, *plan.if_sent):
        yield boundary.tensor


def _shape(spec: TensorSpec, sizes: Mapping[str, int]) -> Iterator[str]:
    try:
        shape = spec.resolve(sizes)
    except PlanError as error:
        yield f"{spec.name} does not have a valid shape: {error.what.rstrip('.')}"
        return
    if not all(0 <= size < _LARGEST_SIZE for size in shape) or prod(shape) >= _LARGEST_TENSOR:
        yield f"{spec.name} has the shape {shape}"
    if not spec.dtype.isidentifier():
        yield f"{spec.name} has no dtype"


def _negative(record: Any) -> Iterator[str]:
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, int | float) and value < 0:
            yield f"{field.name} is {value}"


def _stage(plan: Plan, stage: StageSpec, place: int) -> Iterator[str]:
    name = f"stage {place}"
    if stage.index != place or stage.file != f"stage_{place}.py":
        yield f"{name} is called {stage.index} and is in the file {stage.file}"
    if not stage.class_name.isidentifier():
        yield f"{name} has no class"
    if not stage.ranks or len(set(stage.ranks)) < len(stage.ranks):
        yield f"{name} is on the ranks {stage.ranks}"
    for record in (stage, stage.memory, *stage.parts):
        for problem in _negative(record):
            yield f"{name} {problem}"
    for boundary in stage.sends:
        targets = boundary.targets
        if boundary.source != place or not _rising((place, *targets, len(plan.stages))):
            yield f"{name} sends {boundary.tensor.name} from {boundary.source} to {targets}"
    sent = [received for received in plan.boundaries if place in received.targets]
    if sorted(map(repr, sent)) != sorted(map(repr, stage.receives)):
        yield f"{name} receives other tensors than those sent to it"
    available = {spec.name for spec in plan.inputs} | {
        received.tensor.name for received in stage.receives
    }
    yield from _unknown(f"{name} reads", stage.inputs, available)
    known = {spec.name for spec in (*plan.inputs, *plan.values)}
    yield from _unknown(f"{name} makes", stage.outputs, known)
    yield from _unknown(f"{name} changes", stage.changes, (*stage.parameters, *stage.buffers))
    yield from _unknown(f"{name} changes", stage.changes_trained, stage.changes)
    yield from _unknown(
        f"{name} sends", [received.tensor.name for received in stage.sends], stage.outputs
    )


def _rising(numbers: Sequence[int]) -> bool:
    return all(first < second for first, second in zip(numbers, numbers[1:], strict=False))


def _unknown(reader: str, names: Any, known: Any) -> Iterator[str]:
    for name in names:
        if name not in known:
            yield f"{reader} {name}, which does not exist"
