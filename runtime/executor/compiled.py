"""`--compile`: torch.compile of each stage.

Random numbers are drawn as without it, so that dropout depends on the micro-batch alone. Kernels
are compiled in the process of the rank, at the first micro-batch of each mode.
"""

from __future__ import annotations

import torch
from torch import nn

from ..errors import PlanError
from ..schedule.schedule import Schedule

_OPTIONS = {"fallback_random": True, "compile_threads": 1}


def compile_stage(module: nn.Module) -> None:
    """Compiles a stage's forward, and thereby its backward, in place."""
    module.compile(options=_OPTIONS)


def compile_again() -> None:
    """Drops all compiled forwards, so that stages are compiled again at their next run. torch keeps
    eight versions of a forward and runs any further one uncompiled, and the versions with fewer
    frozen parameters are never used again."""
    torch.compiler.reset()


def check_compiler(device: str, schedule: Schedule) -> None:
    """Raises PlanError where stages cannot be compiled for a device and a schedule."""
    if any(action.kind == "W" for row in schedule.ranks for action in row):
        raise PlanError(
            f"--compile, but {schedule.name} splits backwards, which needs the stages as they are "
            "written.",
            "--schedule 1f1b, or leave --compile out.",
        )
    if lack := _lack(device):
        raise PlanError(f"--compile needs {lack} on this machine.", "Install it, or leave it out.")


def _lack(device: str) -> str:
    """The program that torch.compile needs and this machine lacks; "" if it has all."""
    if device == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "triton"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler (g++ or clang++)"
    return ""
