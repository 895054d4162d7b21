"""Canonical bodies -> the classes of a generated file, one for each distinct structure.

The numbers in which the instances of a class differ become arguments of its constructor. They
are called what the original module calls them, if it keeps them as attributes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..capture import Capture
from .canonical import Canonical, Canonicalizer, Number, Place, calls_in
from .items import Body, Conflict
from .quoting import is_name


@dataclass(frozen=True, slots=True)
class Argument:
    """A constructor argument: its name, its type, and its value by instance path."""

    name: str
    type_name: str
    values: Mapping[str, Any]


@dataclass(slots=True, eq=False)
class ModuleClass:
    """A class of the file: what it is called, the instance it is written from, its arguments.

    `argument_of` says which argument stands at which place of the representative.
    """

    name: str
    canonical: Canonical
    paths: tuple[str, ...]
    arguments: tuple[Argument, ...] = ()
    argument_of: dict[Place, str] = field(default_factory=dict)

    def values(self, path: str) -> tuple[Any, ...]:
        return tuple(argument.values[path] for argument in self.arguments)


@dataclass(frozen=True, slots=True)
class Classes:
    """All classes of a file, children before parents, and the class of each instance."""

    ordered: tuple[ModuleClass, ...]
    of_path: Mapping[str, ModuleClass]


def classify(
    capture: Capture, stage: Body, canonicalizer: Canonicalizer, taken: Iterable[str]
) -> Classes:
    """The classes that a stage needs. Raises Conflict for a module called in two ways."""
    groups: dict[Hashable, list[Canonical]] = defaultdict(list)
    group_of_path: dict[str, Hashable] = {}

    def collect(body: Body) -> None:
        for call in calls_in(body.items):
            collect(call.body)
            canonical = canonicalizer.canonical(call.body)
            known = group_of_path.setdefault(call.call.path, canonical.key)
            if known != canonical.key:
                raise Conflict([call.call.path])
            groups[canonical.key].append(canonical)

    collect(stage)
    names = _class_names(groups, set(taken))
    of_path: dict[str, ModuleClass] = {}
    ordered = []
    for key, members in groups.items():
        paths = tuple(dict.fromkeys(member.body.path for member in members))
        made = ModuleClass(names[key], members[0], paths)
        _find_arguments(capture, made, members, of_path)
        of_path |= dict.fromkeys(paths, made)
        ordered.append(made)
    return Classes(tuple(ordered), of_path)


def _class_names(
    groups: Mapping[Hashable, list[Canonical]], taken: set[str]
) -> dict[Hashable, str]:
    names = {}
    for key, members in groups.items():
        stem = name = members[0].body.type_name
        count = 1
        while name in taken:
            count += 1
            name = f"{stem}{count}" if not stem[-1].isdigit() else f"{stem}_{count}"
        taken.add(name)
        names[key] = name
    return names


def _find_arguments(
    capture: Capture,
    made: ModuleClass,
    members: list[Canonical],
    of_path: Mapping[str, ModuleClass],
) -> None:
    """Finds the numbers that differ between instances; equal rows of values are one argument."""
    rows = [_numbers(member, of_path) for member in members]
    columns: dict[tuple[Any, ...], list[Number]] = {}
    for numbers in zip(*rows, strict=True):
        values = tuple((type(number.value), number.value) for number in numbers)
        by_path: dict[str, Any] = {}
        for member, value in zip(members, values, strict=True):
            if by_path.setdefault(member.body.path, value) != value:
                raise Conflict([member.body.path])
        if len(set(values)) > 1:
            columns.setdefault(values, []).append(numbers[0])
    arguments = []
    own = capture.model.get_submodule(made.paths[0])
    taken = {"self", "training", *own._modules, *own._parameters, *own._buffers}
    for values, numbers_ in columns.items():
        name = _argument_name(capture, members, values, numbers_, taken)
        taken.add(name)
        by_path = {
            member.body.path: value for member, (_, value) in zip(members, values, strict=True)
        }
        kinds = dict.fromkeys(_type_name(value) for _, value in values)
        arguments.append(Argument(name, " | ".join(kinds), by_path))
        made.argument_of |= {number.place: name for number in numbers_}
    made.arguments = tuple(_in_original_order(capture, made, arguments))


def _numbers(member: Canonical, of_path: Mapping[str, ModuleClass]) -> list[Number]:
    children = [
        Number(Place(argument.name, member=call.call.path), value, argument.name)
        for call in member.children
        for argument, value in zip(
            of_path[call.call.path].arguments,
            of_path[call.call.path].values(call.call.path),
            strict=True,
        )
    ]
    return [*member.numbers, *children]


def _type_name(value: Any) -> str:
    if isinstance(value, tuple):
        return "tuple[int, ...]"
    return type(value).__name__


def _argument_name(
    capture: Capture,
    members: list[Canonical],
    values: tuple[Any, ...],
    numbers: list[Number],
    taken: set[str],
) -> str:
    """What the original calls a number: an attribute of the module, else the argument of the
    leaf that takes it."""
    modules = [capture.model.get_submodule(member.body.path) for member in members]
    attributes = [
        name
        for name, value in vars(modules[0]).items()
        if is_name(name) and not name.startswith("_") and isinstance(value, (int, float))
    ]
    for name in attributes:
        own = tuple((type(value), value) for value in (getattr(m, name, None) for m in modules))
        if own == values and name not in taken:
            return name
    for number in numbers:
        path = number.place.member.rpartition(".")[2]
        if number.name in ("", "size"):
            continue
        for name in (number.name, f"{path}_{number.name}"):
            if name not in taken and is_name(name):
                return name
    stem = next((n.place.member.rpartition(".")[2] for n in numbers if n.place.member), "")
    stem = f"{stem}_size" if stem and is_name(stem) else "value"
    name, count = stem, 1
    while name in taken:
        count += 1
        name = f"{stem}_{count}"
    return name


def _in_original_order(
    capture: Capture, made: ModuleClass, arguments: list[Argument]
) -> list[Argument]:
    """Attributes of the original first, in the order in which it sets them."""
    order = list(vars(capture.model.get_submodule(made.paths[0])))
    position = {argument.name: place for place, argument in enumerate(arguments)}
    return sorted(
        arguments,
        key=lambda item: (
            order.index(item.name) if item.name in order else len(order),
            position[item.name],
        ),
    )
