"""An interpreter for tests whose imports are already done: a process of it is a fork.

A process that trains or cuts a model imports for seconds and then works for a fraction of one, and
tests start hundreds. `bin_folder()` has a `python`, a `torchrun` and our commands that take a
fork of one server with torch loaded: each is a process of its own, with the environment, folder,
files, host (namespaces) and exit code or signal of the command that asked for it. The command
stands for the process in the process tree; tests that look there, at process groups or at imports
take the real interpreter.

`python -m asyncpipe.tests.support.processes.quick_python SOCKET` is the server, and with more
arguments its client.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import contextmanager, suppress
from functools import cache

_PRELOADED = (
    "asyncpipe.cli",
    "asyncpipe.commands.partition",
    "asyncpipe.commands.train",
    "asyncpipe.partitioner.compile",
    "asyncpipe.runtime.checkpoint.storage",
    "asyncpipe.runtime.launch.launch",
    "asyncpipe.runtime.launch.job",
    "asyncpipe.commands.run_display",
    "asyncpipe.tests.support.processes.gloo_ranks",
    "torch._dynamo",
    "torch.export._trace",
    "transformers.models.gpt2.modeling_gpt2",
)
_MLP_FEATURES = 1024
AS_NOTEBOOK = "import sys; exec(compile(open(sys.argv.pop(1)).read(), '<script>', 'exec'))"
"""A program for `python -c` that runs the script of its first argument as a notebook would: the
ranks of `asyncpipe.launch` are forks, whose imports are done."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_NAMESPACES = ("user", "net", "uts", "mnt")
_WORD = 8


def bin_folder():
    """A folder as the interpreter's own, of the server of this process, which ends with it."""
    return _start()[0]


def run(settings, reporter: str) -> int:
    """`launch.run`, whose ranks are such processes."""
    from asyncpipe.runtime.launch import launch

    with forked_ranks():
        return launch.run(settings, reporter)


@contextmanager
def forked_ranks():
    """The ranks that this process starts in the block are such processes."""
    real, sys.executable = sys.executable, str(bin_folder() / "python")
    try:
        yield
    finally:
        sys.executable = real


