"""Processes that communicate over MPI (mpi4py): host memory, and CUDA memory if MPI supports it.

Each kind of traffic has a communicator of its own. A message's tag is its channel and index, as
over gloo; a received tensor goes into fresh memory for the reasons given there. The ranks are those
of MPI's world: mpiexec, mpirun or srun started them.

MPI moves large messages only while a process is inside one of its calls, and it cannot wake a
sleeping process. So `Progress` polls: the rank itself while it waits for a message, a thread while
it computes. Both nap between two polls (`naps.py`), and with nothing in transit the thread sleeps.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import shutil
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from ..errors import TransportError
from ..extras import install
from ..mpi_memory import takes_cuda
from .device_slots import find_memory
from .naps import LONGEST_NAP_S, nap_s, wait_until
from .protocol import DIRECTIONS, Channel, Handle, Sends, peer_is_gone, timed_out


class MpiMessage:
    """A send or a receive. It is handed to MPI by `start` as soon as `may_start`, which is at
    once but for memory of a GPU that is still being written. MPI reads or writes `buffer` until
    the message is over, so that it lives as long, whoever else lets it go."""

    __slots__ = ("buffer", "is_over", "may_start", "request", "start")

    def __init__(
        self, buffer: Tensor, start: Callable[[], Any], may_start: Callable[[], bool] | None
    ) -> None:
        self.buffer = buffer
        self.start = start
        self.may_start = may_start
        self.request: Any = None
        self.is_over = False


class Progress:
    """Looks after the messages under way. `test_some` is MPI.Request.Testsome."""

    def __init__(self, test_some: Callable[[list[Any]], list[int] | None]) -> None:
        self._test_some = test_some
        self._asking = threading.Lock()
        self._new: deque[MpiMessage] = deque()
        self._under_way: list[MpiMessage] = []
        self._error: BaseException | None = None
        self._is_closed = False
        self._waits = False  # the rank itself asks
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._look_after, name="mpi progress", daemon=True)
        self._thread.start()

    def add(self, message: MpiMessage) -> None:
        """Takes a message; its request is made now if it can be."""
        if message.may_start is None:
            message.request = message.start()
        self._new.append(message)
        self._wake.set()

    def wait(self, message: MpiMessage, timeout_s: float) -> None:
        """Returns when the message is over. Raises TimeoutError, or what MPI raised."""
        self._waits = True
        try:
            wait_until(lambda: self._is_over(message), timeout_s)
        finally:
            self._waits = False
            if self._new or self._under_way:
                self._wake.set()

    def _is_over(self, message: MpiMessage) -> bool:
        if message.is_over:
            return True
        self.ask()
        if self._error is not None:
            raise self._error
        return message.is_over

    def ask(self) -> bool:
        """Asks MPI once; whether anything was new."""
        with self._asking:
            known = len(self._under_way)
            while self._new:
                self._under_way.append(self._new.popleft())
            is_new = len(self._under_way) > known
            for message in self._under_way:
                if message.request is None and (message.may_start is None or message.may_start()):
                    message.request = message.start()
            started = [message for message in self._under_way if message.request is not None]
            over = self._test_some([message.request for message in started]) if started else None
            for position in over or ():
                started[position].is_over = True
            if over:
                self._under_way = [message for message in self._under_way if not message.is_over]
            return is_new or bool(over)

    def close(self) -> None:
        """Ends the thread, and takes back the receives that nothing came for."""
        self._is_closed = True
        self._wake.set()
        self._thread.join()
        for message in (*self._under_way, *self._new):
            if message.request is not None:
                message.request.Cancel()
                message.request.Wait()

    def _look_after(self) -> None:
        last_s = time.monotonic()
        while not self._is_closed:
            if self._waits or not (self._new or self._under_way):
                self._wake.wait()
                self._wake.clear()
                last_s = time.monotonic()
                continue
            try:
                if self.ask():
                    last_s = time.monotonic()
            except BaseException as error:  # raised when the rank waits
                self._error = error
                return
            time.sleep(nap_s(time.monotonic() - last_s))


INDICES = 1024
"""The number of messages of a channel that tags distinguish: `tag * INDICES + index`."""


@dataclass(frozen=True)
class MpiHandle:
    channel: Channel
    index: int
    message: MpiMessage

    @property
    def ready(self) -> bool:
        return True


class MpiTransport:
    """One rank's end of MPI's world, or of the mpi4py communicator `world`.

    Making one is collective: all its ranks do it. `timeout_s` is the longest that any wait takes.
    `memory` is that of messages of GPUs: cuda, host, or auto, which asks the library.
    Raises TransportError when there is no MPI that threads may call.
    """

    def __init__(
        self,
        world: Any = None,
        *,
        timeout_s: float = 60.0,
        depth: int = 4,
        device: str | torch.device = "cpu",
        memory: str = "auto",
    ) -> None:
        self._mpi = load_mpi()
        world = world or self._mpi.COMM_WORLD
        self.rank: int = world.Get_rank()
        self.depth = depth
        self._timeout_s = timeout_s
        takes = memory == "cuda" or (memory == "auto" and takes_cuda(world))
        self._memory = find_memory(torch.device(device), takes)
        self._largest_tag = world.Get_attr(self._mpi.TAG_UB)
        self._worlds = {direction: world.Dup() for direction in sorted(set(DIRECTIONS.values()))}
        self._progress = Progress(self._mpi.Request.Testsome)
        self._sends: Sends[MpiMessage] = Sends(self._finish_send)

    def send(self, channel: Channel, tensor: Tensor, index: int) -> None:
        channel.check(tensor, index)
        self._sends.forget(channel, lambda message: message.is_over)
        self._sends.make_room(channel, self.depth)
        buffer, is_written = self._memory.outgoing(tensor)
        start = partial(self._world(channel).Isend, self._content(buffer), channel.target_rank)
        message = MpiMessage(buffer, partial(start, self._tag(channel, index)), is_written)
        self._sends.add(channel, index, message)
        with self._waiting(channel.sending(index), channel.target_rank):
            self._progress.add(message)

    def recv(self, channel: Channel, index: int) -> MpiHandle:
        buffer, is_free = self._memory.incoming(channel.shape, channel.dtype)
        start = partial(self._world(channel).Irecv, self._content(buffer), channel.source_rank)
        message = MpiMessage(buffer, partial(start, self._tag(channel, index)), is_free)
        with self._waiting(channel.waiting(index), channel.source_rank):
            self._progress.add(message)
        return MpiHandle(channel, index, message)

    def arrived(self, handle: Handle) -> bool:
        assert isinstance(handle, MpiHandle)
        return handle.message.is_over

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

    def _finish_send(self, channel: Channel, index: int, message: MpiMessage) -> None:
        with self._waiting(channel.sending(index), channel.target_rank):
            self._progress.wait(message, self._timeout_s)

    @contextmanager
    def _waiting(self, wait: str, peer: int) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise timed_out(wait, peer, self._timeout_s) from error
        except self._mpi.Exception as error:
            raise peer_is_gone(wait, peer, f": {error}") from error

    def _world(self, channel: Channel) -> Any:
        return self._worlds[DIRECTIONS[channel.kind]]

    def _content(self, buffer: Tensor) -> list[Any]:
        size = buffer.numel() * buffer.element_size()
        return [self._mpi.buffer.fromaddress(buffer.data_ptr(), size), size, self._mpi.BYTE]

    def _tag(self, channel: Channel, index: int) -> int:
        tag = channel.tag * INDICES + index % INDICES
        if tag > self._largest_tag:
            raise TransportError(
                f"this MPI numbers messages up to {self._largest_tag}, and "
                f"{channel.message(index)} needs {tag}.",
                "--transport gloo",
            )
        return tag


def load_mpi() -> Any:
    """The module mpi4py.MPI. Raises TransportError when it is not there, or when only one thread
    may call the library."""
    mpi = load_mpi_for_one_thread()
    check_thread_level(mpi.Query_thread(), mpi.THREAD_MULTIPLE, mpi.Get_library_version())
    return mpi


def load_mpi_for_one_thread() -> Any:
    """The module mpi4py.MPI, whichever threads may call it. Raises TransportError when it is not
    there."""
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise TransportError("--transport mpi: mpi4py is not installed.", install("mpi")) from error
    except (ImportError, RuntimeError) as error:
        raise TransportError(
            "--transport mpi: mpi4py is installed but finds no MPI library (libmpi.so.12 or .40).",
            "cluster: module load openmpi · laptop: pip install mpich · "
            "otherwise: --transport gloo",
        ) from error
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
    """A store at rank 0, whose address the other ranks receive over MPI.

    `host` is the name of rank 0's host for the others, as rank 0 knows it. Collective over MPI's
    world. Raises TransportError if MPI's world has other ranks, or if some are missing after the
    timeout.
    """
    mpi = load_mpi_for_one_thread()
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


OUTPUT_S = 2.0
"""The longest time that a failed rank waits for mpiexec to read its output."""


def leave_mpi(exit_code: int) -> None:
    """Parts from MPI's ranks and ends the process, if it is one of them. After a failure it ends
    them all: they would wait for this one, and MPI would not let any of them go. Before that it
    waits until mpiexec has read its output: MPICH's drops the rest."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if exit_code:
        end_s = time.monotonic() + OUTPUT_S
        while any(map(_unread_bytes, (1, 2))) and time.monotonic() < end_s:
            time.sleep(LONGEST_NAP_S)
        mpi.COMM_WORLD.Abort(exit_code)
    else:
        mpi.Finalize()
        # MPICH takes leave of mpiexec in a handler of C's exit, and mpiexec kills the others when
        # one ends without. The lock of the interpreter is held: no thread goes on beside that.
        ctypes.PyDLL(None).exit(0)


def _unread_bytes(descriptor: int) -> int:
    """The unread bytes in a pipe; 0 for a descriptor of another kind."""
    import fcntl  # Not every system that this module is loaded on has these.
    import termios

    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return 0
        return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:
        return 0


def mpiexec() -> str:
    """The launcher next to this interpreter, where packages install it; otherwise the one on the
    path. Raises TransportError where it is not installed."""
    beside = Path(sys.executable).parent / "mpiexec"
    launcher = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if launcher is None:
        raise TransportError(
            "--transport mpi: mpiexec, which starts the ranks, was not found.",
            f"{install('mpi')}, or on a cluster: module load openmpi",
        )
    return launcher
