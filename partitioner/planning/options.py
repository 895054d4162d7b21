"""The options of a partition, each declared once: default, legal values, help, where it applies.

`asyncpipe-partition`, `asyncpipe.partition`, `asyncpipe.outline` and `asyncpipe.plan_graph` read
their defaults, checks and help from here.

Imports neither torch nor numpy, so that `--help` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...runtime.errors import PlanError
from ...runtime.freezing.elastic import CACHES, GROWS, NO_CACHE, REPLICAS, check_lengths
from ...runtime.freezing.rules import FORM as FREEZING_FORM
from ...runtime.freezing.rules import WORDS as FREEZING_RULES
from ...runtime.limits import (
    Choice,
    Either,
    Flag,
    ListOf,
    Number,
    Text,
    Whole,
    bytes_of,
    flag_of,
    form,
    key_values,
    path,
    refusal,
    typed,
)
from ...runtime.optimizers.facts import PLANNED as PLANNED_OPTIMIZERS
from ...runtime.options import option, options_of
from ...runtime.schedule.asynchronous import KEEPS
from ...runtime.schedule.builders import AUTO, SCHEDULES
from .keywords import PlanConfig

if TYPE_CHECKING:
    from ..capture import DimensionOption
    from .cluster import Cluster

METHODS = (
    *("auto", "exact", "chain", "uniform", "metis", "acyclic", "mpipe", "2dbin", "pipedream"),
    "all",
)
REPLICATING = ("pipedream", "all")
"""The methods that may place a stage on several of equal ranks."""
PREFER_MODULES = 0.02

# --- where options apply --------------------------------------------------------------

GROUPS = ("Model", "Plan", "Devices", "Profile", "Output")
MODEL, PLAN, DEVICES, PROFILE, OUTPUT = GROUPS
"""The headings of the options in --help."""

OUTLINED = frozenset({"name", "model", "outline"})
"""Read when a model is captured and profiled: by a partition and by an outline."""
PARTITIONED = frozenset({"name", "model"})
"""Read when a model is partitioned: the one that --model names, or the caller's own."""
NAMED = frozenset({"name"})
"""Read when the model that --model names is built."""
PLANNED = frozenset({"name", "model", "graph"})
"""Read when a model or a cost graph is planned."""


_loads = partial(option, group=MODEL, read_by=NAMED)
_builds = partial(option, group=MODEL, read_by=PARTITIONED)
_captures = partial(option, group=MODEL, read_by=OUTLINED)
_plans = partial(option, group=PLAN, read_by=PLANNED)
_profiles = partial(option, group=PROFILE, read_by=OUTLINED)
_writes = partial(option, group=OUTPUT, read_by=PARTITIONED)

_DIMENSIONS = ListOf(Text("a dimension, none or INPUT=DIMENSION", "1"))


@dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """The options of a partition. Raises PlanError for a value that is not legal."""

    model_args: Mapping[str, Any] | None = _builds(
        None,
        key_values("n_layer=4"),
        "KEY=VALUE: overrides a field of the model's configuration, or an argument of your "
        "factory.",
        flag="model_arg",
        is_words=True,
    )
    inputs: Mapping[str, str] | None = _loads(
        None,
        key_values("x=f32[4,64]"),
        "NAME=f32[4,64]: dtype and shape of an input of forward, for a factory that returns only "
        "a model.",
        flag="input",
        is_words=True,
    )
    micro_batch_size: int | None = _loads(
        None,
        Whole(1, 2**24, 8),
        "Number of samples in a micro-batch, for profiling and for training. [default: that of a "
        "factory's example inputs; for other models 8, or 1 with over 50 M parameters]",
    )
    seq: int | None = _loads(
        None,
        Whole(1, 2**24, 128),
        "Sequence length in tokens. [default: that of a factory's example inputs; for other models "
        "128]",
    )
    batch_dim: DimensionOption = _captures(
        "auto",
        _DIMENSIONS,
        "The batch dimension: INPUT=1 or INPUT=none for one input, 1 or none for all inputs "
        "(none: the model has no batch). [default: dimension 0, if the model gives the same "
        "results for a part of the samples]",
        is_words=True,
    )
    sequence_dim: DimensionOption = _captures(
        "auto",
        _DIMENSIONS,
        "The sequence dimension, whose size stays symbolic: INPUT=1 or INPUT=none for one input, "
        "1 or none for all inputs. [default: dimension 1 of two-dimensional integer inputs]",
        is_words=True,
    )
    loss: str | Callable[..., Any] | None = _builds(
        None,
        Text(
            "cross_entropy, mse or FILE.py:FUNCTION",
            "cross_entropy",
            form(r"cross_entropy|mse|.+:.+"),
        ),
        "Loss function, if the model returns no loss: cross_entropy, mse or path/file.py:function.",
    )
    seed: int = _loads(0, Whole(0, 2**53, 0), "Seed of the random weights. [default: 0]")
    pretrained: bool = _loads(
        False,
        Flag(),
        "Read the published weights of a name on the hub (safetensors), from the local cache or by "
        "a download, in place of random ones.",
    )
    meta: bool = _loads(
        False,
        Flag(),
        "Build the model on the meta device, without weights: for models larger than the memory "
        "of this machine.",
    )
    capture: str = _captures(
        "auto",
        Choice(("auto", "tracer", "dynamo")),
        "How to capture forward: auto uses the tracer, and TorchDynamo where the tracer fails.",
    )
    mode: str = _captures(
        "both",
        Choice(("both", "train")),
        "Capture forward in training and evaluation mode, or in training mode only, for a model "
        "that returns another structure in evaluation.",
    )
    leaves: Collection[str] = _captures(
        (),
        ListOf(Text("the name of a class", "GPT2Attention")),
        "Module class to treat as a single opaque operation (leaf module). May be repeated.",
        flag="leaf",
    )
    stages: int | None = _plans(
        None,
        Whole(1, 2**12, 4),
        "Number of stages. Not needed with --stop-after capture or profile; chosen by the planner "
        "if it is left out with --devices, --hosts or --ranks.",
    )
    method: str = _plans(
        "auto",
        Choice(METHODS),
        "Planning method: auto (optimal, with proof), chain, uniform, metis, acyclic, mpipe and "
        "2dbin (several stages per rank), pipedream (replicated stages), or all: compares all "
        "methods and takes the best plan that can be trained.",
    )
    granularity: str = _plans(
        "op",
        Choice(("op", "module")),
        "Where cuts are allowed: between any two operations, or only between whole blocks.",
    )
    prefer_modules: float = _plans(
        PREFER_MODULES,
        Number(0, 1, 0.02),
        "Fraction of the bottleneck time that the planner may give up to cut between modules. "
        "With --graph the default is 0.",
    )
    cut_at: Sequence[str] = _plans(
        (),
        ListOf(Text("a module, an operation or FILE:LINE", "transformer.h.6")),
        "Force a stage boundary right before this module (transformer.h.6), operation or "
        "file:line. May be repeated.",
    )
    keep_together: Sequence[str] = option(
        (),
        ListOf(Text("a module or the name of a class", "transformer.h.6")),
        "Path or class of modules to keep in one stage. May be repeated.",
        group=PLAN,
        read_by=PARTITIONED,
    )
    tensor_parallel: int | str = _builds(
        1,
        Either(Whole(1, 2**10, 2), Choice((AUTO,))),
        "Number of tensor ranks that share out the wide layers of each stage. auto: the fastest "
        "layout of stages, tensor ranks, replicas and --zero on --devices, --hosts or --ranks, "
        "with a table of the best one for each number of devices; with --schedule auto also of the "
        "synchronous schedules.",
        group=PLAN,
    )
    sequence_parallel: bool = _builds(
        False,
        Flag(),
        "Each tensor rank keeps a part of the positions of a sequence between the layers that they "
        "share out: less memory for activations, and a few more messages.",
        group=PLAN,
    )
    schedule: str | None = _plans(
        None,
        Choice((*SCHEDULES, AUTO)),
        "Schedule to balance the stages for; interleaved, looped-bfs and zb-v place several "
        "stages on a rank. [default: async-1f1b]",
    )
    ranks: int | None = _plans(
        None,
        Whole(1, 2**12, 2),
        "Number of processes that share the stages. Without --stages the number of stages is "
        "chosen. [default: as many as the schedule needs for the stages]",
    )
    micro_batches: int = _plans(
        8,
        Whole(1, 2**16, 8),
        "Number of micro-batches in an optimizer step.",
    )
    staleness: str = _plans(
        "none",
        Text(
            f"one of {', '.join(KEEPS)}, or several joined by +",
            "stash",
            lambda text: all(name in KEEPS for name in text.split("+")),
        ),
        "Staleness methods whose weight copies are included in the memory estimate, joined by +, "
        "such as stash+msnag.",
    )
    optimizer: str = _plans(
        "adamw",
        Choice(tuple(PLANNED_OPTIMIZERS)),
        "Optimizer whose state and step time are included in the plan (momentum: sgd with "
        "momentum).",
    )
    zero: int = _plans(
        0,
        Whole(0, 2, 1),
        "Level of ZeRO in the memory and the time of the plan, as --zero of asyncpipe-train: the "
        "replicas of a stage share out 0 nothing, 1 the optimizer state, 2 also the gradients.",
    )
    recompute: str = _plans(
        "auto",
        Choice(("auto", "all", "none")),
        "Activation recomputation: auto (only in stages that would not fit otherwise), all or "
        "none.",
    )
    memory_limit: int | str | None = _plans(
        None,
        Either(Text("a memory size", "11GiB", bytes_of), Whole(1, 10**18, 10**9)),
        "Memory limit of each rank, such as 11GiB or 500MB.",
    )
    elastic: str | None = _writes(
        None,
        Text("lengths of a pipeline", "4,2,1", form(r"[1-9][0-9]{0,3}(,[1-9][0-9]{0,3})+")),
        "Lengths that the pipeline may have while blocks freeze, such as 4,2,1: also plans the "
        "rest of the model at each number of frozen blocks, for asyncpipe-train --elastic.",
    )
    freeze: str | None = _writes(
        None,
        Text(FREEZING_RULES, "schedule:1/3", form(FREEZING_FORM)),
        "With --elastic, the rule by which blocks will freeze: plans only the numbers of frozen "
        "blocks that it can reach. "
        "[default: every number of blocks]",
    )
    grow: str = _writes(
        REPLICAS,
        GROWS,
        "With --elastic, the --grow of the runs to plan for: replicas share out the samples of a "
        "step, batch gives each replica the samples of a first one, off leaves processes idle.",
    )
    cache: str = _writes(
        NO_CACHE,
        CACHES,
        "With --elastic, the --cache of the runs to plan for: with any but off, frozen blocks take "
        "no time.",
    )
    explain: bool = _plans(
        False,
        Flag(),
        "Explain why each cut is where it is, what limits the plan, and what one more device, a "
        "faster link, recomputation or other numbers of micro-batches would change.",
    )
    devices: Cluster | str | Path | None = option(
        None,
        path("devices.toml"),
        "TOML file that describes the devices, hosts and links to plan for.",
        group=DEVICES,
        read_by=PLANNED,
    )
    profile: str | None = _profiles(
        None,
        Choice(("measured", "analytic")),
        "Measure the costs on this machine, or predict them from FLOPs and bytes. [default: "
        "measured; analytic with --meta or a --device of another machine]",
    )
    device: str | None = _profiles(
        None,
        Text("cpu, cuda, the name of a device or a file", "a100-80g"),
        "Device to profile for: cpu or cuda of this machine, or another device (a100-80g, h100, "
        "rtx2080ti, v100-16g, .., or a file.toml that describes one), whose costs are predicted. "
        "[default: cpu]",
    )
    dtype: str = _profiles(
        "float32",
        Choice(("float32", "bfloat16")),
        "Precision used for profiling: float32, or bfloat16 under torch.autocast.",
    )
    threads: int | None = _profiles(
        None,
        Whole(1, 2**12, 1),
        "Number of threads for measuring. [default: the cores of this machine, divided by the "
        "number of ranks]",
    )
    calibrate: bool = _profiles(
        False,
        Flag(),
        "Fit a predicted profile to a few operations measured on this machine.",
    )
    no_cache: bool = _profiles(
        False, Flag(), "Ignore cached measurements and results, and repeat everything."
    )
    output: str | Path | None = _writes(
        None,
        path("generated_models/gpt2_4p"),
        "Folder to write. [default: generated_models/NAME_STAGESp]",
    )
    code: str = _writes(
        "structured",
        Choice(("structured", "flat")),
        "Write classes and loops as in the original, or flat code: one statement per operation.",
    )
    save_weights: bool = _writes(True, Flag(), "Do not store the weights.", flag="no_weights")
    force: bool = _writes(
        False,
        Flag(),
        "Overwrite stages that were edited by hand or generated from another model.",
    )
    stop_after: str | None = _writes(
        None,
        Choice(("capture", "profile", "plan")),
        "Print the graph by module (capture), the graph with costs (profile) or the plan, and "
        "write nothing.",
    )

    def __post_init__(self) -> None:
        check_options({entry.name: getattr(self, entry.name) for entry in fields(self)})
        if self.lengths:
            check_lengths(self.lengths, self.stages, self.schedule)
            for name in ("devices", "ranks", "stop_after", "tensor_parallel", "zero"):
                if getattr(self, name) != DEFAULTS[name]:
                    raise PlanError(
                        f"--elastic writes the plans of equal ranks, but {flag_of(name)} is given.",
                        "Leave one of them out.",
                    )
            return
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise PlanError(
                "--sequence-parallel divides sequences over tensor ranks, but there is one.",
                "--tensor-parallel 2",
            )
        for name in ("freeze", "grow", "cache"):
            if (value := getattr(self, name)) != DEFAULTS[name]:
                raise PlanError(f"{typed(name, value)} requires --elastic.", "--elastic 4,2,1")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of `elastic`; () without it."""
        return tuple(map(int, self.elastic.split(","))) if self.elastic else ()

    @property
    def tensor_ranks(self) -> int:
        """The number of tensor ranks; 1 as long as it is to be chosen."""
        return self.tensor_parallel if isinstance(self.tensor_parallel, int) else 1

    @property
    def running(self) -> PlanConfig:
        """How the plan will be run. The ranks that a layout is to be chosen for are devices."""
        return PlanConfig(
            schedule=self.schedule,
            ranks=None if self.tensor_parallel == AUTO else self.ranks,
            micro_batches=self.micro_batches,
            recompute=self.recompute,
            memory_limit=self.memory_limit,
            optimizer=self.optimizer,
            staleness=self.staleness,
            zero=self.zero,
        )


OPTIONS = options_of(PartitionOptions)
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {entry.name: entry.default for entry in fields(PartitionOptions)}
)


def check_options(given: Mapping[str, Any]) -> None:
    """Raises PlanError if the value of an option is not legal.

    None is legal where it is the default. Values that are parsed further (dimensions, arguments of
    the model) and a `Cluster` are checked where they are used.
    """
    for name, value in given.items():
        if name not in OPTIONS or OPTIONS[name].is_words or is_dataclass(value):
            continue
        if value is None and DEFAULTS[name] is None:
            continue
        if fault := refusal(OPTIONS[name].limit, name, value):
            raise PlanError(*fault)
