"""Options and models that cannot freeze are refused before a run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from asyncpipe.runtime.config.batch_layout import StepBatch
from asyncpipe.runtime.config.freezing_options import events_of
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.data.streams import UNKNOWN_LENGTH
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.freezing.block_outputs import Place, places_of
from asyncpipe.runtime.freezing.blocks import Blocks, FreezeError
from asyncpipe.runtime.freezing.stages import check_modes
from asyncpipe.runtime.launch.job import make_job
from asyncpipe.runtime.plan.plan import TensorSpec
from asyncpipe.runtime.training.joining import joined_job
from asyncpipe.tests.support.models.hand_folders import write_mlp, write_text
from asyncpipe.tests.support.models.plans import plan_by_hand, stage_by_hand
from asyncpipe.tests.support.run_configs import run_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp")
    write_text(folder / "text")
    return folder


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"freeze_every": 3}, "--freeze-every 3, but nothing is frozen"),
        (
            {"freeze": "1=4"},
            r"freezes 4 blocks at event 1, but tiny_mlp has 4 blocks \(layers.0 to",
        ),
        ({"freeze": "1=2", "freeze_most": 4}, "of which the last one must train"),
        ({"freeze": "1=2", "ema": 0.9}, "--ema 0.9 evaluates other weights than it trains"),
        ({"freeze": "missing.toml"}, "missing.toml does not exist"),
        ({"freeze": "schedule:2"}, "is not between 0 and 1"),
        (
            {"freeze": "plasticity", "micro_batch_size": 1},
            "plasticity compares the samples of a micro-batch, but --micro-batch-size is 1",
        ),
        ({"cache": "2GiB"}, "--cache 2GiB, but nothing is frozen"),
        ({"freeze": "1=1", "cache": "auto", "compile": True}, "--cache auto leaves out blocks"),
        ({"freeze": "1=1", "cache": "much"}, "--cache much is not"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    folder: Path, given: dict[str, Any], what: str
) -> None:
    with pytest.raises(AsyncPipeError, match=what):
        make_job(Settings(folder=str(folder / "mlp"), **given))


def test_blocks_freeze_also_where_auto_chooses_the_staleness_method(folder: Path) -> None:
    auto = {"schedule": "async-1f1b", "staleness": "auto", "freeze": "1=1"}
    job = make_job(Settings(folder=str(folder / "mlp"), **auto))
    assert job.config.staleness == "stash+partial-gradient"
    with pytest.raises(AsyncPipeError, match="--staleness stash.error-feedback evaluates other"):
        make_job(
            Settings(folder=str(folder / "mlp"), **auto | {"staleness": "stash+error-feedback"})
        )


def test_a_model_without_blocks_and_a_loop_without_epochs_are_refused(folder: Path) -> None:
    with pytest.raises(FreezeError, match="tiny_text has no list of repeated blocks"):
        make_job(Settings(folder=str(folder / "text"), freeze="1=1"))
    with pytest.raises(AsyncPipeError, match="only your loop knows its epochs"):
        joined_job(folder / "mlp", None, {"freeze": "1=1"})
    with pytest.raises(AsyncPipeError, match="has no length"):
        events_of(run_config(freeze="1=1", freeze_every="epoch"), StepBatch((1,)), UNKNOWN_LENGTH)


class Cut(nn.Module):
    """A stage with half a block in its own forward, and a whole one."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.Module()
        self.h.add_module("0", nn.Module())
        self.h.get_submodule("0").layer = nn.Linear(2, 2)
        self.h.add_module("1", nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.h.get_submodule("0").layer(x), 0.1, self.training)
        return self.h.get_submodule("1")(x)


class Quiet(Cut):
    """The same without a dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return self.h.get_submodule("1")(self.h.get_submodule("0").layer(x))


class Summed(Quiet):
    """The same for the sum of all samples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sum(0))


def test_a_stage_whose_one_mode_is_that_of_several_blocks_is_refused() -> None:
    names = (("h.0.layer.weight", "h.0.layer.bias"), ("h.1.weight", "h.1.bias"))
    blocks = Blocks(("h.0", "h.1"), names, ((), ()), ("head",), {})
    check_modes({0: Quiet()}, blocks, 2)
    with pytest.raises(FreezeError, match="stage 0 has the code of h.0 in its own forward"):
        check_modes({0: Cut()}, blocks, 2)


def test_outputs_of_a_block_without_a_module_or_without_samples_are_refused() -> None:
    names = (("h.0.layer.weight", "h.0.layer.bias"), ("h.1.weight", "h.1.bias"))
    blocks = Blocks(("h.0", "h.1"), names, ((), ()), ("head",), {})
    x, y = TensorSpec("x", "float32", ("batch", 2)), TensorSpec("y", "float32", ("batch", 2))
    stage = stage_by_hand(0, inputs=("x",), outputs=("y",), parameters=(*names[0], *names[1]))
    plan = plan_by_hand(
        "model", sizes={"batch": 3}, inputs=(x,), values=(y,), outputs="y", loss=None,
        stages=(stage,), state_keys=(*names[0], *names[1]),
    )  # fmt: skip
    with pytest.raises(FreezeError, match="h.0, but its code is written out in the forward of st"):
        places_of(plan, blocks, range(2), [Quiet])
    assert places_of(plan, blocks, range(1, 2), [Quiet]) == {1: Place(0, 0)}
    with pytest.raises(FreezeError, match="h.1 for several samples, but none of them has a dim"):
        places_of(plan, blocks, range(1, 2), [Summed])
