"""Random numbers that a forward draws: of Python and NumPy, and of torch.

A number that Python draws is not a tensor: if the tracer missed it, every forward would use the
number of the example. `watched_draws` makes the functions of `random` and `np.random` report to
the tracer during a trace, wherever a module imported them to. Draws from other generators raise an
error with the line; draws that bypass the patches show in the generators' states afterwards.

`watched_seeds`: forward must not set the state of torch's generator.

`RandomDraws` detects operators of torch that draw random numbers.
"""

from __future__ import annotations

import operator
import os
import random
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import numpy as np
import sympy
import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from ...runtime.errors import CaptureError
from ...runtime.rng import number_state, numbers_kept
from .source_lines import exchanged, is_library_file, is_user_file, place, user_frames

_CURE = (
    "Draw with torch (torch.rand, torch.randint, torch.randperm), or one number at a time with "
    "random.random() or np.random.rand()."
)
_SYMPY = os.path.dirname(os.path.abspath(sympy.__file__)) + os.sep
_NO_DRAWS = ("getstate", "get_state")
_GENERATORS = (np.random.Generator, np.random.RandomState)


class Draw:
    """A function of a global generator as the target of a node.

    fx needs a target with a name and a module, which a method of a generator lacks.

    text: the function as it is called, such as `np.random.rand`
    function: the function
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


class Recording(Protocol):
    @property
    def is_recording(self) -> bool:
        """True while forward's own code runs."""


class DrawRecorder(Recording, Protocol):
    """The tracer, as the patches see it."""

    def draw(self, draw: Draw, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Stands in for `draw(*args, **kwargs)`."""


def _global_functions() -> dict[int, Draw]:
    """The functions that draw from the two global generators, by `id`."""
    draws: dict[int, Draw] = {}
    for module, prefix in ((random, "random"), (np.random, "np.random")):
        generator = random._inst if module is random else np.random.mtrand._rand
        for name, value in vars(module).items():
            if getattr(value, "__self__", None) is generator and name not in _NO_DRAWS:
                draws[id(value)] = Draw(f"{prefix}.{name}", value)
    return draws


@contextmanager
def watched_draws(recorder: DrawRecorder, model: nn.Module) -> Iterator[None]:
    """Reports forward's draws in the block to the recorder; other draws raise CaptureError."""
    functions = _global_functions()
    constructors = {id(np.random.default_rng): "np.random.default_rng"}
    own: list[tuple[str, Any, Any]] = []

    def other(holder: str, name: str, value: Any) -> Any:
        if id(value) in functions:
            return _reporting(recorder, functions[id(value)])
        if id(value) in constructors:
            return _refusing(recorder, constructors[id(value)], value)
        if _is_own(value):
            text = f"{holder}.{name}"
            own.append((text, value, _own_state(value)))
            return _OwnGenerator(recorder, text, value)
        return value

    methods = {name: getattr(random.Random, name) for name in ("random", "getrandbits")}
    methods["seed"] = random.Random.seed
    urandom = random._urandom  # type: ignore[attr-defined]
    before = number_state()
    try:
        for name, method in methods.items():
            setattr(random.Random, name, _own_method(recorder, name, method))
        random._urandom = _refusing(recorder, "the operating system", urandom)  # type: ignore[attr-defined]
        held = functions.keys() | constructors.keys()
        with exchanged(model, other, held, _GENERATORS), _undone_checks():
            yield
    finally:
        random._urandom = urandom  # type: ignore[attr-defined]
        del random.Random.random, random.Random.getrandbits
        random.Random.seed = methods["seed"]  # type: ignore[method-assign]
    if not torch.equal(before, number_state()):
        raise CaptureError(
            "forward draws from the generator of random or np.random through a stored reference, "
            "such as self.draw = random.random: its number would never change.",
            "Call random.random() or np.random.rand() in forward.",
        )
    for text, generator, state in own:
        if _own_state(generator) != state:
            raise _own_error("forward", text)


@contextmanager
def _undone_checks() -> Iterator[None]:
    """Undoes the draws of beartype, which checks an item of a list or tuple that it draws: forward
    computes nothing with them. Those of forward through a stored reference stay."""
    if "beartype" not in sys.modules:
        yield
        return
    files: set[str] = set()

    def watch(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__self__", None) is random._inst:
            if function.__name__ in ("random", "getrandbits"):
                files.add(_outside_of_random(frame).f_code.co_filename)

    state, profiler = random.getstate(), sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(profiler)
        checks = {file for file in files if file.startswith("<@beartype(")}
        if checks and files <= checks | {__file__}:
            random.setstate(state)


def _is_own(value: Any) -> bool:
    """True for a generator of NumPy other than the global one."""
    return isinstance(value, _GENERATORS) and value is not np.random.mtrand._rand


def _own_state(generator: Any) -> str:
    legacy = isinstance(generator, np.random.RandomState)
    state = generator.get_state(legacy=False) if legacy else generator.bit_generator.state
    return repr(state)


def _is_library(frame: FrameType) -> bool:
    """True for library code that draws for its own purposes, such as tempfile for a name."""
    file = frame.f_code.co_filename
    return file.startswith(_SYMPY) or is_library_file(file)


def _caller() -> FrameType | None:
    """The frame that called a patched function, without frames of random and secrets; None if it
    is not the user's."""
    frame = _outside_of_random(sys._getframe(2))
    is_user = is_user_file(frame.f_code.co_filename) and not _is_library(frame)
    return frame if is_user else None


def _outside_of_random(frame: FrameType) -> FrameType:
    """The frame itself, or the first one that called it from another module than random."""
    while frame.f_code.co_filename in (random.__file__, secrets.__file__):
        frame = frame.f_back  # type: ignore[assignment]
    return frame


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
    """Replaces a method of every `random.Random` except the global one."""

    def refuse(generator: random.Random, *args: Any, **kwargs: Any) -> Any:
        is_global = generator is random._inst
        frame = None if is_global or not recorder.is_recording else _caller()
        if frame is None:
            return method(generator, *args, **kwargs)
        raise _own_error(place(frame, frame.f_lineno), "a random.Random")

    refuse.__name__ = name
    return refuse


class _OwnGenerator:
    """Replaces a generator of NumPy that the model holds."""

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
        f"{where} draws random numbers from {text}, whose state a stage cannot hold: the numbers "
        "would never change.",
        _CURE,
    )


OWN_GENERATOR = (
    "draws from its own torch.Generator, whose state a stage cannot hold.",
    "Use torch's default generator: leave out generator=...; its state follows from --seed for "
    "each micro-batch.",
)


def number_kind(draw: Draw, args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str) -> type:
    """The type of the random number, `int` or `float`.

    Raises CaptureError for a function that returns more than a number, or sets the generator.
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
    """The number of a symbolic size in the example; 1 if it is unknown."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value.node.hint if value.node.has_hint() else 1
    return value


def _kind(value: Any) -> type | None:
    if isinstance(value, (bool, int, np.integer, np.bool_)):
        return int
    return float if isinstance(value, (float, np.floating)) else None


_REFUSED = {
    "manual_seed": "seeds", "seed": "seeds", "set_state": "sets the state of",
    "initial_seed": "reads the seed of",
}  # fmt: skip


class _Watched:
    """Stands in for torch's default generator in the functions of torch.random."""

    def __init__(self, generator: torch.Generator, recorder: Recording) -> None:
        self._generator, self._recorder = generator, recorder

    def __getattr__(self, name: str) -> Any:
        if name in _REFUSED and self._recorder.is_recording:
            frame = next(iter(user_frames(None)), sys._getframe(1))
            raise CaptureError(
                f"{place(frame, frame.f_lineno)} {_REFUSED[name]} torch's random generator inside "
                "forward, which one stage cannot do for the others.",
                "Seed before the call of the model; keep constant numbers in a "
                "buffer: self.register_buffer(name, tensor).",
            )
        return getattr(self._generator, name)


@contextmanager
def watched_seeds(recorder: Recording) -> Iterator[None]:
    """Raises CaptureError if the block sets the state of torch's default generator.

    A stage continues with the state in which the previous stage ended; a seed inside forward would
    have to be undone in the next stage, and would repeat the same numbers in every micro-batch.
    """
    functions: Any = torch.random
    generator = functions.default_generator
    functions.default_generator = _Watched(generator, recorder)
    try:
        yield
    finally:
        functions.default_generator = generator


class RandomDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sets `drawn` to True when an operator draws; `drew_numbers` is for draws of Python and NumPy.
    The reader sets them back to False."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = self.drew_numbers = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # what its functions do is not seen here
            self.drawn = True
        elif not self.drawn and torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn = _draws(func, args, kwargs)
        return func(*args, **kwargs)


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True if the call really draws: attention with dropout 0 has the tag, but draws nothing."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else None
            return bool(kwargs.get("dropout_p", given))
    return True


def has_hidden_draws(module: nn.Module) -> bool:
    """True if a module draws inside an operator without the random tag: dropout between the
    layers of a recurrent network."""
    return isinstance(module, nn.RNNBase) and module.training and module.dropout > 0


# Functions that draw a number from 0 (included) to 1 (excluded), without arguments or with (0, 1).
_UNIT_DRAWS = (
    "random.random", "random.uniform", "np.random.rand", "np.random.random",
    "np.random.random_sample", "np.random.uniform",
)  # fmt: skip
_RELATIONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)


