"""Canonical bodies -> the classes of a generated file, one for each distinct structure.

The numbers in which the instances of a class differ become arguments of its constructor, named
after the attributes of the original module that hold them.

Besides these, the module makes the parts of a class that no forward shows:

- classes without a forward, for containers of which a stage holds only some members
- a `train` method for modules whose mode differs from the mode of the model. A detector freezes
  its batch norms by overriding `train`: they stay in evaluation mode while the rest is trained.
  The stage overrides it too.
- the assignments that tie the tensors of a stage that are one tensor in the original
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..capture import Capture
from ..models.torch_modules import is_torch_leaf
from ..split.split import StageGraph
from .canonical import BodyNumber, Canonical, Canonicalizer, NumberPlace, calls_in
from .items import Body, Conflict
from .layout import Code, bracket, class_name, is_name, lay_out, quoted


@dataclass(frozen=True, slots=True)
class ConstructorArgument:
    """An argument of a constructor: its name, its type, and its values by instance path."""

    name: str
    type_name: str
    values: Mapping[str, Any]


@dataclass(slots=True, eq=False)
class ModuleClass:
    """A class of the file.

    name: the name of the class
    canonical: the body of the representative, the instance from which the class is written
    paths: the instances of the class
    arguments: the arguments of the constructor
    argument_of: the names of arguments by their places in the representative
    """

    name: str
    canonical: Canonical
    paths: tuple[str, ...]
    arguments: tuple[ConstructorArgument, ...] = ()
    argument_of: dict[NumberPlace, str] = field(default_factory=dict)

    def values(self, path: str) -> tuple[Any, ...]:
        return tuple(argument.values[path] for argument in self.arguments)


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of a file.

    ordered: all classes, children before parents
    of_path: the class of each instance
    """

    ordered: tuple[ModuleClass, ...]
    of_path: Mapping[str, ModuleClass]


def classify(
    capture: Capture, stage: Body, canonicalizer: Canonicalizer, used_names: Iterable[str]
) -> Classes:
    """The classes that a stage needs. Raises Conflict for a module that is called in two ways."""
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
    names = _class_names(groups, set(used_names))
    of_path: dict[str, ModuleClass] = {}
    ordered = []
    for key, members in groups.items():
        paths = tuple(dict.fromkeys(member.body.path for member in members))
        module_class = ModuleClass(names[key], members[0], paths)
        _find_arguments(capture, module_class, members, of_path)
        of_path |= dict.fromkeys(paths, module_class)
        ordered.append(module_class)
    return Classes(tuple(ordered), of_path)


def _class_names(groups: Mapping[Hashable, list[Canonical]], used: set[str]) -> dict[Hashable, str]:
    names = {}
    for key, members in groups.items():
        stem = name = members[0].body.type_name
        count = 1
        while name in used:
            count += 1
            name = f"{stem}{count}" if not stem[-1].isdigit() else f"{stem}_{count}"
        used.add(name)
        names[key] = name
    return names


def _find_arguments(
    capture: Capture,
    module_class: ModuleClass,
    members: list[Canonical],
    of_path: Mapping[str, ModuleClass],
) -> None:
    """Finds the numbers that differ between instances; equal rows of values are one argument."""
    rows = [_numbers(member, of_path) for member in members]
    columns: dict[tuple[Any, ...], list[BodyNumber]] = {}
    for numbers in zip(*rows, strict=True):
        values = tuple((type(number.value), number.value) for number in numbers)
        by_path: dict[str, Any] = {}
        for member, value in zip(members, values, strict=True):
            if by_path.setdefault(member.body.path, value) != value:
                raise Conflict([member.body.path])
        if len(set(values)) > 1:
            columns.setdefault(values, []).append(numbers[0])
    arguments = []
    own = capture.model.get_submodule(module_class.paths[0])
    used = {"self", "training", *own._modules, *own._parameters, *own._buffers}
    for values, numbers_ in columns.items():
        name = _argument_name(capture, members, values, numbers_, used)
        used.add(name)
        by_path = {
            member.body.path: value for member, (_, value) in zip(members, values, strict=True)
        }
        kinds = dict.fromkeys(_type_name(value) for _, value in values)
        arguments.append(ConstructorArgument(name, " | ".join(kinds), by_path))
        module_class.argument_of |= {number.place: name for number in numbers_}
    module_class.arguments = tuple(_in_original_order(capture, module_class, arguments))


def _numbers(member: Canonical, of_path: Mapping[str, ModuleClass]) -> list[BodyNumber]:
    children = [
        BodyNumber(NumberPlace(argument.name, member=call.call.path), value, argument.name)
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
    numbers: list[BodyNumber],
    used: set[str],
) -> str:
    """The name of a number in the original: an attribute of the module, else the argument of the
    leaf that takes it."""
    modules = [capture.model.get_submodule(member.body.path) for member in members]
    attributes = [
        name
        for name, value in vars(modules[0]).items()
        if is_name(name) and not name.startswith("_") and isinstance(value, (int, float))
    ]
    for name in attributes:
        own = tuple((type(value), value) for value in (getattr(m, name, None) for m in modules))
        if own == values and name not in used:
            return name
    for number in numbers:
        path = number.place.member.rpartition(".")[2]
        if number.name in ("", "size"):
            continue
        for name in (number.name, f"{path}_{number.name}"):
            if name not in used and is_name(name):
                return name
    stem = next((n.place.member.rpartition(".")[2] for n in numbers if n.place.member), "")
    stem = f"{stem}_size" if stem and is_name(stem) else "value"
    name, count = stem, 1
    while name in used:
        count += 1
        name = f"{stem}_{count}"
    return name


