"""Runs with a cache equal those without to the last bit, and compute no frozen block twice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import asyncpipe
from asyncpipe.runtime.freezing.arena import Arena
from asyncpipe.runtime.freezing.cached_samples import ShownInputs, Site
from asyncpipe.runtime.freezing.marks import Leaf
from asyncpipe.runtime.freezing.reads import NotCachedError, StageReads
from asyncpipe.runtime.freezing.stage_cache import StageCache
from asyncpipe.runtime.freezing.stages import plan_at
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.runtime.tensor_files import read_tensors
from asyncpipe.runtime.training.pipeline import Pipeline
from asyncpipe.tests.support.models.blocks import WIDTH, write_classifier, write_elastic
from asyncpipe.tests.support.models.hand_folders import exact_settings
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY

SAMPLES, EVALUATED = 32, 12
DATA = f"""
import torch

def data():
    made = torch.Generator().manual_seed(1)
    x = torch.randn({SAMPLES}, {WIDTH}, generator=made)
    samples = torch.utils.data.TensorDataset(x, torch.randint(4, ({SAMPLES},), generator=made))
    return samples, samples

class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return {SAMPLES}
    def __getitem__(self, number):
        return torch.randn({WIDTH}), number % 4

def noisy():
    return Noisy(), Noisy()
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_classifier(folder / "blocks", stages=3)
    write_elastic(folder / "elastic", "2,1", "1=1,2=3")
    (folder / "own.py").write_text(DATA)
    return folder


def train(folder: Path, output: Path, **given: Any) -> tuple[list[float], list[dict[str, Any]]]:
    """The losses of all steps and evaluations, and the lines of the run's metrics."""
    usual: dict[str, Any] = {"freeze": "1=1,2=3", "freeze_every": 2, "steps": 10, "lr": 0.01}
    usual |= {"micro_batches": 4, "eval_every": 4, "eval_batches": 3, "dtype": "float32"}
    usual["data"] = f"{folder.parent / 'own.py'}:data"
    run(exact_settings(folder, output, **(usual | given)), FACTORY)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] in ("step", "eval")], lines


@pytest.mark.parametrize(
    ("name", "given", "sample_bytes"),
    [
        ("blocks", {"schedule": "1f1b"}, 3 * WIDTH * 4),
        ("blocks", {"schedule": "zb-h1", "precision": "bfloat16"}, 3 * WIDTH * 2),
        ("blocks", {"schedule": "async-1f1b", "dtype": "float64"}, 3 * WIDTH * 8),
        ("elastic", {"schedule": "gpipe", "elastic": True, "recompute": "all"}, WIDTH * 4),
    ],
    ids=["1f1b", "zb-h1", "async-1f1b", "elastic"],
)
def test_a_run_with_a_cache_is_the_run_without(
    folders: Path, tmp_path: Path, name: str, given: dict[str, Any], sample_bytes: int
) -> None:
    losses, _ = train(folders / name, tmp_path / "off", **given)
    cached, lines = train(folders / name, tmp_path / "on", cache="1GiB", **given)
    assert cached == losses
    names = read_plan(folders / name).state_keys
    off, on = (read_tensors(tmp_path / run / "weights", names) for run in ("off", "on"))
    assert all(torch.equal(on[key], off[key]) for key in names)
    *_, last = (line for line in lines if line["event"] == "step")
    assert last["cache_hits"] == 1 and last["action_ms"]["cache"]
    # Each of three stages keeps a row; of an elastic run that ends with one only the last stays.
    assert last["cache_bytes"] == (SAMPLES + EVALUATED) * sample_bytes
    assert not [path for path in (tmp_path / "on").iterdir() if path.stat().st_size > 1 << 20]


def test_samples_that_are_drawn_again_are_never_hit(folders: Path, tmp_path: Path) -> None:
    given = {"schedule": "single", "data": f"{folders / 'own.py'}:noisy", "eval_every": 0}
    losses, _ = train(folders / "blocks", tmp_path / "off", **given)
    cached, lines = train(folders / "blocks", tmp_path / "on", cache="4KiB", **given)
    assert cached == losses
    assert {line.get("cache_hits") for line in lines if line["event"] == "step"} == {None, 0.0}
    notes = [line["text"] for line in lines if line.get("about") == "cache"]
    assert notes[0].startswith("4.0 KiB are full, so stage 0 computes the frozen blocks of other")
    assert notes[0].endswith("64 samples take 4.0 KiB there")
    assert notes[-1].endswith(" 0% of micro-batches hit")


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(3)
    x, target = torch.randn(16, WIDTH, generator=made), torch.randint(4, (16,), generator=made)
    orders = [torch.randperm(16, generator=made) for _ in range(count)]
    return [(x[order], target[order]) for order in orders]


