"""A plan -> its task: the content of a sample, its inputs by name, its dimension of samples and the
order.

A dataset gives samples one after the other in dimension 0. A model may need them in another
dimension, may need an input that all samples share, or may have no batch, and then a micro-batch is
one whole sample.

The order of samples follows from the seed and the position, the same on all ranks. A position
counts samples from the start of training; resuming needs nothing else. Position x is sample
`permutation(seed, x // n)[x % n]` of n samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import DataError, PlanError
from ..plan.plan import Plan, TensorSpec
from ..plan.structure import names_in, tensors_by_name
from ..rng import seed_of
from ..serialization import Origin, parse_json, read_text
from ..tensor_files import dtype_of


def arguments_of(plan: Plan) -> dict[str, Any]:
    """The structures of forward's arguments by name, `*args` under a name with its star."""
    if plan.arguments is None:
        return {spec.name: spec.name for spec in plan.inputs}
    return dict(plan.arguments)


def named_inputs(plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a plan by name, for the arguments of a call of the model.

    Arguments that are constants in the plan may be left out; unknown arguments may be None. Raises
    DataError for arguments of another structure and for another constant.
    """
    structures = arguments_of(plan)
    given = _by_name(plan, structures, args, kwargs)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in structures:
            values |= tensors_by_name(structures[name], value, name.removeprefix("*"))
        elif value is not None:
            raise _unlike(plan, structures, given)
    if any(spec.name not in values for spec in plan.inputs):
        raise _unlike(plan, structures, given)
    return values


def sizes_of(plan: Plan, values: Mapping[str, Any]) -> dict[str, int]:
    """The numbers that the plan's symbols stand for in those of its inputs that `values` has.

    Raises DataError where an input has another number of dimensions or another size than the plan
    was made for, and where one symbol would have two numbers.
    """
    size_of: dict[str, tuple[int, str]] = {}
    for spec in plan.inputs:
        if spec.name not in values:
            continue
        shape = tuple(values[spec.name].shape)
        if len(shape) != len(spec.shape):
            raise DataError(
                f"{spec.name} has the shape {_text(shape)}, but {plan.name} was captured with "
                f"{_text(spec.shape)}.",
                "Give data of that shape, or make the plan again with example inputs of this one.",
            )
        for dim, (wanted, size) in enumerate(zip(spec.shape, shape, strict=True)):
            if isinstance(wanted, int):
                if size != wanted:
                    raise _another_size(plan, spec, dim, shape)
            elif wanted in plan.sizes:
                known, where = size_of.setdefault(wanted, (size, f"dimension {dim} of {spec.name}"))
                if known != size:
                    raise DataError(
                        f"the {wanted} size is {known} in {where}, but {size} in dimension {dim} "
                        f"of {spec.name} (in {_text(shape)}).",
                        f"Give inputs of one {wanted} size.",
                    )
    return {**plan.sizes, **{symbol: size for symbol, (size, _) in size_of.items()}}


def _another_size(plan: Plan, spec: TensorSpec, dim: int, shape: tuple[int, ...]) -> DataError:
    wanted, size = spec.shape[dim], shape[dim]
    return DataError(
        f"dimension {dim} of {spec.name} is {size} (in {_text(shape)}), but {plan.name} was "
        f"captured for {wanted} only (in {_text(spec.shape)}).",
        f"Give data that has {wanted} there, or make the plan again with example inputs that have "
        f"{size}{_or_every_size(plan, spec, dim)}.",
    )


def _or_every_size(plan: Plan, spec: TensorSpec, dim: int) -> str:
    """The option that frees a dimension of which the capture has tried no second size."""
    is_tried = "sequence" in plan.sizes or not dtype_of(spec.dtype).is_floating_point
    if is_tried or not dim:
        return ""
    return f"; or, if the model takes every size there, with --sequence-dim {spec.name}={dim}"


def _text(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _by_name(
    plan: Plan, structures: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments by name: a positional one has the name at its place."""
    given: dict[str, Any] = {}
    left = list(args)
    for name in structures:
        if name.startswith("*"):
            given[name] = tuple(left)
            left = []
        elif left:
            given[name] = left.pop(0)
    for name, value in kwargs.items():
        given[f"*{name}" if f"*{name}" in structures else name] = value
    if left:
        raise _unlike(plan, structures, given, f" and {len(left)} more")
    return given


def _unlike(
    plan: Plan, structures: Mapping[str, Any], given: Mapping[str, Any], more: str = ""
) -> DataError:
    takes = [name for name, inner in structures.items() if any(names_in(inner))]
    names = ", ".join(name for name, value in given.items() if value is not None)
    return DataError(f"{plan.name} takes {', '.join(takes)}; got {names or 'nothing'}{more}.")


TARGET = "target"
"""The field of a micro-batch that a criterion outside the model reads."""

GIVEN = "given"
"""The name of data, and of a loss function, that the caller has as an object."""

Kind = Literal["text", "image", "features", "other"]
Objective = Literal["causal", "masked", "seq2seq", "classify"]

_UNITS: dict[Kind, str] = {
    "text": "sequences",
    "image": "images",
    "features": "samples",
    "other": "samples",
}


@dataclass(frozen=True, slots=True)
class Task:
    """The content of a sample, and the fields that the model and the criterion read."""

    kind: Kind
    sample: str
    """The input that holds the sample itself."""
    label: str | None
    """The field that holds the answer: a model input, `target` for a criterion, or None."""
    fields: tuple[str, ...]
    objective: Objective = "causal"
    """The objective that makes the labels of text."""
    classes: int | None = None
    """The width of a classifier's logits, if the plan says it."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The structures of forward's arguments."""
    left_out: tuple[str, ...] = ()
    """The arguments of forward that the plan was made without."""

    @property
    def unit(self) -> str:
        return _UNITS[self.kind]


def find_task(plan: Plan, *, criterion: str | None, architecture: str = "") -> Task:
    """Reads the task off the names, dtypes and shapes of a plan's inputs and outputs.

    `architecture` is the class name that a Hugging Face configuration gives, if there is one.
    """
    sample = _sample_input(plan)
    names = tuple(spec.name for spec in plan.inputs)
    label = "labels" if "labels" in names else TARGET if criterion else None
    label = plan.next_labels or label
    fields = (*names, TARGET) if label == TARGET else names
    kind = _kind(sample)
    objective = _objective(plan, architecture) if kind == "text" else "causal"
    arguments = arguments_of(plan)
    classes, left_out = _classes(plan), plan.left_out
    return Task(kind, sample.name, label, fields, objective, classes, arguments, left_out)


@dataclass(frozen=True)
class InputDtypes:
    """The dtypes of the values that a run reads.

    by_name: those of the model's inputs.
    others: that of other values of floating point, such as a target: by default that of the first
        output. Complex tensors have its complex dtype, and others its real one.
    """

    by_name: Mapping[str, torch.dtype]
    others: torch.dtype

    def cast(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor of the input with this name in its dtype: numbers of floating point, complex
        ones, and whole numbers of a narrower dtype. Others are as they are. Raises DataError for
        complex numbers where the model was captured with real ones."""
        own = self.by_name.get(name)
        if not _is_inexact(tensor.dtype):
            return tensor.to(own) if own and _is_narrower(tensor.dtype, own) else tensor
        if own and tensor.is_complex() and own.is_floating_point:
            raise DataError(
                f"{name} of the data is {tensor.dtype}, but the model reads {own}.",
                f"Partition the model again with example inputs whose {name} is complex.",
            )
        if tensor.is_complex():
            return tensor.to((own if own and own.is_complex else self.others).to_complex())
        return tensor.to(own if own and _is_inexact(own) else self.others.to_real())


def _is_narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    """True for two dtypes of whole numbers of which the other holds all of the first."""
    if any(_is_inexact(either) or either is torch.bool for either in (dtype, other)):
        return False
    own, others = torch.iinfo(dtype), torch.iinfo(other)
    return others.min <= own.min and own.max <= others.max


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def input_dtypes(plan: Plan, dtype: str | None) -> InputDtypes:
    """The dtypes of the model's inputs; `dtype` for all real ones if it is given."""
    own = {spec.name: dtype_of(spec.dtype) for spec in plan.inputs}
    if dtype is not None:
        real = dtype_of(dtype)
        given = {name: real if its.is_floating_point else its for name, its in own.items()}
        return InputDtypes(given, real)
    values = {spec.name: dtype_of(spec.dtype) for spec in plan.values}
    made = [values[name] for name in names_in(plan.outputs) if name in values]
    return InputDtypes(own, next(filter(_is_inexact, made), torch.float32))


def architecture_of(folder: str | Path) -> str:
    """The class name in `hf/config.json` of a generated folder, or an empty text.

    Raises PlanError when the file is damaged."""
    path = Path(folder) / "hf" / "config.json"
    if not path.is_file():
        return ""
    origin = Origin(str(path), PlanError, "Partition the model again.")
    raw = parse_json(read_text(path, origin), origin, finite=False)
    names = raw.get("architectures") if isinstance(raw, dict) else None
    return str(names[0]) if isinstance(names, list) and names else ""


def _sample_input(plan: Plan) -> TensorSpec:
    for name in ("input_ids", "pixel_values"):
        for spec in plan.inputs:
            if spec.name == name:
                return spec
    return plan.inputs[0]


def _kind(sample: TensorSpec) -> Kind:
    dimensions = len(sample.shape)
    if any(isinstance(size, str) for size in sample.shape) and sample.batch_dim is None:
        return "other"
    if sample.dtype.startswith("int"):
        return "text" if dimensions == 2 else "other"
    if not sample.dtype.startswith(("float", "bfloat")):
        return "other"
    return "image" if dimensions == 4 else "features" if dimensions == 2 else "other"


def _objective(plan: Plan, architecture: str) -> Objective:
    labels = next((spec for spec in plan.inputs if spec.name == "labels"), None)
    hint = (architecture or plan.name).lower()
    if labels is not None and len(labels.shape) == 1:
        return "classify"
    if any(spec.name == "decoder_input_ids" for spec in plan.inputs):
        return "seq2seq"
    if "conditionalgeneration" in hint or hint.startswith(("t5", "bart", "mbart", "flan")):
        return "seq2seq"
    if "maskedlm" in hint or hint.startswith(("bert", "roberta", "distilbert", "electra")):
        return "masked"
    return "causal"


def _classes(plan: Plan) -> int | None:
    """The last size of the logits when they are one vector a sample."""
    outputs = plan.outputs
    name = outputs.get("logits") if isinstance(outputs, dict) else outputs
    for value in plan.values:
        if value.name == name and len(value.shape) == 2 and isinstance(value.shape[1], int):
            return value.shape[1]
    return None


BatchDims = Mapping[str, int | None]


def batch_dims(plan: Plan) -> dict[str, int | None]:
    """The dimension of each input and of the target that counts samples; None for an input without
    one. The target has it where the model's first output has it, else where the first input has."""
    dims = {spec.name: spec.batch_dim for spec in plan.inputs}
    outputs = set(names_in(plan.outputs))
    output_dims = [spec.batch_dim for spec in plan.values if spec.name in outputs]
    known = [dim for dim in (*output_dims, *dims.values()) if dim is not None]
    return {**dims, TARGET: known[0] if known else None}


def laid_out(values: Mapping[str, Tensor], dims: BatchDims) -> dict[str, Tensor]:
    """A micro-batch with its samples in the dimensions that the model has them in.

    Raises DataError where an input that all samples have in common differs between them.
    """
    has_batch = any(dim is not None for dim in dims.values()) or not dims
    return {
        name: _laid_out(name, value, dims.get(name, 0), has_batch) for name, value in values.items()
    }


def _laid_out(name: str, value: Tensor, dim: int | None, has_batch: bool) -> Tensor:
    if dim is not None:
        # A target of one number a sample has one dimension only.
        return value.movedim(0, min(dim, value.dim() - 1)).contiguous()
    if not has_batch and len(value) > 1:
        return value.contiguous()  # The plan has one batch size, as a number.
    if not all(torch.equal(value[0], other) for other in value[1:]):
        raise DataError(
            f"{name} has no batch in the model, but differs between samples of a micro-batch.",
            "Give all samples the same one, or train with --micro-batch-size 1.",
        )
    return value[0].contiguous()


def seeded_generator(seed: int, *key: object) -> torch.Generator:
    """A generator for one purpose: equal seed and key, equal numbers, on every machine."""
    return torch.Generator().manual_seed(seed_of(seed, *key))


class SampleOrder:
    """The order in which `length` samples are seen, epoch by epoch: shuffled, or as they are."""

    def __init__(self, length: int, seed: int, *, shuffled: bool = True) -> None:
        self.length = length
        self._seed, self._shuffled = seed, shuffled
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def samples(self, first: int, count: int) -> list[int]:
        """The samples at positions `first` to `first + count`."""
        return [
            self._permutation(position // self.length)[position % self.length]
            for position in range(first, first + count)
        ]

    def epochs(self, first: int, count: int) -> range:
        """The epochs that these positions touch."""
        return range(first // self.length, (first + count - 1) // self.length + 1)

    def digest(self, epoch: int) -> bytes:
        """32 bytes that differ when the order of an epoch does."""
        text = ",".join(map(str, self._permutation(epoch)))
        return hashlib.sha256(text.encode()).digest()

    def _permute(self, epoch: int) -> Sequence[int]:
        if not self._shuffled:
            return range(self.length)
        generator = seeded_generator(self._seed, "epoch", epoch)
        permutation: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return permutation
