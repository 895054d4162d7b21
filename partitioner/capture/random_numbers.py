"""Draws of Python's and NumPy's random numbers during a trace -> calls of the tracer.

A number that Python draws is no tensor: unseen, the number of the example would be the number for
ever. While a trace lasts, the functions of `random` and of `np.random` report to the tracer,
wherever a module imported them to. What is drawn by other generators is refused at its line, and
what is drawn on ways that no patch reaches is seen in the state of the generators afterwards.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any, Protocol

import numpy as np
import sympy
import torch
from torch import nn

from ...runtime.errors import CaptureError
from ...runtime.number_generators import number_state, numbers_kept
from .frames import is_user_file, place

_CURE = (
    "Draw with torch (torch.rand, torch.randint, torch.randperm), or one number at a time with "
    "random.random() or np.random.rand()."
)
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_SYMPY = os.path.dirname(os.path.abspath(sympy.__file__)) + os.sep
_LIBRARIES = (sysconfig.get_path("stdlib") + os.sep, "<frozen ")
_NO_DRAWS = ("getstate", "get_state")


class Draw:
    """A function of the global generators as the target of a node; `text` is how it is called.

    fx asks a target for a name and a module, which a method of a generator does not have.
    """

    def __init__(self, text: str, function: Callable[..., Any]) -> None:
        self.text, self.function = text, function
        module, _, self.__name__ = text.rpartition(".")
        self.__qualname__ = self.__name__
        self.__module__ = {"random": "random", "np.random": "numpy.random"}[module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Draw) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


class DrawRecorder(Protocol):
    """What the patches report to."""

    def draw(self, draw: Draw, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Stands in for `draw(*args, **kwargs)`."""

    @property
    def is_recording(self) -> bool:
        """Whether what runs now is forward's own code."""


def _global_functions() -> dict[int, Draw]:
    """The functions that draw from the two global generators, by `id`."""
    found: dict[int, Draw] = {}
    for module, prefix in ((random, "random"), (np.random, "np.random")):
        generator = random._inst if module is random else np.random.mtrand._rand
        for name, value in vars(module).items():
            if getattr(value, "__self__", None) is generator and name not in _NO_DRAWS:
                found[id(value)] = Draw(f"{prefix}.{name}", value)
    return found


@contextmanager
def watched_draws(recorder: DrawRecorder, model: nn.Module) -> Iterator[None]:
    """Within, forward's draws go through the recorder or raise CaptureError."""
    functions = _global_functions()
    constructors = {id(np.random.default_rng): "np.random.default_rng"}
    changed: list[tuple[dict[str, Any], str, Any]] = []
    own: list[tuple[str, Any, Any]] = []

    def put(scope: dict[str, Any], name: str, value: Any) -> None:
        changed.append((scope, name, scope[name]))
        scope[name] = value

    for scope, holder in _scopes(model):
        for name, value in list(scope.items()):
            if id(value) in functions:
                put(scope, name, _reporting(recorder, functions[id(value)]))
            elif id(value) in constructors:
                put(scope, name, _refusing(recorder, constructors[id(value)], value))
            elif _is_own(value):
                text = f"{holder}.{name}"
                own.append((text, value, _own_state(value)))
                put(scope, name, _OwnGenerator(recorder, text, value))
    methods = {name: getattr(random.Random, name) for name in ("random", "getrandbits")}
    methods["seed"] = random.Random.seed
    urandom = random._urandom  # type: ignore[attr-defined]
    before = number_state()
    try:
        for name, method in methods.items():
            setattr(random.Random, name, _own_method(recorder, name, method))
        random._urandom = _refusing(recorder, "the operating system", urandom)  # type: ignore[attr-defined]
        yield
    finally:
        random._urandom = urandom  # type: ignore[attr-defined]
        del random.Random.random, random.Random.getrandbits
        random.Random.seed = methods["seed"]  # type: ignore[method-assign]
        for scope, name, value in reversed(changed):
            scope[name] = value
    if not torch.equal(before, number_state()):
        raise CaptureError(
            "forward draws from the generator of random or np.random by a reference that was "
            "taken before, such as self.draw = random.random: what it draws would never change.",
            "Call random.random() or np.random.rand() where the number is needed.",
        )
    for text, generator, state in own:
        if _own_state(generator) != state:
            raise _own_error("forward", text)


