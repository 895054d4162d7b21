"""The three commands: parse, call, print. How it looks is in terminal.py; no other module prints.

    asyncpipe-partition --model gpt2 --stages 4
    asyncpipe-train generated_models/gpt2_4p
    asyncpipe-inspect generated_models/gpt2_4p

Nothing heavy is imported before the options are known, so that --help answers at once.
"""

from __future__ import annotations

import json
import shlex
import sys
import traceback
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from cyclopts import App, Parameter
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax

from .runtime.errors import AsyncPipeError, PlanError
from .runtime.plan import portable, read_plan
from .runtime.training.settings import CHOICES, Settings, read_config
from .terminal import (
    Ticks,
    make_console,
    print_facts,
    print_findings,
    print_folder,
    print_graph_plan,
    print_next,
    print_outline,
    print_plan,
)

VERSION = "0.1.0"

partition_app = App(
    name="asyncpipe-partition",
    version=VERSION,
    help="Cut a model into balanced pipeline stages and write them as readable Python.",
)
train_app = App(
    name="asyncpipe-train", version=VERSION, help="Train a generated model as a pipeline."
)
inspect_app = App(
    name="asyncpipe-inspect", version=VERSION, help="Show the stages, costs and code of a model."
)


def partition() -> None:
    """Entry point of asyncpipe-partition."""
    sys.exit(_run(partition_app))


def train() -> None:
    """Entry point of asyncpipe-train."""
    code = _run(train_app)
    if "torch.distributed" in sys.modules:  # else only --help, or a usage error
        from .runtime.training.failure import end_process

        end_process(code)
    sys.exit(code)


def inspect() -> None:
    """Entry point of asyncpipe-inspect."""
    sys.exit(_run(inspect_app))


# ---------------------------------------------------------------------- asyncpipe-partition


