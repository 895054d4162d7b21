"""The weights of a generated folder are the original's, and pass between plans and back."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.runtime.errors import DataError
from asyncpipe.runtime.executor.loading import Pipe, load_stage
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.tests.support.models.generated import CASES, cut
from asyncpipe.tests.support.processes.quick_python import bin_folder


class Counting(nn.Module):
    """Buffers of both kinds, of several dtypes, one of them counted up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 1.5, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("offset", torch.arange(8.0), persistent=False)
        self.register_buffer("never_read", torch.ones(3, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.linear(x) * self.scale.float() + self.offset)


class Nested(nn.Module):
    """Modules in modules, a weight with two names, and two tied layers that forward never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict(
            {"deep": nn.Sequential(nn.Linear(8, 8), nn.Sequential(Counting(), nn.BatchNorm1d(8)))}
        )
        self.rest = nn.ModuleList([Counting(), Counting()])
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.inner["deep"][0].weight
        self.spare, self.spare_too = nn.Linear(2, 2), nn.Linear(2, 2)
        self.spare_too.weight = self.spare.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner["deep"](x)
        for part in self.rest:
            x = x + part(x)
        return self.head(x)


def nested() -> Nested:
    torch.manual_seed(0)
    return Nested()


def pipe_of(model: nn.Module, stages: int, folder: Path) -> Pipe:
    inputs = {"x": torch.randn(4, 8)}
    asyncpipe.partition(model, inputs, stages=stages, output=folder, profile="analytic")
    return asyncpipe.load(folder)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_stages_hold_the_original_s_tensors_and_no_others(stages: int, tmp_path: Path) -> None:
    model = nested()
    pipe = pipe_of(model, stages, tmp_path / "made")
    expected, actual = model.state_dict(), pipe.state_dict()
    assert list(actual) == list(expected)
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype, key
        assert torch.equal(actual[key], value), key
    held = [key for stage in pipe.stages for key in stage.state_dict()]
    tied = {name for shared in pipe.plan.shared for name in shared.names}
    assert set(held) | set(pipe.plan.unused) | tied == set(expected)
    assert len([key for key in held if key not in tied]) == len(set(held) - tied)
    assert {"spare.weight", "rest.0.never_read"} <= set(pipe.plan.unused)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_buffer_is_saved_if_it_is_in_the_original(stages: int, tmp_path: Path) -> None:
    pipe = pipe_of(nested(), stages, tmp_path / "made")
    buffers = {name for stage in pipe.stages for name, _ in stage.named_buffers()}
    saved = {key for stage in pipe.stages for key in stage.state_dict()}
    assert not any(name.endswith("offset") for name in saved)
    assert {"rest.1.calls", "rest.1.scale"} <= buffers & saved


@pytest.mark.parametrize("stages", [2, 4])
def test_a_weight_of_two_names_is_one_again(stages: int, tmp_path: Path) -> None:
    pipe = pipe_of(nested(), stages, tmp_path / "made")
    state = pipe.state_dict()
    assert state["head.weight"].data_ptr() == state["inner.deep.0.weight"].data_ptr()


def test_weights_pass_to_the_original_and_back(tmp_path: Path) -> None:
    pipe = pipe_of(nested(), 3, tmp_path / "made").train()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        pipe(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    model = Nested()
    model.load_state_dict(pipe.state_dict())
    x = torch.randn(5, 8)
    assert torch.equal(model.eval()(x), pipe.eval()(x))
    assert int(model.rest[0].calls) == 4  # three steps, and the line above
    other = pipe_of(nested(), 2, tmp_path / "other")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval()(x), pipe(x))


def test_a_state_dict_of_another_model_is_refused(tmp_path: Path) -> None:
    pipe = pipe_of(nested(), 2, tmp_path / "made")
    state = pipe.state_dict()
    with pytest.raises(DataError, match=r"has 1 tensors that nested lacks, the first is more\."):
        pipe.load_state_dict(state | {"more": torch.zeros(1)})
    with pytest.raises(DataError, match=r"rest.0.scale is \(3,\) in the state_dict, \(8,\) in"):
        pipe.load_state_dict(state | {"rest.0.scale": torch.zeros(3)})


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_weights_trained_in_two_stages_go_on_in_four(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    two = asyncpipe.load(cut(case, 2, tmp_path / "2p")).train()
    optimizer = torch.optim.SGD(two.parameters(), lr=0.1)
    for i in range(3):
        optimizer.zero_grad()
        two(**case.micro_batch(i))["loss"].backward()
        optimizer.step()
    two.save_weights(tmp_path / "saved")
    folder = cut(case, 4, tmp_path / "4p")
    four = asyncpipe.load(folder, weights=tmp_path / "saved").train()
    for key, value in two.state_dict().items():
        assert torch.equal(four.state_dict()[key], value), key
    losses = []
    for pipe in (two, four):
        for parameter in pipe.parameters():
            parameter.grad = None
        torch.manual_seed(1)
        loss = pipe(**case.micro_batch(3))["loss"]
        loss.backward()
        losses.append(loss)
    assert torch.equal(*losses)
    gradients = [dict(pipe.named_parameters()) for pipe in (two, four)]
    assert gradients[0].keys() == gradients[1].keys()
    for key, parameter in gradients[0].items():
        torch.testing.assert_close(gradients[1][key].grad, parameter.grad, rtol=1e-4, atol=1e-7)
    # Each stage alone, as its rank loads it, reads its own names from what the other plan wrote.
    for spec in read_plan(folder).stages:
        stage = load_stage(folder, read_plan(folder), spec.index, weights=tmp_path / "saved")
        for key, value in stage.state_dict().items():
            assert torch.equal(value, two.state_dict()[key]), key


def command(folder: Path, name: str, *arguments: str) -> str:
    result = subprocess.run(
        [bin_folder() / f"asyncpipe-{name}", *arguments],
        cwd=folder,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_run_of_two_stages_is_continued_by_four_from_the_command_line(tmp_path: Path) -> None:
    model = [
        "--model",
        "t5-small",
        "--seq",
        "8",
        "--micro-batch-size",
        "2",
        "--profile",
        "analytic",
    ]
    sizes = {
        "num_layers": 1, "num_decoder_layers": 1, "d_model": 16, "num_heads": 2, "d_kv": 8,
        "d_ff": 24, "vocab_size": 300, "dropout_rate": 0,
    }  # fmt: skip
    model += [word for key, value in sizes.items() for word in ("--model-arg", f"{key}={value}")]
    for stages in ("2", "4"):
        command(tmp_path, "partition", *model, "--stages", stages, "--output", f"{stages}p")
    train = ["--optimizer", "sgd", "--lr", "0.1", "--momentum", "0", "--micro-batches", "4"]
    train += ["--data", "python-docs", "--json", "--log-every", "1", "--decay", "none"]
    train += ["--warmup", "0", "--clip", "0"]

    def run(folder: str, steps: int, output: str, *more: str) -> list[float]:
        told = command(
            tmp_path, "train", folder, *train, "--steps", str(steps), "--output", output, *more
        )
        events = [json.loads(line) for line in told.splitlines()]
        return [event["loss"] for event in events if event.get("event") == "step"]

    first = run("2p", 3, "first")
    stayed = run("2p", 3, "stayed", "--init-from", "first")
    moved = run("4p", 3, "moved", "--init-from", "first")
    assert moved[0] == stayed[0] != first[0]
    assert moved == pytest.approx(stayed, rel=1e-5)
    back = run("2p", 1, "back", "--init-from", "moved/weights")
    assert back[0] == run("4p", 1, "again", "--init-from", "moved")[0]
