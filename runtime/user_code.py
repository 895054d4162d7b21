"""The user's own code: imported by name, kept from ending the process, and read from stage files.

`package.module:name` or `path/file.py:name` names an object of the user's.

`sys.exit(0)` or `os._exit(0)` in a model, a stage, a criterion or the data would end a command as
if it had succeeded; `exits_as_errors` turns it into an error that names the line. A signal is not
such an error. Exits of compiled code without Python are not seen here: the command sees that ranks
in their own processes end early.

The text of a stage's file is read once: the same text is hashed, shown and run.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import shlex
import signal
import stat
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from .errors import AsyncPipeError, PlanError
from .formatting import did_you_mean
from .import_path import add_own_folder
from .process import Ended, Interrupted, handled


def names_object(spec: str) -> bool:
    """True for a text of the form `module:function` or `path.py:function`."""
    place, colon, name = spec.rpartition(":")
    return bool(colon and place and name.isidentifier())


def import_object(spec: str, option: str, error: type[AsyncPipeError]) -> Any:
    """Imports the object that `spec` names, for the command-line `option`.

    Modules are also found in the folder of the command, and a file may import its neighbors, but
    installed modules come first. Raises `error` if the file, the module or the name is missing, or
    if the code fails.
    """
    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        module = _import_own_file(Path(place), option, error)
    else:
        module = _import_module(place, option, error)
    if not hasattr(module, name):
        hint = did_you_mean(name, vars(module))
        raise error(f"{option} {spec}: {place} has no {name}. {hint}".rstrip())
    return getattr(module, name)


def import_file(path: Path, name: str, source: str | bytes | None = None) -> ModuleType:
    """Imports a file as the module `name`, from its source; raises the exceptions of its code.

    Bytecode is neither read nor written, because a `__pycache__` may differ from its file. `source`
    is the content of the file, if it was read before.
    """
    loader = _FromSource(name, str(path))
    loader.source = path.read_bytes() if source is None else source
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _FromSource(SourceFileLoader):
    """Compiles what it is given, whatever bytecode there is."""

    source: str | bytes

    def get_code(self, fullname: str) -> CodeType:
        try:
            code: CodeType = self.source_to_code(self.source, self.get_filename(fullname))
        except (MemoryError, RecursionError):  # of Python's parser, not of this machine
            raise SyntaxError("nested too deeply") from None
        return code


_TORCH_LOSSES = {
    "cross_entropy": "cross_entropy", "CrossEntropyLoss": "cross_entropy",
    "mse_loss": "mse", "MSELoss": "mse",
}  # fmt: skip


def criterion_name(loss: Any, error: type[AsyncPipeError]) -> Any:
    """The text that names a loss function given as an object: one of torch's that has a name here,
    or a function of a file or module. Other values are returned as they are. Raises `error` for a
    function that ranks, which are other processes, cannot import."""
    if not callable(loss):
        return loss
    name = getattr(loss, "__qualname__", type(loss).__name__)
    module = str(loss.__module__)
    if module.startswith("torch.nn.") and name in _TORCH_LOSSES and _is_default(loss):
        return _TORCH_LOSSES[name]
    file = getattr(getattr(loss, "__code__", None), "co_filename", "")
    if name.isidentifier() and is_own_file(file):
        path = Path(file).resolve()
        here = Path.cwd()
        return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{name}"
    if name.isidentifier() and file and is_installed(module.partition(".")[0]):
        return f"{module}:{name}"
    raise error(
        f"loss is {loss!r:.80}, which other processes cannot import.",
        'Write it as a function in a file: loss="my_file.py:function"',
    )


def _is_default(loss: Any) -> bool:
    """True for a function, and for a module as its class makes it."""
    if isinstance(loss, type) or not hasattr(loss, "named_buffers"):
        return True
    plain = type(loss)()
    return (
        not list(loss.buffers())
        and str(loss) == str(plain)
        and all(
            getattr(loss, key) == value
            for key, value in vars(plain).items()
            if isinstance(value, str | int | float)
        )
    )


def hashed_name(prefix: str, path: Path) -> str:
    """A module name for a file that no other file has."""
    return f"{prefix}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"


@contextmanager
def user_errors_as(error: type[AsyncPipeError], subject: str) -> Iterator[None]:
    """An exception in the user's code becomes one sentence with the line it came from."""
    try:
        yield
    except AsyncPipeError:
        raise
    except Exception as cause:
        place = own_line(cause) or last_line(cause)
        is_ours = not own_line(cause) and Path(place).is_relative_to(_PACKAGE)  # a wrong signature
        at = "" if is_ours else f" at {place}"
        raise error(f"{subject} failed{at}: {type(cause).__name__}: {cause}") from cause


