"""The random numbers of a process <-> tensors.

Dropout needs none of it: its numbers follow from the seed and the number of the micro-batch. What a
user's data or criterion draws comes from these four generators.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_PYTHON_VERSION = 3
"""Of what `random.getstate` gives."""


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Those of torch, of Python and of NumPy, and of the GPU where `device` is one."""
    version, words, gauss = random.getstate()
    assert version == _PYTHON_VERSION
    own = np.random.get_state(legacy=False)
    assert isinstance(own, dict)
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(own["state"]["key"].astype(np.int64)),
        "numpy_position": torch.tensor([own["state"]["pos"], own["has_gauss"]]),
        "numpy_gauss": torch.tensor(own["gauss"], dtype=torch.float64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Goes on with what `random_states` gave."""
    torch.set_rng_state(states["torch"])
    gauss = next(iter(states["python_gauss"].tolist()), None)
    random.setstate((_PYTHON_VERSION, tuple(states["python"].tolist()), gauss))
    position, has_gauss = states["numpy_position"].tolist()
    key = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, float(states["numpy_gauss"])))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
