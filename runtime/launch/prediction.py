"""Trained weights and data -> the model's outputs for all samples, in one safetensors file.

A process for each rank runs its stages forward; ranks that make outputs write them, and the file
gets its name when all are done.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..checkpoint.folders import CheckpointError
from ..checkpoint.trained import find_trained
from ..config.option_files import check_code
from ..config.resolve import resolve, sized_plan
from ..config.segments import make_segment
from ..config.settings import RunConfig, Settings
from ..data.streams import StreamSamples
from ..data.task import (
    GIVEN,
    Task,
    architecture_of,
    arguments_of,
    batch_dims,
    laid_out,
    sizes_of,
)
from ..distributed.grid import grid_of
from ..errors import DataError
from ..plan.plan import Plan, read_plan, verify_evaluates
from ..plan.structure import is_named_tuple, names_in, rebuilt
from ..plan.trust import is_trusted, remember, remember_code, untrusted
from ..tensor_files import dtype_of
from ..training.batches import Dataset, open_data
from ..training.pipeline import Pipeline
from ..user_code import check_own_file, names_object
from .functions import launch

_KEPT = ("seq", "seed", "device", "ranks_per_gpu", "dtype", "precision", "transport", "interface")
"""The options of a run that its predictions keep."""
_BUILT_IN = ("digits", "clusters")


@dataclass(frozen=True)
class Prediction:
    """The options of a prediction.

    source: a run, a checkpoint, a saved pipeline or a generated folder with weights.
    output: the file to write.
    data: as --data of asyncpipe-train; None for the run's own.
    split: train or evaluation samples; None for the evaluation samples if there are any.
    batch_size: the samples of a batch; None for a micro-batch of the plan for each stage.
    folder: the generated folder; None for the one that the run names.
    """

    source: Path
    output: Path
    data: str | None = None
    split: str | None = None
    batch_size: int | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class Predicted:
    """The written predictions.

    output: the file.
    weights: the folder of the weights.
    samples: the number of samples.
    tensors: dtype and shape of each output, by name.
    left_out: the names of outputs without a dimension of samples.
    """

    output: Path
    weights: Path
    samples: int
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class _Work:
    """The work of each rank.

    config, task, plan: the resolved options, the task, and the plan at their sizes.
    options: the options of the run that its predictions keep.
    split, batch_size: as for Prediction.
    parts: the folder in which ranks leave their outputs.
    """

    config: RunConfig
    task: Task
    plan: Plan
    options: Mapping[str, Any]
    split: str | None
    batch_size: int
    parts: Path


def predict(prediction: Prediction, *, trust: bool = False, force: bool = False) -> Predicted:
    """Writes the model's outputs for all samples in their order, whole or not at all.

    trust: the folder's code, and the data function that a run names, may run although they were
        not made or named here.
    force: an output file that exists is replaced.

    Raises AsyncPipeError where source, data and output do not fit, before anything runs.
    """
    if prediction.output.exists() and not force:
        raise CheckpointError(
            f"{prediction.output} exists already.", "Name another file, or replace it with --force."
        )
    trained = find_trained(prediction.source, prediction.folder)
    planned = read_plan(trained.folder)
    verify_evaluates(planned)
    own_options = {name: trained.options[name] for name in _KEPT if name in trained.options}
    data = prediction.data or trained.options.get("data")
    options: dict[str, Any] = {**own_options, "data": data} if data else own_options
    settings = Settings(
        folder=str(trained.folder),
        init_from=str(trained.weights),
        criterion=GIVEN if planned.loss is None else None,
        tensor_parallel=1,
        **options,
    )
    config, task = resolve(settings, planned, architecture=architecture_of(trained.folder))
    _check_data(config.data)
    _check_code(config, prediction, trust=trust)
    plan = sized_plan(planned, config)
    size = prediction.batch_size or plan.sizes.get("batch", 1) * len(plan.stages)
    ranks = grid_of(make_segment(plan, config, steps=1)).processes
    try:
        prediction.output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=".predictions-", dir=prediction.output.parent
        ) as parts:
            work = _Work(config, task, plan, own_options, prediction.split, size, Path(parts))
            samples, *_ = launch(_run_rank, work, ranks=ranks)
            written = _join(Path(parts), prediction.output)
    except OSError as error:
        raise CheckpointError(
            f"{prediction.output} cannot be written: {error.strerror}."
        ) from error
    left_out = tuple(name for name in _batch_dims(plan) if name not in written)
    return Predicted(prediction.output, trained.weights, samples, written, left_out)


def _check_data(source: str) -> None:
    """Raises DataError for data without samples in a fixed order."""
    if not names_object(source) and source not in _BUILT_IN:
        raise DataError(
            f"--data {source} is text, of which a run draws windows: it has no samples.",
            "Give my_file.py:function that returns the samples.",
        )
    check_own_file(source, "--data", DataError)


def _check_code(config: RunConfig, prediction: Prediction, *, trust: bool) -> None:
    """Raises TrustError for code that no command here has made or named."""
    named = {"folder": config.folder, "data": config.data, "trust": trust}
    check_code(named, ("data",) if prediction.data else (), str(prediction.source))
    if trust:
        remember(config.folder)
    elif not is_trusted(config.folder):
        raise untrusted(config.folder)
    if names_object(config.data):
        remember_code(config.data)


def _run_rank(work: _Work) -> int:
    """Runs this rank's stages on all samples; leaves the outputs that it makes in a file, and
    returns the number of samples."""
    inputs = tuple(spec.name for spec in work.plan.inputs)
    dataset, fields = _samples(work, inputs)
    dims = _batch_dims(work.plan)
    outputs: dict[str, list[Tensor]] = {}
    with Pipeline(
        work.config.folder,
        loss=None if work.plan.loss is not None else _no_loss,
        micro_batches=len(work.plan.stages),
        init_from=work.config.init_from,
        tensor_parallel=1,
        **work.options,
    ) as pipe:
        for output in pipe.predict(_batches(dataset, fields, work)):
            for name, tensor in named_leaves(output):
                if isinstance(tensor, Tensor) and dims[name] is not None:
                    outputs.setdefault(name, []).append(tensor.cpu())
        rank = pipe.rank
    if outputs:
        joined = {name: _joined(name, parts, dims[name] or 0) for name, parts in outputs.items()}
        save_file(joined, work.parts / f"{rank:05}.safetensors")
    return len(dataset)


def _no_loss(output: Any, target: Tensor) -> Tensor:
    raise AssertionError("a prediction computes no loss")


def _samples(work: _Work, inputs: tuple[str, ...]) -> tuple[Dataset, tuple[str, ...]]:
    """The samples, and the inputs that they have: labels may be missing, where the loss alone
    reads them."""
    task = work.task
    with_labels = replace(task, fields=inputs, label=None)
    if task.label not in inputs:
        return _opened(work, with_labels), inputs
    dataset = _opened(work, with_labels)
    try:
        dataset.get([0], inputs)
        return dataset, inputs
    except DataError:
        if task.objective == "seq2seq":
            raise
    fields = tuple(name for name in inputs if name != task.label)
    return _opened(work, replace(with_labels, fields=fields)), fields


def _opened(work: _Work, task: Task) -> Dataset:
    data = open_data(work.config, task, work.plan, work.parts)
    is_held_out = data.evaluation is not None if work.split is None else work.split == "evaluation"
    dataset = data.evaluation if is_held_out else data.train
    if dataset is None:
        raise DataError(
            f"--data {data.source} has no evaluation samples.", "Omit --split, or give train."
        )
    if isinstance(dataset, StreamSamples):
        raise DataError(
            f"--data {data.source} is a stream, and its samples have no number.",
            "Return a list of them, or a dataset with a length.",
        )
    return dataset


def _batches(dataset: Dataset, fields: tuple[str, ...], work: _Work) -> Iterator[Any]:
    """The arguments of the model for each batch, in the order of the samples."""
    plan, dims = work.plan, batch_dims(work.plan)
    structures = arguments_of(plan)
    for first in range(0, len(dataset), work.batch_size):
        indices = range(first, min(first + work.batch_size, len(dataset)))
        values = laid_out(dataset.get(indices, fields), dims)
        sizes = {**plan.sizes, **sizes_of(plan, values), "batch": len(indices)}
        for spec in plan.inputs:
            if spec.name not in values:
                shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
                values[spec.name] = torch.zeros(shape, dtype=dtype_of(spec.dtype))
        given = {name: rebuilt(item, values, sizes) for name, item in structures.items()}
        if any(name.startswith("*") for name in given):
            yield tuple(
                argument
                for name, value in given.items()
                for argument in (value if name.startswith("*") else (value,))
            )
        else:
            yield given


class _Name(str):
    """The name of a tensor in a plan."""


def _batch_dims(plan: Plan) -> dict[str, int | None]:
    """The dimension of each output that counts samples, by the name of the output."""
    dims = {spec.name: spec.batch_dim for spec in (*plan.inputs, *plan.values)}
    names = {name: _Name(name) for name in names_in(plan.outputs)}
    outputs = named_leaves(rebuilt(plan.outputs, names, plan.sizes))
    return {path: dims.get(name) for path, name in outputs if isinstance(name, _Name)}


def named_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested dicts and tuples by their place, such as `hidden_states.0`; `output` for
    a value that is not nested.

    >>> dict(named_leaves({"logits": 1, "states": (2, 3)}))
    {'logits': 1, 'states.0': 2, 'states.1': 3}
    """
    items: Any = None
    if isinstance(value, Mapping):
        items = value.items()
    elif is_named_tuple(value):
        items = value._asdict().items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    if items is None:
        yield path or "output", value
    else:
        for key, inner in items:
            yield from named_leaves(inner, f"{path}.{key}" if path else str(key))


def _joined(name: str, parts: list[Tensor], dim: int) -> Tensor:
    shapes = {tuple(size for d, size in enumerate(part.shape) if d != dim) for part in parts}
    if len(shapes) > 1:
        first, second, *_ = sorted(shapes)
        raise DataError(
            f"the output {name} differs in size between batches: {first} and {second} a sample.",
            "Pad all samples to one size.",
        )
    return torch.cat(parts, dim).contiguous()


def _join(parts: Path, output: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Makes one file of those of the ranks; returns dtype and shape of each tensor."""
    files = sorted(parts.glob("*.safetensors"))
    if not files:
        raise DataError("the model has no output with a dimension of samples.")
    if len(files) > 1:
        joined = {name: tensor for file in files for name, tensor in load_file(file).items()}
        files = [parts / "joined"]
        save_file(joined, files[0])
    with safe_open(files[0], "pt") as archive:
        slices = {name: archive.get_slice(name) for name in archive.keys()}
        header = {
            name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()
        }
    os.replace(files[0], output)
    return header
