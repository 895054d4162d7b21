"""The cost of --watch to a run, with a page open that follows it.

Trains the same model alternately without and with --watch, with a reader of the page's stream, and
compares the median step times, and the CPU time of the viewer, after its start, with that of the
run. The first pair is a warm-up. On a machine that other programs use too, the CPU times are the
ones to read: the viewer has the lowest priority, so it takes only time that nobody else wants.

    python benchmarks/watching.py [PAIRS]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

from machine import write_result
from watch_pages import DATA, ROOT, address_in, train

STEPS = ("--steps", "1200", "--log-every", "2", "--eval-batches", "0")


def read_stream(address: str) -> None:
    """Reads a page's stream until it ends."""
    with urllib.request.urlopen(f"{address}events") as stream:
        while stream.read1(1 << 16):
            pass


def viewer_of(folder: Path) -> int:
    """The process id of the viewer of a run."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0")
        if b"asyncpipe.runtime.watch.worker" in words and str(folder).encode() in words:
            return int(path.parent.name)
    raise RuntimeError("the run has no viewer")


def cpu_s(process: int) -> float:
    """The CPU seconds that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(folder: Path, name: str, *, is_watched: bool) -> dict[str, float]:
    """Trains once; the median time of a step, and the CPU seconds of the run and its viewer."""
    before = os.times()
    run = train(folder, name, *STEPS, *(("--watch",) if is_watched else ()), data=DATA)
    if is_watched:
        address = address_in(run)
        threading.Thread(target=read_stream, args=(address,), daemon=True).start()
        process = viewer_of(folder / name)
        with urllib.request.urlopen(address) as page:
            page.read()
        start_s = cpu_s(process)
    run.communicate()
    after = os.times()
    run_s = after.children_user + after.children_system
    run_s -= before.children_user + before.children_system
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]
    steps = [record["step_ms"] for record in records if record["event"] == "step"]
    figures = {"step_ms": median(steps[1:]), "run_cpu_s": run_s}
    if is_watched:
        figures |= {"viewer_start_cpu_s": start_s, "viewer_cpu_s": cpu_s(process) - start_s}
        os.kill(process, 15)
    return figures


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "examples").symlink_to(ROOT / "examples")
        for pair in range(pairs + 1):
            alone = measure(Path(name), f"alone{pair}", is_watched=False)
            watched = measure(Path(name), f"watched{pair}", is_watched=True)
            rows.append({"alone": alone, "watched": watched})
            print(json.dumps(rows[-1]), flush=True)
    kept = rows[1:]
    figures = {
        "median_ratio": median(row["watched"]["step_ms"] / row["alone"]["step_ms"] for row in kept),
        "viewer_share_of_cpu": median(
            row["watched"]["viewer_cpu_s"] / row["watched"]["run_cpu_s"] for row in kept
        ),
        "load_average": os.getloadavg()[0],
        "pairs": kept,
    }
    print(write_result("watching", figures))


if __name__ == "__main__":
    main()
