"""Planning methods by name, behind one interface: a problem -> a placement."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import acyclic, chain, uniform
from .method import Method

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "auto": chain.place,
        "chain": chain.place,
        "uniform": uniform.place,
        "acyclic": acyclic.place,
    }
)

__all__ = ["METHODS", "Method"]
