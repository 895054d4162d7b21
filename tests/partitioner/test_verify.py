"""The check at the end of a partition: it passes on what is right, and sees what is not."""

import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import MixtralConfig, MixtralForCausalLM

import asyncpipe
from asyncpipe.partitioner.capture.check import Differs, compare
from asyncpipe.partitioner.output import snapshot, write_folder
from asyncpipe.partitioner.profile.cache import threads_set
from asyncpipe.partitioner.profile.profiler import Profile
from asyncpipe.partitioner.verdict import Verified, rounding_or_defect
from asyncpipe.partitioner.verify import verify
from asyncpipe.runtime.errors import PlanError
from asyncpipe.runtime.executor.loading import SkipRandomInit
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.tests.support.models.generated import CASES, cut


@pytest.mark.parametrize("name", CASES)
def test_what_was_generated_equals_the_original(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = cut(case, 2, tmp_path / "2p")
    verified = verify(case.build(), read_plan(folder), folder, case.example_inputs)
    assert verified.gradients == sum(1 for _ in case.build().parameters())
    assert verified.largest_difference < 1e-5


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("return self.head(", "return 1.001 * self.head(", "the output output"),
        ("= block(hidden)", "= block(hidden.detach())", "gradient of"),
        ("nn.Linear(12, 4)", "nn.Linear(12, 4, bias=False)", "differ in head.bias"),
        ("nn.Linear(12, 4)", "nn.Linear(12, 5)", "head.weight is"),
    ],
)
def test_an_edit_that_changes_a_number_or_a_name_is_seen(
    before: str, after: str, message: str, tmp_path: Path
) -> None:
    case = CASES["mlp"]
    folder = cut(case, 2, tmp_path / "2p")
    stage = folder / "stage_1.py"
    assert before in stage.read_text()
    stage.write_text(stage.read_text().replace(before, after))
    with pytest.raises(PlanError, match=message):
        verify(case.build(), read_plan(folder), folder, case.example_inputs)


@pytest.mark.parametrize(("flops", "threads"), [(8.4e9, 1), (3.2e10, 1), (2e11, 3)])
def test_verified_operations_of_usual_size_wait_for_no_other_thread(
    flops: float, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Watched(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not isinstance(x, FakeTensor):
                seen.append(torch.get_num_threads())
            return super().forward(x)

    monkeypatch.setattr(Profile, "flops", property(lambda self: int(flops)))
    model, x = Watched(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(4, 4)
    with threads_set(3):
        asyncpipe.partition(model, {"x": x}, stages=2, output=tmp_path / "cut", profile="analytic")
        assert torch.get_num_threads() == 3
    assert seen[-1] == threads


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(4, 4, dtype=torch.complex64) for _ in range(2))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(z)))


