"""AdamW that writes the merged gradients of every step, and the weights after it, to a folder.

    RECORDED_IN=here asyncpipe-train .. --optimizer benchmarks/recorded_gradients.py:adamw

With WEIGHTS_OF=there, each step ends with the weights that a recorded run of one process had after
it, so that the gradients of all steps are those at the same weights. TENSOR_RANKS is the number of
ranks that share out a layer.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from asyncpipe.runtime.tensor_parallel.ranks import Split, split_of

RECORDED_IN, WEIGHTS_OF, TENSOR_RANKS = "RECORDED_IN", "WEIGHTS_OF", "TENSOR_RANKS"


def adamw(named: Sequence[tuple[str, Tensor]], lr: float) -> torch.optim.Optimizer:
    return _Recorded(named, lr)


class _Recorded(torch.optim.AdamW):
    def __init__(self, named: Sequence[tuple[str, Tensor]], lr: float) -> None:
        super().__init__([parameter for _, parameter in named], lr=lr)
        self._parameters, self._steps = dict(named), 0
        self._rank = int(os.environ.get("RANK", 0))
        self._stage = min(self._parameters)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = {
            name: parameter.grad
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }
        self._write("gradients", gradients)
        super().step(closure)
        if reference := os.environ.get(WEIGHTS_OF):
            ranks = int(os.environ.get(TENSOR_RANKS, 1))
            weights = read(Path(reference), "weights", self._steps)
            for name, parameter in self._parameters.items():
                split = split_of(parameter)
                whole = weights[name]
                own = split.part(whole, self._rank % ranks, ranks) if split else whole
                parameter.copy_(own)
        else:
            self._write("weights", self._parameters)
        self._steps += 1

    def _write(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        splits = {name: split_of(parameter) for name, parameter in self._parameters.items()}
        facts = {name: f"{split.dim} {split.groups}" for name, split in splits.items() if split}
        folder = Path(os.environ[RECORDED_IN]) / f"{kind}_{self._steps}"
        folder.mkdir(parents=True, exist_ok=True)
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        file = folder / f"{self._rank:03} {self._stage}.safetensors"
        save_file(copies, file, metadata=facts or None)


def read(folder: Path, kind: str, step: int, ranks: int = 1) -> dict[str, Tensor]:
    """The whole tensors of a step, of a run on so many tensor ranks."""
    parts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    splits: dict[str, Split] = {}
    for path in sorted((folder / f"{kind}_{step}").iterdir()):
        rank = int(path.name.split()[0])
        with safe_open(path, "pt") as file:
            for name, fact in (file.metadata() or {}).items():
                splits[name] = Split(*map(int, fact.split()))
            for name in file.keys():
                parts[name].setdefault(rank % ranks, file.get_tensor(name))
    return {
        name: splits[name].whole([by_rank[rank] for rank in range(ranks)])
        if name in splits
        else next(iter(by_rank.values()))
        for name, by_rank in parts.items()
    }
