"""Models cut by the compiler, for tests that run them: each with a maker of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncpipe.partitioner import capture_and_profile
from asyncpipe.partitioner.capture.graph import Capture
from asyncpipe.partitioner.capture_and_profile import capture_source
from asyncpipe.partitioner.compile import partition  # before any patch, which it would keep
from asyncpipe.partitioner.models.builtin import ResNet
from asyncpipe.partitioner.models.load import ModelSource, load_model
from asyncpipe.partitioner.planning.options import PartitionOptions
from asyncpipe.tests.support.models.copies import made_once

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model to cut. `build` makes a new one, always with equal weights; `micro_batch(i)` gives
    its inputs (and the `target`, where the loss is outside the model)."""

    build: Callable[[], nn.Module]
    micro_batch: Callable[[int], Inputs]
    criterion: str | None = None

    @property
    def example_inputs(self) -> Inputs:
        return {name: value for name, value in self.micro_batch(0).items() if name != "target"}


def _published(name: str, **fields: Any) -> Callable[[], nn.Module]:
    return lambda: load_model(name, model_args=fields, seed=0).model


def _tokens(i: int, *, samples: int = 2, length: int = 9, vocabulary: int = 61) -> Inputs:
    generator = torch.Generator().manual_seed(100 + i)
    ids = torch.randint(vocabulary, (samples, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _pairs(i: int) -> Inputs:
    source, target = _tokens(2 * i), _tokens(2 * i + 1, length=7)
    return {"input_ids": source["input_ids"], "labels": target["labels"]}


def _pictures(i: int, *, samples: int = 4, size: int = 16) -> Inputs:
    generator = torch.Generator().manual_seed(100 + i)
    return {
        "pixel_values": torch.randn(samples, 3, size, size, generator=generator),
        "labels": torch.randint(5, (samples,), generator=generator),
    }


def _vectors(i: int) -> Inputs:
    generator = torch.Generator().manual_seed(100 + i)
    return {
        "x": torch.randn(4, 16, generator=generator),
        "target": torch.randint(4, (4,), generator=generator),
    }


def _residual_mlp() -> nn.Module:
    example = Path(__file__).parents[3] / "examples" / "residual_mlp.py"
    return load_model(f"{example}:build", model_args={"width": 12, "depth": 3}, seed=0).model


def _resnet() -> nn.Module:
    torch.manual_seed(0)
    small = {"blocks": (1, 1), "planes": (8, 12), "block": "basic", "stem": "small"}
    return ResNet(**small, num_classes=5)


def _frozen_gpt2() -> nn.Module:
    """Its last block and norm are trained; the table that first and last stage have is not."""
    model = _published("gpt2", n_layer=4, n_embd=64, n_head=4, vocab_size=2003)()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("h.3." in name or "ln_f" in name)
    return model


def _larger_resnet() -> nn.Module:
    torch.manual_seed(0)
    return ResNet(blocks=(1, 1, 1, 1), planes=(16, 32, 64, 64), block="bottleneck", num_classes=5)


CASES: Mapping[str, Case] = {
    "gpt2": Case(_published("gpt2", n_layer=3, n_embd=16, n_head=2, vocab_size=61), _tokens),
    "t5": Case(
        _published(
            "t5-small",
            num_layers=2,
            num_decoder_layers=2,
            d_model=16,
            num_heads=2,
            d_kv=8,
            d_ff=24,
            vocab_size=61,
            # What a cache is given is copied into another layout, which no stage does, and whose
            # products some processors round otherwise.
            use_cache=False,
        ),
        _pairs,
    ),
    "resnet": Case(_resnet, _pictures),
    "mlp": Case(_residual_mlp, _vectors, "cross_entropy"),
}

# Large enough that what a rank holds is its tensors, and not what surrounds them.
LARGER: Mapping[str, Case] = {
    "wider gpt2": Case(
        _published("gpt2", n_layer=4, n_embd=64, n_head=4, vocab_size=503),
        partial(_tokens, samples=4, length=48, vocabulary=503),
    ),
    "frozen gpt2": Case(_frozen_gpt2, partial(_tokens, samples=4, length=48, vocabulary=2003)),
    "larger resnet": Case(_larger_resnet, partial(_pictures, samples=8, size=48)),
    "many words": Case(  # most of its memory is of the table that the first and last stage have
        _published("gpt2", n_layer=2, n_embd=64, n_head=4, vocab_size=10007),
        partial(_tokens, samples=1, length=16, vocabulary=10007),
    ),
}


def cut(case: Case, stages: int, folder: Path, **running: Any) -> Path:
    """Partitions a case of the tables above into `folder`, to run with these options."""
    (name,) = (name for name, known in {**CASES, **LARGER}.items() if known is case)
    return made_once(
        f"{name} in {stages} stages, {sorted(running.items())}",
        folder,
        partial(_partition, name, case, stages, folder, running),
    )


def _partition(name: str, case: Case, stages: int, folder: Path, running: dict[str, Any]) -> None:
    """Partitions a case, which is captured once in a process."""
    with mock.patch.object(capture_and_profile, "capture_source", partial(_capture_of, name)):
        partition(
            _model_of(name),
            case.example_inputs,
            stages=stages,
            output=folder,
            name="case",
            loss=case.criterion,
            profile="analytic",
            **running,
        )


@cache
def _model_of(name: str) -> nn.Module:
    return {**CASES, **LARGER}[name].build()


_CAPTURES: dict[str, Capture] = {}


def _capture_of(name: str, source: ModelSource, options: PartitionOptions) -> Capture:
    if name not in _CAPTURES:
        _CAPTURES[name] = capture_source(source, options)
    return _CAPTURES[name]


def loss_of(case: Case, model: Callable[..., Any], inputs: Inputs) -> Tensor:
    """The loss of one micro-batch, by the model itself or by its criterion."""
    arguments = {name: value for name, value in inputs.items() if name != "target"}
    output = model(**arguments)
    loss: Tensor = F.cross_entropy(output, inputs["target"]) if case.criterion else output["loss"]
    return loss
