"""A model and example inputs -> which dimension of each input counts samples, if any does.

Samples do not influence each other. So the model itself runs on all samples of the example and on
two parts of them: where its results on the parts are those on the whole, the dimension that was cut
counts samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import islice, product

import torch
from torch import Tensor, nn

from .arguments import Arguments
from .check import MAX_PARAMETERS_WITH_GRADIENTS, is_on_meta
from .dimensions import Batch, usual_batch
from .restore import in_mode, silent, unchanged, without_cache
from .samples import BATCH, resized
from .structure import plain_structure, tensors_in

_DIMENSIONS_TRIED = 3
_WAYS_TRIED = 12
_LEAST_SAMPLES = 4  # Parts of one sample are special where forward squeezes.
_TOLERANCE = 1e-3


def find_batch(model: nn.Module, given: Arguments) -> tuple[Batch, str]:
    """The dimension of each input that counts samples, and a note where that is a finding.

    Where nothing can be found out, it is dimension 0 of every input.
    """
    usual = usual_batch(given.tensors)
    none: Batch = dict.fromkeys(given.tensors)
    if not any(tensor.dim() for tensor in given.tensors.values()):
        return none, ""
    # Every model of transformers has its batch first.
    is_known = getattr(model, "main_input_name", None) in given.tensors
    if is_known or is_on_meta(model) or (runs := _on_a_copy(model, given)) is None:
        return usual, ""
    whole = runs(given.tensors)
    if whole is None:
        return usual, ""
    ways = list(islice(_ways(given.tensors), _WAYS_TRIED))
    for way in (usual, *(way for way in ways if way != usual)):
        if _is_independent(runs, given.tensors, way, whole):
            return way, "" if way == usual else _told(way)
    if _covers(usual, given.tensors) and runs(_part(given.tensors, usual, 0)) is not None:
        # Losses may compare the samples of a batch, and draws differ from run to run.
        return usual, ""
    return none, (
        "the model has no batch, and a micro-batch is one whole example: its results change where "
        "an input is cut; if a dimension counts samples, name it: --batch-dim INPUT=DIMENSION"
    )


def _told(batch: Batch) -> str:
    places = [f"dimension {dim} of {name}" for name, dim in batch.items() if dim is not None]
    without = [name for name, dim in batch.items() if dim is None]
    lacking = f" ({' and '.join(without)} without one)" if without else ""
    return (
        f"the batch is {' and '.join(places)}{lacking}, for the model gives a part of it the "
        "results that it has in the whole; if it is another, name it: --batch-dim INPUT=DIMENSION"
    )


Runs = Callable[[Mapping[str, Tensor]], list[Tensor] | None]


def _on_a_copy(model: nn.Module, given: Arguments) -> Runs | None:
    """Runs of copies of the model in evaluation, which give None where it raises; None for a model
    that cannot be copied. What forward keeps in Python objects stays in the copies; a large model
    and its copies have the same parameters."""
    parameters = list(model.parameters())
    is_small = sum(each.numel() for each in parameters) < MAX_PARAMETERS_WITH_GRADIENTS
    shared = {} if is_small else {id(parameter): parameter for parameter in parameters}
    device = next((tensor.device for tensor in (*parameters, *model.buffers())), None)
    try:
        base = copy.deepcopy(model, dict(shared))
    except Exception:
        return None
    if is_small:
        _fill_zeros(base)

    def runs(tensors: Mapping[str, Tensor]) -> list[Tensor] | None:
        own = {name: tensor.detach().clone().to(device) for name, tensor in tensors.items()}
        twin = copy.deepcopy(base, dict(shared))
        try:
            with unchanged(twin), in_mode(twin, False), without_cache(twin), silent():
                torch.manual_seed(0)
                with torch.no_grad():
                    return list(tensors_in(plain_structure(given.call(twin, own))))
        except Exception:
            return None

    return runs


def _fill_zeros(model: nn.Module) -> None:
    """Gives layers that begin with zeros some weights: they hide what comes before them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                noise = torch.rand(parameter.shape, generator=generator) / 4
                parameter.copy_(noise)


