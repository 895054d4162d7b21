"""Processes that talk over MPI (mpi4py): host memory, and CUDA memory where MPI says it takes it.

Each kind of traffic has a communicator of its own. A message's tag is its channel and index, as
over gloo; a received tensor goes into fresh memory for the reasons given there. MPI makes progress
only while it is called, so `Progress` calls it while the rank computes.

The ranks are those of MPI's world: mpiexec, mpirun or srun started them.
"""

from __future__ import annotations

import ctypes
import datetime
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from ..errors import TransportError
from .memory import find_memory
from .progress import LONGEST_NAP_S, Message, Progress
from .protocol import DIRECTIONS, Channel, Handle, peer_is_gone, timed_out
from .sends import Sends

INDICES = 1024
"""Messages of one channel that may be told apart at a time: tags are `tag * INDICES + index`."""


@dataclass(frozen=True)
class MpiHandle:
    channel: Channel
    index: int
    message: Message

    @property
    def ready(self) -> bool:
        return True


class MpiTransport:
    """One rank's end of MPI's world, or of the mpi4py communicator `world`.

    Making one is collective: all its ranks do it. `timeout_s` is the longest that any wait takes.
    Raises TransportError when there is no MPI that threads may call.
    """

    def __init__(
        self,
        world: Any = None,
        *,
        timeout_s: float = 60.0,
        depth: int = 4,
        device: str | torch.device = "cpu",
    ) -> None:
        self._mpi = load_mpi()
        world = world or self._mpi.COMM_WORLD
        self.rank: int = world.Get_rank()
        self.depth = depth
        self._timeout_s = timeout_s
        self._memory = find_memory(torch.device(device), takes_cuda(world))
        self._largest_tag = world.Get_attr(self._mpi.TAG_UB)
        self._worlds = {direction: world.Dup() for direction in sorted(set(DIRECTIONS.values()))}
        self._progress = Progress(self._mpi.Request.Testsome)
        self._sends: Sends[Message] = Sends(self._finish_send)

    def send(self, channel: Channel, tensor: Tensor, index: int) -> None:
        channel.check(tensor, index)
        self._sends.forget(channel, lambda message: message.is_over)
        self._sends.make_room(channel, self.depth)
        buffer, is_written = self._memory.outgoing(tensor)
        start = partial(self._world(channel).Isend, self._content(buffer), channel.target_rank)
        message = Message(buffer, partial(start, self._tag(channel, index)), is_written)
        self._sends.add(channel, index, message)
        with self._waiting(channel.sending(index), channel.target_rank):
            self._progress.add(message)

    def recv(self, channel: Channel, index: int) -> MpiHandle:
        buffer, is_free = self._memory.incoming(channel.shape, channel.dtype)
        start = partial(self._world(channel).Irecv, self._content(buffer), channel.source_rank)
        message = Message(buffer, partial(start, self._tag(channel, index)), is_free)
        with self._waiting(channel.waiting(index), channel.source_rank):
            self._progress.add(message)
        return MpiHandle(channel, index, message)

    def wait(self, handle: Handle) -> Tensor:
        assert isinstance(handle, MpiHandle)
        channel, index = handle.channel, handle.index
        with self._waiting(channel.waiting(index), channel.source_rank):
            self._progress.wait(handle.message, self._timeout_s)
        return self._memory.arrived(handle.message.buffer)

    def wait_sent(self, channel: Channel, index: int) -> None:
        self._sends.finish_until(channel, index)

    def close(self) -> None:
        self._sends.finish_all()
        self._progress.close()
        for world in self._worlds.values():
            world.Free()

    def _finish_send(self, channel: Channel, index: int, message: Message) -> None:
        with self._waiting(channel.sending(index), channel.target_rank):
            self._progress.wait(message, self._timeout_s)

    @contextmanager
    def _waiting(self, what: str, peer: int) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise timed_out(what, peer, self._timeout_s) from error
        except self._mpi.Exception as error:
            raise peer_is_gone(what, peer, f": {error}") from error

    def _world(self, channel: Channel) -> Any:
        return self._worlds[DIRECTIONS[channel.kind]]

    def _content(self, buffer: Tensor) -> list[Any]:
        size = buffer.numel() * buffer.element_size()
        return [self._mpi.buffer.fromaddress(buffer.data_ptr(), size), size, self._mpi.BYTE]

    def _tag(self, channel: Channel, index: int) -> int:
        tag = channel.tag * INDICES + index % INDICES
        if tag > self._largest_tag:
            raise TransportError(
                f"This MPI numbers messages up to {self._largest_tag}, and "
                f"{channel.message(index)} needs {tag}.",
                "--transport gloo",
            )
        return tag


