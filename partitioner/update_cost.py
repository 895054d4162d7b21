"""A profile and an optimizer's name -> what a step of the optimizer takes, by byte of parameters.

Measured where the profile is: on matrices that no cache holds with their gradients and moments,
for between two steps of a run there is other work. Predicted, it is what has to be moved:
parameters and moments there and back, and gradients once.

Sutskever's momentum counts as torch's. Muon and SOAP count as AdamW, which steps what is no hidden
matrix of theirs: their products of matrices grow with a hidden layer's own work, which is balanced
anyway.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from .clock import clock_of, threads_set
from .profile_cache import ProfileCache
from .profiler import Profile
from .setting import OPTIMIZER_COPIES

_MAKE: Mapping[str, Callable[[Iterable[Tensor]], Optimizer]] = MappingProxyType(
    {
        "adamw": partial(AdamW, fused=True),
        "adam": partial(Adam, fused=True),
        "nadam": partial(NAdam, decoupled_weight_decay=True),
        "sgd": SGD,
        "momentum": partial(SGD, momentum=0.9),
    }
)
_COUNTS_AS = {"sutskever": "momentum", "muon": "adamw", "soap": "adamw"}
_SHAPE = (1024, 1024)
_MATRICES = 8
_STEPS = 5


def update_ms_per_byte(profile: Profile, optimizer: str, *, cached: bool = True) -> float:
    """Milliseconds of a step for each byte of parameters, on the device of the profile and with
    its threads; with `cached` as it was measured before, if it was."""
    optimizer = _COUNTS_AS.get(optimizer, optimizer)
    if profile.bandwidth is not None:
        return 1e3 * (3 + 2 * OPTIMIZER_COPIES[optimizer]) / profile.bandwidth
    device = torch.device(profile.device)
    known = ProfileCache.of(device, profile.threads, "float32", read=cached)
    key = f"update of {optimizer}"
    if (found := known.get(key)) is None:
        with threads_set(profile.threads), torch.random.fork_rng(devices=[]):
            found = _measured(optimizer, device)
        known.put(key, found)
        known.save()
    return float(found)


def _measured(optimizer: str, device: torch.device) -> float:
    matrices = [torch.randn(_SHAPE).to(device) for _ in range(_MATRICES)]
    for matrix in matrices:
        matrix.grad = torch.ones_like(matrix)
    stepping = _MAKE[optimizer](matrices)
    stepping.step()  # makes what it keeps
    clock = clock_of(device)
    marks = [clock.mark()]
    for _ in range(_STEPS):
        stepping.step()
        marks.append(clock.mark())
    num_bytes = sum(matrix.numel() * matrix.element_size() for matrix in matrices)
    return statistics.median(clock.ms(*pair) for pair in pairwise(marks)) / num_bytes