def pipeline(folder: Path, **options: Any) -> tuple[Pipeline, torch.optim.Optimizer]:
    pipe = Pipeline(
        folder, loss="cross_entropy", micro_batches=4, freeze="1=1,2=3,3=4", freeze_every=2,
        **options,
    )  # fmt: skip
    return pipe, torch.optim.SGD(pipe.parameters(), lr=0.1)


def test_only_blocks_that_froze_since_run_again(folders: Path) -> None:
    calls = Counter[str]()
    pipe, optimizer = pipeline(folders / "blocks", cache="1MiB")
    plain, other = pipeline(folders / "blocks")
    for module in pipe.modules.values():
        for name, part in module.named_modules():
            if name.endswith(".layer"):
                part.register_forward_hook(lambda *_, name=name: calls.update([name]))
    for number, batch in enumerate(batches(8)):
        calls.clear()
        loss = pipe.step(batch, optimizer=optimizer).loss
        assert loss == plain.step(batch, optimizer=other).loss
        seen = {name.split(".")[1] for name in calls}
        # Steps 3, 5 and 7 are the first at 1, 3 and 4 frozen blocks; the first micro-batch of a
        # depth is computed as a whole, to learn how it can be left out.
        if number in (3, 5, 7):
            assert seen == {str(block) for block in range({3: 1, 5: 3, 7: 4}[number], 4)}
        if number == 4:
            assert calls["blocks.0.layer"] == 2 and calls["blocks.2.layer"] == 5


def test_what_a_micro_batch_needs_is_asked_for_before_the_one_before_it(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, tuple[int, ...]]] = []
    prefetch, load = Arena.prefetch, Site.load

    def asking(arena: Arena, places: Sequence[int], size: int) -> None:
        events.append(("ask", tuple(places)))
        prefetch(arena, places, size)

    def loading(site: Site, arena: Arena, places: Sequence[int], device: torch.device) -> Any:
        events.append(("load", tuple(places)))
        return load(site, arena, places, device)

    monkeypatch.setattr(Arena, "prefetch", asking)
    monkeypatch.setattr(Site, "load", loading)
    pipe, optimizer = pipeline(folders / "blocks", cache="1MiB")
    for batch in batches(8):
        events.clear()
        pipe.step(batch, optimizer=optimizer)
    asks, loads = ([places for kind, places in events if kind == of] for of in ("ask", "load"))
    assert len(loads) == 12 and sorted(asks) == sorted(loads)
    # Those of stage 0: the inputs of later stages in the same process are known when they are due.
    for earlier, later in pairwise(loads[::3]):
        assert events.index(("ask", later)) < events.index(("load", earlier))


def test_an_automatic_cache_gives_up_where_it_is_of_no_use(folders: Path) -> None:
    pipe, optimizer = pipeline(folders / "blocks", cache="auto")
    for batch in batches(3):
        pipe.step(batch, optimizer=optimizer)
    caches = [stage.around for stage in pipe.executor.stages.values()]
    first, second = (cache for cache in caches if isinstance(cache, StageCache))
    first.use.why_not = second.use.why_not = ""
    for _ in range(4):
        first.use.time(2.0, 1.0)
    assert first.use.why_not.startswith("loading takes") and not second.use.why_not
    assert pipe.cache is not None
    pipe.cache.samples = 16
    for _ in range(9):
        second.use.miss(is_new=True)
    assert second.use.why_not == "no sample has come again with the same values"
    told = pipe.cache.news()
    assert len(told) == 2 and "stage 0 computes its frozen blocks each time: loading" in told[0]


def test_what_is_loaded_into_a_pipeline_empties_its_cache(folders: Path, tmp_path: Path) -> None:
    pipe, optimizer = pipeline(folders / "blocks", cache="1MiB")
    for batch in batches(3):
        pipe.step(batch, optimizer=optimizer)
    plain, other = pipeline(folders / "blocks", seed=2)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.5)
    for batch in batches(3):
        plain.step(batch, optimizer=other)
    plain.save(tmp_path / "saved", optimizer=other)
    pipe.load(tmp_path / "saved", optimizer=optimizer)
    for batch in batches(1):
        assert pipe.evaluate([batch]) == plain.evaluate([batch])
    with torch.no_grad():
        next(each for each in pipe.parameters() if not each.requires_grad).mul_(1.5)
        next(each for each in plain.parameters() if not each.requires_grad).mul_(1.5)
    for batch in batches(1):
        assert pipe.evaluate([batch]) == plain.evaluate([batch])


