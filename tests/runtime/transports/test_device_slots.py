"""Tensors on a device go through slots that two processes share, in the order of events."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asyncpipe.runtime.errors import TransportError
from asyncpipe.runtime.transports import Channel, ShmTransport
from asyncpipe.runtime.transports.device_slots import CudaMemory
from asyncpipe.tests.support.processes.fake_device import PretendedDevice, UnorderedDevice
from asyncpipe.tests.support.processes.gloo_ranks import run_processes

FLOATS = Channel("activation", "hidden", 0, 1, 0, 1, 0, torch.float32, (40, 50))
INTEGERS = replace(FLOATS, name="ids", tag=1, dtype=torch.int64)
NOTHING = replace(FLOATS, name="nothing", tag=2, shape=(0, 3))
COUNT, DEPTH = 120, 3


def talk(rank: int, folder: Path, ordered: bool) -> tuple[int, int]:
    """How many tensors arrived as they were sent, and how many slots that took."""
    device = (PretendedDevice if ordered else UnorderedDevice)(folder)
    transport = ShmTransport(timeout_s=20, depth=DEPTH, device_memory=device)
    right = 0
    for i in range(COUNT):
        channel = replace(FLOATS, shape=(40, 30 + i % 3))
        if rank == 0:
            transport.send(channel, torch.full(channel.shape, float(i)), i)
            transport.send(INTEGERS, torch.full(INTEGERS.shape, i), i)
            transport.send(NOTHING, torch.empty(0, 3), i)
        else:
            found = transport.wait(transport.recv(channel, i))
            assert int(transport.wait(transport.recv(INTEGERS, i))[-1, -1]) == i
            assert transport.wait(transport.recv(NOTHING, i)).shape == (0, 3)
            device.finish()
            right += bool((found == float(i)).all())
    transport.close()
    device.finish()
    return right, device.opened


def test_tensors_on_a_device_arrive_whole_and_slots_are_opened_once(tmp_path: Path) -> None:
    results = run_processes(2, talk, tmp_path, True)
    assert isinstance(results[1], tuple), results[1]
    right, opened = results[1]
    assert right == COUNT
    assert 0 < opened <= 2 * DEPTH


def test_without_events_they_would_not(tmp_path: Path) -> None:
    right, _ = run_processes(2, talk, tmp_path, False)[1]
    assert right < COUNT


def see_gpus(monkeypatch: pytest.MonkeyPatch, seen: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=seen[getattr(device, "index", device)]),
    )


def test_a_cuda_buffer_is_opened_by_what_it_was_shared_by(monkeypatch: pytest.MonkeyPatch) -> None:
    block = (b"\x00\xff" * 32, 96, 512, b"/torch_counter", 3, b"\x01" * 64, True)
    opened = []

    def open_storage(*fields: object) -> torch.UntypedStorage:
        opened.append(fields)
        return torch.UntypedStorage(96)

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: (0, *block))
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_storage)
    see_gpus(monkeypatch, ["a1"])
    handle = CudaMemory(torch.device("cuda", 0)).share(torch.zeros(96, dtype=torch.uint8))
    see_gpus(monkeypatch, ["b2", "a1"])  # As another rank numbers them.
    buffer = CudaMemory(torch.device("cuda", 0)).open(handle)
    assert opened == [(1, *block)]
    assert buffer.dtype == torch.uint8 and buffer.shape == (96,)
    see_gpus(monkeypatch, ["b2"])
    with pytest.raises(TransportError, match="GPU a1 of another rank cannot be seen by this one"):
        CudaMemory(torch.device("cuda", 0)).open(handle)


def talk_on_cuda(rank: int) -> bool:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    transport = ShmTransport(timeout_s=60, depth=DEPTH, device=device)
    work = torch.ones(512, 512, device=device)
    for i in range(300):
        channel = replace(FLOATS, shape=(512, 500 + i % 13))
        if rank == 0:
            work = (work @ work).clamp(0, 1)  # The stream is behind the host.
            sent = (work[0, 0] * i).expand(channel.shape).contiguous()
            transport.send(channel, sent, i)
            sent.zero_()
            transport.send(INTEGERS, torch.full(INTEGERS.shape, i), i)
        else:
            found = transport.wait(transport.recv(channel, i))
            assert found.device == device and bool((found == i).all())
            ids = transport.wait(transport.recv(INTEGERS, i))
            assert ids.device.type == "cpu" and int(ids[0, 0]) == i
    transport.close()
    return True


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_processes_talk_over_cuda_ipc_also_when_they_share_a_gpu() -> None:
    assert run_processes(2, talk_on_cuda, limit_s=120) == [True, True]
