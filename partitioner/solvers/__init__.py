"""Planning methods by name, behind one interface: costs and a number of stages -> a placement."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import chain, uniform
from .method import Method, Placement, Rules

METHODS: Mapping[str, Method] = MappingProxyType(
    {"auto": chain.place, "chain": chain.place, "uniform": uniform.place}
)

__all__ = ["METHODS", "Method", "Placement", "Rules"]
