"""Runs a command: what is told of an error, and the code that it ends with."""

from __future__ import annotations

import sys
import traceback

from cyclopts import App
from rich.markup import escape

from ..runtime.errors import AsyncPipeError, is_out_of_memory
from ..runtime.exits import exits_told
from ..runtime.hidden_text import visible
from ..runtime.signals import Ended
from ..runtime.user_code import last_line, own_line
from ..terminal_console import SafeConsole

DEFECT = "This is a defect of asyncpipe"


def run(app: App) -> int:
    """Runs a command: 0, 1 with one `error:` sentence and a cure, 2 for usage, 130 for Ctrl-C, 143
    for a run that a signal asked to stop."""
    from cyclopts import CycloptsError

    errors = SafeConsole(stderr=True, highlight=False)
    app.suppress_keyboard_interrupt = False  # what it says is told below
    try:
        with exits_told():
            ended = app(exit_on_error=False, print_error=False, result_action="return_value")
        return int(ended or 0)
    except CycloptsError as error:
        errors.print(f"[bold red]error:[/] {_shown(str(error))}", soft_wrap=True)
        errors.print(f"[dim]{app.name[0]} --help[/]")
        return 2
    except Ended as stopped:
        for note in getattr(stopped, "__notes__", ()):
            errors.print(escape(note), soft_wrap=True)
        return int(stopped.code or 0)
    except AsyncPipeError as error:
        if {"-v", "--verbose"} & set(sys.argv):
            sys.stderr.write(visible(traceback.format_exc()))
        errors.print(f"[bold red]error:[/] {_shown(error.what)}", soft_wrap=True)
        if error.cure:
            errors.print(_shown(error.cure), soft_wrap=True)
        return 1
    except KeyboardInterrupt as interrupt:
        errors.print(_shown(str(interrupt)) or "interrupted", soft_wrap=True)
        return 130
    except Exception as error:
        if {"-v", "--verbose"} & set(sys.argv):
            sys.stderr.write(visible(traceback.format_exc()))
        what, cure = _unexpected(error)
        errors.print(f"[bold red]error:[/] {_shown(what)}", soft_wrap=True)
        if cure:
            errors.print(_shown(cure), soft_wrap=True)
        return 1
    finally:
        errors.show_cursor(True)


def _unexpected(error: Exception) -> tuple[str, str]:
    """What to tell of an exception that no code of ours expected, and what to do."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {(error.strerror or str(error)).lower()}.", ""
    text = " ".join(str(error).split())
    told = f"{type(error).__name__}{': ' if text else ''}{text[:500]}"
    if is_out_of_memory(error):
        return f"not enough memory: {told}", "Use a smaller --micro-batch-size, --seq or model."
    if place := own_line(error):
        return f"{place}: {told}", "-v shows the traceback."
    return f"{told} ({last_line(error)})", f"{DEFECT}; -v shows the traceback. Please report it."


def _shown(text: str) -> str:
    """A text as it is printed: what would steer the terminal is spelled out."""
    return escape(visible(text))


def usage(text: str) -> Exception:
    """A usage error, told as those of the parser are."""
    from cyclopts import CycloptsError

    return CycloptsError(text)
