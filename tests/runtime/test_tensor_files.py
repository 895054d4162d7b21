"""Files and messages have a tensor's numbers, whatever lies in its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncpipe.runtime.checkpoint.storage import write_tensors
from asyncpipe.runtime.errors import DataError
from asyncpipe.runtime.tensor_files import raw_bytes, read_tensors, write_shard
from asyncpipe.tests.support.models.odd_tensors import put_off

TENSORS = {str(number): tensor for number, tensor in enumerate(put_off(torch.randn(4, 3)))}


def as_shard(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    write_shard(folder, tensors, 0, 1)


def as_checkpoint(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    write_tensors(folder, tensors, lambda name: "model.safetensors")


@pytest.mark.parametrize("write", [as_shard, as_checkpoint])
def test_a_file_has_the_numbers(write: Callable[..., None], tmp_path: Path) -> None:
    write(tmp_path, TENSORS)
    found = read_tensors(tmp_path, TENSORS)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("name", TENSORS)
def test_raw_bytes_are_those_of_the_numbers(name: str) -> None:
    numbers = np.array(TENSORS[name].resolve_conj().resolve_neg().tolist())
    kind = np.complex64 if TENSORS[name].is_complex() else np.float32
    assert bytes(raw_bytes(TENSORS[name])) == numbers.astype(kind).tobytes()


def test_a_dtype_that_no_file_has_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="wide has the dtype complex128, which a safetensors"):
        as_shard(tmp_path, {"wide": torch.ones(2, dtype=torch.complex128)})
