"""The options of the commands, in groups, as cyclopts reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from .runtime.training.settings import CHOICES, Settings

_MODEL = Group.create_ordered("What to cut")
_PLAN = Group.create_ordered("Where to cut")
_DEVICES = Group.create_ordered("What it is to run on")
_COSTS = Group.create_ordered("What it costs")
_OUTPUT = Group.create_ordered("What to write and print")


def _option(group: Group, help: str, *names: str) -> Parameter:
    return Parameter(name=names or None, help=help, group=group, negative=())


def _flag(group: Group, help: str, *names: str) -> Parameter:
    return Parameter(name=names or None, help=help, group=group, negative=(), show_default=False)


@dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """The options of asyncpipe-partition."""

    model: Annotated[
        str | None,
        _option(
            _MODEL,
            "A published configuration (gpt2 .. gpt2-xl, bert-base-uncased, t5-small .., "
            "vit-base, llama-7b ..), a built-in (mlp, resnet50, ..), a folder or hub name of "
            "transformers, or your own: package.module:factory or path/file.py:factory.",
        ),
    ] = None
    graph: Annotated[
        Path | None,
        _option(
            _MODEL,
            "Instead of a model: plan a cost graph (our JSON, dnn-partitioning's, PipeDream's "
            "graph.txt).",
        ),
    ] = None
    model_arg: Annotated[
        list[str] | None,
        _option(
            _MODEL,
            "key=value: overrides a field of the configuration, or an argument of your factory.",
        ),
    ] = None
    input: Annotated[
        list[str] | None,
        _option(
            _MODEL, "name=f32[4,64]: an input of forward, when your factory returns a model alone."
        ),
    ] = None
    micro_batch_size: Annotated[
        int | None,
        _option(
            _MODEL,
            "Samples of a micro-batch, for costs and for training; by default 8, or 1 for a "
            "model of over 50 M parameters.",
        ),
    ] = None
    seq: Annotated[int, _option(_MODEL, "Tokens of a sequence, for models of text.")] = 128
    loss: Annotated[
        str | None,
        _option(
            _MODEL,
            "The loss, when the model does not return one: cross_entropy, mse or "
            "path/file.py:function.",
        ),
    ] = None
    seed: Annotated[int, _option(_MODEL, "Seed of the random weights.")] = 0
    meta: Annotated[
        bool, _flag(_MODEL, "Allocate no weights: plan a model that does not fit here.")
    ] = False
    capture: Annotated[
        Literal["auto", "tracer", "dynamo"],
        _option(
            _MODEL,
            "How forward is read: auto is the tracer, and TorchDynamo where the tracer cannot see.",
        ),
    ] = "auto"
    leaf: Annotated[
        list[str] | None,
        _option(_MODEL, "The name of a module class that is kept as one operation."),
    ] = None
    stages: Annotated[
        int | None,
        _option(
            _PLAN,
            "How many stages to cut it into; not needed with --stop-after capture or profile, "
            "and chosen when it is left out with --devices or --hosts.",
        ),
    ] = None
    method: Annotated[
        str,
        _option(
            _PLAN,
            "How to place the cuts: auto (the optimum, with its proof), chain, uniform, metis, "
            "acyclic, mpipe and 2dbin (several stages a rank), pipedream (replicated stages), "
            "or all: the best of these that trains as planned, with a table of them.",
        ),
    ] = "auto"
    granularity: Annotated[
        Literal["op", "module"],
        _option(
            _PLAN, "Where a cut may be: between any two operations, or only between whole blocks."
        ),
    ] = "op"
    cut_at: Annotated[
        list[str] | None,
        _option(
            _PLAN, "A boundary: right before this module (transformer.h.6), operation or file:line."
        ),
    ] = None
    keep_together: Annotated[
        list[str] | None,
        _option(_PLAN, "The path or class of modules whose operations stay in one stage."),
    ] = None
    schedule: Annotated[
        str | None,
        _option(
            _PLAN,
            "The schedule to balance the stages for: async-1f1b (when none is named), 1f1b, "
            "gpipe, zb-h1, zb-h2, seq; of several stages a rank interleaved, looped-bfs, zb-v.",
        ),
    ] = None
    ranks: Annotated[
        int | None,
        _option(
            _PLAN,
            "Processes that share the stages, by default as many as the schedule has for them. "
            "Without --stages the number of stages is chosen.",
        ),
    ] = None
    micro_batches: Annotated[int, _option(_PLAN, "Micro-batches of one optimizer step.")] = 8
    staleness: Annotated[
        str,
        _option(
            _PLAN,
            "Methods of an asynchronous run, joined by +, whose copies of weights are counted.",
        ),
    ] = "none"
    optimizer: Annotated[
        str,
        _option(
            _PLAN,
            "Whose copies of the weights are counted: adamw, adam, nadam, muon, soap, sutskever, "
            "momentum (of sgd), sgd.",
        ),
    ] = "adamw"
    recompute: Annotated[
        str,
        _option(
            _PLAN,
            "Which stages run forward again instead of keeping activations: auto (those that do "
            "not fit otherwise), all, none.",
        ),
    ] = "auto"
    memory_limit: Annotated[
        str | None, _option(_PLAN, "The most that a rank may need, such as 11GiB or 500MB.")
    ] = None
    explain: Annotated[
        bool,
        _flag(
            _PLAN,
            "Say why each cut is where it is, what bounds the plan, and what one more device, a "
            "faster link, recomputation or other numbers of micro-batches would give.",
        ),
    ] = False
    devices: Annotated[
        Path | None, _option(_DEVICES, "A TOML file of the devices, hosts and links to plan for.")
    ] = None
    hosts: Annotated[
        str | None,
        _option(
            _DEVICES, "Equal devices in short: h1:4,h2:2 are four ranks on host h1 and two on h2."
        ),
    ] = None
    profile: Annotated[
        Literal["measured", "analytic"] | None,
        _option(
            _COSTS,
            "Costs measured on this machine, or predicted from FLOPs and bytes (the default on "
            "meta).",
        ),
    ] = None
    device: Annotated[
        str | None,
        _option(
            _COSTS,
            "Whose costs: cpu or cuda of this machine, or a device that is not here (a100-80g, "
            "h100, rtx2080ti, v100-16g, .., or a file.toml that describes it), which is "
            "predicted.",
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        _option(_COSTS, "Of the profile: float32, or bfloat16 under torch's autocast."),
    ] = "float32"
    threads: Annotated[
        int | None, _option(_COSTS, "Threads while measuring; by default what each rank will have.")
    ] = None
    calibrate: Annotated[
        bool, _flag(_COSTS, "Fit a predicted profile to a few operations measured here.")
    ] = False
    no_cache: Annotated[
        bool, _flag(_COSTS, "Measure anew what was measured before on this machine.")
    ] = False
    output: Annotated[
        Path | None,
        _option(_OUTPUT, "The folder to write; by default generated_models/NAME_STAGESp."),
    ] = None
    code: Annotated[
        Literal["structured", "flat"],
        _option(
            _OUTPUT, "Classes and loops as in the original, or flat: one statement an operation."
        ),
    ] = "structured"
    no_weights: Annotated[bool, _flag(_OUTPUT, "Do not store the weights in the folder.")] = False
    force: Annotated[
        bool, _flag(_OUTPUT, "Write over stages edited by hand, or made from another model.")
    ] = False
    stop_after: Annotated[
        Literal["capture", "profile", "plan"] | None,
        _option(
            _OUTPUT,
            "Print the graph by module (capture), with costs (profile), or the plan, and write "
            "nothing.",
        ),
    ] = None
    json: Annotated[
        bool, _flag(_OUTPUT, "Print the plan (or the graph, with --stop-after) as JSON.")
    ] = False
    quiet: Annotated[bool, _flag(_OUTPUT, "Print only the folder.", "--quiet", "-q")] = False
    verbose: Annotated[
        bool, _flag(_OUTPUT, "Show the traceback of an error.", "--verbose", "-v")
    ] = False

    @property
    def placing(self) -> dict[str, Any]:
        """Those that a plan depends on, of a model or of a graph alone."""
        names = (
            "method", "granularity", "schedule", "ranks", "micro_batches", "staleness",
            "optimizer", "recompute", "memory_limit",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @property
    def of_models_alone(self) -> tuple[str, ...]:
        """The flags that were given and mean nothing for a graph alone."""
        names = (
            "output", "model_arg", "input", "micro_batch_size", "loss", "profile", "threads",
            "device", "calibrate", "no_cache", "leaf", "keep_together", "stop_after", "meta",
            "no_weights", "force",
        )  # fmt: skip
        return tuple(f"--{name.replace('_', '-')}" for name in names if getattr(self, name))


_TRAIN_HELP = {
    "schedule": "Synchronous: gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-h2, zb-v, seq, "
    "single (one process), auto (computed from measured costs), ddp (the whole model in each "
    "process); asynchronous: async-1f1b, virtual-stages-1f1b, 2bw; or a text file.",
    "ranks": "Processes that share the stages; by default as the schedule or the plan has it.",
    "replicas": "Copies of the whole pipeline, each with micro-batches of its own; gradients are "
    "averaged. [default: the plan's, those of single stages too; of ddp one a process]",
    "check_replicas": "Steps between comparisons of all replicas' weights; 0: only at the start.",
    "staleness": "Methods of an asynchronous schedule, joined by +: stash (the default), none, .. "
    "(docs/asynchronous.md has all), or auto: what is recommended for the optimizer and delay.",
    "ahead": "Forwards that stages run ahead: 2x the usual, at most 1, or of each: 5,3,1,0.",
    "staleness_cap": "The most steps that weights may be stale; stages run less far ahead for it.",
    "flush_every": "Steps between drains of an asynchronous pipeline; 0: at evaluations only.",
    "sync_start": "The first steps that are synchronous 1f1b: 20, or 5% of all.",
    "annealing_steps": "Steps over which pipemare-rate returns to the learning rate. [default: "
    "five warm-ups, or a quarter of the steps]",
    "micro_batches": "Micro-batches of one optimizer step, in each replica (ddp: in all).",
    "micro_batch_size": "Samples of a micro-batch; by default the plan's.",
    "global_batch_size": "Samples of one step, instead of one of the two above.",
    "seq": "Tokens of a sequence; by default the plan's.",
    "data": "shakespeare, python-docs, digits, clusters, a file or folder, or file.py:function.",
    "tokenizer": "Of text: bytes, bpe:4096 (trained on it) or a tokenizer.json.",
    "steps": "Optimizer steps.",
    "samples": "Samples to train on, instead of --steps; epochs follow each other without a drain.",
    "remainder": "Of --samples that are not enough for a step: drop them, or make a short last "
    "step with as much less weight (proportional).",
    "optimizer": "The optimizer of every stage.",
    "lr": "Learning rate.",
    "momentum": "Of sgd and sutskever (0.9), and of muon (0.95).",
    "betas": "Of adam, adamw, nadam and soap, and of what muon leaves to adamw.",
    "refresh_every": "Steps between new bases of soap; asynchronous: of the stages on average. "
    "[default: 10]",
    "weight_decay": "Not applied to biases and norms.",
    "warmup": "Steps of linear warm-up.",
    "decay": "How the learning rate falls after the warm-up.",
    "final_lr_ratio": "The last learning rate as a share of the first.",
    "clip": "Bound of the gradient norm; 0 is off.",
    "clip_by": "Of an asynchronous run, the norm that is bounded: stage (its own, by the whole "
    "bound), proportion (its own, by its part of the bound), global (of all; each step waits for "
    "all stages) or known (of all, with the other stages' last known). [default: stage]",
    "criterion": "The loss, when the plan has none: cross_entropy, mse or file.py:function.",
    "batch_norm": "When running statistics are updated: micro-batch, or once a mini-batch as if it "
    "were one batch.",
    "recompute": "Stages that run their forward again for the backward, to hold less: auto (the "
    "plan's), all, none, or numbers such as 0,2.",
    "seed": "Of the data order and of dropout.",
    "init_from": "Weights to start from, with a new optimizer: a safetensors file or folder, a "
    "checkpoint, a run's or a generated folder.",
    "resume": "Go on where a run ended: a run's folder, one of its checkpoints, or auto: the "
    "newest good checkpoint of --output, else of this model's last run; a new run where there is "
    "none.",
    "save_every": "Steps between checkpoints; 0: only when a signal ends the run.",
    "keep_last": "The newest checkpoints, which are kept.",
    "keep_best": "Checkpoints with the lowest evaluation loss, which are kept too.",
    "save_to": "Copy checkpoints to this place too, s3://bucket/run or what fsspec knows; --resume "
    "and --init-from take such URLs.",
    "trust": "Run the code of a folder that was not made on this machine, and that which a file of "
    "options names, from now on.",
    "export_hf": "Write the trained model to this folder, for from_pretrained.",
    "output": "The run's folder; by default a new one in runs/<name>.",
    "eval_every": "Steps between evaluations; 0: only at the end.",
    "eval_batches": "Micro-batches of an evaluation; 0: none.",
    "log_every": "Steps between lines of the log.",
    "log": "Where else the run is told of, joined by commas: tensorboard, wandb, mlflow, trackio, "
    "or your own package.module:factory or path/file.py:factory.",
    "trace": "Record steps as a timeline for ui.perfetto.dev: 3 the last three, 10-12 those.",
    "debug": "Ranks that wait for a debugger (debugpy): 1, 0,2 or all.",
    "device": "Where the stages compute.",
    "ranks_per_gpu": "Ranks that share each GPU, with --device cuda.",
    "threads": "Threads of each rank; by default the cores shared out.",
    "pin": "Keep each rank of a host on cores of its own, on its NUMA node, or none.",
    "timeout_s": "Seconds after which a rank that waits gives up, saying for whom.",
    "stall_s": "Seconds without progress after which is told who waits for whom; 0: never.",
    "restarts": "How often the run begins again by itself when a rank dies or hangs.",
    "dtype": "Of the weights.",
    "precision": "Of computing: that of the weights (full), or less under torch's autocast.",
    "loss_scale": "The first loss scale of float16; it changes with overflows, as GradScaler's.",
    "boundary_dtype": "Cast wider tensors to this on their way between ranks.",
    "transport": "How boundary tensors travel; auto: the fastest that works here.",
    "interface": "The network between hosts; by default that towards rank 0.",
    "master_addr": "Where rank 0 is, if the launcher does not say (mpirun on several hosts).",
    "max_run": "The longest that the command may take, such as 3h50m or 90s: then it ends as after "
    "SIGTERM.",
    "master_port": "Its port; by default the launcher's, or one made of the job's number.",
    "print_sbatch": "Print a batch script for Slurm that trains so, and stop.",
    "nodes": "Of --print-sbatch: hosts; by default the plan's.",
    "time_limit": "Of --print-sbatch: the longest that the job may take.",
    "print_schedule": "Print the schedule, as text that --schedule FILE reads, and stop.",
    "dry_run": "Check everything, say what would run, and stop.",
    "json": "Print every event as a JSON line.",
    "quiet": "Print nothing but errors.",
}


_SWEEP = Group.create_ordered("Several runs")


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Of asyncpipe-train: what differs from run to run, where there are several."""

    sweep: Annotated[
        list[str] | None,
        _option(
            _SWEEP,
            "An option and its values, lr=1e-3,3e-3: a run of each, or of all combinations of "
            "several such; [sweep] in the file of --config has them as lists.",
        ),
    ] = None
    jobs: Annotated[
        int,
        Parameter(
            help="Runs at a time; they share the cores.", group=_SWEEP, validator=Number(gte=1)
        ),
    ] = 1


