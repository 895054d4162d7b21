"""`--model SPEC` -> a model as its author wrote it, and example inputs that its forward accepts."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from ...runtime.errors import ModelError
from ...runtime.formatting import counted, kind_of
from ...runtime.plan.plan import ON_META
from ...runtime.user_code import import_object, user_errors_as
from .builtin import BUILTIN
from .hub import load_transformers

_MOST_VALUES = 2**33
_LENGTH = 128
"""Tokens of the inputs that are made for a model, unless a call names another number."""


@dataclass(frozen=True)
class ModelSource:
    """A model found by its SPEC.

    name: name of the generated folder
    spec: the SPEC itself
    model: the module, on meta if no parameters were allocated
    example_inputs: arguments of forward for one micro-batch, by name
    weights: origin of the weights in words, such as "random (seed 0)"
    files: small files (configuration, tokenizer) that transformers needs to load an export, by name
    criterion: name of the loss, for a model without a loss of its own
    """

    name: str
    spec: str
    model: nn.Module
    example_inputs: Mapping[str, Any]
    weights: str
    files: Mapping[str, str] = field(default_factory=dict)
    criterion: str | None = None


def given_source(
    model: nn.Module,
    example_inputs: Tensor | Mapping[str, Any] | tuple[Any, ...],
    name: str | None = None,
) -> ModelSource:
    """The source of a model that the caller has built."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model is {model!r:.60}, not a torch.nn.Module.",
            "Build the model first; asyncpipe-partition --model takes names.",
        )
    model = without_wrapper(model)
    inputs = (
        dict(example_inputs)
        if isinstance(example_inputs, Mapping)
        else name_inputs(model, example_inputs)
    )
    kind = type(model)
    spec = f"{kind.__module__}:{kind.__name__}"
    return ModelSource(name or kind.__name__.lower(), spec, model, inputs, "given")


def load_model(
    spec: str,
    *,
    model_args: Mapping[str, Any] | None = None,
    micro_batch_size: int | None = None,
    seq: int | None = None,
    seed: int = 0,
    meta: bool = False,
    pretrained: bool = False,
    inputs: Mapping[str, str] | None = None,
) -> ModelSource:
    """Finds and builds the model that `spec` names.

    A spec is a built-in name, a published configuration, a local transformers folder, a name
    on the hub (needs a network), `package.module:factory` or `path/file.py:factory`.
    `micro_batch_size` and `seq` are the sizes of the inputs that are made for a model by name, by
    default 8 samples (1 for a model of over 50 M parameters) of 128 tokens; the inputs of a factory
    keep their sizes. `inputs` maps names to texts such as `"f32[4, 64]"`, for a factory that
    returns only a model.
    With `meta` no parameter is allocated. With `pretrained` a name on the hub has its published
    weights, from the local cache or downloaded. Raises ModelError if there is no such model.
    """
    arguments = dict(model_args or {})
    _verify_options(spec, meta, pretrained, inputs)
    device = torch.device("meta") if meta else contextlib.nullcontext()
    torch.manual_seed(seed)
    random = f"random (seed {seed})" if not meta else ON_META
    if ":" in spec:
        factory = _find_factory(spec)
        with device, user_errors_as(ModelError, f"--model {spec}"):
            model, examples = _split_made(factory(**_checked(factory, arguments)))
        model = without_wrapper(model)
        if inputs:
            examples = {name: parse_input(name, text) for name, text in inputs.items()}
        if examples is None:
            raise ModelError(
                f"{spec} returns only a model: the inputs of its forward are unknown.",
                "Return (model, {name: tensor}), or describe them: --input x=f32[4,64]",
            )
        examples = _by_name(model, examples)
        origin = random if meta else f"from {spec.rpartition(':')[2]}() (seed {seed})"
        return ModelSource(_name_of(spec), spec, model, examples, origin)
    if spec in BUILTIN:
        with device, user_errors_as(ModelError, f"--model {spec}"):
            model = BUILTIN[spec](**arguments)
        inputs_made = _builtin_inputs(spec, model, micro_batch_size or default_size(model))
        criterion = "cross_entropy" if spec == "mlp" else None
        return ModelSource(spec, spec, model, inputs_made, random, criterion=criterion)
    model, weights, files = load_transformers(spec, arguments, device, meta, pretrained)
    name = re.sub(r"\W+", "_", Path(spec).name)
    examples = transformers_inputs(model, micro_batch_size or default_size(model), seq or _LENGTH)
    return ModelSource(name, spec, model, examples, weights or random, files)


def _verify_options(
    spec: str, meta: bool, pretrained: bool, inputs: Mapping[str, str] | None
) -> None:
    """Raises ModelError for options that do not apply to `spec`."""
    if pretrained and meta:
        raise ModelError(
            "--pretrained reads weights, and --meta builds the model without them.",
            "Leave one of them out.",
        )
    if pretrained and (":" in spec or spec in BUILTIN):
        raise ModelError(
            f"--pretrained applies to names on the hub and to folders of transformers, not to "
            f"{spec}.",
            "Leave it out; a factory loads the weights of its model itself.",
        )
    if inputs and ":" not in spec:
        raise ModelError(
            f"--input describes the inputs of a factory's model, and those of {spec} are known.",
            "Leave it out.",
        )


def default_size(model: nn.Module) -> int:
    """Default micro-batch size: 1 for a model with over 50 M parameters, else 8."""
    return 1 if sum(parameter.numel() for parameter in model.parameters()) > 50e6 else 8