def load_mpi() -> Any:
    """The module mpi4py.MPI. Raises TransportError when it is not there, or when only one thread
    may call the library."""
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise TransportError(
            "--transport mpi: mpi4py is not installed.", 'pip install "asyncpipe[mpi]"'
        ) from error
    except (ImportError, RuntimeError) as error:
        raise TransportError(
            "--transport mpi: mpi4py is installed but finds no MPI library (libmpi.so.12 or .40).",
            "cluster: module load openmpi · laptop: pip install mpich · "
            "otherwise: --transport gloo",
        ) from error
    check_thread_level(MPI.Query_thread(), MPI.THREAD_MULTIPLE, MPI.Get_library_version())
    return MPI


def check_thread_level(granted: int, needed: int, library: str) -> None:
    """Raises TransportError when MPI was started for fewer threads than will call it."""
    if granted < needed:
        raise TransportError(
            f"--transport mpi: {library.split(chr(10))[0].strip()} was started with thread level "
            f"{granted}, and two threads call it: that needs level {needed} (MPI_THREAD_MULTIPLE).",
            "Unset MPI4PY_RC_THREAD_LEVEL and MPI4PY_RC_THREADS, or --transport gloo.",
        )


def check_world(world: Any, rank: int, ranks: int) -> None:
    """Raises TransportError unless MPI and the launcher agree which process this is."""
    if (world.Get_rank(), world.Get_size()) != (rank, ranks):
        raise TransportError(
            f"--transport mpi: for MPI this process is rank {world.Get_rank()} of "
            f"{world.Get_size()}, for its launcher rank {rank} of {ranks}.",
            f"Start it with the mpiexec of the MPI that mpi4py uses: {mpiexec()} -n {ranks} ...",
        )


def share_store(rank: int, ranks: int, host: str, timeout_s: float) -> Store:
    """A store at rank 0 that the others learn of over MPI: for what is to be agreed on otherwise.

    `host` is what the others call rank 0's, as it knows it. Collective over MPI's world. Raises
    TransportError when it is not of these ranks, or when they do not come in time.
    """
    mpi = load_mpi()
    world = mpi.COMM_WORLD
    check_world(world, rank, ranks)
    timeout = datetime.timedelta(seconds=timeout_s)
    address = bytearray(256)
    if rank == 0:
        store = TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
        text = f"{host} {store.port}".encode()
        address[: len(text)] = text
    request = world.Ibcast([address, mpi.BYTE])
    end_s = time.monotonic() + timeout_s
    while not request.Test():
        if time.monotonic() > end_s:
            raise TransportError(
                f"rank {rank} waits for rank 0 to say where it is ({timeout_s:g} s).",
                "See what rank 0 does, or allow more time with --timeout-s.",
            )
        time.sleep(LONGEST_NAP_S)
    if rank == 0:
        return store
    host, port = address.rstrip(b"\0").decode().split()
    return TCPStore(host, int(port), None, False, timeout)


def forget_segments() -> None:
    """Takes its name from the shared memory of MPICH's ranks, once all of them have mapped it: it
    goes with them then, however they end. MPICH itself does so only in MPI_Finalize."""
    maps = Path("/proc/self/maps")
    for word in maps.read_text().split() if maps.is_file() else ():
        if word.startswith("/dev/shm/mpich_shm_"):
            Path(word).unlink(missing_ok=True)


def leave_mpi(exit_code: int) -> None:
    """Parts from MPI's ranks and ends the process, if it is one of them. After a failure it ends
    them all: they would wait for this one, and MPI would not let any of them go."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if exit_code:
        mpi.COMM_WORLD.Abort(exit_code)
    else:
        mpi.Finalize()
        # MPICH takes leave of mpiexec in a handler of C's exit, and mpiexec kills the others when
        # one ends without. The lock of the interpreter is held: no thread goes on beside that.
        ctypes.PyDLL(None).exit(0)


def mpiexec() -> str:
    """The launcher beside this interpreter, as packages install it; else the one on the path.

    Raises TransportError when there is neither.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if found is None:
        raise TransportError(
            "--transport mpi: there is no mpiexec to start the ranks with.",
            'pip install "asyncpipe[mpi]", or cluster: module load openmpi',
        )
    return found


def takes_cuda(world: Any) -> bool:
    """Whether MPI says that messages may lie in memory of a GPU (MPI 4.1, section 12.4.3).

    A library that does not say so is not trusted with it.
    """
    information = world.Get_info()
    try:
        kinds = information.Get("mpi_memory_alloc_kinds") or ""
    finally:
        information.Free()
    return any(kind.strip().startswith("cuda") for kind in kinds.split(","))
