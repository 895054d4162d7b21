"""Figures of a rank: its own device's memory, whatever else the machine has."""

import pytest
import torch

from asyncpipe.runtime.monitoring.gather import peak_memory_bytes


def test_peak_memory_is_that_of_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    of_gpus = {"cuda:0": 1, "cuda:1": 2}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", of_gpus.__getitem__)
    assert peak_memory_bytes("cuda:1") == 2
    assert peak_memory_bytes("cpu") > 2**20
