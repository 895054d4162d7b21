"""Measurements other than times: memory that lives for a while, dtypes, devices not here."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from asyncpipe.partitioner.capture import capture
from asyncpipe.partitioner.graph.build import build_graph
from asyncpipe.partitioner.planning.options import PartitionOptions
from asyncpipe.partitioner.profile.measure import (
    Operation,
    Repeats,
    clock_of,
    counting,
    estimate,
    measure,
)
from asyncpipe.partitioner.profile.profiler import profile, profile_analytic
from asyncpipe.partitioner.profile.roofline import (
    DeviceSpec,
    calibrated,
    device_spec,
    this_cpu,
    with_times,
)
from asyncpipe.partitioner.profiling import profile_capture
from asyncpipe.runtime.errors import PlanError
from asyncpipe.tests.support.models.inplace import build, example

CPU = torch.device("cpu")
QUICK = Repeats(enough_ms=0.1, most=2)
MIB = 2**20


def operation(call: Any, *shapes: tuple[int, ...], module: nn.Module | None = None) -> Operation:
    tensors = tuple(torch.empty(shape, device="meta", requires_grad=True) for shape in shapes)

    def again(own: nn.Module | None, made: Any) -> Any:
        return call(*made) if own is None else call(own, *made)

    return Operation(again, module, tensors, (False,) * len(shapes))


# --- memory that lives for a while ---------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bytes_count_from_their_making_until_they_are_freed(device: str) -> None:
    given = torch.zeros(256, 1024, device=device)
    with counting(torch.device(device), [given]) as counted:
        one = given + 1
        given.add_(1)
        view = one.view(-1)[3:]
        assert counted.live == counted.peak == MIB
        two = view * 2
        assert counted.live == 2 * MIB - 12
        del one, view
        assert counted.live == MIB - 12 and counted.peak == 2 * MIB - 12
        counted.reset()
        assert counted.peak == MIB - 12
        del two
    assert counted.live == 0


def test_what_autograd_keeps_is_alive_until_backward() -> None:
    x = torch.zeros(1024, 256, requires_grad=True)
    with counting(CPU, [x]) as counted:
        y = x.exp().sum()
        assert counted.live == MIB + 4
        y.backward()
        assert counted.live == MIB + 4  # the gradient and the sum


def test_an_operation_tells_what_it_needs_beside_what_it_keeps() -> None:
    # Softmax keeps its result; backward has that result's gradient and the argument's.
    softmax = operation(lambda x: F.softmax(x, -1), (256, 1024))
    assert measure(softmax, CPU, QUICK).transient_bytes == 2 * MIB
    # A tower of three: the middle is gone after forward unless backward needs it.
    tower = operation(lambda x: ((x + 1) - 2) * 3, (256, 1024))
    found = measure(tower, CPU, QUICK)
    assert found.internal_bytes == 0 and found.transient_bytes >= MIB
    assert estimate(tower).transient_bytes == found.transient_bytes


def test_the_fresh_gradient_of_a_weight_is_transient() -> None:
    layer = nn.Linear(512, 1024, bias=False, device="meta")
    call = operation(lambda own, x: own(x), (2, 512), module=layer)
    assert 2 * MIB <= measure(call, CPU, QUICK).transient_bytes <= 2.1 * MIB


def test_the_graph_has_the_most_that_lives_in_one_operation_of_a_group() -> None:
    net = nn.Sequential(nn.Linear(64, 256), nn.Softmax(-1), nn.Linear(256, 4))
    captured = capture(net, {"input": torch.randn(32, 64)}, check=False)
    costs = profile_analytic(captured, captured.arguments.tensors)
    for _, data in build_graph(captured, costs).nodes(data=True):
        most = max(costs.nodes[name].transient_bytes for name in data["names"])
        assert data["transient_bytes"] == most > 0


def test_a_model_that_does_not_fit_is_measured_a_piece_at_a_time() -> None:
    """1.6 GB of parameters on meta, of which one layer's at a time are real."""
    script = """
import resource, torch
from torch import nn
from asyncpipe.partitioner.capture import capture
from asyncpipe.partitioner.profile.measure import Repeats
from asyncpipe.partitioner.profile.profiler import profile
with torch.device("meta"):
    net = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(96)))
captured = capture(net, {"input": torch.randn(2, 2048)}, check=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = profile(captured, captured.arguments.tensors, threads=1, repeats=Repeats(0.1, 1))
assert found.unmeasured == () and found.forward_ms > 0
print(sum(p.numel() * 4 for p in net.parameters()) // 2**20)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 2**10)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    whole_mib, peak_mib = map(int, done.stdout.split())
    assert whole_mib > 1500 and peak_mib < 200


# --- clocks --------------------------------------------------------------------------------


class Event:
    """A CUDA event of a device whose clock advances by 5 ms at each record."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at: float | None = None
        self.waited = False

    def record(self, stream: Any) -> None:
        assert stream == "the stream"
        Event.now += 5.0
        self.at = Event.now

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: "Event") -> float:
        assert self.at is not None and end.at is not None and end.waited
        return end.at - self.at


