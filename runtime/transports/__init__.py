"""How tensors get from one rank to another, behind one protocol."""

from .gloo import GlooTransport
from .local import LocalHub, LocalTransport, run_together
from .protocol import Channel, Handle, Transport

__all__ = [
    "Channel",
    "GlooTransport",
    "Handle",
    "LocalHub",
    "LocalTransport",
    "Transport",
    "run_together",
]
