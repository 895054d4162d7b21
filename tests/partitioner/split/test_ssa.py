"""Copies cut memory that is changed in place: the code that is written, and its exactness."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import asyncpipe
from asyncpipe.partitioner.capture import Capture, capture
from asyncpipe.partitioner.codegen import generate
from asyncpipe.partitioner.split import ssa
from asyncpipe.partitioner.split.split import split
from asyncpipe.partitioner.split.ssa import separated
from asyncpipe.runtime.errors import CaptureError, PlanError
from asyncpipe.tests.support.models.generated import CASES
from asyncpipe.tests.support.models.inplace import build, example
from asyncpipe.tests.support.models.random_programs import Operation, Program, programs
from asyncpipe.tests.support.oracles.stage_chain import (
    HEADER,
    Chain,
    computed,
    cut,
    stages_cut_before,
)
from asyncpipe.tests.support.oracles.stage_equality import assert_same


def stages(name: str, *places: int) -> list[str]:
    """The forwards of an awkward model's stages."""
    captured = capture(build(name), example(), check=False)
    stage_of = stages_cut_before(captured, places)
    assert stage_of is not None
    files = generate(*cut(captured, stage_of), HEADER)
    texts = [files[f"stage_{number}.py"] for number in range(len(places) + 1)]
    return [text[text.rindex("    def forward") :] for text in texts]


# What is written


def test_a_stage_changes_a_copy_of_what_it_receives() -> None:
    first, second = stages("Residuals", 3)
    assert "clone" not in first
    assert "        out = out.clone()  # f32[batch, 8]\n        out += a" in second


def test_a_loop_over_modules_that_change_their_argument_stays_one() -> None:
    _, second = stages("Preactivation", 1)
    assert "h = h.clone()" in second
    assert "        for layer in self.layers:\n            h = layer(h)" in second


def test_views_are_taken_anew_and_not_left_where_nobody_reads_them() -> None:
    first, second = stages("ViewOfViews", 6)
    assert "diagonal" not in first and "return y\n" in first
    for line in ("t = y.transpose(1, 2)", "part = t[:, 1:3]", "diagonal.mul_(2)"):
        assert line in second


def test_only_the_view_that_is_wanted_is_sent() -> None:
    first, second = stages("OfOnlyAPart", 3)
    assert "return large[:, 3:11]" in first
    assert "part = part.clone()" in second


def test_state_stays_where_it_is_changed_and_its_contents_are_sent() -> None:
    first, second = stages("Running", 5)
    assert "mean = self.mean.clone()" in first
    assert "self.mean" not in second


def test_a_view_of_an_input_is_taken_anew_where_the_input_is_changed() -> None:
    first, second, third = stages("InputAsSkip", 2, 3)
    assert "first" not in first
    assert "x[:, 0] = 5" in second and "first = x[:, :2]" in second
    assert "x[:" not in third and "first.mean()" in third


def test_what_no_cut_parts_is_as_its_author_wrote_it() -> None:
    captured = capture(build("Operators"), example(), check=False)
    nodes = computed(captured)
    for place in (0, 5):
        stage_of = {node: int(number >= place) for number, node in enumerate(nodes)}
        stage_of = stage_of if place else dict.fromkeys(nodes, 0)
        assert separated(captured, stage_of)[0] is captured
    (only,) = stages("Operators")
    assert "y += 1" in only and "y /= 3" in only and "clone" not in only


def test_memory_that_two_stages_would_change_is_refused() -> None:
    captured = capture(build("Operators"), example(), check=False)
    stage_of = stages_cut_before(captured, [3])
    assert stage_of is not None
    with pytest.raises(PlanError, match="shares memory with y_4, which changes it in stage 1"):
        split(captured, stage_of)


def test_a_cut_where_no_copy_would_do_is_refused() -> None:
    captured = capture(build("NormTwice"), example(), check=False)
    stage_of = {node: int(place > 0) for place, node in enumerate(computed(captured))}
    with pytest.raises(PlanError, match="cuts memory that is changed in place"):
        separated(captured, stage_of)


# Whole models


def test_a_resnet_is_exact_at_every_cut(tmp_path: Path) -> None:
    case = CASES["resnet"]
    captured = capture(case.build(), case.example_inputs, check=False)
    for place in range(1, len(computed(captured))):
        stage_of = stages_cut_before(captured, [place])
        assert stage_of is not None
        chain = Chain.of(captured, stage_of, tmp_path / f"cut_{place}")
        assert_same(chain, case.micro_batch(1), training=True, by_value=True, tolerance=1e-5)


@pytest.mark.parametrize("name", ["Residuals", "Memory", "InputAsSkip", "TwoFamilies", "Noise"])
def test_a_model_that_changes_tensors_is_partitioned(name: str, tmp_path: Path) -> None:
    plan = asyncpipe.partition(
        build(name), example(), stages=3, output=tmp_path / "3p", profile="analytic"
    )
    assert len(plan.stages) == 3


# Any program


def captured_program(operations: tuple[Operation, ...]) -> Capture:
    """The program's capture; rejects examples that eager autograd forbids."""
    try:
        outputs = [out for out in Program(operations)(data()) if out.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
    except RuntimeError:
        reject()
    try:
        return capture(Program(operations), {"x": data()})
    except CaptureError as error:
        # The two modes cannot always be one graph.
        assert "--mode train" in error.cure
        reject()


def data() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(7))


def check_program(operations: tuple[Operation, ...], cuts: list[float]) -> None:
    captured = captured_program(operations)
    nodes = computed(captured)
    places = sorted({1 + int(share * (len(nodes) - 1)) for share in cuts} - {len(nodes)})
    stage_of = stages_cut_before(captured, places)
    if stage_of is None:
        event("refused")
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            chain = Chain.of(captured, stage_of, Path(folder) / "stages")
        except PlanError as error:
            assert "would hand nothing on" in str(error) or "would compute nothing" in str(error)
            return
        event(f"cut, {'copies' if chain.capture is not captured else 'as it was'}")
        assert_same(chain, {"x": data()}, training=True, by_value=True)
        assert_same(chain, {"x": torch.cat([data(), data()[:1]])}, training=False)


ANY = settings(
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)
SHARES = st.lists(st.floats(0, 0.999), min_size=1, max_size=2)


@settings(ANY, max_examples=15)
@given(programs(), SHARES)
def test_any_program_is_exact_wherever_it_can_be_cut(
    operations: tuple[Operation, ...], cuts: list[float]
) -> None:
    check_program(operations, cuts)


@settings(ANY, max_examples=20)
@given(programs(14), SHARES)
def test_any_longer_program_is_exact_wherever_it_can_be_cut(
    operations: tuple[Operation, ...], cuts: list[float]
) -> None:
    check_program(operations, cuts)


# The oracle sees faults


def test_a_reader_that_is_not_renamed_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replace = ssa._Separation._replace

    def forgetful(self: ssa._Separation, reader: fx.Node, *rest: fx.Node) -> None:
        if reader.meta["mutates"]:
            replace(self, reader, *rest)

    monkeypatch.setattr(ssa._Separation, "_replace", forgetful)
    captured = capture(build("ViewThenMutate"), example(), check=False)
    stage_of = stages_cut_before(captured, [2])
    assert stage_of is not None
    chain = Chain.of(captured, stage_of, tmp_path / "stages")
    with pytest.raises(AssertionError):
        assert_same(chain, example(), training=False)
