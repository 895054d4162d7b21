"""How tensors get from one rank to another, behind one protocol."""

from .gloo import GlooTransport
from .local import LocalHub, LocalTransport, run_together
from .mpi import MpiTransport
from .nccl import NcclTransport
from .protocol import Channel, Handle, Transport
from .shm import ShmTransport

__all__ = [
    "Channel",
    "GlooTransport",
    "Handle",
    "LocalHub",
    "LocalTransport",
    "MpiTransport",
    "NcclTransport",
    "ShmTransport",
    "Transport",
    "run_together",
]