def test_a_cuda_device_is_timed_by_events_in_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    clock = clock_of(torch.device("cuda"))
    first, second, third = clock.mark(), clock.mark(), clock.mark()
    assert clock.ms(first, second) == 5.0 and clock.ms(first, third) == 10.0


def test_peaks_on_a_cuda_device_are_its_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"memory_allocated": 100, "max_memory_allocated": 130}
    resets = []
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    with counting(torch.device("cuda"), []) as counted:
        assert (counted.live, counted.peak) == (0, 30)
        counted.reset()
    assert len(resets) == 2


def test_a_cpu_of_one_thread_is_timed_by_what_this_process_computes() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        clock = clock_of(CPU)
        start = clock.mark()
        subprocess.run([sys.executable, "-c", "import time; time.sleep(0.3)"], check=True)
        assert clock.ms(start, clock.mark()) < 200
    finally:
        torch.set_num_threads(threads)


# --- dtypes --------------------------------------------------------------------------------


def small() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)), {
        "input": torch.randn(16, 64)
    }


@pytest.mark.parametrize("on_meta", [False, True])
def test_under_bfloat16_activations_are_saved_in_half_the_bytes(on_meta: bool) -> None:
    net, inputs = small()
    captured = capture(net.to("meta") if on_meta else net, inputs, check=False)
    saved = {}
    for dtype in ("float32", "bfloat16"):
        found = profile_analytic(captured, inputs, dtype=dtype)
        (relu,) = (node.name for node in captured.graph.nodes if str(node.target) == "1")
        saved[dtype] = found.nodes[relu].saved[relu]
        assert found.dtype == found.facts["dtype"] == dtype
        assert found.flops == 2 * 16 * (64 * 128 + 128 * 8)
    assert saved == {"float32": 16 * 128 * 4, "bfloat16": 16 * 128 * 2}
    assert all(parameter.is_meta == on_meta for parameter in net.parameters())


def test_a_model_that_cannot_run_under_bfloat16_is_refused_with_its_line() -> None:
    captured = capture(build("Products"), example(), check=False)
    with pytest.raises(PlanError, match=r"in bfloat16 the model raises at inplace\.py:[0-9]+: .*"):
        profile_analytic(captured, example(), dtype="bfloat16")


def test_what_is_measured_under_bfloat16_saves_what_is_predicted() -> None:
    net, inputs = small()
    captured = capture(net, inputs, check=False)
    found = profile(captured, inputs, threads=1, repeats=QUICK, dtype="bfloat16")
    predicted = profile_analytic(captured, inputs, dtype="bfloat16")
    assert {name: cost.saved for name, cost in found.nodes.items()} == {
        name: cost.saved for name, cost in predicted.nodes.items()
    }
    assert found.unmeasured == () and "bfloat16" in found.summary
    assert net[0].weight.dtype == torch.float32


# --- devices that are not here ---------------------------------------------------------------


def test_a_faster_device_is_predicted_to_be_faster() -> None:
    net = nn.Linear(4096, 4096, device="meta")
    cost = estimate(operation(lambda own, x: own(x), (4096, 4096), module=net))
    ms = [
        with_times(cost, device_spec(name), dtype).forward_ms
        for name, dtype in [
            ("cpu-core", "float32"),
            ("rtx2080ti", "float32"),
            ("a100-80g", "float32"),
            ("a100-80g", "bfloat16"),
            ("h100", "bfloat16"),
        ]
    ]
    assert ms == sorted(ms, reverse=True) and ms[0] > 100 * ms[-1]


