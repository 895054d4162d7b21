"""A class of torch's optimizers -> the same, for which torch does not load its compiler.

torch keeps its compiler out of some methods of an optimizer, and loads it at their first call to do
so: about a second of a rank's start, and up to 80 MB. No rank compiles its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import unwrap

import torch
from torch.optim import Optimizer

_KEPT_OUT = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


@cache
def uncompiled(kind: type[Optimizer]) -> Callable[..., Optimizer]:
    """A class of the same name that does the same, its methods without what wraps them."""
    plain = {name: unwrap(getattr(kind, name)) for name in _KEPT_OUT}
    step = torch.no_grad()(unwrap(kind.step))
    return type(kind.__name__, (kind,), {**plain, "step": step})
