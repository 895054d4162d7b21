"""Transports of tensors between ranks, behind one protocol."""

from .gloo import GlooTransport
from .mpi import MpiTransport
from .nccl import NcclTransport
from .protocol import Channel, Handle, LocalHub, LocalTransport, Transport, run_together
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