def is_drawn(condition: fx.Node) -> bool:
    """True if a condition follows from random numbers, sizes and constants alone: each forward
    decides again, and the generators alone decide."""
    nodes = ancestors(condition)
    if not isinstance(condition.meta["val"], Tensor) and condition.target not in _RELATIONS:
        return False
    return any(node.meta["random"] for node in nodes) and all(
        node.op in ("call_function", "call_method") for node in nodes
    )


def ancestors(node: fx.Node) -> set[fx.Node]:
    """A node, and the nodes from which it follows."""
    waiting, seen = [node], {node}
    while waiting:
        fresh = [used for used in waiting.pop().all_input_nodes if used not in seen]
        seen.update(fresh)
        waiting += fresh
    return seen


def same_answer(condition: fx.Node) -> bool | None:
    """The answer of a comparison that is the same for all random numbers from 0 to below 1, as of
    `random.random() < keep` where `keep` is 1; None if the number decides."""
    if condition.target not in _RELATIONS:
        return None
    relation, (drawn, bound) = condition.target, condition.args
    if not _is_unit_draw(drawn) or not isinstance(bound, (int, float)):
        return None
    if bound < 0 or bound >= 1 or (bound == 0 and relation in (operator.lt, operator.ge)):
        return bool(relation(0.5, bound))
    return None


def _is_unit_draw(value: Any) -> bool:
    if not isinstance(value, fx.Node):
        return False
    if value.target == "item":
        return _is_unit_draw(value.args[0])
    if not isinstance(value.target, Draw):
        return value.target is torch.rand
    return value.target.text in _UNIT_DRAWS and value.args in ((), (0, 1)) and not value.kwargs
