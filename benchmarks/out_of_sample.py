"""Coverage outside transformers: published packages, as tiny models with random weights.

Each model that builds and trains a step by itself is cut into 2 and into 4 stages and judged by
`trials.judge`: exact, exact in training alone, refused with its cause, refused without one, a
traceback, or wrong. For comparison the same model goes through
`torch.distributed.pipelining.pipeline`, in two stages, at the captured size and with dropout off,
as that front end promises.

    pip install timm torchvision diffusers x-transformers vit-pytorch torch_geometric monai \
        segmentation-models-pytorch denoising-diffusion-pytorch perceiver-pytorch \
        performer-pytorch mambapy pytorch-tabnet dynamic-network-architectures peft ultralytics \
        zuko pykan
    python benchmarks/out_of_sample.py
    python benchmarks/out_of_sample.py --packages timm monai --only unet

Packages that are not installed are listed and skipped. `--again FILE` repeats only the rows of an
earlier result that were not exact, and keeps the others.
"""

import argparse
import functools
import json
import os
import time
import traceback
from collections import Counter
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from machine import write_result
from outside_models import PACKAGES, declare_operators
from trials import LIMIT_S, OUTCOMES, Case, judge, limited, outcome, peer, quiet, sentence, trains
from workers import Died, each

STAGES = (2, 4)
PEER = "pipelining"
COLUMNS = (*(f"{stages} stages" for stages in STAGES), PEER)
Key = tuple[str, str]
DISTRIBUTIONS = (
    "timm", "torchvision", "diffusers", "x-transformers", "vit-pytorch", "torch_geometric", "monai",
    "segmentation-models-pytorch", "denoising-diffusion-pytorch", "perceiver-pytorch",
    "performer-pytorch", "mambapy", "pytorch-tabnet", "dynamic-network-architectures", "peft",
    "ultralytics", "zuko", "pykan",
)  # fmt: skip


def found(packages: list[str]) -> dict[Key, Case]:
    """The cases of the installed packages; prints the missing ones."""
    declare_operators()
    cases: dict[Key, Case] = {}
    for package in packages:
        try:
            for case in PACKAGES[package]():
                cases[case.package, case.name] = case
        except ImportError as error:
            print(f"{package} is left out: {error}", flush=True)
    return cases


def examine(key: Key, limit_s: int = LIMIT_S) -> dict[str, Any]:
    """The row of one model: `reason` if it cannot train by itself, else the outcome of each cut."""
    quiet()
    case = found([name for name in PACKAGES if _holds(name, key[0])])[key]
    started = time.process_time()
    try:
        with limited(limit_s):
            trains(case)
    except BaseException as error:
        return {"reason": sentence(error)}
    row: dict[str, Any] = {}
    for stages in STAGES:
        row[f"{stages} stages"] = outcome(judge, case, stages, limit_s=limit_s)
    row[PEER] = outcome(peer, case, limit_s=limit_s)
    return row | {"cpu_s": round(time.process_time() - started, 1)}


def _holds(package: str, name: str) -> bool:
    return package == name or (package == "others" and name not in PACKAGES)


def counted(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The number of models with each outcome, by package and in total."""
    counts: dict[str, Any] = {}
    for package in [*dict.fromkeys(row["package"] for row in rows), "all"]:
        tried = [row for row in rows if package in (row["package"], "all")]
        trained = [row for row in tried if "reason" not in row]
        counts[package] = {"tried": len(tried), "train": len(trained)}
        for column in COLUMNS:
            kinds = Counter(row[column].partition(":")[0] for row in trained)
            exact = kinds["exact"] + kinds["training"]
            share = round(100 * exact / max(1, len(trained)), 1)
            counts[package][column] = {kind: kinds[kind] for kind in OUTCOMES} | {"exact_%": share}
    return counts


def show(counts: dict[str, Any]) -> None:
    """Prints the counts as a table."""
    print(f"\n{'package':20} {'tried':>5} {'train':>5}  " + "  ".join(COLUMNS))
    for package, count in counts.items():
        line = f"{package:20} {count['tried']:5} {count['train']:5}"
        for column in COLUMNS:
            kinds = count[column]
            others = " ".join(f"{kinds[kind]} {kind}" for kind in OUTCOMES[1:] if kinds[kind])
            line += f"  {kinds['exact_%']:.1f}% {others}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--packages", nargs="+", default=[*PACKAGES], choices=[*PACKAGES])
    parser.add_argument("--only", default="", help="only models whose name contains this text")
    parser.add_argument(
        "--again",
        type=Path,
        help="result file whose rows are kept until they are repeated; exact ones are not repeated",
    )
    parser.add_argument(
        "--limit-s",
        type=int,
        default=LIMIT_S,
        help="seconds of processor time for each check of a model (default %(default)s)",
    )
    parser.add_argument("--output", default="out_of_sample", help="the name of the result")
    parser.add_argument(
        "--trace", action="store_true", help="judge in this process, and show tracebacks"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    cases = {
        key: case for key, case in found(arguments.packages).items() if arguments.only in case.name
    }
    if arguments.trace:
        quiet()
        for case in cases.values():
            try:
                trains(case)
                judge(case, 2)
                print(case.name, "exact")
            except Exception:
                traceback.print_exc()
        return
    earlier = json.loads(arguments.again.read_text()) if arguments.again else {"rows": []}
    # Rows that are to be repeated stay until their new ones replace them.
    rows = {(row["package"], row["model"]): row for row in earlier["rows"]}
    exact = {
        key for key, row in rows.items() if row.get("2 stages") == row.get("4 stages") == "exact"
    }
    work = [key for key in cases if key not in exact]
    order = [*dict.fromkeys([*rows, *cases])]
    started = time.perf_counter()
    for run, (key, answer) in enumerate(
        each(
            functools.partial(examine, limit_s=arguments.limit_s),
            work,
            processes=arguments.processes,
            limit_s=20 * arguments.limit_s,
            cases_a_process=12,
        )
    ):
        row = {"package": key[0], "model": key[1]}
        died = isinstance(answer, Died)
        row |= dict.fromkeys(COLUMNS, f"traceback: {answer.why}") if died else answer
        rows[key] = row
        to_run = len(work) - run - 1
        shown = {name: value for name, value in row.items() if value != "exact"}
        print(f"{len(order) - to_run}/{len(order)} {json.dumps(shown)}", flush=True)
        write_result(
            arguments.output,
            {
                "versions": earlier.get("versions", {}) | versions(),
                "minutes": round(
                    earlier.get("minutes", 0) + (time.perf_counter() - started) / 60, 1
                ),
                "not yet run": to_run,
                "counts": counted([*rows.values()]),
                "rows": [rows[key] for key in order if key in rows],
            },
        )
    show(counted([*rows.values()]))


def versions() -> dict[str, str]:
    """The versions of the installed packages."""
    found = {}
    for package in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


if __name__ == "__main__":
    main()
