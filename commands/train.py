"""asyncpipe-train: trains a run or a sweep, writes reports of runs, and uses trained weights."""

from __future__ import annotations

import json as jsons
import sys
from collections.abc import Container
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ..runtime.checkpoint.resuming import with_options_of_run
from ..runtime.config.learning_options import CHECKPOINTS, LOGGING
from ..runtime.config.option_files import check_code, merged, read_config, settings_from
from ..runtime.formatting import counted, write_bytes
from ..runtime.import_path import ISOLATED
from ..runtime.limits import Choice, ListOf, Text, Whole, bytes_of, flag_of, key_values, path
from ..runtime.process import first_imports
from .console import make_console, print_text
from .options import PANEL, SEVERAL, limited, make_app, option, unwrapped, with_limits
from .running import REPORTER, usage
from .training_options import TrainOptions

app = make_app(
    "asyncpipe-train",
    "Train a generated model as a pipeline.",
    usage="Usage: asyncpipe-train [OPTIONS] FOLDER\n"
    "       asyncpipe-train report [OPTIONS] RUN...\n"
    "       asyncpipe-train predict [OPTIONS] RUN\n"
    "       asyncpipe-train export [OPTIONS] RUN DIR",
)
_SWEEP = PANEL[SEVERAL]


@with_limits(
    {
        "sweep": key_values("lr=1e-3,3e-3"),
        "strategies": Text("strategies, separated by commas", "ddp,1f1b+replicas=2"),
        "batch": Choice(("search",)),
        "memory_limit": Text("a memory size", "11GiB", bytes_of),
        "jobs": Whole(1, 2**12, 2),
    }
)
@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The options of a sweep."""

    sweep: Annotated[
        list[str] | None,
        option(
            _SWEEP,
            "Option with several values, such as lr=1e-3,3e-3: trains a run with each value, or "
            "with all combinations of several options. The file of --config may list values under "
            "[sweep]. [default: none]",
        ),
    ] = None
    strategies: Annotated[
        str | None,
        option(
            _SWEEP,
            "Ways to train, to be compared: schedules with options of their own, such as "
            "single,ddp,1f1b,1f1b+replicas=2. [default: none]",
        ),
    ] = None
    batch: Annotated[
        Literal["search"] | None,
        option(
            _SWEEP,
            "Search the largest micro-batch that fits into the memory of a rank under each "
            "strategy, and train with it. [default: none]",
        ),
    ] = None
    memory_limit: Annotated[
        str | None,
        option(
            _SWEEP,
            "Memory that the stages of a rank may take in that search, such as 11GiB. [default: "
            "that of the plan's devices, or a share of the free memory]",
        ),
    ] = None
    jobs: Annotated[int, option(_SWEEP, "Concurrent runs of a sweep; they share the cores.")] = 1


_RUNS = ListOf(path("runs/gpt2_4p/1"))
_NO_OPTIONS, _NO_SWEEP_OPTIONS = TrainOptions(), SweepOptions()


@app.default
@unwrapped
def train_command(
    folder: Annotated[Path | None, limited(path("generated_models/gpt2_4p"), "folder")] = None,
    /,
    *,
    options: Annotated[TrainOptions, Parameter(name="*")] = _NO_OPTIONS,
    several: Annotated[SweepOptions, Parameter(name="*")] = _NO_SWEEP_OPTIONS,
    config: Annotated[
        Path | None, limited(path("run.toml"), "config"), Parameter(group=PANEL[CHECKPOINTS])
    ] = None,
    verbose: Annotated[
        bool, Parameter(name=("--verbose", "-v"), negative=(), group=PANEL[LOGGING])
    ] = False,
) -> int:
    """Train a generated model as a pipeline, synchronously or asynchronously.

    Parameters
    ----------
    folder
        Generated folder, such as generated_models/gpt2_4p; a file of --config may name it.
    config
        TOML file of options; flags override it. [default: none]
    verbose
        Show the traceback of an error.
    """
    with first_imports():
        from ..runtime.experiments.variants import lists_from_texts, lists_of
        from ..runtime.launch.launch import run, schedule_text
        from .run_display import print_starting

    flags = options.given() | ({} if folder is None else {"folder": str(folder)})
    given = merged(read_config(config) if config else {}, flags)
    lists = lists_of(several.sweep or (), config, flags)
    if lists or several.strategies:
        typed = {*flags, *lists_from_texts(several.sweep or ())}
        if not given.get("dry_run"):
            check_code({**given, **lists}, typed, _files(given, config))
        return _sweep(given, lists, several, typed)
    for name in ("batch", "memory_limit"):
        if getattr(several, name) is not None:
            raise usage(f"{flag_of(name)} requires --strategies.")
    all_options = with_options_of_run(given)
    settings = settings_from(all_options)
    if not (settings.dry_run or settings.print_schedule):  # these run nothing of it
        check_code(all_options, flags, _files(given, config))
    if settings.print_sbatch:
        from ..runtime.launch.slurm import batch_script

        print_text(batch_script(settings))
        return 0
    if settings.print_schedule:
        print_text(schedule_text(settings))
        return 0
    run(settings, REPORTER, partial(print_starting, settings))
    return 0


def _files(options: dict[str, Any], config: Path | None) -> str:
    """The flags that name files of options."""
    named = {"--config": config, "--resume": options.get("resume")}
    return " and ".join(f"{flag} {value}" for flag, value in named.items() if value)


def _sweep(
    options: dict[str, Any],
    lists: dict[str, tuple[Any, ...]],
    several: SweepOptions,
    typed: Container[str],
) -> int:
    """Trains a run for each strategy and combination of values, each in a process of this same
    command."""
    from ..runtime.experiments.batch_search import search_batches
    from ..runtime.experiments.strategies import read_strategies
    from ..runtime.experiments.sweep import check_finished, plan_sweep, run_sweep
    from .console import print_sweep, print_swept_run, print_trial

    for name in ("print_sbatch", "print_schedule", "resume"):
        if options.get(name):
            raise usage(f"{flag_of(name)} cannot be combined with --sweep or --strategies.")
    strategies = read_strategies(several.strategies, typed) if several.strategies else ()
    if several.batch is None and several.memory_limit is not None:
        raise usage("--memory-limit requires --batch search.")
    for name in ("micro_batch_size", "global_batch_size") if several.batch else ():
        if options.get(name) or name in lists:
            raise usage(f"--batch search chooses the micro-batch, but {flag_of(name)} is given.")
    sweep = plan_sweep(options, lists, strategies)
    as_json = bool(options.get("json"))
    console = make_console(quiet=bool(options.get("quiet")) or as_json)
    command = (sys.executable, *ISOLATED, sys.argv[0])
    if not options.get("dry_run"):
        if several.batch is not None:
            strategies, too_large = search_batches(
                sweep,
                options,
                strategies,
                command,
                limit=None if several.memory_limit is None else bytes_of(several.memory_limit),
                on_trial=partial(print_trial, console),
            )
            sweep = plan_sweep(options, lists, strategies, too_large)
        total, done = len(sweep.runs), len(sweep.runs) - len(sweep.waiting)
        numbers = iter(range(done + 1, total + 1))
        sweep = run_sweep(
            sweep,
            command,
            at_once=several.jobs,
            on_run=lambda run: print_swept_run(console, run, next(numbers), total),
        )
    if as_json:
        for run in sweep.ranked:
            print_text(run.to_json())
    print_sweep(console, sweep)
    check_finished(sweep)
    return 0


@app.command(name="report")
@unwrapped
def report_command(
    folders: Annotated[list[Path], Parameter(consume_multiple=True), limited(_RUNS, "folders")],
    /,
    *,
    output: Annotated[Path | None, limited(path("report.html"), "output")] = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False,
) -> int:
    """Write the report of a run again, or compare several runs.

    Parameters
    ----------
    folders
        Folders of runs, such as runs/gpt2_4p/1. (To train a generated folder named report, write
        ./report.)
    output
        Page to write. [default: report.html in the run's folder; for several runs comparison.html
        next to the first]
    json
        Print the numbers as JSON, and write a page only if --output names one.
    verbose
        Show the traceback of an error.
    """
    from ..runtime.monitoring.run_files import read_run
    from ..runtime.reports.comparison import as_json, compare, write_comparison
    from ..runtime.reports.measures import to_json
    from ..runtime.reports.page import write_report
    from .console import print_page, print_run_comparison

    console = make_console()
    is_written = output is not None or not json
    if len(folders) == 1:
        run = read_run(folders[0])
        if json:
            print_text(to_json(run))
        page = write_report(run, output) if is_written else None
    else:
        comparison = compare(folders)
        if json:
            print_text(as_json(comparison))
        else:
            print_run_comparison(console, comparison)
        page = write_comparison(comparison, output) if is_written else None
    if page is not None and not json:
        print_page(console, page)
    return 0


_SOURCE = path("runs/gpt2_4p/1")
_FOLDER = path("generated_models/gpt2_4p")


@app.command(name="predict")
@unwrapped
def predict_command(
    run: Annotated[Path, limited(_SOURCE, "run")],
    /,
    *,
    data: Annotated[str | None, limited(Text("data", "my_file.py:data"), "data")] = None,
    split: Literal["train", "evaluation"] | None = None,
    batch_size: Annotated[int | None, limited(Whole(1, 2**24, 64), "batch_size")] = None,
    output: Annotated[Path, limited(path("predictions.safetensors"), "output")] = Path(
        "predictions.safetensors"
    ),
    folder: Annotated[Path | None, limited(_FOLDER, "folder")] = None,
    force: Annotated[bool, Parameter(negative=())] = False,
    trust: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False,
) -> int:
    """Write a trained model's outputs for all samples of data, in their order.

    Runs the stages forward in a process each, in evaluation mode. Samples need no target.

    Parameters
    ----------
    run
        Run, checkpoint, folder of Pipeline.save, or generated folder with weights.
    data
        Samples, as my_file.py:function, digits or clusters. [default: the data of the run]
    split
        Part of the data. [default: evaluation if the data has such a part, else train]
    batch_size
        Samples of a batch. [default: a micro-batch of the plan for each stage]
    output
        Safetensors file to write; its tensors have the names of the model's outputs. [default:
        predictions.safetensors]
    folder
        Generated folder of the model. [default: the one that the run names]
    force
        Replace an output file that exists.
    trust
        Run code of the generated folder and of the run's data that was not made or named here.
    json
        Print what was written as one line of JSON.
    verbose
        Show the traceback of an error.
    """
    from ..runtime.launch.prediction import Prediction, predict

    prediction = Prediction(run, output, data, split, batch_size, folder)
    predicted = predict(prediction, trust=trust, force=force)
    if json:
        print_text(jsons.dumps(asdict(predicted), default=str))
        return 0
    console = make_console()
    for name, (dtype, shape) in predicted.tensors.items():
        console.print(f"{name}  {dtype} {list(shape)}", markup=False)
    if left_out := ", ".join(predicted.left_out):
        console.print(f"left out, without a dimension of samples: {left_out}", markup=False)
    samples = counted(predicted.samples, "sample")
    written = f"written  {predicted.output} · {samples} · {predicted.weights}"
    console.print(written, markup=False)
    return 0


@app.command(name="export")
@unwrapped
def export_command(
    run: Annotated[Path, limited(_SOURCE, "run")],
    target: Annotated[Path, limited(path("exported/gpt2"), "target")],
    /,
    *,
    folder: Annotated[Path | None, limited(_FOLDER, "folder")] = None,
    force: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False,
) -> int:
    """Write trained weights as a folder that from_pretrained of transformers loads.

    Starts no ranks, and runs no code of the generated folder.

    Parameters
    ----------
    run
        Run, checkpoint, folder of Pipeline.save, or generated folder with weights.
    target
        Folder to write, new or empty.
    folder
        Generated folder of the model. [default: the one that the run names]
    force
        Replace the weights and configuration in a folder that is not empty.
    json
        Print what was written as one line of JSON.
    verbose
        Show the traceback of an error.
    """
    from ..runtime.checkpoint.trained import export

    exported = export(run, target, folder=folder, force=force)
    if json:
        print_text(jsons.dumps(asdict(exported), default=str))
        return 0
    size = f"{counted(exported.tensors, 'tensor')}, {write_bytes(exported.bytes)}"
    written = f"written  {exported.folder} · {size} · from {exported.weights}"
    make_console().print(written, markup=False)
    return 0
