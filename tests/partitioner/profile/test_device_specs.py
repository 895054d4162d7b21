"""Devices that need not be here: the files that are shipped, a user's own, and bad ones."""

from pathlib import Path

import pytest

from asyncpipe.partitioner.profile.roofline import device_spec, known_devices
from asyncpipe.runtime.errors import PlanError

OWN = """
memory_gib = 48
bandwidth_gb_s = 864
call_us = 7.5
memory_efficiency = 0.5

[tflops]
float32 = 91
bfloat16 = 181
"""


@pytest.mark.parametrize("name", known_devices())
def test_every_shipped_device_is_plausible(name: str) -> None:
    spec = device_spec(name)
    assert 1e10 < spec.flops("float32") < 1e15
    assert 5e9 < spec.bandwidth <= spec.bytes_per_s < 1e13
    assert 2**30 < spec.memory_bytes < 2**40
    assert 0.001 <= spec.call_ms <= 0.1


def test_the_devices_that_people_ask_for_are_known() -> None:
    assert {"a100-80g", "h100", "rtx2080ti", "v100-16g"} <= set(known_devices())
    assert device_spec("rtx2080ti").memory_bytes == 11 * 2**30
    assert device_spec("h100").flops("bfloat16") > device_spec("a100-80g").flops("bfloat16")


def test_a_users_file_has_the_same_form(tmp_path: Path) -> None:
    file = tmp_path / "l40s.toml"
    file.write_text(OWN)
    spec = device_spec(file)
    assert (spec.name, spec.memory_bytes, spec.call_ms) == ("l40s", 48 * 2**30, 0.0075)
    assert spec.flops("float32") == 91e12 and spec.bandwidth == 432e9


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(PlanError, match=r"no device is called A100\.\nDid you mean a100-40g\?"):
        device_spec("A100")


def test_a_dtype_without_units_is_refused_with_those_there_are() -> None:
    with pytest.raises(PlanError, match=r"cannot compute in bfloat16.\nChoose float64, float32"):
        device_spec("v100-16g").flops("bfloat16")


@pytest.mark.parametrize(
    ("found", "made", "told"),
    [
        ("memory_gib = 48", "", "memory_gib is missing"),
        ("memory_gib", "memory_gb", "a device has no memory_gb.\nDid you mean memory_gib?"),
        ("call_us = 7.5", "call_us = -1", "call_us = -1 is not a number above 0"),
        ("call_us = 7.5", "call_us = true", "call_us = True is not a number above 0"),
        ("864", '"fast"', "bandwidth_gb_s = 'fast' is not a number above 0"),
        ("float32 = 91", "float32 = nan", "tflops.float32 = nan is not a number above 0"),
        ("float32", "fp32", "is not a table of peaks by dtype"),
        ("0.5", "1.5", "memory_efficiency = 1.5 is above 1"),
        ("[tflops]", "[tflops", "is not TOML"),
        ("memory_gib", 'name = ""\nmemory_gib', "name = '' is not a valid name"),
    ],
)
def test_a_bad_file_is_told_in_one_sentence(
    tmp_path: Path, found: str, made: str, told: str
) -> None:
    file = tmp_path / "own.toml"
    file.write_text(OWN.replace(found, made))
    with pytest.raises(PlanError) as caught:
        device_spec(file)
    assert told in str(caught.value) and "own.toml" in str(caught.value)
    assert "\n" not in caught.value.what


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(PlanError, match=r"nowhere\.toml cannot be read: No such file"):
        device_spec("nowhere.toml")