def own_line(error: BaseException) -> str:
    """`data.py:12`: the last line that an exception came through of code that is neither ours nor
    installed; "" where there is none."""
    files = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in files if is_own_file(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def last_line(error: BaseException) -> str:
    """Where an exception was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def is_own_file(file: str) -> bool:
    """True for a file that is neither ours nor installed."""
    if not os.path.isfile(file):
        return False  # <string>, <frozen importlib>
    return not any(Path(file).is_relative_to(folder) for folder in _NOT_OWN)


_PACKAGE = Path(__file__).parent.parent
_NOT_OWN = (
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
    *(_PACKAGE / name for name in ("runtime", "partitioner", "commands", "cli.py")),
    Path(sys.prefix),
)
"""Folders of code that is not the user's."""


def check_own_file(spec: str, option: str, error: type[AsyncPipeError]) -> None:
    """Raises `error` if a text names an object of a missing file; runs nothing."""
    place = spec.rpartition(":")[0]
    if names_object(spec) and place.endswith(".py"):
        _check_is_file(Path(place), option, error)


def _check_is_file(path: Path, option: str, error: type[AsyncPipeError]) -> None:
    if not path.is_file():
        raise error(f"{option} {path}: no such file.", f"{option} path/to/file.py:function")


def _import_own_file(path: Path, option: str, error: type[AsyncPipeError]) -> ModuleType:
    """Under its own name, unless that is another module's, so that its classes are called what they
    are."""
    _check_is_file(path, option, error)
    for name in (path.stem, hashed_name(path.stem, path)):
        known = sys.modules.get(name)
        if known is not None:
            if Path(getattr(known, "__file__", None) or "").resolve() == path.resolve():
                return known
        elif name != path.stem or not is_installed(name):
            add_own_folder(path.parent)
            with user_errors_as(error, f"{option} {path}"):
                return import_file(path, name)
    raise AssertionError(f"{path} has no name")


def is_installed(name: str) -> bool:
    """True if a module of this name is on the current path."""
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ValueError, ImportError):  # a name with dots, of a package that is none
        return False