@pytest.mark.parametrize(
    ("edit", "is_rounding"),
    [("({0} + 1e4) - 1e4", True), ("torch.complex({0}.real, {0}.imag.detach())", False)],
)
def test_both_parts_of_complex_numbers_are_compared(
    edit: str, is_rounding: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, z = Turned(), {"z": torch.randn(3, 4, dtype=torch.complex64)}
    asyncpipe.partition(model, z, stages=2, output=tmp_path / "2p", profile="analytic")
    plan, stage = read_plan(tmp_path / "2p"), tmp_path / "2p" / "stage_1.py"
    assert verify(model, plan, tmp_path / "2p", z).rounding == 0
    written = stage.read_text().replace("torch.tanh(first)", edit.format("torch.tanh(first)"))
    stage.write_text(written)
    if is_rounding:
        verified = verify(model, plan, tmp_path / "2p", z)
        assert verified.rounding > 0 and verified.largest_difference < 1e-8
        return
    with pytest.raises(PlanError, match="gradient of first.weight"):
        verify(model, plan, tmp_path / "2p", z)


def test_a_difference_by_rounding_alone_is_decided_in_float64(tmp_path: Path) -> None:
    case = CASES["mlp"]
    folder = cut(case, 2, tmp_path / "2p")
    stage = folder / "stage_1.py"
    rounded = re.sub(r"return (self.head.*)  #", r"return (\1 + 1e4) - 1e4  #", stage.read_text())
    assert rounded != stage.read_text()
    stage.write_text(rounded)
    verified = verify(model := case.build(), read_plan(folder), folder, case.example_inputs)
    assert 1e-4 < verified.rounding < 1e-2
    assert verified.largest_difference < 1e-8
    assert "in float32 by rounding" in verified.summary
    assert all(each.dtype == torch.float32 for each in model.parameters())


def test_a_gradient_that_is_almost_zero_may_differ_by_much_in_float32() -> None:
    def differs(kind: str, difference: float) -> Verified:
        raise Differs(kind, "w", difference, 1e-4)

    equal = Verified({}, {}, 1, 1, 1e-12)
    of_gradient = partial(differs, "gradient of", 0.3)
    assert rounding_or_defect(nn.Linear(1, 1), of_gradient, lambda: equal).rounding == 0.3
    with pytest.raises(Differs, match=r"gradient of w .* by 3\.0e-01"):
        rounding_or_defect(nn.Linear(1, 1), of_gradient, partial(differs, "gradient of", 1e-3))
    with pytest.raises(Differs, match=r"output w .* by 3\.0e-01"):
        rounding_or_defect(nn.Linear(1, 1), partial(differs, "output", 0.3), lambda: equal)


class _Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.second(self.first(x).relu()).float()


def test_a_lost_autocast_is_no_rounding_although_float64_ignores_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    example = {"x": torch.randn(4, 6)}
    plan = asyncpipe.partition(
        _Autocast(), example, stages=2, output=tmp_path / "2p", profile="analytic"
    )
    verify(_Autocast(), plan, tmp_path / "2p", example)
    for stage in (tmp_path / "2p").glob("stage_*.py"):
        lost = re.sub(r"with torch.autocast\(.*\):", "if True:", stage.read_text())
        assert lost != stage.read_text()
        stage.write_text(lost)
    with pytest.raises(PlanError, match="generated stages differs"):
        verify(_Autocast(), plan, tmp_path / "2p", example)


class Reseeded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.seed()
        return self.linear(nn.functional.dropout(x, 0.5))


def test_a_model_that_differs_from_itself_is_refused_by_its_cause(tmp_path: Path) -> None:
    model = nn.Sequential(Reseeded(), nn.Linear(6, 2))
    example = {"input": torch.randn(4, 6)}
    with pytest.raises(PlanError, match="Sequential itself gives other outputs when it runs again"):
        asyncpipe.partition(
            model, example, stages=2, output=tmp_path / "2p", profile="analytic",
            leaves=["Reseeded"],
        )  # fmt: skip


def test_a_mixture_of_experts_is_cut(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    torch.manual_seed(0)
    plan = asyncpipe.partition(
        MixtralForCausalLM(config),
        CASES["gpt2"].example_inputs,
        stages=2,
        output=tmp_path / "2p",
        profile="analytic",
    )
    assert plan.profile["unmeasured"] == []
    assert plan.profile["flops"] > 0


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    case = CASES["resnet"]
    model = case.build().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    folder = cut(case, 2, tmp_path / "2p")
    torch.set_rng_state(random)
    verify(model, read_plan(folder), folder, case.example_inputs)
    assert not model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_check_runs_at_other_sizes_than_the_capture(tmp_path: Path) -> None:
    case = CASES["gpt2"]
    plan = read_plan(folder := cut(case, 2, tmp_path / "2p"))
    sizes = verify(case.build(), plan, folder, case.example_inputs).sizes
    assert sizes.keys() == plan.sizes.keys()
    assert all(size != plan.sizes[name] and size > 1 for name, size in sizes.items())


def test_a_fault_at_the_captured_sizes_alone_is_seen_at_those_sizes(tmp_path: Path) -> None:
    case = CASES["mlp"]
    folder = cut(case, 2, tmp_path / "2p")
    plan = read_plan(folder)
    stage = folder / "stage_1.py"
    head = "return self.head("
    assert head in stage.read_text()
    wrong_there = f"return (1.0 + (hidden.shape[0] == {plan.sizes['batch']})) * self.head("
    stage.write_text(stage.read_text().replace(head, wrong_there))
    verify(case.build(), plan, folder, case.example_inputs)
    with pytest.raises(PlanError, match="the output output"):
        verify(case.build(), plan, folder, case.example_inputs, sizes=plan.sizes)


@pytest.mark.parametrize(("wrong_by", "seen"), [(1e-9, False), (1e-3, True)])
def test_rounding_of_a_gradient_that_is_zero_is_no_fault(wrong_by: float, seen: bool) -> None:
    gradients = {"weight": torch.ones(2), "bias": torch.tensor([1e-10, 0.0])}
    others = gradients | {"bias": gradients["bias"] + wrong_by}
    with pytest.raises(PlanError) if seen else nullcontext():
        compare(gradients, others, 1e-4, "gradient of")
    with pytest.raises(PlanError):
        compare(gradients, others, 1e-4, "output")


@pytest.mark.parametrize(("wrong_by", "seen"), [(5e-7, False), (1e-5, True)])
def test_a_bias_has_the_rounding_of_its_weight(wrong_by: float, seen: bool) -> None:
    """As in front of a batch norm, where another module has far larger gradients."""
    gradients = {"conv.weight": torch.full((2,), 1e-2), "conv.bias": torch.zeros(2)}
    gradients["head.weight"] = torch.ones(2)
    with pytest.raises(PlanError) if seen else nullcontext():
        compare(
            gradients, gradients | {"conv.bias": torch.full((2,), wrong_by)}, 1e-4, "gradient of"
        )


def refuse(_: Path) -> None:
    raise PlanError("no")


def write_slowly(weights: Path) -> None:
    time.sleep(0.1)
    weights.mkdir()


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize(
    ("write_weights", "check"),
    [(None, refuse), (write_slowly, refuse), (refuse, lambda _: None)],
    ids=["check", "check while weights are written", "weights"],
)
def test_what_fails_leaves_nothing_behind(
    write_weights: Callable[[Path], None] | None,
    check: Callable[[Path], None],
    existed: bool,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "above" / "made"
    if existed:
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text("old")
    with pytest.raises(PlanError):
        write_folder(folder, {"plan.json": "new"}, write_weights, check)
    left = [path.name for path in tmp_path.rglob("*")]
    assert left == (["above", "made", "plan.json"] if existed else [])
    if existed:
        assert (folder / "plan.json").read_text() == "old"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
def test_a_value_that_is_no_number_or_far_off_is_found(wrong: float) -> None:
    right = torch.tensor([0.5, -0.25, 0.125])
    other = right.clone()
    other[1] = wrong
    with pytest.raises(PlanError, match="the output y of the generated stages differs"):
        compare({"y": right}, {"y": other}, 1e-4, "output")
    assert compare({"y": right}, {"y": right * (1 + 1e-6)}, 1e-4, "output") < 1e-5
    assert compare({"y": right * 1j}, {"y": right * 1j}, 1e-4, "output") == 0


def test_stages_are_built_without_drawing_random_numbers() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with SkipRandomInit():
        torch.nn.Linear(3, 4)
        torch.nn.Conv2d(3, 4, 3)
        torch.nn.Embedding(3, 4)
        torch.nn.MultiheadAttention(8, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_snapshot_has_the_buffers_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = snapshot(model)
    model(torch.randn(4, 3))
    assert int(before["1.num_batches_tracked"]) == 0 and int(model[1].num_batches_tracked) == 1
    assert before["0.weight"].data_ptr() == model[0].weight.data_ptr()


@pytest.mark.parametrize("other", [2.0, float("nan"), -float("inf")])
def test_infinite_values_are_equal_to_themselves_and_hide_nothing(other: float) -> None:
    masked = torch.tensor([1.0, -float("inf"), float("nan")])
    assert compare({"logits": masked}, {"logits": masked.clone()}, 1e-4, "output") == 0
    for place in (0, 1):
        changed = masked.clone()
        changed[place] = other if place == 0 else 5.0
        with pytest.raises(PlanError, match="logits"):
            compare({"logits": masked}, {"logits": changed}, 1e-4, "output")