def parse_input(name: str, text: str) -> Tensor:
    """`"f32[4, 64]"` or `"i64[4, 16]"` -> a tensor of that dtype and shape.

    Its values are random, so that samples differ: from 0 to 1 for numbers of floating point, 0 or 1
    for whole numbers of two dimensions or more. Others are zeros, which also count as lengths in
    order. Raises ModelError for another text.
    """
    dtypes = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}
    dtypes |= {"i64": torch.int64, "i32": torch.int32, "bool": torch.bool}
    match = re.fullmatch(r"(\w+)\[([0-9,\s]{0,200})\]", text.strip())
    if not match or match[1] not in dtypes:
        raise ModelError(
            f"--input {name}={text} is not a dtype and a shape.",
            f"Write --input {name}=f32[4,64]; dtypes are {', '.join(dtypes)}.",
        )
    shape = [int(size) for size in match[2].split(",") if size.strip()]
    if prod(shape) > _MOST_VALUES:
        raise ModelError(
            f"--input {name}={text} has {prod(shape):.1e} values, more than one micro-batch can "
            "have."
        )
    dtype = dtypes[match[1]]
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=dtype)
    if dtype is not torch.bool and len(shape) > 1:
        return torch.randint(2, shape, generator=generator, dtype=dtype)
    return torch.zeros(shape, dtype=dtype)


def transformers_inputs(model: nn.Module, batch: int, seq: int) -> dict[str, Tensor]:
    """Inputs, with labels, for a transformers model; random, from a fixed seed."""
    config: Any = model.config
    generator = torch.Generator().manual_seed(0)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(config.vocab_size, shape, generator=generator)

    parameters = inspect.signature(model.forward).parameters
    kind = type(model).__name__
    if "pixel_values" in parameters:
        side = getattr(config, "image_size", 224)
        channels = getattr(config, "num_channels", 3)
        pixels = torch.randn(batch, channels, side, side, generator=generator)
        labels = torch.randint(config.num_labels, (batch,), generator=generator)
        return {"pixel_values": pixels, "labels": labels}
    if "labels" not in parameters:
        return {"input_ids": tokens(batch, seq)}
    if "SequenceClassification" in kind:
        labels = torch.randint(config.num_labels, (batch,), generator=generator)
        return {"input_ids": tokens(batch, seq), "labels": labels}
    return {"input_ids": tokens(batch, seq), "labels": tokens(batch, seq)}


def _builtin_inputs(spec: str, model: nn.Module, batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    first = next(model.parameters())
    if spec == "mlp":
        return {"x": torch.randn(batch, first.shape[1], generator=generator)}
    side = 32 if "28" in spec else 224
    pixels = torch.randn(batch, first.shape[1], side, side, generator=generator)
    classes = list(model.parameters())[-1].shape[0]
    labels = torch.randint(classes, (batch,), generator=generator)
    return {"pixel_values": pixels, "labels": labels}


def _find_factory(spec: str) -> Callable[..., Any]:
    """`package.module:factory` or `path/file.py:factory` -> the callable."""
    factory: Callable[..., Any] = import_object(spec, "--model", ModelError)
    if not callable(factory):
        raise ModelError(
            f"--model {spec} is {kind_of(factory)}, not a function.",
            "Name a function that returns the model: --model path/file.py:build",
        )
    return factory


def _checked(factory: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(factory).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    for name in arguments:
        if name not in parameters:
            raise ModelError(
                f"{factory.__name__} takes no argument {name!r}; "
                f"it takes {', '.join(parameters) or 'none'}."
            )
    return arguments


def _split_made(built: Any) -> tuple[nn.Module, Any]:
    if isinstance(built, nn.Module):
        return built, None
    if isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module):
        return built[0], built[1]
    raise ModelError(
        f"the factory returned {type(built).__name__}, not a model.",
        "Return an nn.Module, or (nn.Module, {name: tensor}).",
    )


def without_wrapper(model: nn.Module) -> nn.Module:
    """The module in a wrapper of torch.compile or of torch's data parallelism: the wrapper's
    forward has no names for its arguments."""
    parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    inner = dict(model.named_children()).get("module" if parallel else "_orig_mod")
    return model if inner is None else without_wrapper(inner)


def _by_name(model: nn.Module, examples: Any) -> dict[str, Any]:
    if isinstance(examples, Mapping):
        return dict(examples)
    return name_inputs(model, examples if isinstance(examples, tuple | list) else (examples,))


def name_inputs(model: nn.Module, values: Any) -> dict[str, Any]:
    """Positional example inputs -> keyword arguments of the model's forward.

    A single value is the first argument of forward. Raises ModelError if forward takes others.
    """
    is_several = isinstance(values, tuple | list)
    given = tuple(values) if is_several else (values,)
    forward = inspect.signature(model.forward)
    try:
        return dict(forward.bind(*given).arguments)
    except TypeError as error:
        raise ModelError(
            f"{type(model).__name__}.forward takes {forward}, but example_inputs "
            f"{'has' if is_several else 'is'} {counted(len(given), 'value')}: "
            f"{error}.",
            "Give a dict with the name of each argument: {'input_ids': tensor, ..}.",
        ) from error


def _name_of(spec: str) -> str:
    """`examples/residual_mlp.py:build` -> `residual_mlp`."""
    place, _, factory = spec.rpartition(":")
    stem = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    return re.sub(r"\W+", "_", stem if factory in {"build", "make", "model"} else factory.lower())
