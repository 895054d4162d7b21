"""Everything that has to be tried on a GPU, in 30 minutes: one JSON file and one page.

Each part runs in a process of its own with a share of the time; what one part leaves over, the
later ones have. Rows that fail, parts that crash or hang, and what the machine cannot run are
named, with the command that repeats them. Sizes follow the memory of the GPUs.

    make gpu-report                                       all parts, into build/gpu-report
    python benchmarks/gpu_report.py --parts transports    one part again, into the same files
    python benchmarks/gpu_report.py --device cpu          a dry run with small sizes
"""

import argparse
import faulthandler
import json
import math
import multiprocessing
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_page import failures_of, page_of
from gpu_parts import PARTS
from gpu_setting import Setting, dry_setting, setting_of_gpus
from gpu_work import NCCL_ANSWER, Work, sentence_of, touch
from machine import describe

MODULES = ["torch", "asyncpipe.commands.in_python", "asyncpipe.partitioner.compile"]
"""Imported once, in the process whose forks are the parts."""

FORKS = multiprocessing.get_context("forkserver")
PATIENCE_S = 5.0


def apart(call: Callable[..., None], arguments: Sequence[Any], log: Path, limit_s: float) -> str:
    """Makes the call in a process of its own; "" if it ended well, otherwise why not.

    The process and all that it started have ended afterwards.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    process = FORKS.Process(target=_in_own_group, args=(log, call, *arguments))
    process.start()
    assert process.pid is not None
    process.join(limit_s)
    is_late = process.is_alive()
    for number, end in ((signal.SIGTERM, process.terminate), (signal.SIGKILL, process.kill)):
        end()  # It may not have a group yet.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        process.join(PATIENCE_S)
    if is_late:
        return f"it took over {limit_s:.0f} s and was stopped; it was at: {_last_line(log)}"
    code = process.exitcode or 0
    if code < 0:
        return f"its process ended with {signal.Signals(-code).name}; it was at: {_last_line(log)}"
    return f"its process ended with exit status {code}: {_last_line(log)}" if code else ""


def _in_own_group(log: Path, function: Callable[..., None], *arguments: Any) -> None:
    os.setsid()
    with log.open("wb") as written:
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
    faulthandler.enable()
    function(*arguments)


def _last_line(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "its start"


def write_facts(device: str, most_gib: float, answer: Path) -> None:
    """The setting and the machine: asked in another process, as a process that has asked for GPUs
    cannot fork."""
    setting = dry_setting() if device == "cpu" else setting_of_gpus(most_gib)
    answer.write_text(json.dumps({"setting": asdict(setting), "machine": describe()}))


def run_part(name: str, work: Work) -> None:
    work.answer.write_text("[]")
    try:
        touch(work.setting.device)
    except Exception as error:
        work.rows.append({"row": "the first call to the device", "cause": sentence_of(error)})
        work.answer.write_text(json.dumps(work.rows))
        return
    PARTS[name].run(work)


def report_part(name: str, setting: Setting, output: Path, limit_s: float) -> dict[str, Any]:
    """The entry of a part in the report."""
    answer, log = output / "parts" / f"{name}.json", output / "logs" / f"{name}.log"
    answer.parent.mkdir(parents=True, exist_ok=True)
    answer.unlink(missing_ok=True)
    start_s = time.monotonic()
    work = Work(setting, output / "work", answer, start_s + limit_s)
    work.folder.mkdir(exist_ok=True)
    cause = apart(run_part, (name, work), log, limit_s)
    with suppress(OSError, json.JSONDecodeError):
        work.rows = json.loads(answer.read_text())
    command = ["python", "benchmarks/gpu_report.py", "--parts", name, "--output", str(output)]
    command += ["--device", "cpu"] if setting.is_dry else ["--gib", f"{setting.scale.gib:g}"]
    return {
        "about": PARTS[name].about,
        "rows": work.rows,
        "cause": cause,
        "command": shlex.join(command),
        "log": str(log),
        "seconds": round(time.monotonic() - start_s, 1),
    }


def limit_of(name: str, names: Sequence[str], left_s: float) -> float:
    """A part's share of the time that is left for it and the ones after it."""
    after = names[names.index(name) :]
    return left_s * PARTS[name].share / sum(PARTS[other].share for other in after)


def check(setting: Setting) -> None:
    """Ends the program if there is nothing to report on."""
    if not setting.is_dry and not setting.gpus:
        sys.exit(
            "error: torch finds no GPU here.\n"
            "TORCH_BACKEND=auto make install installs a CUDA build where there is a driver; "
            "--device cpu makes a dry run."
        )


def run(
    names: Sequence[str], device: str, output: Path, minutes: float, most_gib: float = math.inf
) -> dict[str, Any]:
    """Runs the parts, and writes the report after each of them."""
    start_s = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    facts = output / "parts" / "facts.json"
    facts.parent.mkdir(exist_ok=True)
    if why := apart(write_facts, (device, most_gib, facts), output / "logs" / "facts.log", 120.0):
        sys.exit(f"error: the machine could not be described: {why}")
    report: dict[str, Any] = json.loads(facts.read_text())
    given = report["setting"]
    setting = Setting(**given | {"scale": type(dry_setting().scale)(*given["scale"])})
    check(setting)
    written = output / "gpu_report.json"
    report["parts"] = {}
    (output / "work" / NCCL_ANSWER).unlink(missing_ok=True)
    if written.exists() and (old := json.loads(written.read_text()))["setting"] == given:
        report["parts"] = {} if len(names) == len(PARTS) else old["parts"]
    for name in names:
        limit_s = limit_of(name, names, start_s + 60.0 * minutes - time.monotonic())
        print(f"{name:18} at most {limit_s:4.0f} s", end="", flush=True)
        entry = report["parts"][name] = report_part(name, setting, output, limit_s)
        failed = sum(1 for row in entry["rows"] if "cause" in row) + bool(entry["cause"])
        print(
            f"   {entry['seconds']:5.0f} s   {len(entry['rows'])} rows, {failed} failed", flush=True
        )
        report["seconds"] = round(time.monotonic() - start_s, 1)
        report["failures"] = failures_of(report)
        written.write_text(json.dumps(report, indent=1) + "\n")
        (output / "gpu_report.md").write_text(page_of(report))
    return report


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=Path("build/gpu-report"))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--gib", type=float, default=math.inf, help="sizes of the models as for GPUs of this memory"
    )
    arguments = parser.parse_args()
    FORKS.set_forkserver_preload(MODULES)
    report = run(
        arguments.parts, arguments.device, arguments.output, arguments.minutes, arguments.gib
    )
    for failure in report["failures"]:
        print(f"{failure['part']}, {failure['row'] or 'the part'}: {failure['cause']}")
        print(f"  {failure['command']}")
    print(f"{arguments.output / 'gpu_report.md'}")


if __name__ == "__main__":
    main()