def test_a_prediction_is_arithmetic_or_traffic_and_a_call() -> None:
    spec = DeviceSpec("round", {"float32": 2e12}, 2e9, 2**30, 0.5, 0.5, 0.5)
    product = estimate(operation(torch.matmul, (1000, 1000), (1000, 1000)))
    assert with_times(product, spec, "float32").forward_ms == pytest.approx(12.0 + 0.5)
    heavy = DeviceSpec("round", {"float32": 2e9}, 2e9, 2**30, 0.5, 0.5, 0.5)
    assert with_times(product, heavy, "float32").forward_ms == pytest.approx(2000.0 + 0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prediction_counts_the_products_of_attention(dtype: str) -> None:
    heads = [(2, 4, 64, 16)] * 3
    cost = estimate(operation(F.scaled_dot_product_attention, *heads), dtype)
    product = 2 * 2 * 4 * 64 * 64 * 16
    assert (cost.forward_flops, cost.backward_flops) in [
        (2 * product, 5 * product),  # the fused kernel computes the scores again
        (2 * product, 4 * product),
    ]


def test_a_calibrated_prediction_has_the_magnitude_of_what_is_measured() -> None:
    """Within a factor of ten: tests share their cores with others."""
    spec = calibrated(this_cpu(), CPU, "float32", threads=1)
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(64 * 16 * 16, 256),
        nn.LayerNorm(256),
        nn.Linear(256, 4096),
    )
    inputs = {"input": torch.randn(32, 3, 16, 16)}
    captured = capture(net, inputs, check=False)
    found = profile(captured, inputs, threads=1)
    predicted = profile_analytic(captured, inputs, spec)
    ratio = (predicted.forward_ms + predicted.backward_ms) / (found.forward_ms + found.backward_ms)
    assert 0.1 < ratio < 10.0
    assert spec.memory_bytes > 2**28 and 0.0 < spec.call_ms < 1.0


def test_a_profile_is_measured_or_predicted_as_the_device_says() -> None:
    net, inputs = small()
    captured = capture(net, inputs, check=False)
    kinds = {
        PartitionOptions(no_cache=True): ("measured", "cpu"),
        PartitionOptions(profile="analytic"): ("analytic", "one cpu core"),
        PartitionOptions(device="h100"): ("analytic", "NVIDIA H100"),
        PartitionOptions(profile="analytic", calibrate=True): ("analytic", this_cpu().name),
        PartitionOptions(profile="analytic", device="cpu"): ("analytic", this_cpu().name),
    }
    for options, wanted in kinds.items():
        found = profile_capture(captured, options, stages=2)
        assert (found.kind, found.device) == wanted
    on_meta = capture(small()[0].to("meta"), inputs, check=False)
    assert profile_capture(on_meta, PartitionOptions(), stages=2).kind == "analytic"


def test_what_is_measured_keeps_the_memory_that_it_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    place = "asyncpipe.partitioner.profiling.keep_freed_memory"
    monkeypatch.setattr(place, lambda: asked.append("keep"))
    net, inputs = small()
    captured = capture(net, inputs, check=False)
    profile_capture(captured, PartitionOptions(profile="analytic"), stages=2)
    assert asked == []
    profile_capture(captured, PartitionOptions(no_cache=True), stages=2)
    assert asked == ["keep"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"profile": "measured", "device": "h100"}, "h100 is not here to be measured"),
        ({"calibrate": True}, "--calibrate fits a predicted profile"),
        ({"profile": "analytic", "device": "cuda"}, "needs the name of a device"),
        ({"device": "cuda"}, "finds no CUDA device"),
        ({"device": "h100", "calibrate": True}, "--calibrate measures NVIDIA H100"),
        ({"device": "h1000"}, "no device is called h1000"),
        ({"device": "v100-16g", "dtype": "bfloat16"}, "cannot compute in bfloat16"),
        ({"dtype": "float8"}, "--dtype float8 is not one of"),
    ],
)
def test_options_that_do_not_fit_are_told_in_one_sentence(
    options: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    net, inputs = small()
    captured = capture(net, inputs, check=False)
    with pytest.raises(PlanError, match=told) as caught:
        profile_capture(captured, PartitionOptions(**options), stages=2)
    assert caught.value.cure and "\n" not in caught.value.what


# --- what cannot run without values ---------------------------------------------------------


def test_only_a_call_that_needs_values_has_a_result_made_up() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x > 0].sum() + x.mean()

    inputs = {"x": torch.randn(4, 4)}
    captured = capture(Masked(), inputs, check=False)
    assert profile_analytic(captured, inputs).nodes

    (mean,) = (node for node in captured.graph.nodes if node.target == "mean")
    mean.args = (*mean.args, "no dimension")
    with pytest.raises(TypeError):
        profile_analytic(captured, inputs)