def _scopes(model: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """All globals of imported modules, and the attributes of the model's modules."""
    for name, module in list(sys.modules.items()):
        root = name.partition(".")[0]
        if isinstance(module, ModuleType) and root not in ("torch", "sympy", "asyncpipe"):
            if root != "numpy" or name == "numpy.random":
                yield vars(module), name
    for path, part in model.named_modules():
        yield vars(part), f"self.{path}" if path else "self"


def _is_own(value: Any) -> bool:
    """Whether it is a generator of NumPy other than the global one."""
    if not isinstance(value, (np.random.Generator, np.random.RandomState)):
        return False
    return value is not np.random.mtrand._rand


def _own_state(generator: Any) -> str:
    legacy = isinstance(generator, np.random.RandomState)
    state = generator.get_state(legacy=False) if legacy else generator.bit_generator.state
    return repr(state)


def _is_library(frame: FrameType) -> bool:
    """Whether a frame is of code that draws for itself, such as tempfile for a name."""
    file = frame.f_code.co_filename
    if file.startswith(_SYMPY):
        return True
    # Installed packages may lie within the folder of the standard library.
    return file.startswith(_LIBRARIES) and not _PACKAGES & set(file.split(os.sep))


def _caller() -> FrameType | None:
    """The frame that called a patched function, past those of the standard library's random and
    secrets; None if it is not the user's."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename in (random.__file__, secrets.__file__):
        frame = frame.f_back  # type: ignore[assignment]
    is_user = is_user_file(frame.f_code.co_filename) and not _is_library(frame)
    return frame if is_user else None


def _reporting(recorder: DrawRecorder, draw: Draw) -> Any:
    def report(*args: Any, **kwargs: Any) -> Any:
        if _caller() is None or not recorder.is_recording:
            return draw(*args, **kwargs)
        return recorder.draw(draw, args, kwargs)

    return report


def _refusing(recorder: DrawRecorder, text: str, function: Callable[..., Any]) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if not recorder.is_recording:
            return function(*args, **kwargs)
        frame = _caller()
        if frame is None:
            return function(*args, **kwargs)
        raise _own_error(place(frame, frame.f_lineno), text)

    return refuse


def _own_method(recorder: DrawRecorder, name: str, method: Callable[..., Any]) -> Any:
    """A method of every `random.Random` but the global one."""

    def refuse(generator: random.Random, *args: Any, **kwargs: Any) -> Any:
        is_global = generator is random._inst
        frame = None if is_global or not recorder.is_recording else _caller()
        if frame is None:
            return method(generator, *args, **kwargs)
        raise _own_error(place(frame, frame.f_lineno), "a random.Random")

    refuse.__name__ = name
    return refuse


class _OwnGenerator:
    """Stands in for a generator of NumPy that the model holds."""

    def __init__(self, recorder: DrawRecorder, text: str, generator: Any) -> None:
        self._given = recorder, text, generator

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._given[2])

    def __getattr__(self, name: str) -> Any:
        recorder, text, generator = self._given
        value = getattr(generator, name)
        return _refusing(recorder, text, value) if callable(value) else value


def _own_error(where: str, text: str) -> CaptureError:
    return CaptureError(
        f"{where} draws random numbers from {text}, whose state no stage could hold: what it draws "
        "would never change.",
        _CURE,
    )


def number_kind(draw: Draw, args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str) -> type:
    """The type of the number that is drawn, `int` or `float`.

    Raises CaptureError for a function that returns no single number, or changes the generator.
    """
    name = draw.__name__
    if name in ("seed", "setstate", "set_state"):
        raise CaptureError(
            f"{where} sets the generator of Python or NumPy: every forward would draw the same.",
            "Seed the generators before the training loop.",
        )
    given = tuple(map(_example, args))
    named = {key: _example(value) for key, value in kwargs.items()}
    population = next(iter((*given, *named.values())), None)
    if name == "choice" and isinstance(population, (list, tuple)):
        kinds = {_kind(item) for item in population}
    else:
        with numbers_kept():
            kinds = {_kind(draw(*given, **named))}
    if None in kinds:
        raise CaptureError(
            f"{where} draws more than a number from the generator of Python or NumPy.", _CURE
        )
    return float if float in kinds else int


def _example(value: Any) -> Any:
    """The number that a symbolic size has in the example; 1 for one that is not known there."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value.node.hint if value.node.has_hint() else 1
    return value


def _kind(value: Any) -> type | None:
    if isinstance(value, (bool, int, np.integer, np.bool_)):
        return int
    return float if isinstance(value, (float, np.floating)) else None
