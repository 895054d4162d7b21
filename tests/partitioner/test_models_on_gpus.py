"""Models whose weights lie on a GPU, as far as a machine without one can tell: fake tensors and
tensors on meta lie on another device than the CPU, and know it."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import asyncpipe
from asyncpipe.partitioner.capture import LocalDevice, capture
from asyncpipe.partitioner.capture.check import Differs, total_of
from asyncpipe.partitioner.capture.sizes import accepted, first_accepted
from asyncpipe.partitioner.codegen import generate
from asyncpipe.partitioner.codegen.canonical import _without_device
from asyncpipe.partitioner.profile.operation_costs import made_up
from asyncpipe.partitioner.stage_timing import adopt
from asyncpipe.partitioner.verdict import Verified, rounding_or_defect
from asyncpipe.runtime.errors import GpuStoppedError
from asyncpipe.tests.support.oracles.stage_chain import HEADER, cut, stages_at

META = torch.device("meta")


class Net(nn.Module):
    """A tied weight, a buffer of the model, one of no checkpoint, and one of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4), persistent=False)


def on_gpu(*shape: int) -> Tensor:
    with FakeTensorMode():
        return torch.empty(shape, device="cuda")


def stopping(given: dict[str, Tensor]) -> Tensor:
    raise torch.AcceleratorError("CUDA error: device-side assert triggered\nand advice")


def test_a_stage_computes_where_the_model_is_also_with_buffers_of_its_constructor() -> None:
    model, stage = Net().to("meta"), Net()
    stage.register_buffer("table", torch.arange(3))
    adopt(stage, model, {"constant": torch.ones(2)})
    assert all(buffer.device == META for buffer in stage.buffers())
    assert stage.first.weight is model.first.weight


def test_a_stage_elsewhere_has_copies_of_the_model_which_stays() -> None:
    model, stage = Net(), Net()
    adopt(stage, model, {}, META)
    tensors = [*stage.parameters(), *stage.buffers()]
    assert all(tensor.device == META for tensor in tensors)
    assert stage.first.weight is stage.last.weight
    assert all(not tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_a_model_without_a_loss_has_one_made_where_its_outputs_are() -> None:
    outputs = {name: torch.ones(2, 3, device="meta", requires_grad=True) for name in "ab"}
    assert total_of(outputs).requires_grad


def test_on_a_gpu_only_the_batch_is_tried_above_the_captured_size() -> None:
    dims = {"x": {0: "batch", 1: "sequence"}}
    tried: list[dict[str, int]] = []
    for sizes in ({"batch": 9, "sequence": 5}, {"batch": 3, "sequence": 7}):
        for x in (on_gpu(2, 6), torch.ones(2, 6)):
            with FakeTensorMode(allow_non_fake_inputs=True):
                taken = accepted(lambda given: given["x"], {"x": x}, dims, sizes)
            if taken is not None:
                tried.append(sizes | {"gpu": x.is_cuda})
    assert tried == [
        {"batch": 9, "sequence": 5, "gpu": True},
        {"batch": 9, "sequence": 5, "gpu": False},
        {"batch": 3, "sequence": 7, "gpu": False},
    ]


def test_a_model_that_stops_its_gpu_is_not_tried_again() -> None:
    inputs, dims = {"x": torch.ones(4, 2)}, {"x": {0: "batch"}}
    with pytest.raises(GpuStoppedError, match="at batch 3: CUDA error: device-side assert tri"):
        first_accepted(stopping, inputs, dims, {"batch": 4}, [{"batch": 3}, {"batch": 2}])


def test_whatever_stops_a_gpu_is_named_with_the_cure(monkeypatch: Any) -> None:
    def capture(*_: Any, **__: Any) -> None:
        stopping({})

    monkeypatch.setattr("asyncpipe.partitioner.compile.partition_source", capture)
    with pytest.raises(GpuStoppedError, match=r"CUDA error: .* triggered\.\n.*model\.cpu\(\)"):
        asyncpipe.partition(nn.Linear(2, 2), torch.ones(3, 2), stages=1)


@pytest.mark.parametrize(("device", "current"), [("cuda:1", 1), ("cpu", -1)])
def test_the_gpu_of_the_model_is_the_current_one(
    monkeypatch: pytest.MonkeyPatch, device: str, current: int
) -> None:
    chosen: list[int] = []

    def choose(index: int) -> Any:
        chosen.append(index)
        return nullcontext()

    monkeypatch.setattr("torch.cuda.device", choose)
    monkeypatch.setattr("asyncpipe.partitioner.compile.device_of", lambda _: torch.device(device))
    monkeypatch.setattr("asyncpipe.partitioner.compile.partition_source", lambda *_, **__: None)
    asyncpipe.partition(nn.Linear(2, 2), torch.ones(3, 2), stages=1)
    assert chosen == [current]


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_tensor_is_moved_in_a_stage_if_forward_moves_it(is_moved: bool) -> None:
    graph = fx.Graph()
    source = graph.placeholder("x")
    moved = graph.call_method("to", (source, LocalDevice()), {"dtype": torch.float16})
    source.meta["val"] = torch.empty(2) if is_moved else on_gpu(2)
    moved.meta["val"] = on_gpu(2)
    args, kwargs = _without_device(moved)
    assert args == ((source, LocalDevice()) if is_moved else (source,))
    assert kwargs == {"dtype": torch.float16}


def test_the_result_of_a_module_that_reads_values_is_made_up_where_it_was() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta |= {"val": on_gpu(2), "shape": (2,)}
    with FakeTensorMode():
        assert made_up(node, lambda shape: shape).is_cuda


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_attention_that_differs_on_a_gpu_is_compared_with_one_kernel(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr("asyncpipe.partitioner.verdict.device_of", lambda _: torch.device(device))

    def compared() -> Verified:
        if torch.backends.cuda.flash_sdp_enabled():
            raise Differs("output", "logits", 0.1, 1e-4)
        return Verified({}, {}, 1, 1, 0.0)

    if device == "cpu":
        with pytest.raises(Differs):
            rounding_or_defect(nn.Module(), compared, compared)
    else:
        assert rounding_or_defect(nn.Module(), compared, compared).gradients == 1
        assert torch.backends.cuda.flash_sdp_enabled()


class Positions(nn.Module):
    """Makes positions on another device and moves them to where its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device="meta").to(device=x.device, dtype=torch.int64)
        places: Tensor = self.table(positions)
        return places


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.places = nn.Linear(4, 4), Positions()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.places(x)


def test_a_stage_moves_what_forward_moves_to_the_device_of_its_weights() -> None:
    captured = capture(Placed(), {"x": torch.ones(2, 5, 4)}, batch_dim=None, check=False)
    text = "".join(generate(*cut(captured, stages_at(captured, (0.5,))), HEADER).values())
    assert "positions.to(device=self.table.weight.device, dtype=torch.int64)" in text