def _in_original_order(
    capture: Capture, module_class: ModuleClass, arguments: list[ConstructorArgument]
) -> list[ConstructorArgument]:
    """Sorts attributes of the original first, in the order in which the original sets them."""
    order = list(vars(capture.model.get_submodule(module_class.paths[0])))
    position = {argument.name: place for place, argument in enumerate(arguments)}
    return sorted(
        arguments,
        key=lambda item: (
            order.index(item.name) if item.name in order else len(order),
            position[item.name],
        ),
    )


@dataclass(frozen=True, slots=True)
class PartialClass:
    """A class without a forward: a container of which the stage holds only some members."""

    name: str
    path: str
    annotations: tuple[str, ...]
    lines: tuple[str, ...]


class PartialClasses:
    """The classes without a forward of one file; equal containers share a class."""

    def __init__(self, used: set[str]) -> None:
        self._taken = used
        self._parts: dict[tuple[object, ...], PartialClass] = {}

    def add(self, type_name: str, path: str, annotations: Sequence[str], lines: list[str]) -> str:
        key = (type_name, *annotations, *lines)
        if key not in self._parts:
            stem = name = f"{class_name(type_name)}Part"
            count = 1
            while name in self._taken:
                count += 1
                name = f"{stem}{count}"
            self._taken.add(name)
            self._parts[key] = PartialClass(name, path, tuple(annotations), tuple(lines))
        return self._parts[key].name

    @property
    def ordered(self) -> tuple[PartialClass, ...]:
        return tuple(self._parts.values())


_MODES = {(False, False): "False", (True, True): "True", (False, True): "not mode"}
_SAYS = {
    "False": "evaluation mode",
    "True": "training mode",
    "not mode": "the opposite mode",
}


def train_method(capture: Capture, stage: StageGraph) -> tuple[str, ...]:
    """The lines of `train` for a stage; empty where all of its modules follow the mode."""
    modules = dict(_modules(capture, stage))
    unlike: dict[str, list[str]] = defaultdict(list)
    for path in modules:
        if path in capture.flags:
            unlike[_MODES[capture.flags[path]]].append(path)
    if not unlike:
        return ()
    modes = " and ".join(_SAYS[mode] for mode in unlike)
    return (
        "    def train(self, mode: bool = True) -> Self:",
        f'        """Keeps modules in {modes}, as the original does."""',
        "        super().train(mode)",
        *(line for mode, paths in unlike.items() for line in _loop(modules, paths, mode)),
        "        return self",
    )


def _modules(capture: Capture, stage: StageGraph) -> Iterator[tuple[str, nn.Module]]:
    """The modules that the stage calls as a whole, and the modules in them, by path."""
    called = dict.fromkeys(str(node.target) for node in stage.nodes if node.op == "call_module")
    for path in called:
        for inner, module in capture.model.get_submodule(path).named_modules():
            yield f"{path}.{inner}" if inner else path, module


def _loop(modules: Mapping[str, nn.Module], paths: Sequence[str], mode: str) -> Iterable[str]:
    """Selects by class where all modules of those classes are in the mode, else by name."""
    kinds = dict.fromkeys(type(modules[path]) for path in paths)
    alike = [path for path, module in modules.items() if isinstance(module, tuple(kinds))]
    if len(alike) > 1 and alike == list(paths) and all(is_torch_leaf(modules[p]) for p in paths):
        names = " | ".join(f"nn.{kind.__name__}" for kind in kinds)
        yield "        for module in self.modules():"
        yield f"            if isinstance(module, {names}):"
        yield f"                module.training = {mode}"
    elif len(paths) == 1:
        yield f"        self.get_submodule({quoted(paths[0])}).training = {mode}"
    else:
        listed = bracket("(", tuple(Code(quoted(path)) for path in paths), ")")
        yield lay_out("for path in ", listed, ":", indent=8)
        yield f"            self.get_submodule(path).training = {mode}"


def ties(capture: Capture, canonicalizer: Canonicalizer, stage: Body) -> list[tuple[str, str]]:
    """Pairs `(name, name of the owner)` of modules with tensors, then of parameters, that are the
    same object within a stage; the owner is the first in the order of the model."""
    leaves = set(_leaves(canonicalizer, stage))
    modules = [
        (path, module)
        for path, module in capture.model.named_modules(remove_duplicate=False)
        if path in leaves and any(True for _ in (*module.parameters(), *module.buffers()))
    ]
    tied_modules = _pairs(modules)
    tied = tuple(f"{path}." for path, _ in tied_modules)
    parameter_names = set(_parameters(capture, canonicalizer, stage))
    parameters = [
        (name, parameter)
        for name, parameter in capture.model.named_parameters(remove_duplicate=False)
        if name in parameter_names and not name.startswith(tied)
    ]
    return tied_modules + _pairs(parameters)


def _pairs(named: Sequence[tuple[str, object]]) -> list[tuple[str, str]]:
    owners: dict[int, str] = {}
    pairs = []
    for name, value in named:
        owner = owners.setdefault(id(value), name)
        if owner != name:
            pairs.append((name, owner))
    return pairs


def _leaves(canonicalizer: Canonicalizer, body: Body) -> Iterator[str]:
    canonical = canonicalizer.canonical(body)
    yield from (leaf.path for leaf in canonical.leaves)
    for child in canonical.children:
        yield from _leaves(canonicalizer, child.body)


def _parameters(capture: Capture, canonicalizer: Canonicalizer, body: Body) -> Iterator[str]:
    canonical = canonicalizer.canonical(body)
    for leaf in canonical.leaves:
        module = capture.model.get_submodule(leaf.path)
        for name, _ in module.named_parameters():
            yield f"{leaf.path}.{name}"
    for member in canonical.tensors:
        if member.is_parameter:
            yield member.path
    for child in canonical.children:
        yield from _parameters(capture, canonicalizer, child.body)
