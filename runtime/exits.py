"""Code of the user's that ends the process -> an error that names the line.

`sys.exit(0)` or `os._exit(0)` in a model, a stage, a criterion or the data would end a command as
if it had done what it was asked to. A signal that ends it is no such error.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from .errors import AsyncPipeError
from .signals import Ended, Interrupted, handled
from .user_code import last_line, own_line


class ExitError(AsyncPipeError):
    """The user's code ended the process."""


@contextmanager
def exits_told() -> Iterator[None]:
    """Raises ExitError where the code inside ends this process by an exception or by `os._exit`.

    Raises Ended and Interrupted as they are: a signal is behind them.
    """
    with _interrupts_marked() as are_marked, _os_exit_raises():
        try:
            yield
        except (Ended, Interrupted):
            raise
        except SystemExit as leaving:
            raise _told(leaving, f"SystemExit: {leaving.code}") from leaving
        except KeyboardInterrupt as interrupt:
            if not are_marked:
                raise
            raise _told(interrupt, "KeyboardInterrupt without Ctrl-C") from interrupt


def _told(leaving: BaseException, how: str) -> ExitError:
    return ExitError(
        f"{own_line(leaving) or last_line(leaving)} ended the process ({how}).",
        "Return from there, or raise an exception that says what is wrong.",
    )


@contextmanager
def _interrupts_marked() -> Iterator[bool]:
    """Within, Ctrl-C raises Interrupted; whether it does, or raises nothing at all."""
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and handler is signal.default_int_handler:
        with handled((signal.SIGINT,), _interrupt):
            yield True
    else:
        yield is_main and handler in (_interrupt, signal.SIG_DFL, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted


@contextmanager
def _os_exit_raises() -> Iterator[None]:
    """Within, `os._exit` raises SystemExit in the main thread of this process."""
    real, own = os._exit, os.getpid()

    def leave(code: int) -> None:
        if os.getpid() != own or threading.current_thread() is not threading.main_thread():
            real(code)
        raise SystemExit(code)

    os._exit = leave  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = real