@cache
def _start():
    """The folder, and the server, which ends when nothing holds its standard input open."""
    import subprocess  # here, for the client is to start at once
    import tempfile
    from pathlib import Path

    real, folder = Path(sys.executable).parent, Path(tempfile.mkdtemp(prefix="quick-"))
    python = folder / "python"
    client = f"{sys.executable} -I -S {__file__} {folder / 'socket'}"
    scripts = {python: f'#!/bin/sh\nexec {client} "$@"\n'}
    commands = ("partition", "train", "inspect", "compare", "info", "view", "comm", "job")
    for command in commands:
        body = (
            f"import sys\nfrom asyncpipe.cli import {command}\n"
            f"if __name__ == '__main__':\n    sys.exit({command}())\n"
        )
        scripts[folder / f"asyncpipe-{command}"] = f"#!{python}\n{body}"
    _, _, body = (real / "torchrun").read_text().partition("\n")
    scripts[folder / "torchrun"] = f"#!{python}\n{body}"
    for name in ("mpiexec", "mpirun"):  # no links: it looks for a helper beside itself
        if (real / name).is_file():
            scripts[folder / name] = f'#!/bin/sh\nexec {real / name} "$@"\n'
    for path, text in scripts.items():
        path.write_text(text)
        path.chmod(0o755)
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "asyncpipe.tests.support.processes.quick_python",
            str(folder / "socket"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not (folder / "socket").exists():
        assert server.poll() is None
        time.sleep(0.01)
    return folder, server


# The client: what stands for the process where it was asked for


def _stand_for(address: str, arguments: list[str]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # until they can be forwarded
    # Also those by which mpiexec talks to its rank, and multiprocessing to its children.
    inherited = (int(name) for name in os.listdir("/proc/self/fd"))
    descriptors = [number for number in inherited if _is_open(number)]
    call = {
        "process": os.getpid(),
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "descriptors": descriptors,
    }
    content = json.dumps(call).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [len(content).to_bytes(_WORD, "little")], descriptors)
        connection.sendall(content)
        process = _number(connection)
        for number in _FORWARDED:
            signal.signal(number, lambda number, frame: os.kill(process, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        status = _number(connection)
    if os.WIFSIGNALED(status):
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _number(connection: socket.socket) -> int:
    content = _read(connection, _WORD)
    if not content:
        sys.exit("the server of processes has ended")
    return int.from_bytes(content, "little")


def _is_open(descriptor: int) -> bool:
    """True if it is still open, unlike the one that listed the descriptors."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _read(connection: socket.socket, count: int) -> bytes:
    """So many bytes, or none if the other side has ended."""
    content = b""
    while len(content) < count:
        part = connection.recv(count - len(content))
        if not part:
            return b""
        content += part
    return content


# The server


def _serve(address: str) -> list[str]:
    """Forks a process for each client, until standard input ends; in a fork, its arguments."""
    import gc
    import importlib
    import shutil

    sys.path.pop(0)
    sys.executable = os.path.join(os.path.dirname(address), "python")
    for name in _PRELOADED:
        importlib.import_module(name)
    _prepare()
    gc.freeze()  # a collection in a fork would copy all that is shared
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    running: dict[int, _Running] = {}  # by the descriptors of a process and of its connection
    while True:
        for ready in select.select([listener, sys.stdin, *running], [], [])[0]:
            if ready is sys.stdin:
                shutil.rmtree(os.path.dirname(address))
                sys.exit()
            elif ready is not listener:
                if process := running.get(ready):
                    _end(process, running)
            elif arguments := _accept(listener, running):
                return arguments


class _Running:
    def __init__(self, process: int, connection: socket.socket) -> None:
        self.process, self.connection = process, connection
        self.handle = os.pidfd_open(process)


def _accept(listener: socket.socket, running: dict[int, _Running]) -> list[str] | None:
    """Starts the process that a client asks for, and tells it the number; in the process, its
    arguments."""
    connection, _ = listener.accept()
    length, received, _, _ = socket.recv_fds(connection, _WORD, 64)
    content = _read(connection, int.from_bytes(length, "little"))
    process = os.fork() if content else 0
    if content and process == 0:
        others = {*running.values()}
        for used in (listener, connection, *(one.connection for one in others)):
            os.close(used.detach())  # else it would be closed later, when the number is another's
        for one in others:
            os.close(one.handle)
        call = json.loads(content)
        _settle(call, received)
        return call["arguments"]
    for descriptor in received:
        os.close(descriptor)
    if content:
        one = _Running(process, connection)
        running |= {one.handle: one, connection.fileno(): one}
        _tell(one, process)
    return None


def _end(one: _Running, running: dict[int, _Running]) -> None:
    """Tells a client how its process ended; if the client is gone, kills the process."""
    with suppress(ProcessLookupError):
        if not select.select([one.handle], [], [], 0)[0]:
            signal.pidfd_send_signal(one.handle, signal.SIGKILL)
    _, status = os.waitpid(one.process, 0)
    _tell(one, status)
    for descriptor in (one.handle, one.connection.fileno()):
        del running[descriptor]
    os.close(one.handle)
    one.connection.close()


def _tell(one: _Running, number: int) -> None:
    with suppress(OSError):  # it is gone
        one.connection.sendall(number.to_bytes(_WORD, "little"))


def _prepare() -> None:
    """Does once what most processes would do first: compiles the templates, draws the synthetic
    points, and cuts a model, whose first time takes twice as long as others."""
    import tempfile

    import torch

    from asyncpipe.commands.partition import app
    from asyncpipe.commands.running import run as run_command
    from asyncpipe.runtime.data.datasets import CLUSTER_CLASSES, clustered_points
    from asyncpipe.runtime.reports.rendering import TEMPLATES

    for name in TEMPLATES.list_templates(extensions=["j2"]):
        TEMPLATES.get_template(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork does not have the threads of a pool
    clustered_points(_MLP_FEATURES, CLUSTER_CLASSES)
    if torch.version.cuda is None:  # else a fork of a process that ran a backward can run none
        with tempfile.TemporaryDirectory() as folder, _own_surroundings(folder):
            sys.argv = ["asyncpipe-partition", "--model", "mlp", "--stages", "2", "--output", "mlp"]
            assert not run_command(app)
    torch.set_num_threads(threads)


@contextmanager
def _own_surroundings(folder: str):
    """Inside, caches and the current folder are in a folder of the block's own; afterwards all is
    as in a process that has done nothing."""
    import torch

    environment, arguments, paths = dict(os.environ), sys.argv, list(sys.path)
    here, numbers = os.getcwd(), torch.get_rng_state()
    os.environ |= {"ASYNCPIPE_CACHE": folder, "ASYNCPIPE_STATE": folder}
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv, sys.path[:] = arguments, paths
        torch.set_rng_state(numbers)


def _settle(call: dict, received: list[int]) -> None:
    """Takes over the client's files, namespaces, folder and environment."""
    import fcntl
    import random

    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 500) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(moved, call["descriptors"], strict=True):
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)
    _enter_namespaces_of(call["process"])
    os.chdir(call["folder"])
    os.environ.clear()
    os.environ.update(call["environment"])
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [entry for entry in given if entry and entry not in sys.path]
    random.seed()


def _enter_namespaces_of(process: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    for name in _NAMESPACES:
        own, other = (f"/proc/{who}/ns/{name}" for who in ("self", process))
        if os.readlink(own) != os.readlink(other):
            with open(other) as namespace:
                if libc.setns(namespace.fileno(), 0) != 0:
                    raise OSError(ctypes.get_errno(), "setns", other)


def _run(arguments: list[str]) -> None:
    import runpy
    import types

    is_safe = bool(os.environ.get("PYTHONSAFEPATH"))
    while arguments[0] in ("-u", "-B", "-P"):
        is_safe |= arguments[0] == "-P"
        arguments = arguments[1:]
    match arguments:
        case ["-c", program, *rest]:
            sys.argv = ["-c", *rest]
            first = ""
        case ["-m", name, *rest]:
            sys.argv = [name, *rest]
            first = os.getcwd()
        case [script, *rest]:
            sys.argv = [script, *rest]
            first = os.path.dirname(os.path.abspath(script))
    # `isolate` cannot see that this is as with -P, and takes the first entry away.
    sys.path.insert(0, os.devnull if is_safe else first)
    if arguments[0] == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), main.__dict__)
    elif arguments[0] == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


def _run_and_end(arguments: list[str]) -> None:
    """Ends the process where no error does as the interpreter would, but lets the system free its
    memory: to free each object would copy all that the fork shares."""
    import atexit
    import threading

    code = None
    try:
        _run(arguments)
    except SystemExit as end:
        code = end.code
    threading._shutdown()
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    if sys.argv[2:]:
        _stand_for(sys.argv[1], sys.argv[2:])
    else:
        _run_and_end(_serve(sys.argv[1]))
