"""The five commands: parse, call, print. How it looks is in terminal*.py; no other module prints.

    asyncpipe-partition --model gpt2 --stages 4
    asyncpipe-train generated_models/gpt2_4p
    asyncpipe-inspect generated_models/gpt2_4p
    asyncpipe-compare generated_models/gpt2_4p --methods sync stash none
    asyncpipe-info

Nothing heavy is imported before the options are known, so that --help answers at once.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import traceback
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax

from .options import (
    ComparedOptions,
    CompareOptions,
    PartitionOptions,
    SweepOptions,
    TrainOptions,
)
from .runtime.checkpoint.resuming import with_options_of_run
from .runtime.errors import AsyncPipeError, PlanError
from .runtime.plan import portable, read_plan
from .runtime.training.named_code import check_code
from .runtime.training.settings import Settings, read_config, settings_from
from .terminal import (
    Ticks,
    make_console,
    print_candidates,
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
    name="asyncpipe-train",
    version=VERSION,
    help="Train a generated model as a pipeline.",
    suppress_keyboard_interrupt=False,  # it says at which step
)
inspect_app = App(
    name="asyncpipe-inspect", version=VERSION, help="Show the stages, costs and code of a model."
)
compare_app = App(
    name="asyncpipe-compare",
    version=VERSION,
    help="Compare ways to train on stale weights: losses, and simulated times.",
)
info_app = App(
    name="asyncpipe-info",
    version=VERSION,
    help="Show versions, backends, devices and links, and what a run here would use of them.",
)
_NO_PARTITION_OPTIONS, _NO_TRAIN_OPTIONS = PartitionOptions(), TrainOptions()
_NO_SWEEP_OPTIONS = SweepOptions()
_NO_COMPARE_OPTIONS, _NO_COMPARED_OPTIONS = CompareOptions(), ComparedOptions()


def partition() -> None:
    """Entry point of asyncpipe-partition."""
    sys.exit(_run(partition_app))


def train() -> None:
    """Entry point of asyncpipe-train."""
    code = _run(train_app)
    if "torch.distributed" in sys.modules:  # else only --help, or a usage error
        from .runtime.launching.failure import end_process

        end_process(code)
    sys.exit(code)


def inspect() -> None:
    """Entry point of asyncpipe-inspect."""
    sys.exit(_run(inspect_app))


def compare() -> None:
    """Entry point of asyncpipe-compare."""
    sys.exit(_run(compare_app))


def info() -> None:
    """Entry point of asyncpipe-info."""
    sys.exit(_run(info_app))


# ---------------------------------------------------------------------- asyncpipe-partition


@partition_app.default
def partition_command(
    *, options: Annotated[PartitionOptions, Parameter(name="*")] = _NO_PARTITION_OPTIONS
) -> int:
    """Cut a model into balanced pipeline stages and write them as readable Python."""
    if (options.model is None) == (options.graph is None):
        raise _usage("Either --model or --graph is needed: what to cut into stages.")
    if options.graph is not None:
        return _plan_graph(options.graph, options)
    if options.stop_after in ("capture", "profile"):
        return _outline(options)
    from .partitioner.compile import partition_spec

    assert options.model is not None
    devices = _devices(options)
    if options.stages is None and devices is None and options.ranks is None:
        raise _usage("--stages is needed: the number of stages to cut the model into.")
    console = make_console()
    with Ticks(console, silent=options.json or options.quiet) as ticks:
        plan = partition_spec(
            options.model,
            stages=options.stages,
            devices=devices,
            output=options.output,
            loss=options.loss,
            cut_at=options.cut_at or (),
            keep_together=options.keep_together or (),
            code=options.code,
            explain=options.explain,
            stop_after=options.stop_after,
            save_weights=not options.no_weights,
            force=options.force,
            command=_command_line("asyncpipe-partition"),
            **options.placing,
            **_of_model(options, ticks),
        )
    folder = options.output or Path("generated_models") / (
        f"{plan.name}_{options.stages or len(plan.stages)}p"
    )
    if options.json:
        print(plan.to_json(), end="")
    elif options.quiet and options.stop_after is None:
        print(folder)
    else:
        print_plan(console, plan)
        if options.explain or options.method == "all" or devices is not None:
            print_candidates(console, plan.candidates, plan.method)
        if options.explain:
            print_findings(console, plan.findings)
        if options.stop_after == "plan":
            print_facts(console, plan)
        else:
            print_next(console, plan, folder)
    return 0


def _of_model(options: PartitionOptions, ticks: Ticks) -> dict[str, Any]:
    """What loading, capturing and profiling a model take."""
    return {
        "model_args": dict(_key_value("--model-arg", text) for text in options.model_arg or ()),
        "inputs": dict(_key_text("--input", text) for text in options.input or ()) or None,
        "micro_batch_size": options.micro_batch_size,
        "seq": options.seq,
        "seed": options.seed,
        "meta": options.meta,
        "profile": options.profile,
        "threads": options.threads,
        "device": options.device,
        "dtype": options.dtype,
        "calibrate": options.calibrate,
        "no_cache": options.no_cache,
        "leaves": options.leaf or (),
        "capture": options.capture,
        "on_tick": ticks.tick,
        "on_progress": ticks.progress,
    }


def _outline(options: PartitionOptions) -> int:
    """The graph by module, with costs where it was profiled; nothing is written."""
    from .partitioner.outline import outline_spec

    assert options.model is not None
    console = make_console()
    with Ticks(console, silent=options.json or options.quiet) as ticks:
        with_profile = options.stop_after == "profile"
        outline = outline_spec(
            options.model, with_profile=with_profile, **_of_model(options, ticks)
        )
    if options.json:
        print(outline.to_json(), end="")
    else:
        print_outline(console, outline)
    return 0


def _devices(options: PartitionOptions) -> Any:
    """The devices to plan for, as --devices or --hosts gives them; None for equal ranks."""
    from .partitioner.cluster import cluster_of_hosts
    from .partitioner.cluster_file import read_cluster

    if options.devices is not None and options.hosts is not None:
        raise _usage("--devices and --hosts both say what there is: leave one out.")
    if options.hosts is not None:
        return cluster_of_hosts(options.hosts)
    return read_cluster(options.devices) if options.devices is not None else None


def _plan_graph(path: Path, options: PartitionOptions) -> int:
    """Plans a cost graph alone; nothing is written."""
    from .partitioner.graph_files import read_graph
    from .partitioner.graph_plan import plan_graph

    for flag in options.of_models_alone:
        raise _usage(f"{flag} is of a model; with --graph nothing is captured or written.")
    devices = _devices(options)
    if options.stages is None and devices is None and options.ranks is None:
        raise _usage("--stages is needed: the number of stages to cut the graph into.")
    plan = plan_graph(
        read_graph(path),
        options.stages,
        devices=devices,
        cut_before=options.cut_at or (),
        explain=options.explain,
        **options.placing,
    )
    if options.json:
        print(plan.to_json(), end="")
    else:
        console = make_console()
        print_graph_plan(console, plan)
        print_findings(console, plan.findings)
    return 0


# -------------------------------------------------------------------------- asyncpipe-train


@train_app.default
def train_command(
    folder: Path | None = None,
    /,
    *,
    options: Annotated[TrainOptions, Parameter(name="*")] = _NO_TRAIN_OPTIONS,
    several: Annotated[SweepOptions, Parameter(name="*")] = _NO_SWEEP_OPTIONS,
    config: Path | None = None,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False,
) -> int:
    """Train a generated model as a pipeline, synchronously or asynchronously.

    Parameters
    ----------
    folder
        A generated folder, such as generated_models/gpt2_4p; a file of --config may name it.
    config
        A TOML file of the options; flags win over it.
    verbose
        Show the traceback of an error.
    """
    from .runtime.sweep.variants import lists_from_texts, lists_of

    flags = _given(options) | ({} if folder is None else {"folder": str(folder)})
    merged = {**(read_config(config) if config else {}), **flags}
    if lists := lists_of(several.sweep or (), config, flags):
        typed = {*flags, *lists_from_texts(several.sweep or ())}
        if not merged.get("dry_run"):
            check_code({**merged, **lists}, typed, _files(merged, config))
        return _sweep(merged, lists, several.jobs)
    options = with_options_of_run(merged)
    settings = settings_from(options)
    if not (settings.dry_run or settings.print_schedule):  # these run nothing of it
        check_code(options, flags, _files(merged, config))
    if settings.print_sbatch:
        from .runtime.launching.sbatch import batch_script

        print(batch_script(settings), end="")
        return 0
    from .runtime.launching.launch import run, schedule_text

    if settings.print_schedule:
        print(schedule_text(settings), end="")
        return 0
    return run(settings, "asyncpipe.terminal_train:make_reporter")


def _files(options: dict[str, Any], config: Path | None) -> str:
    """The flags that name files of options."""
    named = {"--config": config, "--resume": options.get("resume")}
    return " and ".join(f"{flag} {value}" for flag, value in named.items() if value)


def _sweep(options: dict[str, Any], lists: dict[str, tuple[Any, ...]], at_once: int) -> int:
    """A run of each combination of values, each a process of this same command."""
    from .runtime.sweep.sweep import check_finished, plan_sweep, run_sweep
    from .terminal_sweep import print_sweep, print_swept_run

    for name in ("print_sbatch", "print_schedule", "resume"):
        if options.get(name):
            raise _usage(f"--{name.replace('_', '-')} is of one run; --sweep makes several.")
    sweep = plan_sweep(options, lists)
    as_json = bool(options.get("json"))
    console = make_console(quiet=bool(options.get("quiet")) or as_json)
    if not options.get("dry_run"):
        total, done = len(sweep.runs), len(sweep.runs) - len(sweep.waiting)
        numbers = iter(range(done + 1, total + 1))
        sweep = run_sweep(
            sweep,
            (sys.executable, sys.argv[0]),
            at_once=at_once,
            on_run=lambda run: print_swept_run(console, run, next(numbers), total),
        )
    if as_json:
        for run in sweep.ranked:
            print(run.to_json())
    print_sweep(console, sweep)
    check_finished(sweep)
    return 0


@train_app.command(name="report")
def report_command(
    folders: Annotated[list[Path], Parameter(consume_multiple=True)],
    /,
    *,
    output: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False,
) -> int:
    """Write the page about a run again, or compare several runs.

    Parameters
    ----------
    folders
        Folders of runs, such as runs/gpt2_4p/1. (A generated folder that is called so is trained
        as ./report.)
    output
        The page to write; by default report.html in the run's folder, of several runs
        comparison.html beside the first.
    json
        Print the numbers as JSON, and write no page unless --output names one.
    verbose
        Show the traceback of an error.
    """
    from .runtime.run_report.comparison import as_json, compare
    from .runtime.run_report.records import read_run
    from .runtime.run_report.summary import to_json
    from .runtime.run_report.writing import write_comparison, write_report
    from .terminal_report import print_comparison, print_page

    console = make_console()
    is_written = output is not None or not json
    if len(folders) == 1:
        run = read_run(folders[0])
        if json:
            print(to_json(run))
        page = write_report(run, output) if is_written else None
    else:
        comparison = compare(folders)
        if json:
            print(as_json(comparison))
        else:
            print_comparison(console, comparison)
        page = write_comparison(comparison, output) if is_written else None
    if page is not None and not json:
        print_page(console, page)
    return 0


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


# ------------------------------------------------------------------------ asyncpipe-compare


@compare_app.default
def compare_command(
    folder: Path,
    /,
    *,
    varied: Annotated[CompareOptions, Parameter(name="*")] = _NO_COMPARE_OPTIONS,
    options: Annotated[ComparedOptions, Parameter(name="*")] = _NO_COMPARED_OPTIONS,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False,
) -> int:
    """Compare ways to train on stale weights: losses, and simulated times.

    All stages are trained in this process, with the weight versions that asynchronous 1f1b gives
    them; the time that a rank a stage would take is simulated. Runs that were made before are not
    repeated.

    Parameters
    ----------
    folder
        A generated folder, such as generated_models/gpt2_4p.
    verbose
        Show the traceback of an error.
    """
    from .runtime.comparison.compare import compare
    from .terminal_compare import print_comparison, print_run

    settings = Settings(**_given(options), folder=str(folder))
    console = make_console(quiet=settings.quiet)
    comparison = compare(
        settings,
        varied.methods,
        optimizers=varied.optimizers or (),
        lrs=varied.lr or (),
        seeds=varied.seeds,
        on_run=lambda run, number, of: print_run(
            console, run, number, of, as_json=bool(settings.json)
        ),
    )
    if not settings.json:
        print_comparison(console, comparison)
    return 0


# --------------------------------------------------------------------------- asyncpipe-info


@info_app.default
def info_command(
    *,
    ranks: int | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False,
) -> int:
    """Show versions, backends, devices and links, and what a run here would use of them.

    Parameters
    ----------
    ranks
        Of the run; by default one a GPU, or two.
    json
        Print it as JSON.
    verbose
        Show the traceback of an error.
    """
    if ranks is not None and ranks < 1:
        raise _usage(f"--ranks {ranks} is not a number from 1 up.")
    from .runtime.info.describe import describe
    from .terminal_report import print_info

    print_info(make_console(), describe(ranks), as_json=json)
    return 0


# ---------------------------------------------------------------------------------- shared


def _given(options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {
        option.name: value
        for option in fields(options)
        if (value := getattr(options, option.name)) is not None
    }


def _run(app: App) -> int:
    """Runs a command: 0, 1 with one `error:` sentence and a cure, 2 for usage, 130 for Ctrl-C, 143
    for a run that a signal asked to stop."""
    from cyclopts import CycloptsError

    errors = Console(stderr=True, highlight=False)
    try:
        return int(app(exit_on_error=False, print_error=False, result_action="return_value") or 0)
    except CycloptsError as error:
        errors.print(f"[bold red]error:[/] {_shown(str(error))}", soft_wrap=True)
        errors.print(f"[dim]{app.name[0]} --help[/]")
        return 2
    except SystemExit as stopped:
        for note in getattr(stopped, "__notes__", ()):
            errors.print(escape(note), soft_wrap=True)
        return int(stopped.code or 0)
    except AsyncPipeError as error:
        if {"-v", "--verbose"} & set(sys.argv):
            traceback.print_exc()
        errors.print(f"[bold red]error:[/] {_shown(error.what)}", soft_wrap=True)
        if error.cure:
            errors.print(_shown(error.cure), soft_wrap=True)
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        if {"-v", "--verbose"} & set(sys.argv):
            traceback.print_exc()
        told = f"{error.filename}: {(error.strerror or str(error)).lower()}."
        errors.print(f"[bold red]error:[/] {_shown(told)}", soft_wrap=True)
        return 1
    except KeyboardInterrupt as interrupt:
        errors.print(str(interrupt) or "interrupted")
        return 130
    finally:
        errors.show_cursor(True)


def _shown(text: str) -> str:
    """A text as it is printed: what would steer the terminal is spelled out."""
    return escape(
        re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], text)
    )


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
    except (ValueError, RecursionError):
        return key, value
