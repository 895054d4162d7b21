"""Work on a device -> the most bytes that were alive at once of those that it made.

On CUDA the allocator knows. Elsewhere every operation below autograd is looked at, and a storage
counts from the operation that returns it until it is freed; what a kernel allocates for itself
and frees before it returns is not seen. It works on tensors without data too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .capture.structure import tensors_in


class LiveBytes(Protocol):
    """`live` are the bytes made and not yet freed, `peak` the most since `reset`."""

    @property
    def live(self) -> int: ...

    @property
    def peak(self) -> int: ...

    def reset(self) -> None: ...


@contextmanager
def counting(device: torch.device, given: Iterable[Tensor]) -> Iterator[LiveBytes]:
    """Counts what the block makes on `device`; `given` are tensors that it works on."""
    if device.type == "cuda":
        yield _OfAllocator(device)
    else:
        with _OfOperations(given) as counted:
            yield counted


class _OfAllocator:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = torch.cuda.memory_allocated(device)
        self.reset()

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class _OfOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._given = [tensor.untyped_storage() for tensor in given]
        self._known: dict[int, Any] = {storage._cdata: None for storage in self._given}

    def reset(self) -> None:
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def freed(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)