_COMPARE = Group.create_ordered("What to compare")
_COMPARED = (
    *("micro_batches", "micro_batch_size", "seq", "data", "tokenizer", "steps", "momentum"),
    *(
        "betas",
        "refresh_every",
        "weight_decay",
        "warmup",
        "decay",
        "final_lr_ratio",
        "clip",
        "clip_by",
    ),
    *("criterion", "batch_norm", "recompute", "init_from", "trust"),
    *("output", "eval_every", "eval_batches"),
    *("dtype", "json", "quiet"),
)
"""The options of Settings that are the same in all runs of a comparison."""


def _several(help: str) -> Parameter:
    return Parameter(help=help, group=_COMPARE, negative=(), consume_multiple=True)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What is varied from run to run of asyncpipe-compare."""

    methods: Annotated[
        list[str],
        _several(
            "sync, or a --staleness such as none or stash; with an optimizer of its own "
            "(stash:muon) and options (stash:adamw,lr=0.001,sync-start=0.1)."
        ),
    ] = field(default_factory=lambda: ["sync", "stash", "none"])
    optimizers: Annotated[
        list[str] | None, _several("For the methods that name none; by default asyncpipe-train's.")
    ] = None
    lr: Annotated[list[float] | None, _several("Learning rates to try each method with.")] = None
    seeds: Annotated[list[int], _several("Of the data order and of dropout.")] = field(
        default_factory=lambda: [1]
    )


def _options_of(name: str, chosen: Iterable[str], help: Mapping[str, str]) -> type[Any]:
    """Options of Settings as cyclopts reads them; None means not given."""
    hints = get_type_hints(Settings)
    options = []
    names = set(chosen)
    for option in fields(Settings):
        if option.name not in names:
            continue
        kind: Any = hints[option.name]
        if option.name in CHOICES:
            kind = Literal[CHOICES[option.name]]
        default = "" if option.default in (None, False) else f" [default: {option.default}]"
        parameter = Parameter(
            name=("--quiet", "-q") if option.name == "quiet" else None,
            help=help[option.name] + default,
            negative=(),
            show_default=False,
        )
        options.append((option.name, Annotated[kind | None, parameter], field(default=None)))
    made = make_dataclass(name, options, frozen=True, kw_only=True)
    made.__module__ = __name__  # cyclopts resolves the annotations there
    return made


if TYPE_CHECKING:
    TrainOptions = Any
    ComparedOptions = Any
else:
    TrainOptions = _options_of(
        "TrainOptions", (option.name for option in fields(Settings)[1:]), _TRAIN_HELP
    )
    ComparedOptions = _options_of(
        "ComparedOptions",
        _COMPARED,
        {
            **_TRAIN_HELP,
            "output": "The folder of the comparison; by default runs/<name>/comparison.",
            "json": "Print every run as a JSON line.",
        },
    )