def _import_module(name: str, option: str, error: type[AsyncPipeError]) -> ModuleType:
    if not is_installed(name.partition(".")[0]):
        add_own_folder(Path.cwd())
    with user_errors_as(error, f"{option} {name}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as cause:
            raise error(
                f"{option} {name}: no module named {cause.name}.",
                "Run from the folder that holds it, or name the file: path/to/file.py:function",
            ) from cause


class ExitError(AsyncPipeError):
    """The user's code ended the process."""


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Raises ExitError where the code inside ends this process by an exception, by `os._exit` or
    C's functions as ctypes finds them, or puts another program in its place (`os.exec*`). A thread
    that ends it with code 0 is named, and the code is 1.

    Raises Ended and Interrupted as they are: a signal is behind them.
    """
    with _interrupts_marked() as are_marked, _ways_out_raise():
        try:
            yield
        except (Ended, Interrupted):
            raise
        except SystemExit as leaving:
            raise _exit_error(leaving, f"SystemExit: {leaving.code}") from leaving
        except KeyboardInterrupt as interrupt:
            if not are_marked:
                raise
            raise _exit_error(interrupt, "KeyboardInterrupt without Ctrl-C") from interrupt


def _exit_error(leaving: BaseException, how: str, place: str = "") -> ExitError:
    return ExitError(
        f"{place or own_line(leaving) or last_line(leaving)} ended the process ({how}).",
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
def _ways_out_raise() -> Iterator[None]:
    """Within, what ends this process without Python's leave raises SystemExit in the main thread:
    `os._exit`, C's functions for that as ctypes finds them, and another program in its place."""
    real, own = os._exit, os.getpid()

    def is_asked() -> bool:
        return os.getpid() == own and threading.current_thread() is threading.main_thread()

    def leave(code: int) -> None:
        if is_asked():
            raise SystemExit(code)
        if os.getpid() == own and code == 0:
            error = _exit_error(SystemExit(code), "os._exit in a thread", _line_of_caller())
            sys.stderr.write(f"error: {error.what}\n{error.cure}\n")
            sys.stderr.flush()
            code = 1
        real(code)

    def on_way_out(how: str) -> None:
        if is_asked():
            raise SystemExit(how)

    built_in: Any = sys.modules[os.name]  # where os has it from
    outer, _watched.report = _watched.report, on_way_out
    _watched.begin()
    os._exit = built_in._exit = leave  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = built_in._exit = real
        _watched.report = outer


class _Watched:
    """Watches the ways out of a process with an audit hook, which Python cannot remove."""

    report: Callable[[str], None] | None = None
    _has_begun = False

    def begin(self) -> None:
        if not self._has_begun:
            sys.addaudithook(self._on_event)
            self._has_begun = True

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.report is None or event not in _EVENTS:
            return
        if event == "os.exec":
            self.report(f"os.exec of {os.fsdecode(arguments[0])}")
        elif arguments[1] in _EXITS_OF_C:
            self.report(f"{arguments[1]} of C")


_watched = _Watched()
_EVENTS = {"os.exec", "ctypes.dlsym", "ctypes.dlsym/handle"}
_EXITS_OF_C = {"exit", "_exit", "_Exit", "quick_exit"}


def _line_of_caller() -> str:
    """The last line outside this file that has led here."""
    frame = next(entry for entry in traceback.extract_stack()[::-1] if entry.filename != __file__)
    return f"{frame.filename}:{frame.lineno}"


MOST_BYTES = 64 << 20
_CURE = "Undo the edit, or partition the model again with --force."


def source_of(path: Path) -> str:
    """The file as UTF-8, whatever encoding it declares: another could make code of a comment.

    Raises PlanError when it is missing, is not a file, is too large to be a stage or is not UTF-8.
    """
    try:
        status = path.stat()
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise PlanError(f"{path} is neither a file nor a folder.", _CURE)
        if status.st_size > MOST_BYTES:
            raise PlanError(
                f"{path} has {status.st_size >> 20} MiB, more than a stage can have.", _CURE
            )
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise PlanError(f"{path} is missing.", "Partition the model again with --force.") from None
    except UnicodeDecodeError as error:
        raise PlanError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.", _CURE
        ) from None


def portable(text: str) -> str:
    """A path or `file.py:function` without the folders of this machine.

    >>> portable("/home/me/nets.py:build"), portable("nets/mine.py:build"), portable("gpt2")
    ('nets.py:build', 'nets/mine.py:build', 'gpt2')
    """
    path, colon, function = text.partition(":")
    return Path(path).name + colon + function if Path(path).is_absolute() else text


_WITHOUT_EFFECT = {"--force", "--json", "--no-cache", "--quiet", "-q", "--verbose", "-v"}


def command_line(name: str, words: Sequence[str]) -> str:
    """The command that made a plan, without what does not change it.

    >>> command_line("asyncpipe-partition", ["--model", "/home/me/nets.py:build", "--force"])
    'asyncpipe-partition --model nets.py:build'
    """
    return shlex.join([name, *(portable(word) for word in words if word not in _WITHOUT_EFFECT)])


def file_hash(path: Path) -> str:
    """The SHA-256 of a file, as in `StageSpec.sha256`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
