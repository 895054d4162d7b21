"""A stage's tensor -> memory that a library outside of torch may read, and back.

Such a library knows nothing of CUDA streams. So what a GPU writes is handed over once an event
says that it is written, and memory that is to be filled once an event says that nothing queued
before still uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Ready = Callable[[], bool]


class Memory(Protocol):
    """Where messages lie while they are sent."""

    def outgoing(self, tensor: Tensor) -> tuple[Tensor, Ready | None]:
        """The contiguous memory to send; None for `Ready` when it may be read at once."""

    def incoming(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Ready | None]:
        """Fresh memory to receive into; None when it may be written at once."""

    def arrived(self, buffer: Tensor) -> Tensor:
        """What was received, on the stage's device."""


def find_memory(device: torch.device, library_takes_cuda: bool) -> Memory:
    """The memory in which a library is given the messages of a device."""
    if device.type != "cuda":
        return HostMemory()
    return DeviceMemory(device) if library_takes_cuda else PinnedMemory(device)


class HostMemory:
    """Tensors of the CPU are sent as they are."""

    def outgoing(self, tensor: Tensor) -> tuple[Tensor, Ready | None]:
        return tensor.detach().contiguous(), None

    def incoming(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Ready | None]:
        return torch.empty(shape, dtype=dtype), None

    def arrived(self, buffer: Tensor) -> Tensor:
        return buffer


class PinnedMemory:
    """Tensors of a GPU go through pinned host memory, copied beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def outgoing(self, tensor: Tensor) -> tuple[Tensor, Ready | None]:
        tensor = tensor.detach()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return host, self._stream.record_event().query

    def incoming(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Ready | None]:
        return torch.empty(shape, dtype=dtype, pin_memory=True), None

    def arrived(self, buffer: Tensor) -> Tensor:
        # The allocator of pinned memory does not give it away before the copy is over.
        return buffer.to(self._device, non_blocking=True)


class DeviceMemory:
    """Tensors of a GPU are sent as they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def outgoing(self, tensor: Tensor) -> tuple[Tensor, Ready | None]:
        tensor = tensor.detach().contiguous()
        return tensor, self._event()

    def incoming(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Ready | None]:
        return torch.empty(shape, dtype=dtype, device=self._device), self._event()

    def arrived(self, buffer: Tensor) -> Tensor:
        return buffer

    def _event(self) -> Ready:
        written: Ready = torch.cuda.current_stream(self._device).record_event().query
        return written
