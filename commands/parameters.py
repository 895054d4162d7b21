"""How an option is told to cyclopts."""

from __future__ import annotations

from cyclopts import Group, Parameter


def option(group: Group, help: str, *names: str) -> Parameter:
    return Parameter(name=names or None, help=help, group=group, negative=())


def flag(group: Group, help: str, *names: str) -> Parameter:
    return Parameter(name=names or None, help=help, group=group, negative=(), show_default=False)
