"""A forward that sets the state of torch's generator is refused at its line.

A stage draws from where the stage before it ended. What seeds inside forward would have to be
undone in the next stage, and would repeat the same numbers in every micro-batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ...runtime.errors import CaptureError
from .frames import is_user_file, place

_SETTING = {"manual_seed": "seeds", "seed": "seeds", "set_state": "sets the state of"}


class Recording(Protocol):
    @property
    def is_recording(self) -> bool:
        """Whether what runs now is forward's own code."""


class _Watched:
    """Stands in for torch's default generator in the functions of torch.random."""

    def __init__(self, generator: torch.Generator, recorder: Recording) -> None:
        self._generator, self._recorder = generator, recorder

    def __getattr__(self, name: str) -> Any:
        if name in _SETTING and self._recorder.is_recording:
            frame = sys._getframe(1)
            while frame.f_back and not is_user_file(frame.f_code.co_filename):
                frame = frame.f_back
            raise CaptureError(
                f"{place(frame, frame.f_lineno)} {_SETTING[name]} torch's random generator inside "
                "forward (torch.manual_seed, torch.random.fork_rng), which no stage can do for the "
                "others.",
                "Seed before the call of the model; numbers that are always the same belong in a "
                "buffer: self.register_buffer(name, tensor).",
            )
        return getattr(self._generator, name)


@contextmanager
def watched_seeds(recorder: Recording) -> Iterator[None]:
    """Within, setting the state of torch's default generator raises CaptureError."""
    functions: Any = torch.random
    generator = functions.default_generator
    functions.default_generator = _Watched(generator, recorder)
    try:
        yield
    finally:
        functions.default_generator = generator
