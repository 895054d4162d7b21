"""The legal values of the options of asyncpipe-partition, on the command line and in Python.

Imports neither torch nor numpy, so that `--help` answers at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import wraps
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from ..runtime.errors import PlanError
from ..runtime.limits import (
    Choice,
    Either,
    Flag,
    Limit,
    Number,
    Several,
    Text,
    Whole,
    form,
    key_values,
    path,
    refusal,
)
from ..runtime.schedules import AUTO, SCHEDULES
from ..runtime.weight_copies import KEEPS

P = ParamSpec("P")
R = TypeVar("R")

METHODS = (
    *("auto", "exact", "chain", "uniform", "metis", "acyclic", "mpipe", "2dbin", "pipedream"),
    "all",
)
OPTIMIZERS = ("adamw", "adam", "nadam", "muon", "soap", "sutskever", "momentum", "sgd")

_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("ib", 1024), ("b", 1000))
    for power, prefix in enumerate("kmgt", start=1)
}


def bytes_of(size: int | str) -> int | None:
    """A number of bytes from "11GiB", "500 MB" or "1.5e9"; None of what is not a memory size.

    >>> bytes_of("11GiB"), bytes_of("500 MB"), bytes_of(7), bytes_of("many")
    (11811160064, 500000000, 7, None)
    """
    number = r"([0-9]{1,20}(?:\.[0-9]{0,20})?(?:e[0-9]{1,2})?)"
    found = re.fullmatch(rf"\s*{number}\s*([a-z]*)\s*", str(size), re.IGNORECASE)
    unit = _UNITS.get(found[2].lower(), 0) if found else 0
    is_size = found is not None and unit > 0 and 0 < float(found[1]) < 1e18
    return int(float(found[1]) * unit) if found and is_size else None


_DIMENSIONS = Several(
    Text("a dimension or none, or either by input", "x=1", form(r"(?:[^=\s]+=)?(?:[0-9]+|none)"))
)

LIMITS: Mapping[str, Limit] = MappingProxyType(
    {
        "model": Text("the name of a model, a folder or MODULE:FACTORY", "gpt2"),
        "graph": path("graph.json"),
        "model_arg": key_values("n_layer=4"),
        "input": key_values("x=f32[4,64]"),
        "micro_batch_size": Whole(1, 2**24, 8),
        "seq": Whole(1, 2**24, 128),
        "loss": Text("cross_entropy, mse or FILE.py:FUNCTION", "cross_entropy"),
        "seed": Whole(0, 2**53, 0),
        "meta": Flag(),
        "capture": Choice(("auto", "tracer", "dynamo")),
        "mode": Choice(("both", "train")),
        "leaf": Several(Text("the name of a class", "GPT2Attention")),
        "batch_dim": _DIMENSIONS,
        "sequence_dim": _DIMENSIONS,
        "stages": Whole(1, 2**12, 4),
        "method": Choice(METHODS),
        "granularity": Choice(("op", "module")),
        "prefer_modules": Number(0, 1, 0.02),
        "cut_at": Several(Text("a module, an operation or FILE:LINE", "transformer.h.6")),
        "keep_together": Several(Text("a module or the name of a class", "transformer.h.6")),
        "schedule": Choice((*SCHEDULES, AUTO)),
        "ranks": Whole(1, 2**12, 2),
        "micro_batches": Whole(1, 2**16, 8),
        "staleness": Text(
            f"one of {', '.join(KEEPS)}, or several joined by +",
            "stash",
            lambda text: all(name in KEEPS for name in text.split("+")),
        ),
        "optimizer": Choice(OPTIMIZERS),
        "recompute": Choice(("auto", "all", "none")),
        "memory_limit": Either(Text("a memory size", "11GiB", bytes_of), Whole(1, 10**18, 10**9)),
        "explain": Flag(),
        "devices": path("devices.toml"),
        "hosts": Text("a list of hosts and numbers of ranks", "h1:4,h2:2"),
        "profile": Choice(("measured", "analytic")),
        "device": Text("cpu, cuda, the name of a device or a file", "a100-80g"),
        "dtype": Choice(("float32", "bfloat16")),
        "threads": Whole(1, 2**12, 1),
        "calibrate": Flag(),
        "no_cache": Flag(),
        "output": path("generated_models/gpt2_4p"),
        "code": Choice(("structured", "flat")),
        "no_weights": Flag(),
        "force": Flag(),
        "stop_after": Choice(("capture", "profile", "plan")),
        "json": Flag(),
        "quiet": Flag(),
        "verbose": Flag(),
        "leaves": Several(Text("the name of a class", "GPT2Attention")),
        "save_weights": Flag(),
    }
)
"""By option, and by argument where that has another name."""

_BY_INPUT = frozenset({"batch_dim", "sequence_dim"})
"""As arguments they are numbers or mappings, which the capture compares with the inputs."""

_NEVER_NONE = frozenset(
    {
        *("seq", "seed", "meta", "capture", "mode", "method", "granularity", "prefer_modules"),
        *("micro_batches", "staleness", "optimizer", "recompute", "explain", "dtype"),
        *("calibrate", "no_cache", "code", "save_weights", "force"),
    }
)


def check_options(given: Mapping[str, Any]) -> None:
    """Raises PlanError for the value of an option that is not legal. None means not given; devices
    that were read already are legal."""
    for name, value in given.items():
        is_checked = name in LIMITS.keys() - _BY_INPUT and not is_dataclass(value)
        if is_checked and (value is not None or name in _NEVER_NONE):
            if fault := refusal(LIMITS[name], name, value):
                raise PlanError(*fault)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose keyword arguments are checked as the options of their names."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        check_options(kwargs)
        return function(*args, **kwargs)

    return call
