"""The parts of a GPU report: each a function that adds rows to its `Work`."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_contenders import compare
from gpu_setting import MODELS
from gpu_work import Refuted, Work, expect, figures_of, largest_difference

from asyncpipe.runtime.plan.plan import read_plan

_MATRIX = {"cpu": 512, "cuda": 8192}


@dataclass(frozen=True)
class Part:
    """A part, its share of the report's time, and what it is about in a sentence."""

    run: Callable[[Work], None]
    share: float
    about: str


def machine(work: Work) -> None:
    device = work.setting.device
    with work.row("versions") as row:
        row |= {"torch": torch.__version__, "python": sys.version.split()[0]}
        if device == "cuda":
            row |= {
                "cuda": torch.version.cuda,
                "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            }
    for index in range(work.setting.gpus):
        with work.row(f"GPU {index}") as row:
            card = torch.cuda.get_device_properties(index)
            others = [other for other in range(work.setting.gpus) if other != index]
            row |= {
                "name": card.name,
                "gib": round(card.total_memory / 2**30, 1),
                "reaches": [o for o in others if torch.cuda.can_device_access_peer(index, o)],
            }
    for dtype in (torch.float32, torch.bfloat16):
        with work.row(f"matmul {dtype}".replace("torch.", "")) as row:
            row["tflop_per_s"] = round(_matmul_rate(device, dtype) / 1e12, 3)


def _matmul_rate(device: str, dtype: torch.dtype) -> float:
    size = _MATRIX[device]
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    least_s = float("inf")
    for _ in range(5):
        start_s = time.perf_counter()
        float((matrix @ matrix)[0, 0])
        least_s = min(least_s, time.perf_counter() - start_s)
    return 2.0 * size**3 / least_s


def profile(work: Work, dtype: str) -> None:
    """Each operation and each stage, measured on the device."""
    for model in MODELS:
        with work.row(model) as row:
            start_s = time.monotonic()
            folder = work.plan(model, 2, measured=True, dtype=dtype, micro_batches=8)
            plan = read_plan(folder)
            row |= {
                "seconds": round(time.monotonic() - start_s, 1),
                "forward_ms": [round(stage.forward_ms, 3) for stage in plan.stages],
                "backward_ms": [round(stage.backward_ms, 3) for stage in plan.stages],
                "gap": plan.gap,
            }


def exactness(work: Work) -> None:
    """Compares the losses of the device in float64 with those of the CPU. A synchronous schedule
    has the losses of one process."""
    ways: dict[str, dict[str, Any]] = {
        "single": {"schedule": "single"},
        "1f1b": {},
        "gpipe, recompute": {"schedule": "gpipe", "recompute": "all"},
        "zb-h1": {"schedule": "zb-h1"},
        "async-1f1b, stash": {"schedule": "async-1f1b", "staleness": "stash"},
        "async-1f1b, msnag": {"schedule": "async-1f1b", "staleness": "msnag"},
    }
    small = {"dtype": "float64", "micro_batches": 4, "steps": 4}
    on_cpu = small | {"device": "cpu", "threads": 1, "ranks_per_gpu": 1}
    plain = None
    for name, options in ways.items():
        with work.row(name) as row:
            folder = work.plan("tiny", 2)
            there = work.train(folder, 1 if name == "single" else 2, **small, **options)
            if "staleness" in options:
                here = work.train(folder, 2, **on_cpu, **options)
            else:
                here = plain = plain or work.train(folder, 1, **on_cpu, schedule="single")
            row["difference"] = expect(largest_difference(there, here), 1e-9, "losses")


_DELAYED = {
    # staleness: optimizers
    "none": ("adamw",),
    "stash": ("adamw",),
    "pipemare": ("adamw",),
    "stash+gap-aware": ("adamw",),
    "stash+gap-aware-activations": ("adamw",),
    "stash+dc-asgd": ("sgd",),
    "stash+dc-asgd-adaptive": ("adamw",),
    "stash+error-feedback": ("adamw",),
    "stash+msnag": ("adamw", "sgd"),
    "stash+aggmsnag": ("sgd",),
    "stash+nag": ("nadam",),
    "stash+lwp": ("sgd",),
    "stash+delay-rate": ("sutskever",),
    "stash+spike-compensation": ("sgd",),
    "none+pipemare-rate": ("adamw",),
    "spectrain": ("sgd",),
    "xpipe": ("adamw",),
    "pipeoptim": ("adamw",),
    "auto": ("adamw", "adafactor", "nadam", "muon", "soap"),
}
_OPTIONS: dict[str, dict[str, Any]] = {
    **{
        f"{staleness}, {optimizer}": {
            "schedule": "async-1f1b",
            "staleness": staleness,
            "optimizer": optimizer,
            "lr": 1e-2 if optimizer in ("sgd", "sutskever", "muon") else 1e-3,
        }
        for staleness, optimizers in _DELAYED.items()
        for optimizer in optimizers
    },
    "2bw": {"schedule": "2bw", "staleness": "2bw", "micro_batches": 8},
    "ahead 2x": {"schedule": "async-1f1b", "ahead": "2x"},
    "sync end": {"schedule": "async-1f1b", "sync_end": "3"},
    "clip by known": {"schedule": "async-1f1b", "clip": 0.5, "clip_by": "known"},
    "zb-h2": {"schedule": "zb-h2"},
    "clip": {"clip": 0.5},
    "ema": {"ema": 0.9},
    "freeze": {"freeze": "3=1,6=2", "freeze_every": 1},
    "boundaries in bfloat16": {"boundary_dtype": "bfloat16"},
}
_OVER_NCCL: dict[str, dict[str, Any]] = {
    "1f1b over NCCL": {},
    "zb-h1 over NCCL": {"schedule": "zb-h1"},
    "async-1f1b, stash over NCCL": {"schedule": "async-1f1b", "staleness": "stash"},
    "ddp, zero 2 over NCCL": {"schedule": "ddp", "replicas": 2, "zero": 2},
}
_IN_SINGLE = ("muon", "soap")
"""Optimizers that compute in bfloat16 (Newton-Schulz) or with a solver of the device's own."""


def methods(work: Work) -> None:
    """Compares the losses of the device in float64 with those of the CPU: every staleness method,
    optimizers, options, and NCCL. Several runs at once, since no time is measured."""
    small = {"dtype": "float64", "micro_batches": 4, "steps": 8, "folder": work.plan("tiny", 2)}
    here = {"device": "cpu", "threads": 1, "ranks_per_gpu": 1}
    work.tokens()  # made once, before several runs look for it
    refusal = work.refusal_of_nccl()
    if refusal:
        for name in _OVER_NCCL:
            work.skip(name, refusal)
    tried = _OPTIONS if refusal else _OPTIONS | _OVER_NCCL
    at_once = max(4, len(os.sched_getaffinity(0)) // 2)
    with ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = {
            name: [
                pool.submit(losses_of, work, name, place, options)
                for place, options in (
                    ("device", small | given),
                    ("cpu", small | given | here),
                )
            ]
            for name, given in tried.items()
        }
        for name, both in runs.items():
            with work.row(name) as row:
                there, expected = (run.result() for run in both)
                difference = max(abs(a - b) / abs(b) for a, b in zip(there, expected, strict=True))
                limit = 1e-4 if name.endswith(_IN_SINGLE) else 1e-9
                row["difference"] = expect(float(f"{difference:.2g}"), limit, "losses")


def losses_of(work: Work, name: str, place: str, options: dict[str, Any]) -> list[float]:
    """The losses of a run in a process of its own."""
    torch.set_num_threads(1)
    output = str(work.folder / "runs" / f"{name}, {place}".replace(" ", "_"))
    is_nccl = name in _OVER_NCCL and place == "device"
    run = (work.train_over_nccl if is_nccl else work.train)(processes=2, output=output, **options)
    return [run.losses[step] for step in sorted(run.losses)]


def resume(work: Work) -> None:
    """Compares a run that was resumed from a checkpoint with an uninterrupted run."""
    with work.row("1f1b") as row:
        folder = work.plan("tiny", 2)
        options = {"micro_batches": 4, "steps": 6, "save_every": 3}
        whole = work.train(folder, 2, **options)
        [checkpoint, *_] = sorted((whole.folder / "checkpoints").iterdir())
        again = work.train(folder, 2, **options, resume=str(checkpoint))
        difference = max(abs(again.losses[step] - whole.losses[step]) for step in (4, 5, 6))
        row["difference"] = expect(difference, 0.0, "losses after the checkpoint")


def transports(work: Work) -> None:
    """The same run over each transport: two ranks on one GPU and on two."""
    setting = work.setting
    counts = [0] if setting.is_dry else [1, 2]
    with work.row("one process") as row:
        alone = work.train(work.plan("gpt", 2), 1, schedule="single")
        row |= figures_of(alone)
    for gpus in counts:
        for transport in ("shm", "gloo", "nccl"):
            name = f"{transport}, {('CPU', 'one GPU', 'two GPUs')[gpus]}"
            if gpus > setting.gpus:
                work.skip(name, f"this machine has {setting.gpus} GPU")
            elif transport == "nccl" and (why := work.refusal_of_nccl()):
                work.skip(name, why)
            else:
                with work.row(name) as row:
                    where = setting.places(2, gpus or None)
                    train = work.train_over_nccl if transport == "nccl" else work.train
                    run = train(work.plan("gpt", 2), 2, transport=transport, **where)
                    row |= figures_of(run)
                    difference = largest_difference(run, alone)
                    row["difference"] = expect(difference, 1e-4, "losses")
    if setting.gpus == 1:
        return work.skip("asyncpipe-comm measure", "this machine has 1 GPU")
    with work.row("asyncpipe-comm measure") as row:
        row["links"] = _measured_links(setting.device)


def _measured_links(device: str) -> list[str]:
    """The links between two ranks, measured by asyncpipe-comm."""
    program = Path(sys.executable).with_name("asyncpipe-comm")
    command = [str(program), "measure", "--ranks", "2", "--device", device, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise Refuted((errors or [done.stderr.strip() or "asyncpipe-comm failed"])[0])
    return [
        f"{link['source']}>{link['target']} {link['latency_us']:.0f} us {link['gb_s']:.1f} GB/s"
        for link in json.loads(done.stdout.splitlines()[-1])["links"]
    ]


def prediction(work: Work) -> None:
    """Predicted and measured steps and memory. Ranks that share a GPU run the stages of 1f1b one
    after the other (`seq`), because the plan assumes a device for each rank."""
    setting = work.setting
    schedule = "1f1b" if setting.gpus != 1 else "seq"
    for model in MODELS:
        with work.row(model) as row:
            folder = work.plan(model, 2, measured=True, micro_batches=setting.micro_batches)
            run = work.train(folder, 2, schedule=schedule)
            peaks = run.records.start["predicted"]["peak_bytes"]
            figures = figures_of(run)
            row |= {
                "schedule": schedule,
                "predicted_step_ms": round(float(run.records.end["simulated_step_ms"]), 2),
                "step_ms": figures["step_ms"],
                "predicted_mib": [round(peak / 2**20, 1) for peak in peaks],
                "peak_mib": figures["peak_mib"],
            }


def bfloat16(work: Work) -> None:
    """Compares a step with --precision bfloat16 with one in float32."""
    _compared(work, "bfloat16", {"precision": "bfloat16"}, 0.02)


def compiled(work: Work) -> None:
    """Compares a step with --compile with one without."""
    _compared(work, "--compile", {"compile": True, "timeout_s": 120.0}, 1e-4)


def _compared(work: Work, name: str, options: dict[str, Any], limit: float) -> None:
    for model in MODELS:
        with work.row(f"{model}, {name}") as row:
            folder = work.plan(model, 2)
            run, plain = work.train(folder, 2, **options), work.train(folder, 2)
            figures, others = figures_of(run), figures_of(plain)
            row |= {
                "plain_ms": others["step_ms"],
                "step_ms": figures["step_ms"],
                "first_step_s": round(float(run.records.steps[0]["elapsed_s"]), 1),
                "plain_mib": others["peak_mib"],
                "peak_mib": figures["peak_mib"],
            }
            row["difference"] = expect(largest_difference(run, plain), limit, "losses")


def asynchronous(work: Work) -> None:
    """Times and memory of asynchronous schedules and of 1f1b."""
    for name, options in {
        "1f1b": {},
        "async-1f1b, none": {"schedule": "async-1f1b", "staleness": "none"},
        "async-1f1b, stash": {"schedule": "async-1f1b", "staleness": "stash"},
        "async-1f1b, stash, ahead 2x": {"schedule": "async-1f1b", "ahead": "2x"},
        "2bw": {"schedule": "2bw", "staleness": "2bw"},
    }.items():
        with work.row(name) as row:
            row |= figures_of(work.train(work.plan("gpt", 2), 2, **options))


def tensor(work: Work) -> None:
    """Compares two tensor ranks with one process."""
    for model in MODELS:
        with work.row(f"{model}, 2 tensor ranks") as row:
            folder = work.plan(model, 1, tensor_parallel=2)
            run = work.train_over_nccl(folder, 2, tensor_parallel=2)
            alone = work.train(folder, 1, schedule="single")
            row |= figures_of(run) | {"alone_ms": figures_of(alone)["step_ms"]}
            row["difference"] = expect(largest_difference(run, alone), 1e-4, "losses")


def zero(work: Work) -> None:
    """Two replicas with each level of --zero."""
    reference = None
    for level in (0, 1, 2):
        with work.row(f"--zero {level}") as row:
            folder = work.plan("gpt", 1)
            run = work.train_over_nccl(folder, 2, schedule="ddp", replicas=2, zero=level)
            row |= figures_of(run)
            reference = reference or run
            row["difference"] = expect(largest_difference(run, reference), 1e-5, "losses")


PARTS = {
    "machine": Part(machine, 1, "Versions, GPUs, direct access between them, matmul rates."),
    "exactness": Part(exactness, 3, "Losses in float64, compared with those of the CPU."),
    "methods": Part(methods, 5, "Every staleness method in float64, compared with the CPU."),
    "transports": Part(transports, 4, "CUDA IPC (shm), gloo and NCCL, on one GPU and on two."),
    "profile": Part(partial(profile, dtype="float32"), 3, "The measured profile."),
    "profile-bfloat16": Part(partial(profile, dtype="bfloat16"), 3, "The profile in bfloat16."),
    "prediction": Part(prediction, 4, "Predicted and measured steps and memory."),
    "bfloat16": Part(bfloat16, 3, "--precision bfloat16, compared with float32."),
    "compare-gpt": Part(partial(compare, model="gpt"), 9, "GPT-2's shapes, torch and DDP."),
    "compare-llama": Part(partial(compare, model="llama"), 9, "Llama's shapes, torch and DDP."),
    "asynchronous": Part(asynchronous, 3, "Asynchronous schedules, compared with 1f1b."),
    "tensor": Part(tensor, 3, "Layers shared out over two tensor ranks."),
    "zero": Part(zero, 2, "Optimizer state and gradients shared out over two replicas."),
    "resume": Part(resume, 2, "A resumed run, compared with an uninterrupted one."),
    "compile": Part(compiled, 5, "torch.compile of the stages."),
}
"""The parts in the order in which they run."""
