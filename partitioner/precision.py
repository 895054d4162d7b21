"""The name of a dtype -> the autocast that computes in it, for one or more kinds of device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from ..runtime.errors import PlanError

DTYPES = ("float32", "bfloat16")


def check_dtype(dtype: str) -> None:
    """Raises PlanError for a dtype that nothing is profiled in."""
    if dtype not in DTYPES:
        raise PlanError(f"--dtype {dtype} is not known.", f"Choose {', '.join(DTYPES)}.")


@contextmanager
def mixed_precision(dtype: str, *device_types: str, cached: bool = True) -> Iterator[None]:
    """Within, torch computes matrix products in `dtype`; float32 is as without.

    Not `cached`, a parameter is cast at each use, as at the start of each micro-batch.
    """
    with ExitStack() as stack:
        for kind in dict.fromkeys(device_types) if dtype != "float32" else ():
            if kind != "meta":
                made = torch.autocast(kind, dtype=getattr(torch, dtype), cache_enabled=cached)
                stack.enter_context(made)
        yield
