"""One stage graph -> the text of its file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ...runtime.reports.rendering import TEMPLATES
from ..capture import Capture
from ..split.split import StageGraph, names_of_outputs
from .canonical import Canonicalizer
from .classes import (
    Classes,
    ModuleClass,
    PartialClass,
    PartialClasses,
    classify,
    ties,
    train_method,
)
from .documentation import Header, index_card
from .forward_method import Forward, write_forward
from .init_method import Scope
from .items import Body, Conflict
from .layout import WIDTH, Code, call, class_name, fits_docstring, lay_out, write_imports
from .structure import build, build_flat


@dataclass(frozen=True, slots=True)
class StageText:
    """The text of a stage's file, and the names of the values that the stage returns."""

    text: str
    names: Mapping[fx.Node, str]


@dataclass(frozen=True, slots=True)
class ClassText:
    """One class, in the parts that the template lays out."""

    name: str
    summary: str
    annotations: tuple[str, ...]
    init_signature: str
    init_lines: tuple[str, ...]
    forward: Forward | None
    train: tuple[str, ...] = ()

    @property
    def methods(self) -> tuple[Forward, ...]:
        return () if self.forward is None else (self.forward, *self.forward.helpers)


class StageWriter:
    """Writes the files of one folder."""

    def __init__(
        self,
        capture: Capture,
        stages: Sequence[StageGraph],
        header: Header,
        *,
        is_flat: bool = False,
    ) -> None:
        self._is_flat = is_flat
        self._capture = capture
        self._stages = stages
        self._header = header
        self._canonicalizer = Canonicalizer(capture)

    def write(self, stage: StageGraph, names: Mapping[fx.Node, str]) -> StageText:
        """The file of one stage; `names` are the names that earlier stages give its inputs.

        Modules that cannot be classes are written out where they are called.
        """
        flat: frozenset[str] = frozenset()
        while True:
            try:
                return self._write(stage, names, flat)
            except Conflict as conflict:
                assert not conflict.paths <= flat, conflict.paths
                flat |= conflict.paths

    def _write(
        self, stage: StageGraph, names: Mapping[fx.Node, str], flat: frozenset[str]
    ) -> StageText:
        if self._is_flat:
            body = build_flat(stage)
        else:
            body = build(self._capture, stage, self._is_same, flat, names)
        name = f"Stage{stage.index}"
        used_names = {name, *_RESERVED, *self._canonicalizer.imported_classes}
        classes = classify(self._capture, body, self._canonicalizer, used_names)
        parts = PartialClasses(used_names | {module_class.name for module_class in classes.ordered})
        texts: list[ClassText] = []
        imports: set[tuple[str, str]] = set()
        scopes: dict[ModuleClass, Scope] = {}
        for module_class in classes.ordered:
            texts += self._class(module_class, classes, parts, scopes, imports)

        known = len(parts.ordered)
        scope = Scope(self._capture, self._canonicalizer.canonical(body), classes, parts, scopes)
        forward = write_forward(
            self._capture,
            body,
            scope,
            is_stage=True,
            is_flat=self._is_flat,
            output_names=names_of_outputs(self._capture),
        )
        tied = [
            _tie(scope.access_typed(name), scope.access_typed(owner))
            for name, owner in ties(self._capture, self._canonicalizer, body)
        ]
        texts += map(_part_text, parts.ordered[known:])
        train = train_method(self._capture, stage)
        imports |= {("typing", "Self")} if train else set()
        texts.append(
            ClassText(
                name=name,
                summary=self._stage_summary(stage),
                annotations=scope.annotations,
                init_signature=_init_signature(()),
                init_lines=(*scope.lines, *tied, *(("        self.train()",) if train else ())),
                forward=forward,
                train=train,
            )
        )
        imports |= scope.imports | forward.imports
        card = index_card(
            self._capture, self._stages, stage, self._header, forward.arguments, forward.results
        )
        return StageText(
            _render(card, texts, imports), dict(zip(stage.outputs, forward.results, strict=True))
        )

    def _is_same(self, body: Body, other: Body) -> bool:
        canonical = self._canonicalizer.canonical
        return canonical(body).key == canonical(other).key

    def _class(
        self,
        module_class: ModuleClass,
        classes: Classes,
        parts: PartialClasses,
        scopes: dict[ModuleClass, Scope],
        imports: set[tuple[str, str]],
    ) -> Iterable[ClassText]:
        """A class, after the classes without a forward that it needs."""
        known = len(parts.ordered)
        scope = scopes[module_class] = Scope(
            self._capture, module_class.canonical, classes, parts, scopes, module_class.argument_of
        )
        forward = write_forward(
            self._capture, module_class.canonical.body, scope, module_class.argument_of
        )
        attributes = [
            f"        self.{argument.name} = {argument.name}"
            for argument in module_class.arguments
            if argument.name in forward.used_arguments
        ]
        imports |= scope.imports | forward.imports
        yield from map(_part_text, parts.ordered[known:])
        yield ClassText(
            name=module_class.name,
            summary=self._class_summary(module_class),
            annotations=scope.annotations,
            init_signature=_init_signature(
                [f"{argument.name}: {argument.type_name}" for argument in module_class.arguments]
            ),
            init_lines=(*attributes, *scope.lines),
            forward=forward,
        )

    # --- docstrings -------------------------------------------------------------------------

    def _stage_summary(self, stage: StageGraph) -> str:
        position = f"Stage {stage.index} of {len(self._stages)}"
        return _fitting(
            f"{position}; parameter names are those of {self._header.model}.", f"{position}."
        )

    def _class_summary(self, module_class: ModuleClass) -> str:
        """`GPT2Attention (transformers.models.gpt2.modeling_gpt2): transformer.h.*.attn.`"""
        kind = type(self._capture.model.get_submodule(module_class.paths[0]))
        patterns = list(
            dict.fromkeys(_pattern(path, len(module_class.paths)) for path in module_class.paths)
        )
        more = f" and {len(patterns) - 1} more" if len(patterns) > 1 else ""
        homes = (f" ({kind.__module__})", f" ({kind.__module__.rpartition('.')[2]})", "")
        return _fitting(
            *(f"{kind.__name__}{home}: {patterns[0]}{more}." for home in homes),
            f"{class_name(kind.__name__)} of the original.",
        )


