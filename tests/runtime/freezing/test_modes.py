"""Which modules are in evaluation mode while blocks are frozen: the same for every cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import asyncpipe
from asyncpipe.runtime.rng import micro_batch_seed
from asyncpipe.tests.support.models import zoo

SAMPLES, WIDTH = 8, 8
DROPOUTS = {"at_head", "everywhere", "noise"}


class Noise(nn.Module):
    """A dropout of one's own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.25, self.training)


class Model(nn.Module):
    """Dropouts that are used in other places than they are listed."""

    def __init__(self) -> None:
        super().__init__()
        self.at_head = nn.Dropout(0.25)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.everywhere = nn.Dropout(0.25)
        self.noise = Noise()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.everywhere(self.inner(x))
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(self.noise(x) if number == 1 else x))
        return self.head(self.at_head(self.everywhere(x)))


def batches(steps: int, **values: Tensor) -> Iterator[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(2)
    for _ in range(steps):
        order = torch.randperm(SAMPLES, generator=made)
        yield {name: value[order] for name, value in values.items()}


def test_a_module_is_off_when_a_frozen_block_reads_what_it_returns(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Model()
    x, target = torch.randn(SAMPLES, WIDTH), torch.randint(4, (SAMPLES,))
    losses = []
    for cut_at, cache in [((), "off"), ((), "1MiB"), (("blocks.1",), "off"), (("head",), "1MiB")]:
        # Before the head: the first stage freezes as a whole, but for a dropout after its blocks.
        folder = tmp_path / "_".join(("model", *cut_at))
        if not folder.exists():
            asyncpipe.partition(
                model, {"x": x[:4]}, stages=1 + len(cut_at), cut_at=cut_at, loss="cross_entropy",
                output=str(folder), profile="analytic",
            )  # fmt: skip
        pipe = asyncpipe.Pipeline(
            folder, loss="cross_entropy", micro_batches=2, freeze="1=1,2=2,3=3", freeze_every=2,
            cache=cache,
        )  # fmt: skip
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses.append([])
        noisy = []
        for batch in batches(9, x=x, target=target):
            losses[-1].append(pipe.step(batch, optimizer=optimizer).loss)
            parts = [each for of in pipe.modules.values() for each in of.named_modules()]
            noisy.append({path for path, part in parts if part.training} & DROPOUTS)
        assert noisy[1] == DROPOUTS
        assert noisy[3] == {"noise", "at_head"} and noisy[5] == noisy[8] == {"at_head"}
        assert pipe.cache is None or not pipe.cache.reported
    assert losses[0] == losses[1] and losses[2:] == [pytest.approx(losses[0], rel=1e-6)] * 2


def of_t5(model: nn.Module) -> list[list[nn.Module]]:
    """The modules of a T5 that a plain loop freezes at each event, listed by hand."""
    paths = [["shared", "encoder.block.0", "encoder.dropout"]]
    paths.append(["encoder.block.1", "encoder.final_layer_norm"])
    paths[-1] += ["decoder.block.0", "decoder.dropout"]
    return [[model.get_submodule(path) for path in of] for of in paths]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_t5_whose_dropouts_are_listed_after_its_blocks_is_the_plain_loop(
    tmp_path: Path, stages: int
) -> None:
    model, inputs = zoo.t5(decoder_layers=1)
    asyncpipe.partition(
        model, inputs, stages=stages, output=str(tmp_path / "t5"), profile="analytic",
        cut_at=("decoder.block.0",) * (stages - 1),
    )  # fmt: skip
    own = list(batches(4, **{name: value.repeat(2, 1) for name, value in inputs.items()}))
    losses, weights = [], []
    for cache in ("off", "1MiB"):
        pipe = asyncpipe.Pipeline(
            tmp_path / "t5", micro_batches=2, freeze="1=1,2=3", freeze_every=1, cache=cache,
            dtype="float64",
        )  # fmt: skip
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses.append([pipe.step(batch, optimizer=optimizer).loss for batch in own])
        weights.append(pipe.state_dict())
        assert pipe.cache is None or not pipe.cache.reported
    assert losses[0] == losses[1]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    plain, optimizer = [], torch.optim.SGD(model.double().train().parameters(), lr=0.1)
    for step, batch in enumerate(own):
        parts = [
            dict(zip(batch, of, strict=True))
            for of in zip(*(value.split(SAMPLES // 2) for value in batch.values()), strict=True)
        ]
        plain.append(0.0)
        for number, part in enumerate(parts):
            torch.manual_seed(micro_batch_seed(1, 2 * step + number))
            loss = model(**part).loss / 2
            loss.backward()
            plain[-1] += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        for part in of_t5(model)[step] if step < 2 else ():
            part.requires_grad_(False).eval()
    assert losses[0] == pytest.approx(plain, rel=1e-12)
    for name, value in model.state_dict().items():
        if name in weights[0]:
            torch.testing.assert_close(weights[0][name], value, rtol=1e-12, atol=1e-12)
