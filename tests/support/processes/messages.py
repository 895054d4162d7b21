"""Channels between two ranks and what goes through them, for tests of every transport."""

from collections.abc import Generator
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncpipe.runtime.executor.mailbox import take
from asyncpipe.runtime.transports import Channel, Transport
from asyncpipe.tests.support.processes.transports import (
    KINDS,
    PROCESS_KINDS,
    same_bits,
)

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip
SHAPES = ((), (0,), (3,), (2, 0, 3), (4, 5), (33, 1031))
HIDDEN = Channel("activation", "hidden", 0, 1, 0, 1, 0, torch.float32, (2, 3))
BACK = replace(HIDDEN, kind="gradient", source=1, target=0, source_rank=1, target_rank=0, tag=1)
TIED = replace(HIDDEN, kind="shared gradient", name="wte.weight", tag=2)
LARGE = replace(HIDDEN, name="large", tag=3, shape=(512, 513))
LARGE_BACK = replace(BACK, name="large", tag=4, shape=(512, 513))
Steps = Generator[Any, None, Any]

every_kind = pytest.mark.parametrize("kind", KINDS)
every_process_kind = pytest.mark.parametrize("kind", PROCESS_KINDS)


def content(channel: Channel, index: int) -> Tensor:
    """Bits that tell channel and index, NaNs and denormals among them."""
    size = prod(channel.shape) * channel.dtype.itemsize
    seed = torch.Generator().manual_seed(1000 * channel.tag + index)
    highest = 2 if channel.dtype == torch.bool else 256
    bits = torch.randint(0, highest, (size,), generator=seed, dtype=torch.uint8)
    if not size:
        return torch.empty(channel.shape, dtype=channel.dtype)
    return bits.view(channel.dtype).view(channel.shape)


def receive(transport: Transport, channel: Channel, index: int) -> Steps:
    found = yield from take(transport, transport.recv(channel, index))
    assert same_bits(found, content(channel, index)), channel.message(index)
