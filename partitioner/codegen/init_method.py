"""The parts of its module that a class uses -> the lines of `__init__`, and access from forward.

Names are those of the original, so that parameters keep theirs. A list of which a stage holds
only some items becomes an nn.ModuleDict with the numbers of the items as keys; any other container
of which the stage uses only parts becomes a small class without a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...runtime.tensor_parallel.layers import shared_module, split_module, split_parameter
from ...runtime.tensor_parallel.ranks import Split
from ..capture import Capture
from ..capture.leaf_modules import Constructor
from ..models.builtin import configuration_arguments, is_configuration
from . import constants
from .canonical import Canonical, MemberTensor, NumberPlace
from .classes import Classes, ModuleClass, PartialClasses
from .constants import write_constant
from .items import Conflict
from .layout import Code, bracket, call, is_name, lay_out, listing, mapping, named, prefixed, quoted


@dataclass(slots=True)
class Member:
    """One name below `self`: a leaf, an instance of a class, a tensor, or a container.

    path: the name in the original
    leaf: the constructor of a leaf
    instance: the class of an instance
    tensor: a parameter or buffer
    children: the members of a container
    """

    path: str
    leaf: Constructor | None = None
    instance: ModuleClass | None = None
    tensor: MemberTensor | None = None
    children: dict[str, Member] = field(default_factory=dict)


class Scope:
    """`self` of one class: its members, in the order of the original."""

    def __init__(
        self,
        capture: Capture,
        canonical: Canonical,
        classes: Classes,
        parts: PartialClasses,
        scopes: Mapping[ModuleClass, Scope],
        argument_of: Mapping[NumberPlace, str] | None = None,
    ) -> None:
        self._capture = capture
        self._base = canonical.body.path
        self._parts = parts
        self._scopes = scopes
        self._argument_of = argument_of or {}
        self._imports: set[tuple[str, str]] = set()
        self._root = Member(self._base)
        for child in canonical.children:
            self._place(child.call.path).instance = classes.of_path[child.call.path]
        for leaf in canonical.leaves:
            self._place(leaf.path).leaf = leaf.constructor
        for tensor in canonical.tensors:
            self._place(tensor.path).tensor = tensor
        self._verify(self._root)
        self._part_of: dict[str, str] = {}
        self.lines = (
            *self._assignments(self._root),
            *(
                f"        {_within(self.access(leaf.path), name.split('.'))}.requires_grad_(False)"
                for leaf in canonical.leaves
                for name in leaf.constructor.frozen_names
            ),
        )

    def _relative(self, path: str) -> list[str]:
        start = len(self._base) + 1 if self._base else 0
        return path[start:].split(".")

    def _path(self, names: Sequence[str]) -> str:
        return ".".join([self._base, *names] if self._base else names)

    def _place(self, path: str) -> Member:
        member = self._root
        for name in self._relative(path):
            inside = f"{member.path}.{name}" if member.path else name
            if member.instance is not None:
                return Member(inside)  # the class of the instance holds it, or `_verify` objects
            member = member.children.setdefault(name, Member(inside))
        return member

    def _verify(self, member: Member) -> None:
        if member.instance is not None and member.children:
            raise Conflict([member.path])
        for child in member.children.values():
            self._verify(child)

    def has(self, name: str) -> bool:
        """Returns whether `self.name` is a part of the module or an argument of its constructor."""
        return name in self._root.children or name in self._argument_of.values()

    # --- reaching a member ------------------------------------------------------------------

    def access(self, path: str, handles: Mapping[str, str] | None = None) -> str:
        """The expression for the module or tensor that the original calls `path`; `handles` are
        variables that hold modules, by path."""
        text, member = "self", self._root
        names = self._relative(path)
        for position, name in enumerate(names):
            text = (handles or {}).get(member.path, text)
            if member.instance is not None:
                scope = self._scopes[member.instance]
                return text + scope.access(scope._path(names[position:])).removeprefix("self")
            if member.leaf is not None:
                return _within(text, names[position:])
            if name not in member.children:
                raise Conflict([self._base or member.path])
            text += self._step(member, name)
            member = member.children[name]
        return (handles or {}).get(member.path, text)

    def opened_items(self, path: str, *, is_opened: bool) -> Iterator[tuple[str, str]]:
        """The items of lists and the members whose names are not Python's on the way to `path`,
        outermost first, each with its type; includes `path` itself if it `is_opened`. A type
        checker knows only that each is a module."""
        member = self._root
        names = self._relative(path)
        for position, name in enumerate(names):
            is_item = not is_name(name) or self._kind(member) in ("list", "dict", "ordered")
            if name not in member.children:
                return
            member = member.children[name]
            if is_item and (is_opened or position + 1 < len(names)):
                if type_name := self._annotation(member):
                    yield member.path, type_name

    def _annotation(self, member: Member) -> str:
        """The type of a member in generated code; empty for a tensor."""
        if member.instance is not None:
            return member.instance.name
        if member.leaf is not None:
            return member.leaf.name
        if member.tensor is not None:
            return ""
        module = self._capture.model.get_submodule(member.path)
        match self._kind(member):
            case "class":
                return self._part_of.get(member.path, "")
            case "ordered":
                return "nn.Sequential"
            case "list" if isinstance(module, nn.Sequential):
                return "nn.Sequential"
            case "list":
                return "nn.ParameterList" if _holds_tensors(member) else "nn.ModuleList"
        return "nn.ParameterDict" if _holds_tensors(member) else "nn.ModuleDict"

    def access_typed(self, path: str) -> str:
        """`access` where no variable can hold the modules on the way: casts stand inside."""
        handles: dict[str, str] = {}
        for item, type_name in self.opened_items(path, is_opened=False):
            self._imports.add(("typing", "cast"))
            handles[item] = f"cast({type_name}, {self.access(item, handles)})"
        return self.access(path, handles)

    def type_name(self, path: str) -> str:
        return type(self._capture.model.get_submodule(path)).__name__

    def _step(self, member: Member, name: str) -> str:
        match self._kind(member):
            case "list":
                return f"[{name}]"
            case "dict":
                return f"[{quoted(name)}]"
            case "ordered":
                # A type checker takes its attributes for tensors or modules.
                module = self._capture.model.get_submodule(member.path)
                return f"[{list(module._modules).index(name)}]"
        tensor = member.children[name].tensor
        kind = "submodule" if tensor is None else "parameter" if tensor.is_parameter else "buffer"
        return f".{name}" if is_name(name) else f".get_{kind}({quoted(name)})"

    def _member(self, path: str) -> Member:
        """The member that the original calls `path`, which the class of an instance may hold."""
        member = self._root
        names = self._relative(path)
        for position, name in enumerate(names):
            if member.instance is not None:
                scope = self._scopes[member.instance]
                return scope._member(scope._path(names[position:]))
            if name not in member.children:
                raise Conflict([self._base or member.path])
            member = member.children[name]
        return member

    def iterate(self, paths: Sequence[str], text: str) -> tuple[str, str]:
        """`(iterable, item)` for a loop over siblings in the list `text`: the item is empty if
        the iterable gives the modules themselves, else it is their expression by `index`."""
        parent = paths[0].rpartition(".")[0]
        member = self._member(parent)
        first, last = (int(path.rpartition(".")[2]) for path in (paths[0], paths[-1]))
        if self._kind(member) == "list":
            if len(paths) == len(member.children):
                return text, ""
            start = str(first) if first else ""
            stop = str(last + 1) if last + 1 < len(member.children) else ""
            if isinstance(self._capture.model.get_submodule(parent), nn.Sequential):
                text = f"list({text})"  # to a type checker its slice may be a module
            return f"{text}[{start}:{stop}]", ""
        if list(member.children) == [path.rpartition(".")[2] for path in paths]:
            return (text if self._kind(member) == "ordered" else f"{text}.values()"), ""
        return f"range({first}, {last + 1})", f"{text}[str(index)]"

    # --- writing __init__ -------------------------------------------------------------------

    @property
    def imports(self) -> frozenset[tuple[str, str]]:
        return frozenset(self._imports)

    @property
    def annotations(self) -> tuple[str, ...]:
        return self._annotations(self._root)

    def _annotations(self, member: Member) -> tuple[str, ...]:
        """Annotations of buffers, which a type checker cannot see."""
        return tuple(
            name
            for name, child in self._ordered(member)
            if child.tensor is not None and not child.tensor.is_parameter and is_name(name)
        )

    def _assignments(self, member: Member) -> list[str]:
        return [self._assignment(name, child) for name, child in self._ordered(member)]

    def _ordered(self, member: Member) -> list[tuple[str, Member]]:
        module = self._capture.model.get_submodule(member.path)
        order = [*module._parameters, *module._buffers, *module._modules]
        rank = {name: place for place, name in enumerate(order)}
        return sorted(
            member.children.items(), key=lambda item: (rank.get(item[0], len(rank)), item[0])
        )

    def _assignment(self, name: str, member: Member) -> str:
        tensor = member.tensor
        if not is_name(name) and (tensor is None or tensor.is_parameter):
            items = (Code(quoted(name)), self._expression(member))
            adder = "self.add_module" if tensor is None else "self.register_parameter"
            return lay_out("", call(adder, items), indent=8)
        if tensor is None or tensor.is_parameter:
            return lay_out(f"self.{name} = ", self._expression(member), indent=8)
        arguments = [Code(quoted(name)), self._buffer(tensor)]
        arguments += [] if tensor.is_persistent else [Code("persistent=False")]
        return lay_out("", call("self.register_buffer", tuple(arguments)), indent=8)

    def _expression(self, member: Member) -> Code:
        if member.leaf is not None:
            return self._constructor(member.path, member.leaf)
        if member.instance is not None:
            instance = member.instance
            named = zip(instance.arguments, instance.values(member.path), strict=True)
            values = [
                (argument.name, self._number(NumberPlace(argument.name, member=member.path), value))
                for argument, value in named
            ]
            # A call with more than two bare numbers would be hard to read.
            bare = len(values) <= 2
            items = tuple(code if bare else prefixed(f"{name}=", code) for name, code in values)
            return call(instance.name, items)
        if member.tensor is not None:
            return self._parameter(member.tensor)
        return self._container(member)

    def _number(self, place: NumberPlace, value: object) -> Code:
        name = self._argument_of.get(place)
        return Code(name) if name else write_constant(value)

    def _argument(self, place: NumberPlace, value: object) -> Code:
        if not is_configuration(value):
            return self._number(place, value)
        kind = type(value)
        self._imports.add((kind.__module__, kind.__qualname__))
        fields = configuration_arguments(value) or {}
        items = [named(name, self._argument(place, field)) for name, field in fields.items()]
        return call(kind.__qualname__, tuple(items))

    def _constructor(self, path: str, constructor: Constructor) -> Code:
        if not constructor.name.startswith("nn."):
            self._imports.add((constructor.type.__module__, constructor.type.__qualname__))
        items: list[Code] = []
        for argument in constructor.arguments:
            place = NumberPlace(argument.name, member=path)
            if argument.is_default and place not in self._argument_of:
                continue
            value = self._argument(place, argument.value)
            is_positional = argument.is_positional and len(items) < 2
            items.append(value if is_positional else named(argument.name, value))
        tail = ").requires_grad_(False)" if constructor.frozen else ")"
        built = bracket(f"{constructor.name}(", tuple(items), tail)
        if constructor.is_shared:
            return self._call_of(shared_module, built)
        if constructor.split is None:
            return built
        return self._call_of(split_module, built, *_options(constructor.split, usual_dim=0))

    def _call_of(self, function: Callable[..., Any], *arguments: Code) -> Code:
        self._imports.add((function.__module__, function.__name__))
        return call(function.__name__, arguments)

    def _parameter(self, tensor: MemberTensor) -> Code:
        inside: tuple[Code, ...] = (self._empty(tensor),)
        if not tensor.value.requires_grad:
            inside += (Code("requires_grad=False"),)
        if tensor.split is None:
            return call("nn.Parameter", inside)
        return self._call_of(split_parameter, *inside, *_options(tensor.split))

    def _buffer(self, tensor: MemberTensor) -> Code:
        expression = None if tensor.is_persistent else constants.rebuild(tensor.value)
        return expression or self._empty(tensor)

    def _empty(self, tensor: MemberTensor) -> Code:
        shape = tuple(
            self._number(NumberPlace(dimension, member=tensor.path), length)
            for dimension, length in enumerate(tensor.value.shape)
        )
        return constants.empty(shape, tensor.value.dtype)

    # --- containers -------------------------------------------------------------------------

    def _kind(self, member: Member) -> str:
        """The form that a container takes: `list`, `dict`, `ordered` or `class`."""
        module = self._capture.model.get_submodule(member.path)
        if member.path == self._base:
            return "class"
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ParameterList)):
            names = [name for name, _ in self._ordered(member)]
            if names == [str(index) for index in range(len(names))]:
                return "list"
            if isinstance(module, nn.Sequential) and names == list(module._modules):
                return "ordered"
            return "dict" if all(name.isdigit() for name in names) else "class"
        return "dict" if isinstance(module, (nn.ModuleDict, nn.ParameterDict)) else "class"

    def _container(self, member: Member) -> Code:
        module = self._capture.model.get_submodule(member.path)
        children = [(name, self._expression(child)) for name, child in self._ordered(member)]
        match self._kind(member):
            case "list" if isinstance(module, nn.Sequential):
                return call("nn.Sequential", tuple(code for _, code in children))
            case "ordered":
                self._imports.add(("collections", "OrderedDict"))
                if all(is_name(name) for name, _ in children):
                    pairs = tuple(prefixed(f"{name}=", code) for name, code in children)
                    return call("nn.Sequential", (call("OrderedDict", pairs),))
                return call("nn.Sequential", (mapping("OrderedDict({", children),))
            case "list":
                return listing(f"{self._annotation(member)}([", [code for _, code in children])
            case "dict":
                return mapping(f"{self._annotation(member)}({{", children)
        lines = self._assignments(member)
        return call(self._part(member, lines), ())

    def _part(self, member: Member, lines: list[str]) -> str:
        # Its constructor takes no arguments, so it cannot be written from those of a class.
        if any(place.member.startswith(f"{member.path}.") for place in self._argument_of):
            raise Conflict([self._base])
        module = self._capture.model.get_submodule(member.path)
        name = self._parts.add(type(module).__name__, member.path, self._annotations(member), lines)
        self._part_of[member.path] = name
        return name


def _options(split: Split, usual_dim: int | None = None) -> list[Code]:
    """The keyword arguments that describe a split."""
    dim = [] if split.dim == usual_dim else [named("dim", write_constant(split.dim))]
    groups = [named("groups", write_constant(split.groups))] if split.groups != 1 else []
    uneven = [Code("uneven=True")] if split.length is not None else []
    return dim + groups + uneven


def _within(text: str, names: Sequence[str]) -> str:
    """The expression for a name inside the module `text`, whose class is not generated."""
    for name in names:
        text = f"{text}.{name}" if is_name(name) else f"getattr({text}, {quoted(name)})"
    return text


def _holds_tensors(member: Member) -> bool:
    return all(child.tensor is not None for child in member.children.values())
