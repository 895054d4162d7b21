"""Runs a command: prints errors and returns the exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from dataclasses import replace

from cyclopts import App, UnknownOptionError
from rich.markup import escape

from ..runtime.errors import AsyncPipeError, is_out_of_memory
from ..runtime.formatting import visible
from ..runtime.known_names import PARTITION, TRAIN, KnownNames
from ..runtime.process import Ended
from ..runtime.user_code import exits_as_errors, last_line, own_line
from .console import SafeConsole

_NAMES = {
    "asyncpipe-partition": PARTITION,
    "asyncpipe-train": TRAIN,
    "asyncpipe-compare": TRAIN,
}
_NO_NAMES = KnownNames({}, {})
DEFECT = "This is a defect of asyncpipe"

REPORTER = "asyncpipe.commands.run_display:make_reporter"
"""The reporter of a run, in the process of its rank 0."""


def run(app: App) -> int:
    """Runs a command and returns its exit code.

    0: success; 1: an error, printed as one `error:` sentence with a cure; 2: wrong usage;
    130: Ctrl-C; 143: a run that a signal stopped.
    """
    from cyclopts import CycloptsError

    errors = SafeConsole(stderr=True, highlight=False)
    app.suppress_keyboard_interrupt = False  # handled below
    app.console = SafeConsole()
    words = sys.argv[1:]
    try:
        with exits_as_errors():
            ended = app(
                _in_ours(app, words),
                exit_on_error=False,
                print_error=False,
                result_action="return_value",
            )
        return int(ended or 0)
    except CycloptsError as error:
        fault = _shown(_usage_fault(app, words, error))
        errors.print(f"[bold red]error:[/] {fault}", soft_wrap=True)
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
        if errors.is_terminal:
            errors.print()  # the terminal has written ^C into the line
        errors.print(_shown(str(interrupt)) or "interrupted", soft_wrap=True)
        return 130
    except Exception as error:
        if {"-v", "--verbose"} & set(sys.argv):
            sys.stderr.write(visible(traceback.format_exc()))
        message, cure = _unexpected(error)
        errors.print(f"[bold red]error:[/] {_shown(message)}", soft_wrap=True)
        if cure:
            errors.print(_shown(cure), soft_wrap=True)
        return 1
    finally:
        errors.show_cursor(True)


def check_words(app: App, words: list[str]) -> None:
    """Raises the usage error that a command would answer these words with. Runs nothing."""
    from cyclopts import CycloptsError

    try:
        app.parse_args(_in_ours(app, words), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise usage(f"{app.name[0]}: {_usage_fault(app, words, error)}") from error


def _in_ours(app: App, words: list[str]) -> list[str]:
    """The words of a command line with our options in place of other tools' names for them."""
    names = _NAMES.get(app.name[0], _NO_NAMES)
    return names.in_ours(words, lambda flag: flag in _options(app, _subcommand(app, words)))


def _subcommand(app: App, words: list[str]) -> str:
    """The subcommand that a command line names, or nothing."""
    # cyclopts counts --help and --version as commands.
    return " ".join(word for word in app.parse_commands(words)[0] if not word.startswith("-"))


def _options(app: App, subcommand: str) -> set[str]:
    """The flags of a command, or of one of its subcommands."""
    command = app[subcommand] if subcommand else app
    if command.default_command is None:
        return set()
    return {name for argument in command.assemble_argument_collection() for name in argument.names}


def _usage_fault(app: App, words: list[str], error: Exception) -> str:
    """The message of wrong usage; for an unknown option with the right one, if it is known."""
    if not isinstance(error, UnknownOptionError):
        return str(error)
    option = (error.token.keyword or error.token.value).partition("=")[0]
    names = _NAMES.get(app.name[0], _NO_NAMES)
    subcommand = _subcommand(app, words)
    if subcommand:
        names = replace(names, answers={})  # they name options of the command itself
    meant = names.meant(option, _options(app, subcommand)) or _elsewhere(app, option)
    return f"Unknown option: {option}. {meant}".rstrip()


def _elsewhere(app: App, option: str) -> str:
    """The commands of an app that have an option."""
    others = ["", *(name for name in app if not name.startswith("-"))]
    having = [f"{app.name[0]} {name}".rstrip() for name in others if option in _options(app, name)]
    return f"It is an option of {' and '.join(having)}." if having else ""


def _unexpected(error: Exception) -> tuple[str, str]:
    """The message and the cure for an unexpected exception."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {(error.strerror or str(error)).lower()}.", ""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the output cannot be written: {os.strerror(error.errno).lower()}.", ""
    text = " ".join(str(error).split())
    message = f"{type(error).__name__}{': ' if text else ''}{text[:500]}"
    if is_out_of_memory(error):
        return f"not enough memory: {message}", "Use a smaller --micro-batch-size, --seq or model."
    if place := own_line(error):
        return f"{place}: {message}", "-v shows the traceback."
    return f"{message} ({last_line(error)})", f"{DEFECT}; -v shows the traceback. Please report it."


def _shown(text: str) -> str:
    """A text to print, with control characters of the terminal spelled out."""
    return escape(visible(text))


def usage(text: str) -> Exception:
    """A usage error, printed like those of the parser."""
    from cyclopts import CycloptsError

    return CycloptsError(text)