def _ways(inputs: Mapping[str, Tensor]) -> Iterator[Batch]:
    """Dimensions that may count samples: of one size in all inputs that have it."""
    base = max(inputs, key=lambda name: min(inputs[name].dim(), 2))
    shape = inputs[base].shape[:_DIMENSIONS_TRIED]
    if inputs[base].dim() == 2 and inputs[base].is_floating_point():
        shape = shape[:1]  # The other has features.
    for dim, size in enumerate(shape):
        if size < 2:
            continue
        options: list[list[int | None]] = []
        for name, tensor in inputs.items():
            equal = [at for at, other in enumerate(tensor.shape) if other == size]
            equal.sort(key=lambda at: at != dim)
            options.append([dim] if name == base else [*equal, None])
        for chosen in product(*options):
            yield dict(zip(inputs, chosen, strict=True))


def _covers(batch: Batch, inputs: Mapping[str, Tensor]) -> bool:
    """Whether every input with a dimension has a batch, or broadcasts with one."""
    return all(
        batch[name] is not None or not tensor.dim() or tensor.shape[0] == 1
        for name, tensor in inputs.items()
    )


def _size(inputs: Mapping[str, Tensor], batch: Batch) -> int:
    return next((inputs[name].shape[dim] for name, dim in batch.items() if dim is not None), 0)


def _part(inputs: Mapping[str, Tensor], batch: Batch, number: int) -> dict[str, Tensor]:
    """The first or the last part of the samples."""
    size = _size(inputs, batch)
    start, end = (0, size // 2) if number == 0 else (size // 2, size)
    return {
        name: tensor if (dim := batch[name]) is None else tensor.narrow(dim, start, end - start)
        for name, tensor in inputs.items()
    }


def _is_independent(
    runs: Runs, inputs: Mapping[str, Tensor], batch: Batch, whole: list[Tensor]
) -> bool:
    """Whether the results on two parts of the samples are those on the whole."""
    if not (size := _size(inputs, batch)):
        return False
    if size < _LEAST_SAMPLES:
        dims = {name: {} if dim is None else {dim: BATCH} for name, dim in batch.items()}
        inputs = resized(inputs, dims, {BATCH: _LEAST_SAMPLES})
        size, enlarged = _LEAST_SAMPLES, runs(inputs)
        if enlarged is None:
            return False
        whole = enlarged
    ones, twos = (runs(_part(inputs, batch, number)) for number in (0, 1))
    if ones is None or twos is None or not len(whole) == len(ones) == len(twos):
        return False
    first = size // 2
    by_sample: list[bool] = []
    others: list[bool] = []
    for all_, one, two in zip(whole, ones, twos, strict=True):
        if one.dim() != all_.dim() or two.dim() != all_.dim():
            return False
        longer = [dim for dim in range(all_.dim()) if all_.shape[dim] != two.shape[dim]]
        if longer:
            by_sample.append(any(_close(all_, made) for made in _joined(all_, one, two, longer)))
        elif one.shape == all_.shape:
            mean = (one.double() * first + two.double() * (size - first)) / size
            others.append(_close(all_, mean) or _close(all_, one.double() + two.double()))
        else:
            return False
    # A loss is no mean over samples where labels are left out; what each sample has says more.
    return all(by_sample) if by_sample else bool(others) and all(others)


def _joined(all_: Tensor, one: Tensor, two: Tensor, dims: list[int]) -> Iterator[Tensor]:
    """The results of two parts as those of the whole may have them: one after the other in a
    dimension, or alternately where several were made one with the batch last."""
    if len(dims) > 1:
        return
    (dim,) = dims
    if one.shape[dim] + two.shape[dim] != all_.shape[dim]:
        return
    yield torch.cat([one, two], dim)
    for often in range(2, min(one.shape[dim], two.shape[dim]) + 1):
        if one.shape[dim] % often == 0 and two.shape[dim] % often == 0:
            apart = [_apart(part, dim, often) for part in (one, two)]
            yield torch.cat(apart, dim + 1).flatten(dim, dim + 1)


def _apart(tensor: Tensor, dim: int, often: int) -> Tensor:
    """The tensor with a dimension made two, the first of which has `often` entries."""
    shape = tensor.shape
    return tensor.reshape(*shape[:dim], often, shape[dim] // often, *shape[dim + 1 :])


def _close(expected: Tensor, found: Tensor) -> bool:
    if expected.shape != found.shape:
        return False
    if expected.dtype == torch.bool:
        return torch.equal(expected, found.to(torch.bool))
    expected, found = expected.double(), found.double()
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(expected, found, rtol=_TOLERANCE, atol=_TOLERANCE * scale)
