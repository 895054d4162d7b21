"""A part of a GPU report in its process: rows that fail one by one, plans and runs of asyncpipe.

Every row is written as soon as it ends, so that a part that crashes keeps what it had.
"""

import gc
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import gpt
import llama
import numpy as np
import torch
import torch.distributed as dist
from gpu_setting import Setting
from torch import Tensor, nn

import asyncpipe
from asyncpipe.commands.in_python import RunResult
from asyncpipe.runtime.errors import AsyncPipeError, root_of

LEAST_ROW_S = 60.0
PATIENCE_S = 50.0
"""A rank that waits for another says so before its row ends."""
MEETING_S = 45.0
NCCL_ANSWER = "nccl.json"
_USUAL = {"schedule": "1f1b", "dtype": "float32", "ranks": None}
"""Options whose plan is that without them, so that parts share plans."""


class Refuted(Exception):
    """A run ended well with other numbers than expected."""


class TooLong(Exception):
    """A row took more than its share of the time of its part."""


def sentence_of(error: BaseException) -> str:
    """The first cause of an error in one sentence."""
    if isinstance(error, AsyncPipeError):
        text = str(root_of(error).args[0]).splitlines()[0]
    elif isinstance(error, Refuted | TooLong):
        text = str(error)
    else:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = f"{type(error).__name__}: {lines[0] if lines else 'without a message'}"
    return text.partition(". ")[0].rstrip(".")[:400] + "."


@dataclass
class Work:
    """The setting of a part, a folder that all parts share, and the time at which it ends."""

    setting: Setting
    folder: Path
    answer: Path
    end_s: float
    rows: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def row(self, name: str) -> Iterator[dict[str, Any]]:
        """One row of the part's table; an error in it becomes its cause, and the part continues.

        A row has at most half of the time that its part has left, or a minute.
        """
        row: dict[str, Any] = {"row": name}
        print(f"# {name}", flush=True)
        limit_s = max(LEAST_ROW_S, (self.end_s - time.monotonic()) / 2)
        try:
            with _limited(limit_s):
                yield row
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            row["cause"] = sentence_of(error)
        self.rows.append(row)
        self.answer.write_text(json.dumps(self.rows))
        free_memory()

    def skip(self, name: str, why: str) -> None:
        """A row that cannot run on this machine."""
        self.rows.append({"row": name, "skipped": why})
        self.answer.write_text(json.dumps(self.rows))

    def plan(self, model: str, stages: int, *, measured: bool = False, **options: Any) -> Path:
        """The generated folder of a model; made once for all parts. Costs are measured on the
        report's device, or else predicted, so that a part fails for its own reasons alone."""
        options["stages"] = stages
        how: dict[str, Any] = {"profile": "analytic"}
        if measured:
            how = {"profile": "measured", "device": self.setting.device}
        how |= {name: value for name, value in options.items() if _USUAL.get(name, ...) != value}
        key = "_".join([model, *(f"{name}_{value}" for name, value in sorted(how.items()))])
        folder = self.folder / "plans" / key.replace("-", "_")
        if not (folder / "plan.json").exists():
            made, inputs = self.model(model)
            asyncpipe.partition(made, inputs, output=folder, **how)
            del made, inputs
            free_memory()
        return folder

    def model(self, model: str) -> tuple[nn.Module, dict[str, Tensor]]:
        """A model and one micro-batch: gpt, llama, or the tiny one of exact comparisons."""
        torch.manual_seed(0)
        if model == "tiny":
            return gpt.build(4, 64, 4, 32, 256, 2)
        build = {"gpt": gpt.build, "llama": llama.build}[model]
        return build(**self.setting.model_args(model))

    def train(self, folder: Path, processes: int, **options: Any) -> RunResult:
        """A run of asyncpipe-train on random tokens, by default over all GPUs."""
        number = sum(1 for _ in self.folder.glob("runs/*"))
        defaults = {
            "schedule": "1f1b",
            "micro_batches": self.setting.micro_batches,
            "steps": self.setting.steps,
            "lr": 1e-4,
            "warmup": 0,
            "eval_batches": 0,
            "log_every": 1,
            "quiet": True,
            "timeout_s": PATIENCE_S,
            "output": str(self.folder / "runs" / f"{number:03}"),
        }
        options = self.setting.places(processes) | defaults | options
        return asyncpipe.train(folder, data=str(self.tokens()), **options)

    def refusal_of_nccl(self) -> str:
        """Why NCCL does not connect two ranks here; "" if it does. Tried once for all parts of a
        report."""
        if self.setting.is_dry:
            return "NCCL needs a GPU"
        answer = self.folder / NCCL_ANSWER
        if not answer.exists():
            try:
                with _limited(MEETING_S):
                    asyncpipe.launch(_meet_over_nccl, self.setting, ranks=2)
                cause = ""
            except Exception as error:
                cause = f"NCCL does not connect two ranks: {sentence_of(error)}"
            answer.write_text(json.dumps(cause))
        return str(json.loads(answer.read_text()))

    def train_over_nccl(self, folder: Path, processes: int, **options: Any) -> RunResult:
        """As `train`, over NCCL where it connects two ranks, also on one GPU."""
        if self.refusal_of_nccl():
            return self.train(folder, processes, **options)
        options = self.setting.places(processes) | {"transport": "nccl"} | options
        if options["ranks_per_gpu"] == 1:
            return self.train(folder, processes, **options)
        arguments = (self, folder, processes, options)
        run: RunResult = asyncpipe.launch(_run_on_own_hosts, *arguments, ranks=processes)[0]
        return run

    def tokens(self) -> Path:
        """A file of random tokens."""
        tokens = self.folder / "tokens.bin"
        if not tokens.exists():
            drawn = np.random.default_rng(0).integers(256, size=2**18)
            drawn.astype(np.uint16).tofile(tokens)
        return tokens


