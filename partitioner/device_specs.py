"""A device's name or TOML file -> what it can do: FLOP/s by dtype, bandwidth, memory, call cost.

The files of the devices that are known by name lie in `devices/`, each with its source; a user's
file has the same form. Peaks are the maker's; the efficiencies say what share of them is reached
by large matrix products and by long copies.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime.errors import PlanError
from ..runtime.reading import Origin, parse_toml, read_text

_FOLDER = Path(__file__).parent / "devices"
_DTYPES = ("float64", "float32", "float16", "bfloat16")
_NEEDED = ("memory_gib", "bandwidth_gb_s", "call_us", "tflops")
_SHARES = ("compute_efficiency", "memory_efficiency")
_MOST = 1e9
_KNOWN = ("name", *_NEEDED, *_SHARES)


@dataclass(frozen=True)
class DeviceSpec:
    """A device that need not be here.

    `flops_per_s` are peaks by dtype, `bytes_per_s` the peak of its memory; the efficiencies are
    the shares of them that real operations reach. `call_ms` is what a call takes that computes
    nothing.
    """

    name: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    memory_bytes: int
    call_ms: float
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0

    def flops(self, dtype: str) -> float:
        """Reached FLOP/s. Raises PlanError for a dtype that the device has no units for."""
        if dtype not in self.flops_per_s:
            raise PlanError(
                f"{self.name} does not compute in {dtype}.",
                f"Choose {', '.join(self.flops_per_s)}.",
            )
        return self.compute_efficiency * self.flops_per_s[dtype]

    @property
    def bandwidth(self) -> float:
        """Reached bytes per second of its memory."""
        return self.memory_efficiency * self.bytes_per_s


def known_devices() -> tuple[str, ...]:
    """The names that `device_spec` knows without a file."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def device_spec(name: str | Path) -> DeviceSpec:
    """The device of that name, or of that TOML file.

    >>> device_spec("a100-80g").memory_bytes // 2**30
    80

    Raises PlanError for an unknown name and for a file that does not describe a device.
    """
    text = str(name)
    if text.endswith(".toml"):
        return _read(Path(text))
    if text in known_devices():
        return _read(_FOLDER / f"{text}.toml")
    near = [known for known in known_devices() if known.startswith(text.lower())]
    near += difflib.get_close_matches(text.lower(), known_devices(), n=1)
    meant = f"Did you mean {near[0]}? " if near else ""
    raise PlanError(
        f"no device is called {text}.",
        f"{meant}Choose {', '.join(known_devices())}, or describe it in a file.toml.",
    )


def parse_device(raw: Mapping[str, Any], where: str, name: str = "") -> DeviceSpec:
    """A device from the table of a TOML file; `where` names that in errors.

    `name` is what it is called if the table does not say.
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
        raise PlanError(f"{where}: name = {called!r} is not a name.")
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
        raise PlanError(f"{where} = {value!r:.60} is not a number above 0 that a device can have.")
    return float(value)


def _share(value: Any, where: str) -> float:
    if _positive(value, where) > 1:
        raise PlanError(f"{where} = {value!r} is above 1: it is the share of the peak reached.")
    return float(value)