@partition_app.default
def partition_command(
    *,
    model: str | None = None,
    graph: Path | None = None,
    stages: int | None = None,
    devices: Path | None = None,
    hosts: str | None = None,
    output: Path | None = None,
    model_arg: Annotated[list[str] | None, Parameter(negative=())] = None,
    input: Annotated[list[str] | None, Parameter(negative=())] = None,
    micro_batch_size: int | None = None,
    seq: int = 128,
    loss: str | None = None,
    method: str = "auto",
    granularity: Literal["op", "module"] = "op",
    schedule: str | None = None,
    micro_batches: int = 8,
    staleness: str = "none",
    optimizer: str = "adamw",
    recompute: str = "auto",
    memory_limit: str | None = None,
    profile: Literal["measured", "analytic"] | None = None,
    threads: int | None = None,
    device: str | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    calibrate: Annotated[bool, Parameter(negative=())] = False,
    no_cache: Annotated[bool, Parameter(negative=())] = False,
    leaf: Annotated[list[str] | None, Parameter(negative=())] = None,
    cut_at: Annotated[list[str] | None, Parameter(negative=())] = None,
    keep_together: Annotated[list[str] | None, Parameter(negative=())] = None,
    code: Literal["structured", "flat"] = "structured",
    stop_after: Literal["capture", "profile", "plan"] | None = None,
    capture: Literal["auto", "tracer", "dynamo"] = "auto",
    seed: int = 0,
    meta: Annotated[bool, Parameter(negative=())] = False,
    no_weights: Annotated[bool, Parameter(negative=())] = False,
    explain: Annotated[bool, Parameter(negative=())] = False,
    force: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=())] = False,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False,
) -> int:
    """Cut a model into balanced pipeline stages and write them as readable Python.

    Parameters
    ----------
    model
        A published configuration (gpt2 .. gpt2-xl, bert-base-uncased, t5-small .., vit-base,
        llama-7b ..), a built-in (mlp, resnet50, ..), a folder or hub name of transformers, or
        your own: package.module:factory or path/file.py:factory.
    graph
        Instead of a model: plan a cost graph (our JSON, dnn-partitioning's, PipeDream's graph.txt).
    stages
        How many stages to cut it into; not needed with --stop-after capture or profile, and
        chosen when it is left out with --devices or --hosts.
    devices
        A TOML file of the devices, hosts and links to plan for.
    hosts
        Equal devices in short: h1:4,h2:2 are four ranks on host h1 and two on h2.
    output
        The folder to write; by default generated_models/<name>_<stages>p.
    model_arg
        key=value: overrides a field of the configuration, or an argument of your factory.
    input
        name=f32[4,64]: an input of forward, when your factory returns a model alone.
    micro_batch_size
        Samples of a micro-batch, for costs and for training; by default 8, or 1 for a model of
        over 50 M parameters.
    seq
        Tokens of a sequence, for models of text.
    loss
        The loss, when the model does not return one: cross_entropy, mse or path/file.py:function.
    method
        How to place the cuts: auto (the optimum, with its proof), chain, uniform, metis, acyclic,
        mpipe and 2dbin (several stages a rank), pipedream (replicated stages), or all: the best of
        these that trains as planned, with a table of them.
    granularity
        Where a cut may be: between any two operations, or only between whole blocks.
    schedule
        The schedule to balance the stages for: async-1f1b (when none is named), 1f1b, gpipe, seq.
    micro_batches
        Micro-batches of one optimizer step.
    staleness
        stash: count the weight versions that it keeps.
    optimizer
        Whose copies of the weights are counted: adamw, adam, momentum (of sgd), sgd.
    recompute
        Which stages run forward again instead of keeping activations: auto (those that do not fit
        otherwise), all, none.
    memory_limit
        The most that a rank may need, such as 11GiB or 500MB.
    profile
        Costs measured on this machine, or predicted from FLOPs and bytes (the default on meta).
    threads
        Threads while measuring; by default what each rank will have.
    device
        Whose costs: cpu or cuda of this machine, or a device that is not here (a100-80g, h100,
        rtx2080ti, v100-16g, .., or a file.toml that describes it), which is predicted.
    dtype
        Of the profile: float32, or bfloat16 under torch's autocast.
    calibrate
        Fit a predicted profile to a few operations measured here.
    no_cache
        Measure anew what was measured before on this machine.
    leaf
        The name of a module class that is kept as one operation.
    cut_at
        A boundary: right before this module (transformer.h.6), operation or file:line.
    keep_together
        The path or class of modules whose operations stay in one stage.
    code
        Classes and loops as in the original, or flat: one statement an operation.
    stop_after
        Print the graph by module (capture), with costs (profile), or the plan, and write nothing.
    capture
        How forward is read: auto is the tracer, and TorchDynamo where the tracer cannot see.
    seed
        Seed of the random weights.
    meta
        Allocate no weights: plan a model that does not fit here.
    no_weights
        Do not store the weights in the folder.
    explain
        Say why each cut is where it is, what bounds the plan, and what one more device, a faster
        link, recomputation or other numbers of micro-batches would give.
    force
        Write over stages edited by hand, or made from another model.
    json
        Print the plan (or the graph, with --stop-after) as JSON.
    quiet
        Print only the folder.
    verbose
        Show the traceback of an error.
    """
    if (model is None) == (graph is None):
        raise _usage("Either --model or --graph is needed: what to cut into stages.")
    console = make_console()
    placing: dict[str, Any] = {
        "method": method,
        "granularity": granularity,
        "schedule": schedule,
        "micro_batches": micro_batches,
        "staleness": staleness,
        "optimizer": optimizer,
        "recompute": recompute,
        "memory_limit": memory_limit,
    }
    if model is None:
        assert graph is not None
        of_models = {
            "--output": output,
            "--model-arg": model_arg,
            "--input": input,
            "--micro-batch-size": micro_batch_size,
            "--loss": loss,
            "--profile": profile,
            "--threads": threads,
            "--device": device,
            "--calibrate": calibrate,
            "--no-cache": no_cache,
            "--leaf": leaf,
            "--keep-together": keep_together,
            "--stop-after": stop_after,
            "--meta": meta,
            "--no-weights": no_weights,
            "--force": force,
        }
        for flag, value in of_models.items():
            if value:
                raise _usage(f"{flag} is of a model; with --graph nothing is captured or written.")
        placing |= {"devices": _devices(devices, hosts), "cut_before": cut_at or ()}
        return _plan_graph(console, graph, stages, json=json, explain=explain, **placing)
    from .partitioner.compile import partition_spec
    from .partitioner.outline import outline_spec

    ticks = Ticks(console, silent=json or quiet)
    shared: dict[str, Any] = {
        "model_args": dict(_key_value("--model-arg", text) for text in model_arg or ()),
        "inputs": dict(_key_text("--input", text) for text in input or ()) or None,
        "micro_batch_size": micro_batch_size,
        "seq": seq,
        "seed": seed,
        "meta": meta,
        "profile": profile,
        "threads": threads,
        "device": device,
        "dtype": dtype,
        "calibrate": calibrate,
        "no_cache": no_cache,
        "leaves": leaf or (),
        "capture": capture,
        "on_tick": ticks.tick,
        "on_progress": ticks.progress,
    }
    if stop_after in ("capture", "profile"):
        with ticks:
            outline = outline_spec(model, with_profile=stop_after == "profile", **shared)
        if json:
            print(outline.to_json(), end="")
        else:
            print_outline(console, outline)
        return 0
    on = _devices(devices, hosts)
    if stages is None and on is None:
        raise _usage("--stages is needed: the number of stages to cut the model into.")
    with ticks:
        plan = partition_spec(
            model,
            stages=stages,
            devices=on,
            output=output,
            loss=loss,
            cut_at=cut_at or (),
            keep_together=keep_together or (),
            code=code,
            explain=explain,
            stop_after=stop_after,
            save_weights=not no_weights,
            force=force,
            command=_command_line("asyncpipe-partition"),
            **placing,
            **shared,
        )
    folder = output or Path("generated_models") / f"{plan.name}_{stages or len(plan.stages)}p"
    if json:
        print(plan.to_json(), end="")
    elif stop_after == "plan":
        print_plan(console, plan)
        if explain:
            print_findings(console, plan.findings)
        print_facts(console, plan)
    elif quiet:
        print(folder)
    else:
        print_plan(console, plan)
        if explain:
            print_findings(console, plan.findings)
        print_next(console, plan, folder)
    return 0