class Block(nn.Module):
    """A block that also returns a bias, which the first one makes for all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor]:
        bias = self.layer.weight.diagonal()[None] * mask if bias is None else bias
        return torch.tanh(self.layer(x)) + bias, bias


class Model(nn.Module):
    """Blocks, and a part around them of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.side = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h, bias = x, None
        if self.kind == "trained before":
            h = self.side(x)
        if self.kind == "drawn before":
            h = F.dropout(x, 0.5, self.training)
        if self.kind == "over samples":
            mask = mask.mean(0, keepdim=True)
        for block in self.blocks:
            h, bias = block(h, bias, mask)
        return self.head(h + self.side(x) if self.kind == "skip" else h)


def reads_of(kind: str, folder: Path, depth: int = 2) -> StageReads:
    torch.manual_seed(1)
    plan = asyncpipe.partition(
        Model(kind),
        {"x": torch.randn(4, WIDTH), "mask": torch.rand(4, WIDTH)},
        stages=1,
        loss="cross_entropy",
        output=str(folder),
        profile="analytic",
    )
    pipe = Pipeline(folder, loss="cross_entropy", freeze=f"1={depth}", freeze_every=1)
    assert pipe.freezing is not None
    blocks, builds = pipe.freezing.blocks, pipe.freezing._builds
    at_depth = plan_at(plan, blocks, depth, builds)
    return StageReads(at_depth, at_depth.stages[0], builds[0], blocks, depth, False)


def test_what_later_blocks_and_skips_read_is_kept(tmp_path: Path) -> None:
    reads = reads_of("skip", tmp_path / "skip")
    assert reads.kept(reads.last) == (Leaf(0, 1), Leaf(1, 0))
    assert reads.kept(0) == (Leaf(0, 0), Leaf(0, 1))
    assert reads.inputs == {0, 1}


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("trained before", "blocks.[01] reads what still trains"),
        ("drawn before", "blocks.1 reads random numbers"),
        ("over samples", "blocks.0 returns a tensor for all samples together"),
    ],
)
def test_blocks_that_depend_on_more_than_their_sample_are_not_cached(
    tmp_path: Path, kind: str, why: str
) -> None:
    reads = reads_of(kind, tmp_path / "model")
    with pytest.raises(NotCachedError, match=why):
        reads.kept(reads.last)
    pipe = Pipeline(
        tmp_path / "model", loss="cross_entropy", micro_batches=1, freeze="1=2", freeze_every=1,
        cache="1MiB",
    )  # fmt: skip
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    batch = torch.randn(4, WIDTH), torch.rand(4, WIDTH), torch.randint(4, (4,))
    pipe.step(batch, optimizer=optimizer)
    with pytest.warns(UserWarning, match=f"stage 0 computes its frozen blocks each time: {why}"):
        pipe.step(batch, optimizer=optimizer)


def test_a_loop_whose_micro_batches_are_not_the_planned_ones_is_warned(folders: Path) -> None:
    pipe, optimizer = pipeline(folders / "blocks", cache="1MiB")
    halves = [(x[:8], target[:8]) for x, target in batches(3)]
    for batch in halves[:2]:
        pipe.step(batch, optimizer=optimizer)
    with pytest.warns(
        UserWarning, match=r"x\w* of a micro-batch has the sizes \[2, 16\], and the p"
    ):
        pipe.step(halves[2], optimizer=optimizer)


def test_the_keys_of_inputs_hold_as_long_as_these_do_not_change() -> None:
    shown, x, keys = ShownInputs(), torch.ones(2, WIDTH), [b"0", b"1"]
    shown.add("facts", [(x, 0)], keys)
    assert shown.take("other", [(x, 0)]) is shown.take("facts", [(x.clone(), 0)]) is None
    assert shown.take("facts", [(x.detach(), 0)]) == keys
    assert shown.take("facts", [(x, 0)]) is None
    shown.add("facts", [(x, 0)], keys)
    x.view(-1)[0] = 2
    assert shown.take("facts", [(x, 0)]) is None