_RESERVED = ("Tensor", "nn", "F", "torch", "math", "operator", "cast", "OrderedDict")


def _tie(name: str, owner: str) -> str:
    """The statement that ties a module or parameter to its owner."""
    if called := re.fullmatch(r"(.+)\.get_(submodule|parameter)\(([^.]+)\)", name):
        adder = "add_module" if called[2] == "submodule" else "register_parameter"
        added = call(f"{called[1]}.{adder}", (Code(called[3]), Code(owner)))
        return lay_out("", added, indent=8)
    return lay_out(f"{name} = ", Code(owner), indent=8)


def _fitting(*texts: str) -> str:
    """The first docstring that fits on a line, else the last."""
    fitting = (text for text in texts if len(text) + 10 <= WIDTH and fits_docstring(text))
    return next(fitting, texts[-1])


def _pattern(path: str, count: int) -> str:
    return path if count == 1 else re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _part_text(part: PartialClass) -> ClassText:
    return ClassText(
        name=part.name,
        summary=_fitting(
            f"The part of {part.path} that this stage holds.", "A part of a module of the original."
        ),
        annotations=part.annotations,
        init_signature=_init_signature(()),
        init_lines=part.lines,
        forward=None,
    )


def _init_signature(arguments: Sequence[str]) -> str:
    signature = call("def __init__", (Code("self"), *map(Code, arguments)))
    return lay_out("", signature, " -> None:", indent=4)


def _render(card: str, classes: list[ClassText], imports: set[tuple[str, str]]) -> str:
    template = TEMPLATES.get_template("stage.py.j2")
    draft = template.render(header=card, imports=(), classes=classes)
    return template.render(header=card, imports=write_imports(draft, imports), classes=classes)
