"""One model, cut and compared with itself: the common part of the coverage benchmarks.

`judge` is independent of the compiler's own verification. It builds the model twice from equal
seeds, cuts one, loads the folder and compares with the other: outputs, every gradient, inputs and
state after each pass, in training and in evaluation, at several sizes, with the weights that the
model was built with and with perturbed ones. The outcome is one of

    exact     equal everywhere that the original itself runs
    training  refused for both modes, and exact with `--mode train`, which the refusal names
    refused   an asyncpipe error, when the model is cut or when it meets a size that it rejects
    unclear   such an error without a cause: only that numbers or names differ
    traceback any other exception
    wrong     the folder was made, and its results differ from the original's
"""

import contextlib
import copy
import logging
import os
import random
import re
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.utils import _pytree as pytree

import asyncpipe
from asyncpipe.runtime.errors import AsyncPipeError, DataError
from asyncpipe.runtime.executor.loading import Pipe

LIMIT_S = 120  # of processor time, so that a busy machine does not decide
TOLERANCE = 1e-4
# A gradient below this share of the largest one is rounding: a bias before a batch norm.
NOISE_FLOOR = 1e-2
TRAINING_ALONE = "--mode train"
OUTCOMES = ("exact", "training", "refused", "unclear", "traceback", "wrong")
_NO_CAUSE = re.compile(
    r"generated stages.* differ|graph (is not the model|does not run)|original does not"
    r"|^only the (original|stages) ha|in the original, .* in the stages|a defect of"
)

Inputs = tuple[Any, ...] | dict[str, Any]


class Wrong(Exception):
    """The stages ran, or should have run, but their results differ."""


class TooLong(BaseException):
    """A check took longer than its limit; not an Exception, so that no handler catches it."""


@dataclass(frozen=True)
class Case:
    """A model and its inputs: `inputs[0]` for the capture, the others to compare at as well."""

    package: str
    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[Callable[[], Inputs], ...]
    options: Mapping[str, Any] = field(default_factory=dict)


def built(case: Case) -> nn.Module:
    """The model, with the same weights at every call."""
    seed_all(0)
    return case.build().train()


def trains(case: Case) -> None:
    """Raises the error of the model when it trains a step by itself, or ValueError if equal seeds
    give different results."""
    first, second = (passed(built(case), case.inputs[0](), True) for _ in range(2))
    if not first.gradients:
        raise ValueError("no output requires a gradient")
    try:
        first.equals(second)
    except Wrong as error:
        raise ValueError(f"two runs from equal seeds differ: {error}") from error


def outcome(check: Callable[..., None], *arguments: Any, limit_s: int = LIMIT_S) -> str:
    """One of OUTCOMES, followed by a colon and the reason unless it is "exact"."""
    try:
        with (
            limited(limit_s),
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stderr(nowhere),
        ):
            check(*arguments)
    except Wrong as error:
        return f"wrong: {error}"
    except AsyncPipeError as error:
        if (
            TRAINING_ALONE in str(error.cure)
            and outcome(check, *_training_alone(arguments), limit_s=limit_s) == "exact"
        ):
            return f"training: {sentence(error)}"
        kind = "unclear" if _NO_CAUSE.search(error.what) else "refused"
        return f"{kind}: {sentence(error)}"
    except (Exception, TooLong) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"traceback: {sentence(error)} ({Path(where.filename).name}:{where.lineno})"
    return "exact"


