"""The options that decide where and how a run is carried out: checkpoints, logs, devices, jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from ..limits import Choice, Flag, Number, Text, Whole, form, path
from ..options import option
from .learning_options import (
    CHECKPOINTS,
    CODE,
    DATA,
    DEVICES,
    LAUNCH,
    LOGGING,
    POSITIVE_STEPS,
    STEPS,
)

_reads = partial(option, group=DATA)
_stores = partial(option, group=CHECKPOINTS)
_logs = partial(option, group=LOGGING)
_computes = partial(option, group=DEVICES)
_launches = partial(option, group=LAUNCH)

TRANSPORTS = ("auto", "local", "shm", "gloo", "nccl", "mpi")
LEFT_OUT = "none"
"""The transport that carries nothing, which a run may have."""

_UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_FORM = re.compile("".join(rf"(?:(\d+){unit})?" for unit in _UNITS))


def seconds_of(text: str) -> int | None:
    """The seconds of a duration in days, hours, minutes and seconds; None for zero and for a text
    that is not a duration.

    >>> [seconds_of(text) for text in ("3h50m", "90s", "2d", "90", "0s", "")]
    [13800, 90, 172800, None, None, None]
    """
    match = _FORM.fullmatch(text)
    numbers = match.groups(default="0") if match else ()
    return sum(int(n) * s for n, s in zip(numbers, _UNITS.values(), strict=False)) or None


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """The options that decide where and how a run is carried out."""

    init_from: str | None = _stores(
        None,
        path("runs/gpt2_4p/1"),
        "Initial weights, with a new optimizer: a safetensors file or folder, a checkpoint, a run "
        "or a generated folder. [default: the weights of the generated folder]",
        on_resume="ignored",
        changes_losses=True,
        compared=True,
    )
    resume: str | None = _stores(
        None,
        Text("auto, a run or a checkpoint", "auto"),
        "Resume a run: a run's folder, one of its checkpoints, or auto: the newest good checkpoint "
        "of --output, or else of the last run of this model, or a new run if there is none.",
        scope="call",
    )
    save_every: int = _stores(
        0,
        STEPS,
        "Steps between checkpoints; 0 writes one only when a signal ends the run.",
        on_resume="ignored",
    )
    keep_last: int = _stores(
        3, Whole(1, 10**6, 3), "Number of newest checkpoints to keep.", on_resume="ignored"
    )
    keep_best: int = _stores(
        0,
        Whole(0, 10**6, 1),
        "Number of checkpoints with the lowest evaluation loss to keep as well.",
        on_resume="ignored",
    )
    save_to: str | None = _stores(
        None,
        Text("the URL of a place", "s3://bucket/run"),
        "URL to copy checkpoints to as well: s3://bucket/run or any that fsspec supports; --resume "
        "and --init-from accept such URLs.",
        on_resume="ignored",
    )
    trust: bool = _stores(
        False,
        Flag(),
        "Allow running code from folders generated on another machine or named in an options file. "
        "Remembered.",
        scope="call and job",
        compared=True,
    )
    export_hf: str | None = _stores(
        None,
        path("exported"),
        "Folder to write the trained model to, in the format of from_pretrained.",
        on_resume="ignored",
    )
    output: str | None = _stores(
        None,
        path("runs/mine"),
        "Folder of the run. [default: a new one in runs/NAME]",
        scope="call and job",
        compared=True,
    )

    eval_every: int = _logs(
        0,
        STEPS,
        "Steps between evaluations; 0 evaluates only at the end.",
        on_resume="ignored",
        changes_losses=True,
        compared=True,
    )
    eval_batches: int | None = _logs(
        None,
        Whole(0, 10**9, 8),
        "Micro-batches of an evaluation; 0 turns evaluation off. [default: all evaluation data]",
        on_resume="ignored",
        changes_losses=True,
        compared=True,
    )
    workers: int | None = _reads(
        None,
        Whole(0, 2**12, 4),
        "Processes that read data ahead for each rank that reads data; 0 reads in the rank itself. "
        "[default: num_workers of your DataLoader, or 0]",
        on_resume="ignored",
    )
    prefetch: int | None = _reads(
        None,
        Whole(1, 2**16, 2),
        "Micro-batches that each of --workers reads ahead. [default: prefetch_factor of your "
        "DataLoader, or 2]",
        on_resume="ignored",
    )
    metric: str | None = _logs(
        None,
        CODE,
        "Metric of evaluations: file.py:function, whose function(outputs, target) returns a number "
        "or a dict of numbers, means over the samples of a micro-batch.",
        on_resume="ignored",
        names_code=True,
    )
    early_stop: int = _logs(
        0,
        STEPS,
        "End the run after this many evaluations in a row without a lower loss; 0 never does.",
        on_resume="ignored",
        changes_losses=True,
    )
    callbacks: str | None = _logs(
        None,
        CODE,
        "Callbacks that may stop, save, evaluate or change the learning rate: file.py:make, whose "
        "make(config, folder) returns an object with on_step, on_evaluation, on_checkpoint or "
        "on_end.",
        on_resume="ignored",
        changes_losses=True,
        names_code=True,
    )
    log_every: int = _logs(
        10, POSITIVE_STEPS, "Steps between lines of the log.", on_resume="ignored"
    )
    log: str | None = _logs(
        None,
        Text("names of trackers, joined by commas", "tensorboard"),
        "Experiment trackers to log to, joined by commas: tensorboard, wandb, mlflow, trackio, or "
        "your own package.module:factory or path/file.py:factory.",
        changes_losses=False,
        names_code=True,
    )
    watch: bool = _logs(
        False,
        Flag(),
        "Serve a page that follows the run in a browser on this machine, and print its address; "
        "asyncpipe-view RUN does so at any time.",
        scope="call",
    )
    trace: str | None = _logs(
        None,
        Text(
            "a number of steps, or the first and the last", "3", form(r"[0-9]{1,15}(-[0-9]{1,15})?")
        ),
        "Steps to record as a timeline for ui.perfetto.dev: 3 for the last three (in an "
        "asynchronous run, before the pipeline drains), 10-12 for those.",
        on_resume="ignored",
    )
    debug: str | None = _launches(
        None,
        Text("all or numbers of ranks", "0,2", form(r"all|[0-9]{1,9}(,[0-9]{1,9})*")),
        "Ranks that wait for a debugger (debugpy): 1, 0,2 or all.",
        scope="call",
    )

    device: str = _computes("cpu", Choice(("cpu", "cuda")), "Device type that stages compute on.")
    ranks_per_gpu: int = _computes(
        1, Whole(1, 2**16, 2), "Ranks that share a GPU, with --device cuda."
    )
    threads: int | None = _computes(
        None,
        Whole(1, 2**12, 1),
        "Threads of each rank. [default: an equal share of the cores]",
        on_resume="ignored",
        compared=True,
    )
    pin: str = _computes(
        "cores",
        Choice(("cores", "numa", "none")),
        "CPU affinity of the ranks of a host: each on its own cores, on its NUMA node, or none.",
        on_resume="ignored",
    )
    timeout_s: float = _launches(
        300.0,
        Number(1, 1e8, 300),
        "Seconds that a rank waits for another before it fails and names that rank.",
        on_resume="ignored",
    )
    stall_s: float = _launches(
        60.0,
        Number(0, 1e8, 60),
        "Seconds without progress before a report of which ranks wait for which; 0 turns it off.",
        on_resume="ignored",
    )
    restarts: int = _launches(
        0,
        Whole(0, 10**6, 3),
        "Automatic restarts of the run after a rank dies or hangs.",
        changes_losses=False,
    )
    dtype: str | None = _computes(
        None,
        Choice(("float32", "float64")),
        "Dtype of all parameters of floating point. [default: those of the model]",
        compared=True,
    )
    compile: bool = _computes(
        False,
        Flag(),
        "Compile each stage with torch.compile: the same numbers up to rounding, after a start of "
        "seconds to minutes.",
    )
    precision: str = _computes(
        "full",
        Choice(("full", "bfloat16", "float16")),
        "Precision of forwards and backwards: that of the weights (full), or lower under "
        "torch.autocast.",
    )
    loss_scale: float | None = _computes(
        None,
        Number(1, 2**64, 65536),
        "Initial loss scale with --precision float16; it adapts to overflows as torch's GradScaler "
        "does. [default: 65536]",
    )
    boundary_dtype: str | None = _computes(
        None,
        Choice(("bfloat16",)),
        "Data type to which wider boundary tensors are cast between ranks. [default: no cast]",
    )
    transport: str = _launches(
        "auto",
        Choice((*TRANSPORTS, LEFT_OUT)),
        "Transport of boundary tensors; auto selects the fastest that works here. none leaves the "
        "network out, to measure the computation alone: ranks make these tensors themselves, "
        "losses are meaningless, and no weights are written.",
        on_resume="ignored",
        changes_losses=True,
    )
    mpi_memory: str = _launches(
        "auto",
        Choice(("auto", "host", "cuda")),
        "Memory that holds the messages of GPUs under --transport mpi: the GPU's, for a CUDA-aware "
        "MPI (cuda), or copies in the CPU's (host); auto asks the library.",
        on_resume="ignored",
    )
    interface: str | None = _launches(
        None,
        Text("a network interface", "eth0", form(r"\S+")),
        "Network interface between hosts. [default: the one that leads to rank 0]",
        on_resume="ignored",
    )
    master_addr: str | None = _launches(
        None,
        Text("a host name or an address", "host-0", form(r"\S+")),
        "Host name or address of rank 0, for launchers that leave it open (mpirun on several "
        "hosts). [default: the launcher's, or this host]",
        on_resume="ignored",
    )
    master_port: int | None = _launches(
        None,
        Whole(1, 2**16 - 1, 29500),
        "Port of rank 0. [default: the launcher's, or one derived from the job number]",
        on_resume="ignored",
    )
    rank: int | None = _launches(
        None,
        Whole(0, 2**16 - 1, 1),
        "Number of this rank, from 0, when each rank is started by hand. [default: RANK of the "
        "environment]",
        scope="call",
    )
    world_size: int | None = _launches(
        None,
        Whole(1, 2**16, 2),
        "Number of ranks that are started by hand. [default: WORLD_SIZE of the environment]",
        scope="call",
    )
    rendezvous: str | None = _launches(
        None,
        Text(
            "tcp://HOST:PORT or file:///PATH",
            "tcp://host-0:29500",
            form(r"tcp://([\w.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?|file:///.+"),
        ),
        "Place where ranks that are started by hand meet: tcp:// with rank 0's host and a free "
        "port there, or file:// with a file in a folder that all hosts share. [default: "
        "--master-addr and --master-port]",
        scope="call",
    )
    max_run: str | None = _launches(
        None,
        Text("a time of days, hours, minutes and seconds", "3h50m", seconds_of),
        "Longest duration of the command, such as 3h50m or 90s; the run then ends as after "
        "SIGTERM.",
        scope="call and job",
    )

    print_sbatch: bool = _launches(
        False, Flag(), "Print a Slurm batch script for this run, then exit.", scope="call"
    )
    nodes: int | None = _launches(
        None,
        Whole(1, 2**16, 2),
        "Hosts of the job that --print-sbatch writes. [default: the plan's]",
        scope="call",
    )
    time_limit: str = _launches(
        "24:00:00",
        Text(
            "a time limit of Slurm",
            "24:00:00",
            form(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}"),
        ),
        "Time limit of the job that --print-sbatch writes.",
        scope="call",
    )

    dry_run: bool = _launches(
        False, Flag(), "Check everything, print a summary of the run, then exit.", scope="call"
    )
    print_schedule: bool = _launches(
        False,
        Flag(),
        "Print the schedule as text that --schedule FILE reads, then exit.",
        scope="call",
    )
    json: bool = _logs(
        False, Flag(), "Print every event as a JSON line.", scope="call and job", compared=True
    )
    quiet: bool = _logs(
        False, Flag(), "Print errors only.", scope="call", compared=True, short="-q"
    )

    @property
    def has_network(self) -> bool:
        """False when ranks exchange no tensors and no gradients."""
        return self.transport != LEFT_OUT

    @property
    def max_run_s(self) -> int | None:
        """The longest duration of the command, in seconds."""
        return None if self.max_run is None else seconds_of(self.max_run)

    @property
    def is_scaled(self) -> bool:
        """True when the loss is scaled for the backward and steps with an overflow are skipped."""
        return self.precision == "float16"

    @property
    def patience_s(self) -> float:
        """Seconds that a rank waits: `timeout_s`, or a week while a debugger may stop another."""
        return self.timeout_s if self.debug is None else 7 * 86_400.0

    def is_debugged(self, rank: int) -> bool:
        """True when the rank waits for a debugger."""
        return self.debug == "all" or str(rank) in (self.debug or "").split(",")
