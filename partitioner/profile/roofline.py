"""The roofline model: one operation and a described device -> its predicted times.

The time of a call is that of its arithmetic or of its memory traffic, whichever is longer, plus
the time of an empty call:

    t = max(flops / reached FLOP/s of its dtype, bytes / reached bandwidth) + t_call

Williams, Waterman, Patterson: "Roofline: an insightful visual performance model" (CACM 2009).

`device_spec` reads a device (FLOP/s by dtype, bandwidth, memory, call time) from `devices/` by its
name, or from a user's TOML file of the same form. Peaks are the manufacturer's; the efficiencies
are the shares that large matrix products and long copies reach.

`calibrated` fits three numbers of a device to measurements of operations that are typical of
transformers and convolutional networks: the time of an empty call, the reached FLOP/s of matrix
products, and the reached bandwidth of all other operations.
"""

from __future__ import annotations

import difflib
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...runtime.errors import PlanError
from ...runtime.serialization import Origin, parse_toml, read_text
from .cache import device_identity, mixed_precision, threads_set
from .measure import Operation, OperationCost, Repeats, estimate, measure

_FOLDER = Path(__file__).parent / "devices"
_DTYPES = ("float64", "float32", "float16", "bfloat16")
_NEEDED = ("memory_gib", "bandwidth_gb_s", "call_us", "tflops")
_SHARES = ("compute_efficiency", "memory_efficiency")
_MOST = 1e9
_KNOWN = ("name", *_NEEDED, *_SHARES)


@dataclass(frozen=True)
class DeviceSpec:
    """A device, which this machine need not have.

    name: its name
    flops_per_s: peak FLOP/s by dtype
    bytes_per_s: peak memory bandwidth
    memory_bytes: size of its memory
    call_ms: time of an empty call
    compute_efficiency: share of the peak FLOP/s that matrix products reach
    memory_efficiency: share of the peak bandwidth that other operations reach
    """

    name: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    memory_bytes: int
    call_ms: float
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0

    def flops(self, dtype: str) -> float:
        """Reached FLOP/s. Raises PlanError for an unsupported dtype."""
        if dtype not in self.flops_per_s:
            raise PlanError(
                f"{self.name} cannot compute in {dtype}.",
                f"Choose {', '.join(self.flops_per_s)}.",
            )
        return self.compute_efficiency * self.flops_per_s[dtype]

    @property
    def bandwidth(self) -> float:
        """Reached memory bandwidth in bytes per second."""
        return self.memory_efficiency * self.bytes_per_s