def _devices(path: Path | None, hosts: str | None) -> Any:
    """The devices to plan for, as --devices or --hosts gives them; None for equal ranks."""
    from .partitioner.cluster import cluster_of_hosts
    from .partitioner.cluster_file import read_cluster

    if path is not None and hosts is not None:
        raise _usage("--devices and --hosts both say what there is: leave one out.")
    if hosts is not None:
        return cluster_of_hosts(hosts)
    return read_cluster(path) if path is not None else None


def _plan_graph(
    console: Console, path: Path, stages: int | None, *, json: bool, **placing: Any
) -> int:
    """Plans a cost graph alone; nothing is written."""
    from .partitioner.graph_files import read_graph
    from .partitioner.graph_plan import plan_graph

    if stages is None and placing["devices"] is None:
        raise _usage("--stages is needed: the number of stages to cut the graph into.")
    plan = plan_graph(read_graph(path), stages, **placing)
    if json:
        print(plan.to_json(), end="")
    else:
        print_graph_plan(console, plan)
        print_findings(console, plan.findings)
    return 0


# -------------------------------------------------------------------------- asyncpipe-train


_HELP = {
    "schedule": "Synchronous: gpipe, 1f1b, seq, single (one process); asynchronous: async-1f1b.",
    "staleness": "Of an asynchronous schedule: backward with live weights, or with a stash.",
    "micro_batches": "Micro-batches of one optimizer step.",
    "micro_batch_size": "Samples of a micro-batch; by default the plan's.",
    "global_batch_size": "Samples of one step, instead of one of the two above.",
    "seq": "Tokens of a sequence; by default the plan's.",
    "data": "shakespeare, python-docs, digits, clusters, a file or folder, or file.py:function.",
    "tokenizer": "Of text: bytes, bpe:4096 (trained on it) or a tokenizer.json.",
    "steps": "Optimizer steps.",
    "optimizer": "The optimizer of every stage.",
    "lr": "Learning rate.",
    "momentum": "Of sgd.",
    "betas": "Of adam and adamw.",
    "weight_decay": "Not applied to biases and norms.",
    "warmup": "Steps of linear warm-up.",
    "decay": "How the learning rate falls after the warm-up.",
    "final_lr_ratio": "The last learning rate as a share of the first.",
    "clip": "Bound of the gradient norm over all stages (asynchronous: of each); 0 is off.",
    "criterion": "The loss, when the plan has none: cross_entropy, mse or file.py:function.",
    "seed": "Of the data order and of dropout.",
    "weights": "To start from: a safetensors file or folder, a run's or a generated folder.",
    "export_hf": "Write the trained model to this folder, for from_pretrained.",
    "output": "The run's folder; by default a new one in runs/<name>.",
    "eval_every": "Steps between evaluations; 0: only at the end.",
    "eval_batches": "Micro-batches of an evaluation; 0: none.",
    "log_every": "Steps between lines of the log.",
    "device": "Where the stages compute.",
    "threads": "Threads of each rank; by default the cores shared out.",
    "timeout_s": "Seconds after which a rank that waits gives up, saying for whom.",
    "dtype": "Of the weights.",
    "transport": "How boundary tensors travel.",
    "dry_run": "Check everything, say what would run, and stop.",
    "json": "Print every event as a JSON line.",
    "quiet": "Print nothing but errors.",
}


