"""Tensors on a GPU, from process to process without the host in between (CUDA IPC), or to a
library.

A slot is a buffer on the sender's GPU that the receiver has opened, with two events that both
processes know. Handles are exchanged once a slot, then only its number. Nothing here waits on the
host: each rank's current stream waits for the other's event.

    sender's stream     wait(emptied)  copy in   record(filled)
    receiver's stream                            wait(filled)  copy out  record(emptied)

The receiver copies out, over NVLink or PCIe if its GPU is another one: tensors that autograd keeps
then lie on its own GPU. Two processes that share a GPU do the same.

`find_memory` gives memory that a library outside of torch may read. Such a library ignores
CUDA streams. So memory that a GPU writes is handed over after an event says that it is written, and
memory to be filled after an event says that no earlier work still uses it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import TransportError
from ..tensor_files import dense
from .peers import Slots
from .protocol import Channel

_EVENT: Any = torch.cuda.Event  # torch does not type it.


class DeviceMemory(Protocol):
    """Memory and events that two processes can share, and one stream of work on them."""

    @property
    def device(self) -> torch.device: ...

    def holds(self, tensor: Tensor) -> bool:
        """True if the tensor lies in memory of this kind."""

    def allocate(self, size: int) -> Tensor: ...

    def copy(self, target: Tensor, source: Tensor) -> None: ...

    def share(self, buffer: Tensor) -> str: ...

    def open(self, handle: str) -> Tensor: ...

    def new_event(self) -> Any: ...

    def share_event(self, event: Any) -> str: ...

    def open_event(self, handle: str) -> Any: ...

    def record(self, event: Any) -> None: ...

    def wait(self, event: Any) -> None: ...


class CudaMemory:
    """One GPU; its stream is the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def device(self) -> torch.device:
        return self._device

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        # Between two GPUs torch has the source's stream wait for the target's, and that for it.
        target.copy_(source, non_blocking=True)

    def share(self, buffer: Tensor) -> str:
        storage: Any = buffer.untyped_storage()
        _, *fields = storage._share_cuda_()
        return json.dumps([self._uuid, *(f.hex() if isinstance(f, bytes) else f for f in fields)])

    def open(self, handle: str) -> Tensor:
        uuid, block, size, offset, counter, counter_offset, event, has_event = json.loads(handle)
        storage = torch.UntypedStorage._new_shared_cuda(
            _device_of(uuid),
            bytes.fromhex(block),
            size,
            offset,
            bytes.fromhex(counter),
            counter_offset,
            bytes.fromhex(event),
            has_event,
        )
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def new_event(self) -> Any:
        return _EVENT(interprocess=True)

    def share_event(self, event: Any) -> str:
        with torch.cuda.device(self.device):
            return json.dumps([self._uuid, event.ipc_handle().hex()])

    def open_event(self, handle: str) -> Any:
        uuid, content = json.loads(handle)
        device = torch.device("cuda", _device_of(uuid))
        return _EVENT.from_ipc_handle(device, bytes.fromhex(content))

    def record(self, event: Any) -> None:
        event.record(torch.cuda.current_stream(self.device))

    def wait(self, event: Any) -> None:
        event.wait(torch.cuda.current_stream(self.device))

    @property
    def _uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)


@dataclass(slots=True)
class _Slot:
    """A buffer and the events of its last filling and emptying, as far as they are known."""

    buffer: Tensor
    filled: Any
    emptied: Any = None


class Outgoing:
    """The slots in which tensors go to one peer."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._places = Slots(2**62)
        self._slots: dict[int, _Slot] = {}

    def fill(self, tensor: Tensor) -> tuple[int, str]:
        """The place of the slot that the tensor is copied into, and what the receiver opens it
        by: nothing when it has."""
        memory, place, handles = self._memory, self._places.take(tensor.nbytes), ""
        slot = self._slots.get(place)
        if slot is None:
            slot = _Slot(memory.allocate(self._places.capacity(place)), memory.new_event())
            self._slots[place] = slot
        if slot.emptied is not None:
            memory.wait(slot.emptied)
        memory.copy(_view(slot.buffer, tensor.dtype, tuple(tensor.shape)), tensor.detach())
        memory.record(slot.filled)
        if slot.emptied is None:
            handles = json.dumps([memory.share(slot.buffer), memory.share_event(slot.filled)])
        return place, handles

    def give_back(self, place: int, handle: str = "") -> None:
        """The peer has emptied a slot; it says by what event when it does so first."""
        if handle:
            self._slots[place].emptied = self._memory.open_event(handle)
        self._places.give_back(place)


class Incoming:
    """The slots of one peer, opened."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._slots: dict[int, _Slot] = {}

    def empty(self, place: int, handles: str, channel: Channel) -> tuple[Tensor, str]:
        """The tensor of a slot, copied out, and the event's handle if the peer has it not yet."""
        memory, handle = self._memory, ""
        if handles:
            buffer, filled = json.loads(handles)
            slot = _Slot(memory.open(buffer), memory.open_event(filled), memory.new_event())
            self._slots[place] = slot
        slot = self._slots[place]
        copied = memory.allocate(channel.nbytes)
        memory.wait(slot.filled)
        memory.copy(copied, slot.buffer[: channel.nbytes])
        memory.record(slot.emptied)
        if handles:
            handle = memory.share_event(slot.emptied)
        return _view(copied, channel.dtype, channel.shape), handle


def _view(buffer: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    size = dtype.itemsize * torch.Size(shape).numel()
    return buffer[:size].view(dtype).view(shape)


def _device_of(uuid: str) -> int:
    """The number of a GPU in this process: CUDA_VISIBLE_DEVICES numbers them differently in each
    process."""
    for device in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(device).uuid) == uuid:
            return device
    raise TransportError(
        f"GPU {uuid} of another rank cannot be seen by this one.",
        "Let every rank see all GPUs of the host (CUDA_VISIBLE_DEVICES), or use --transport nccl.",
    )


Ready = Callable[[], bool]


class Memory(Protocol):
    """Where messages lie while they are sent."""

    def outgoing(self, tensor: Tensor) -> tuple[Tensor, Ready | None]:
        """The contiguous memory to send; None for `Ready` when it may be read at once."""

    def incoming(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Ready | None]:
        """Fresh memory to receive into; None when it may be written at once."""

    def arrived(self, buffer: Tensor) -> Tensor:
        """The received tensor, on the stage's device."""


def find_memory(device: torch.device, library_takes_cuda: bool) -> Memory:
    """The memory in which a library is given the messages of a device."""
    if device.type != "cuda":
        return HostMemory()
    return DirectMemory(device) if library_takes_cuda else PinnedMemory(device)


class HostMemory:
    """Tensors of the CPU are sent as they are."""

    def outgoing(self, tensor: Tensor) -> tuple[Tensor, Ready | None]:
        return dense(tensor), None

    def incoming(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Ready | None]:
        return torch.empty(shape, dtype=dtype), None

    def arrived(self, buffer: Tensor) -> Tensor:
        return buffer


class PinnedMemory:
    """Tensors of a GPU pass through pinned host memory, copied concurrently with the
    computation."""

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


class DirectMemory:
    """Tensors of a GPU are sent as they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def outgoing(self, tensor: Tensor) -> tuple[Tensor, Ready | None]:
        tensor = dense(tensor)
        return tensor, self._event()

    def incoming(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Ready | None]:
        return torch.empty(shape, dtype=dtype, device=self._device), self._event()

    def arrived(self, buffer: Tensor) -> Tensor:
        return buffer

    def _event(self) -> Ready:
        written: Ready = torch.cuda.current_stream(self._device).record_event().query
        return written