def known_devices() -> tuple[str, ...]:
    """The names that `device_spec` knows without a file."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def device_spec(name: str | Path) -> DeviceSpec:
    """The device of that name, or of that TOML file.

    >>> device_spec("a100-80g").memory_bytes // 2**30
    80

    Raises PlanError for an unknown name and for a file that is not a valid device.
    """
    text = str(name)
    if text.endswith(".toml"):
        return _read(Path(text))
    if text in known_devices():
        return _read(_FOLDER / f"{text}.toml")
    near = ["cuda"] * (text.lower() == "gpu")
    near += [known for known in known_devices() if known.startswith(text.lower())]
    near += difflib.get_close_matches(text.lower(), known_devices(), n=1)
    meant = f"Did you mean {near[0]}? " if near else ""
    raise PlanError(
        f"no device is called {text}.",
        f"{meant}Choose {', '.join(known_devices())}, or describe it in a file.toml.",
    )


def parse_device(raw: Mapping[str, Any], where: str, name: str = "") -> DeviceSpec:
    """A device from a table of a TOML file; errors call the table `where`.

    `name` is the device's name if the table has none. Raises PlanError for an unknown, missing or
    invalid value.
    """
    for key in raw.keys() - {*_KNOWN}:
        near = difflib.get_close_matches(key, _KNOWN, n=1)
        meant = f"Did you mean {near[0]}?" if near else f"Keys: {', '.join(_KNOWN)}."
        raise PlanError(f"{where}: a device has no {key}.", meant)
    for key in _NEEDED:
        if key not in raw:
            raise PlanError(f"{where}: {key} is missing.", f"A device has {', '.join(_NEEDED)}.")
    peaks = raw["tflops"]
    if not isinstance(peaks, Mapping) or not peaks or not peaks.keys() <= {*_DTYPES}:
        raise PlanError(
            f"{where}: tflops = {peaks!r} is not a table of peaks by dtype.",
            f"Write [tflops] and a line for each of {', '.join(_DTYPES)} that the device has.",
        )
    called = raw.get("name", name)
    if not isinstance(called, str) or not called:
        raise PlanError(f"{where}: name = {called!r} is not a valid name.")
    return DeviceSpec(
        name=called,
        flops_per_s={
            dtype: 1e12 * _positive(peaks[dtype], f"{where}: tflops.{dtype}")
            for dtype in _DTYPES
            if dtype in peaks
        },
        bytes_per_s=1e9 * _positive(raw["bandwidth_gb_s"], f"{where}: bandwidth_gb_s"),
        memory_bytes=int(_positive(raw["memory_gib"], f"{where}: memory_gib") * 2**30),
        call_ms=_positive(raw["call_us"], f"{where}: call_us") / 1e3,
        **{key: _share(raw[key], f"{where}: {key}") for key in _SHARES if key in raw},
    )


def _read(path: Path) -> DeviceSpec:
    origin = Origin(f"device file {path}", PlanError)
    return parse_device(parse_toml(read_text(path, origin), origin), str(path), path.stem)


def _positive(value: Any, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < _MOST:
        raise PlanError(f"{where} = {value!r:.60} is not a number above 0 and below {_MOST:.0e}.")
    return float(value)


def _share(value: Any, where: str) -> float:
    if _positive(value, where) > 1:
        raise PlanError(f"{where} = {value!r} is above 1: it is the share of the peak reached.")
    return float(value)


def predict(operation: Operation, device: DeviceSpec, dtype: str = "float32") -> OperationCost:
    """The predicted cost of the operation on `device`; with `dtype` bfloat16 under autocast."""
    used = arithmetic_dtype(operation) if dtype == "float32" else dtype
    return with_times(estimate(operation, dtype), device, used)


def with_times(cost: OperationCost, device: DeviceSpec, dtype: str) -> OperationCost:
    """The cost with times from the formula above, and matrix products in `dtype`."""
    if cost.is_view:
        return cost
    traffic_ms = 1e3 * cost.moved_bytes / device.bandwidth
    arithmetic_ms = 1e3 / device.flops(dtype)
    forward_ms = max(cost.forward_flops * arithmetic_ms, traffic_ms) + device.call_ms
    if not cost.has_backward:
        return replace(cost, forward_ms=forward_ms)
    # Backward reads what forward read and wrote, and writes gradients of the same size.
    backward_ms = max(cost.backward_flops * arithmetic_ms, 2 * traffic_ms) + device.call_ms
    return replace(cost, forward_ms=forward_ms, backward_ms=backward_ms)


def arithmetic_dtype(operation: Operation) -> str:
    """The widest floating dtype of an operation's tensors; float32 if there is none."""
    given = [*operation.tensors, *(operation.module.parameters() if operation.module else ())]
    kinds = {tensor.dtype for tensor in given if tensor.dtype.is_floating_point}
    kinds &= {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    widest = max(kinds, key=lambda kind: (kind.itemsize, str(kind)), default=torch.float32)
    return str(widest).removeprefix("torch.")


_OFTEN = Repeats(enough_ms=80.0, most=9)


def this_cpu() -> DeviceSpec:
    """The CPU of this machine, with assumed speeds and all of its memory."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    name = device_identity(torch.device("cpu"))
    return replace(device_spec("cpu-core"), name=name, memory_bytes=pages * size)


def calibrated(spec: DeviceSpec, device: torch.device, dtype: str, threads: int) -> DeviceSpec:
    """`spec` with call time and efficiencies measured on `device`, which it describes."""
    spec.flops(dtype)  # raises for a dtype that the device does not support
    # In this order: every time includes a call, and that of products includes traffic.
    with (
        threads_set(threads),
        torch.random.fork_rng(devices=[]),
        mixed_precision(dtype, device.type, cached=False),
    ):
        calls = [_measured(operation, device) for operation in _smallest()]
        traffic = [_measured(operation, device) for operation in _elementwise()]
        products = [_measured(operation, device) for operation in _products()]
    call_ms = statistics.median(cost.forward_ms for cost in calls)
    return replace(
        spec,
        call_ms=call_ms,
        memory_efficiency=_rate(traffic, call_ms, lambda cost: 3e3 * cost.moved_bytes)
        / spec.bytes_per_s,
        compute_efficiency=_rate(
            products, call_ms, lambda cost: 1e3 * (cost.forward_flops + cost.backward_flops)
        )
        / spec.flops_per_s[dtype],
    )


def _rate(
    costs: Sequence[OperationCost], call_ms: float, work: Callable[[OperationCost], float]
) -> float:
    """Median work per second of forward and backward, without the time of the calls."""
    return statistics.median(
        work(cost) / max(cost.forward_ms + cost.backward_ms - 2 * call_ms, 1e-6) for cost in costs
    )


def _measured(operation: Operation, device: torch.device) -> OperationCost:
    return measure(operation, device, _OFTEN)


def _smallest() -> list[Operation]:
    return [_function(torch.add, (4, 4), (4, 4)), _function(torch.tanh, (4, 4))]


def _elementwise() -> list[Operation]:
    wide, image = (512, 3072), (8, 64, 56, 56)
    return [
        _function(torch.add, wide, wide),
        _function(F.gelu, wide),
        _function(F.relu, image),
        _function(lambda x: F.dropout(x, 0.1), wide),
        _function(lambda x: F.softmax(x, -1), (8, 12, 128, 128)),
        _module(nn.LayerNorm(768, device="meta"), (512, 768)),
        _module(nn.BatchNorm2d(64, device="meta"), image),
    ]


def _products() -> list[Operation]:
    return [
        _module(nn.Linear(768, 3072, device="meta"), (256, 768)),
        _module(nn.Linear(3072, 768, device="meta"), (256, 3072)),
        _module(nn.Linear(1024, 1024, device="meta"), (512, 1024)),
        _module(nn.Conv2d(64, 64, 3, padding=1, bias=False, device="meta"), (4, 64, 56, 56)),
        _module(nn.Conv2d(256, 256, 3, padding=1, bias=False, device="meta"), (4, 256, 14, 14)),
    ]


def _function(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Operation:
    def call(_: nn.Module | None, tensors: Sequence[Tensor]) -> Any:
        return function(*tensors)

    return Operation(call, None, _examples(shapes), (False,) * len(shapes))


def _module(module: nn.Module, *shapes: tuple[int, ...]) -> Operation:
    def call(own: nn.Module | None, tensors: Sequence[Tensor]) -> Any:
        assert own is not None
        return own(*tensors)

    return Operation(call, module, _examples(shapes), (False,) * len(shapes))


def _examples(shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, device="meta", requires_grad=True) for shape in shapes)