def _train_options() -> type[Any]:
    """The options of Settings as cyclopts reads them; None means not given."""
    hints = get_type_hints(Settings)
    options = []
    for option in fields(Settings):
        if option.name == "folder":
            continue
        kind: Any = hints[option.name]
        if option.name in CHOICES:
            kind = Literal[CHOICES[option.name]]
        default = "" if option.default in (None, False) else f" [default: {option.default}]"
        parameter = Parameter(
            name=("--quiet", "-q") if option.name == "quiet" else None,
            help=_HELP[option.name] + default,
            negative=(),
            show_default=False,
        )
        options.append((option.name, Annotated[kind | None, parameter], field(default=None)))
    made = make_dataclass("TrainOptions", options, frozen=True, kw_only=True)
    made.__module__ = __name__  # cyclopts resolves the annotations there
    return made


if TYPE_CHECKING:
    TrainOptions = Any
else:
    TrainOptions = _train_options()
_NOTHING_GIVEN = TrainOptions()


@train_app.default
def train_command(
    folder: Path,
    /,
    *,
    options: Annotated[TrainOptions, Parameter(name="*")] = _NOTHING_GIVEN,
    config: Path | None = None,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False,
) -> int:
    """Train a generated model as a pipeline, synchronously or asynchronously.

    Parameters
    ----------
    folder
        A generated folder, such as generated_models/gpt2_4p.
    config
        A TOML file of the options; flags win over it.
    verbose
        Show the traceback of an error.
    """
    given = {
        option.name: value
        for option in fields(options)
        if (value := getattr(options, option.name)) is not None
    }
    settings = Settings(
        **{**(read_config(config) if config else {}), **given, "folder": str(folder)}
    )
    from .runtime.training.launch import run

    return run(settings, "asyncpipe.terminal:make_reporter")


# ------------------------------------------------------------------------ asyncpipe-inspect


@inspect_app.default
def inspect_command(
    folder: Path,
    /,
    *,
    stage: int | None = None,
    explain: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False,
) -> int:
    """Show the stages, boundaries, costs and code of a generated model.

    Parameters
    ----------
    folder
        A generated folder, such as generated_models/gpt2_4p.
    stage
        Print the code of this stage.
    explain
        Say why each cut is where it is and what bounds the plan, and what would change it if the
        model was partitioned with --explain.
    json
        Print the plan as JSON.
    verbose
        Show the traceback of an error.
    """
    plan = read_plan(folder)
    console = make_console()
    if json:
        print(plan.to_json(), end="")
        return 0
    if stage is not None:
        if not 0 <= stage < len(plan.stages):
            raise PlanError(
                f"{folder} has no stage {stage}: its stages are 0 to {len(plan.stages) - 1}."
            )
        code = (folder / plan.stages[stage].file).read_text(encoding="utf-8")
        console.print(Syntax(code, "python", theme="ansi_dark", background_color="default"))
        return 0
    if explain:
        print_findings(console, plan.findings)
        return 0
    print_folder(console, plan, folder)
    return 0


# ---------------------------------------------------------------------------------- shared


def _run(app: App) -> int:
    """Runs a command: 0, 1 with one `error:` sentence and a cure, 2 for usage, 130 for Ctrl-C."""
    from cyclopts import CycloptsError

    errors = Console(stderr=True, highlight=False)
    try:
        return int(app(exit_on_error=False, print_error=False, result_action="return_value") or 0)
    except CycloptsError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        errors.print(f"[dim]{app.name[0]} --help[/]")
        return 2
    except AsyncPipeError as error:
        if {"-v", "--verbose"} & set(sys.argv):
            traceback.print_exc()
        errors.print(f"[bold red]error:[/] {escape(error.what)}", soft_wrap=True)
        if error.cure:
            errors.print(escape(error.cure), soft_wrap=True)
        return 1
    except KeyboardInterrupt as interrupt:
        errors.print(str(interrupt) or "interrupted")
        return 130
    finally:
        errors.show_cursor(True)


def _usage(text: str) -> Exception:
    """A usage error, told as those of the parser are."""
    from cyclopts import CycloptsError

    return CycloptsError(text)


def _command_line(name: str) -> str:
    """The command that made a plan, without what does not change it."""
    dropped = {"--force", "--json", "--no-cache", "--quiet", "-q", "--verbose", "-v"}
    tokens = [portable(token) for token in sys.argv[1:] if token not in dropped]
    return shlex.join([name, *tokens])


def _key_text(flag: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise AsyncPipeError(f"{flag} {text} has no value.", f"Write {flag} {text}=VALUE")
    return key.replace("-", "_"), value


def _key_value(flag: str, text: str) -> tuple[str, Any]:
    """`n_layer=4` -> ("n_layer", 4); what is not JSON is text."""
    key, value = _key_text(flag, text)
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
