"""Packages that are installed, and the backends that ranks may talk over."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from ..environment import EXTRAS, describe, version_of
from ..errors import TransportError
from ..import_path import ISOLATED
from ..transports.choose import has_nccl
from ..transports.mpi import mpiexec

_PATIENCE_S = 20.0
_OF_LAUNCHERS = ("PMI", "OMPI_", "PRTE", "HYDRA", "MPI_", "SLURM_")
"""Variables by which MPI would take a process for a rank of somebody's job."""
_ASK_MPI = """
import json
from mpi4py import MPI
levels = {getattr(MPI, "THREAD_" + name): name for name in
          ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
print(json.dumps([MPI.Get_library_version().strip("\\0"), levels.get(MPI.Query_thread(), "?")]))
"""


def versions() -> dict[str, str]:
    """asyncpipe, the interpreter, and the packages that are needed."""
    optional = {package for packages in EXTRAS.values() for package in packages}
    told: dict[str, str] = describe()["versions"]
    return {name: number for name, number in told.items() if name not in optional} | {
        "torch": torch.__version__,
        "python": f"{told['python']} ({sys.executable})",
    }


def extras() -> dict[str, str]:
    """The extras of asyncpipe, with what is installed of them."""
    return {
        extra: ", ".join(f"{package} {version_of(package) or '-'}" for package in packages)
        for extra, packages in EXTRAS.items()
    }


def backends() -> dict[str, str]:
    """gloo, nccl and MPI: their version, or why they are not there."""
    has_gloo = dist.is_available() and dist.is_gloo_available()
    return {
        "gloo": "with this torch" if has_gloo else "this torch was built without it",
        "nccl": _nccl(),
        "mpi": _mpi(),
        "mpiexec": _mpiexec(),
    }


def _nccl() -> str:
    if not has_nccl():
        return "this torch was built without it"
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return f"{version}" if torch.cuda.is_available() else f"{version}, but torch sees no GPU"


def _mpi() -> str:
    """Asked in a process of its own: a library that does not work may end the process."""
    if find_spec("mpi4py") is None:
        return 'mpi4py is not installed: pip install "asyncpipe[mpi]"'
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)
    }
    try:
        asked = subprocess.run(
            [sys.executable, *ISOLATED, "-c", _ASK_MPI],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
        )
    except subprocess.TimeoutExpired:
        return f"mpi4py is installed, but MPI did not start in {_PATIENCE_S:g} s"
    if asked.returncode:
        said = asked.stderr.strip().splitlines() or ["it ended without a word"]
        return f"mpi4py is installed, but MPI does not start: {said[-1].strip()}"
    library, level = json.loads(asked.stdout.splitlines()[-1])
    lines = " ".join(library.split())
    enough = "" if level == "MULTIPLE" else ", which is too low: two threads call it"
    return f"{_shortened(lines)}, thread level {level}{enough}"


def _shortened(library: str) -> str:
    """Name and version of a library that tells more.

    >>> _shortened("MPICH Version: 5.0.2 Release date: .."), _shortened("Open MPI v5.0.3, ..")
    ('MPICH 5.0.2', 'Open MPI v5.0.3')
    """
    found = re.match(r"(\D+?)\s*(?:Version:)?\s*(v?\d[\w.]*)", library)
    return f"{found[1]} {found[2]}" if found else library


def _mpiexec() -> str:
    try:
        return str(Path(mpiexec()))
    except TransportError:
        return "none, neither beside the interpreter nor on the path"