def _training_alone(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    case, *others = arguments
    return replace(case, options={**case.options, "mode": "train"}), *others


def judge(case: Case, stages: int) -> None:
    """Cuts the model and compares; raises Wrong, or the error of `partition` and the stages."""
    given, reference = built(case), built(case)
    before = copy.deepcopy(given.state_dict())
    with tempfile.TemporaryDirectory() as parent:
        asyncpipe.partition(
            given,
            case.inputs[0](),
            stages=stages,
            output=Path(parent) / "made",
            profile="analytic",
            **case.options,
        )
        pipe = asyncpipe.load(Path(parent) / "made")
    _equal_values(before, given.state_dict(), "partition changed its model's")
    _equal_values(before, pipe.state_dict(), "the folder was written with another")
    refused: AsyncPipeError | None = None
    for others in (False, True):
        if others:
            pipe.load_state_dict(perturb(reference))
        for training in (True,) if case.options.get("mode") == "train" else (True, False):
            for inputs in case.inputs:
                try:
                    compare(reference, pipe, inputs, training)
                except AsyncPipeError as error:
                    refused = refused or error
                _copy_state(pipe.state_dict(), reference)
    if refused is not None:
        raise refused


def _copy_state(state: Mapping[str, Tensor], model: nn.Module) -> None:
    """By name, without `load_state_dict`, which some models override to ask for a version."""
    for name, tensor in model.state_dict().items():
        tensor.copy_(state[name])


def compare(reference: nn.Module, pipe: Pipe, inputs: Callable[[], Inputs], training: bool) -> None:
    """One pass of both; skips the comparison where the original itself cannot run."""
    try:
        expected = passed(reference, inputs(), training)
    except Exception:
        return
    mode = "training" if training else "evaluation"
    try:
        found = passed(pipe, inputs(), training)
    except AsyncPipeError:
        raise
    except Exception as error:
        if "captured for" in str(error):  # a guard of the generated code
            raise DataError(str(error)) from error
        raise
    try:
        expected.equals(found)
    except Wrong as error:
        raise Wrong(f"{mode} at {_sizes(inputs())}: {error}") from None


@dataclass(frozen=True)
class Passed:
    """All results of one pass, by name."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    inputs: dict[str, Tensor]

    def equals(self, other: "Passed") -> None:
        for what in ("outputs", "gradients", "state", "inputs"):
            expected, found = getattr(self, what), getattr(other, what)
            floor = 1e-6
            if what == "gradients":
                floor = max([floor, *(NOISE_FLOOR * _magnitude(g) for g in expected.values())])
            if expected.keys() != found.keys():
                raise Wrong(f"{what}: only one has {sorted(expected.keys() ^ found.keys())[:3]}")
            for name, value in expected.items():
                _close(value, found[name], f"{what} {name}", floor)


def passed(model: nn.Module | Pipe, inputs: Inputs, training: bool) -> Passed:
    """A forward and, in training, a backward of a weighted sum of the outputs."""
    model.train(training)
    seed_all(1)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.grad = None
    arguments = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    with torch.set_grad_enabled(training):
        outputs = _tensors(model(*arguments[0], **arguments[1]))
        if training:
            total = [_weighted(value) for value in outputs.values() if value.requires_grad]
            if total:
                torch.autograd.backward(torch.stack(total).sum())
    gradients = {
        name: parameter.grad.to_dense().clone()
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }
    return Passed(
        {name: value.detach().clone() for name, value in outputs.items()},
        gradients,
        {name: value.clone() for name, value in model.state_dict().items()},
        {name: value.detach().clone() for name, value in _tensors(inputs).items()},
    )


def perturb(model: nn.Module) -> dict[str, Tensor]:
    """Adds noise to the weights, so that no zero hides a difference; variances stay positive."""
    source = torch.Generator().manual_seed(7)
    saved = {value.data_ptr() for value in model.state_dict().values()}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.data_ptr() in saved:
                tensor += 0.05 * torch.rand(tensor.shape, generator=source).to(tensor.dtype)
    return {name: value.clone() for name, value in model.state_dict().items()}


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def quiet() -> None:
    """One thread, no warnings: the initial state of a worker."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)


def peer(case: Case) -> None:
    """The same model through torch.distributed.pipelining in two stages, at the captured size,
    with dropout off, as that front end promises."""
    inputs = case.inputs[0]()
    arguments = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    model, reference = built(case), built(case)
    for module in (*model.modules(), *reference.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    split = pipeline(model, *arguments, split_spec={middle(model): SplitPoint.BEGINNING}).split_gm
    # Its own forward refuses, and a Pipe's detaches between stages: no gradients would pass.
    seed_all(1)
    output = type(split).forward(split, *arguments[0], **arguments[1])
    found = [value for value in _tensors(output).values() if value.requires_grad]
    torch.stack([_weighted(value) for value in found]).sum().backward()
    expected = passed(reference, case.inputs[0](), True)
    wanted = [value for value in expected.outputs.values() if value.is_floating_point()]
    for value, other in zip(wanted, found, strict=False):
        _close(value, other.detach(), "output", 1e-6)
    floor = max(NOISE_FLOOR * _magnitude(g) for g in expected.gradients.values())
    made: dict[str, Tensor] = {}
    for name, parameter in split.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            made[name.partition(".")[2]] = parameter.grad
    for name, gradient in expected.gradients.items():
        if name not in made:
            raise Wrong(f"no gradient of {name}")
        _close(gradient, made[name], f"gradient {name}", floor)


def middle(model: nn.Module) -> str:
    """The name of the block in the middle of the longest list of blocks, or of the children."""
    lists = [
        (len(module), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and name
    ]
    if not lists:
        children = [name for name, _ in model.named_children()]
        return children[len(children) // 2]
    length, name = max(lists)
    return f"{name}.{length // 2}"


@contextlib.contextmanager
def limited(limit_s: int = LIMIT_S) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TooLong(f"took over {limit_s} s of processor time")

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def sentence(error: BaseException) -> str:
    """The error message, without the traceback that some messages carry."""
    if isinstance(error, AsyncPipeError):
        return str(error.what)[:300]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    while len(lines) > 1 and lines[0].endswith(":"):
        lines[:2] = [f"{lines[0]} {lines[1]}"]
    first = lines[0].partition(". ")[0] if lines else "without a word"
    return f"{type(error).__name__}: {first}"[:300]


def _tensors(values: Any) -> dict[str, Tensor]:
    paths, _ = pytree.tree_flatten_with_path(_plain(values))
    return {
        pytree.keystr(path) or "output": leaf for path, leaf in paths if isinstance(leaf, Tensor)
    }


def _plain(values: Any) -> Any:
    """Replaces the classes that packages return by dicts, lists and tuples."""
    if isinstance(values, Mapping):
        return {str(key): _plain(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_plain(value) for value in values]
    if hasattr(values, "__dataclass_fields__"):
        return {name: _plain(getattr(values, name)) for name in values.__dataclass_fields__}
    return values


def _weighted(value: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 1.5, max(value.numel(), 1), dtype=torch.float64)
    real = torch.view_as_real(value).sum(-1) if value.is_complex() else value
    return (real.double().flatten() * weights[: real.numel()]).sum() / max(value.numel(), 1)


def _close(expected: Tensor, found: Tensor, what: str, floor: float) -> None:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        raise Wrong(
            f"{what}: {expected.dtype} {tuple(expected.shape)} of the original, "
            f"{found.dtype} {tuple(found.shape)} of the stages"
        )
    if torch.equal(expected.isnan(), found.isnan()):
        expected, found = expected.nan_to_num(), found.nan_to_num()
    difference = _magnitude(expected.to(torch.complex128) - found.to(torch.complex128))
    scale = max(_magnitude(expected), floor)
    if not difference <= TOLERANCE * scale:
        raise Wrong(f"{what} differs by {difference:.2g} of {scale:.2g}")


def _magnitude(value: Tensor) -> float:
    return float(value.to(torch.complex128).abs().max()) if value.numel() else 0.0


def _equal_values(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], what: str) -> None:
    if expected.keys() != found.keys():
        raise Wrong(f"{what} {sorted(expected.keys() ^ found.keys())[0]}")
    for name, value in expected.items():
        if not torch.equal(value, found[name]) and not value.isnan().any():
            raise Wrong(f"{what} {name}")


def _sizes(inputs: Inputs) -> str:
    return " ".join(str(tuple(value.shape)) for value in _tensors(inputs).values())
