"""A device -> the sizes that a GPU report runs with, so that they fit its memory."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Scale(NamedTuple):
    """Model sizes for devices with at least `gib` of memory."""

    gib: float
    layers: int
    width: int
    heads: int
    tokens: int
    micro_batch_size: int


SCALES = (
    Scale(70.0, 24, 1024, 16, 1024, 2),
    Scale(36.0, 24, 1024, 16, 512, 2),
    Scale(20.0, 24, 1024, 16, 512, 1),
    Scale(12.0, 12, 768, 12, 256, 2),
    Scale(0.0, 12, 768, 12, 256, 1),
)
"""Two ranks that share a GPU hold a whole model, its AdamW and eight micro-batches under gpipe:
at most three quarters of the memory."""

DRY = Scale(0.0, 4, 64, 4, 32, 2)
MODELS = ("gpt", "llama")


@dataclass(frozen=True)
class Setting:
    """The conditions of a report.

    device: cuda, or cpu for a dry run.
    gpus: the number of GPUs.
    gib: the memory of the smallest GPU; 0 on a CPU.
    scale: the sizes of the models.
    micro_batches, steps: of a run.
    """

    device: str
    gpus: int
    gib: float
    scale: Scale
    micro_batches: int = 8
    steps: int = 12

    @property
    def is_dry(self) -> bool:
        return self.device == "cpu"

    @property
    def vocabulary(self) -> int:
        return 512 if self.is_dry else 50257

    def model_args(self, model: str) -> dict[str, Any]:
        """The arguments of `gpt.build` or `llama.build`."""
        scale = self.scale
        args: dict[str, Any] = {
            "layers": scale.layers,
            "width": scale.width,
            "heads": scale.heads,
            "tokens": scale.tokens,
            "vocabulary": self.vocabulary,
            "micro_batch_size": scale.micro_batch_size,
        }
        if model == "llama":
            args |= {"key_heads": scale.heads // 4, "hidden": scale.width * 8 // 3 // 8 * 8}
        return args

    def places(self, ranks: int, gpus: int | None = None) -> dict[str, Any]:
        """The options of a run of so many ranks on so many GPUs, all of them by default."""
        if self.is_dry:
            return {"device": "cpu", "threads": 1}
        return {"device": "cuda", "ranks_per_gpu": -(-ranks // min(ranks, gpus or self.gpus))}


def dry_setting() -> Setting:
    return Setting("cpu", 0, 0.0, DRY, micro_batches=4, steps=4)


def setting_of_gpus(most_gib: float) -> Setting:
    """The setting for the GPUs that torch finds; without any, that of none. The models are as for
    GPUs of at most `most_gib`."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    memory = [torch.cuda.get_device_properties(index).total_memory for index in range(count)]
    gib = min(memory, default=0) / 2**30
    scale = next(scale for scale in SCALES if min(gib, most_gib) >= scale.gib)
    return Setting("cuda", count, round(gib, 1), scale)