def seem_to_be_on_own_hosts() -> None:
    """Makes NCCL connect ranks that share a GPU, which it refuses on one host; it does so over
    loopback."""
    rank = os.environ["RANK"]
    os.environ |= {"NCCL_HOSTID": rank, "NCCL_SOCKET_IFNAME": "lo", "NCCL_MNNVL_ENABLE": "0"}


def _run_on_own_hosts(
    work: Work, folder: Path, processes: int, options: dict[str, Any]
) -> RunResult:
    seem_to_be_on_own_hosts()
    return work.train(folder, processes, **options)


def _meet_over_nccl(setting: Setting) -> None:
    """Exchanges a number."""
    if setting.gpus == 1:
        seem_to_be_on_own_hosts()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", min(rank, setting.gpus - 1))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    number = torch.full((1,), float(rank), device=device)
    both = [torch.zeros(1, device=device) for _ in range(2)]
    dist.all_gather(both, number)
    if [int(each) for each in both] != [0, 1]:
        raise Refuted(f"it sent {[float(each) for each in both]} instead of [0, 1]")
    dist.destroy_process_group()


def figures_of(run: RunResult) -> dict[str, Any]:
    """The time of a step without the first ones, the last loss and each rank's peak memory."""
    last = run.records.steps[-1]
    pairs = zip(last["mem_bytes_by_rank"], last["base_bytes_by_rank"], strict=True)
    return {
        "step_ms": round(float(run.records.end["step_ms"]), 2),
        "loss": round(run.losses[max(run.losses)], 5),
        "peak_mib": [round((peak - base) / 2**20, 1) for peak, base in pairs],
    }


def largest_difference(run: RunResult, reference: RunResult) -> float:
    """The largest relative difference of the losses of two runs."""
    pairs = [(run.losses[step], loss) for step, loss in reference.losses.items()]
    return float(f"{max(abs(ours - its) / abs(its) for ours, its in pairs):.2g}")


def expect(difference: float, limit: float, what: str) -> float:
    """The difference. Raises Refuted if it is over the limit, or no number."""
    if not difference <= limit:
        raise Refuted(f"{what} differ by {difference:.2g}; at most {limit:.2g} was expected")
    return difference


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"it took over {limit_s:.0f} s and was stopped")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def touch(device: str) -> None:
    """The first call of a part to its device, so that one that is out of order is named."""
    torch.ones(1, device=device).add_(1).item()
