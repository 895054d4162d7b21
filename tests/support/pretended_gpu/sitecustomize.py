"""Tells torch of GPUs that are not there, in every Python process with this folder on PYTHONPATH.

`PRETENDED_GPUS` is their number. torch counts and describes them; any use of one fails as it does
in a build without CUDA.
"""

import os
from types import SimpleNamespace
from typing import Any

import torch

_NUMBER = int(os.environ["PRETENDED_GPUS"])


def _properties(device: Any = 0) -> SimpleNamespace:
    return SimpleNamespace(
        name="Pretended GPU",
        total_memory=8 << 30,
        uuid=f"GPU-{torch.device('cuda', device).index}",
        pci_domain_id=0,
        pci_bus_id=1,
        pci_device_id=0,
    )


torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: _NUMBER
torch.cuda.get_device_properties = _properties  # type: ignore[assignment]
torch.cuda.get_device_name = lambda device=None: "Pretended GPU"
