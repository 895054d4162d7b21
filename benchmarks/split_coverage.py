"""Causal language models of transformers whose layers two tensor ranks share out.

Takes the tiny models of `coverage.py` in a shuffled order, partitions each into 2 stages with
`tensor_parallel=2`, and compares the stages on two tensor ranks with those on one: outputs and all
gradients, in training with dropout, on other data and other batch sizes than those of the
partition, which has made the same comparison on its own data. The outcome is one of

    exact    equal; `share` is the share of the parameters that the ranks share out
    refused  an asyncpipe error: no layer can be split, or the model cannot be partitioned
    unequal  the partition's own comparison found a difference, and wrote nothing
    wrong    the folder was written, and its results differ
    crash    any other exception

python benchmarks/split_coverage.py --models 60 --processes 1
python benchmarks/split_coverage.py --again benchmarks/results/split_coverage.json

`--again FILE` keeps the exact rows of an earlier result, and tries the others again.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import transformers
from coverage import cases
from machine import write_result
from tiny_models import Recipe, find_recipe
from trials import LIMIT_S, TooLong, limited, quiet, sentence
from workers import Died, each

import asyncpipe
from asyncpipe.partitioner.verify_parts import verify_parts
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.executor.loading import stage_builder
from asyncpipe.runtime.plan.plan import Plan, read_plan
from asyncpipe.runtime.tensor_parallel import splits_of
from asyncpipe.runtime.tensor_parallel.threads import in_threads

RANKS = 2
OUTCOMES = ("exact", "refused", "unequal", "wrong", "crash")


def split_share(folder: Path, plan: Plan) -> float:
    """The share of the parameters of all stages that the tensor ranks share out."""

    def sizes() -> list[tuple[bool, int]]:
        found = []
        for spec in plan.stages:
            stage = stage_builder(folder, spec)()
            splits = splits_of(stage)
            found += [(name in splits, p.numel()) for name, p in stage.named_parameters()]
        return found

    (whole,), (part, *_) = (in_threads(number, lambda _: sizes()) for number in (1, RANKS))
    split = sum(size * RANKS for is_split, size in part if is_split)
    return split / max(1, sum(size for _, size in whole))


def examine(class_name: str) -> dict[str, Any]:
    """The row of one model: its outcome, the share that is split, and what stays whole."""
    quiet()
    try:
        with limited():
            recipe = find_recipe("causal", class_name)
    except (Exception, TooLong) as error:
        return {"untrained": sentence(error)}
    with (
        tempfile.TemporaryDirectory() as parent,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stderr(nowhere),
    ):
        return outcome(recipe, Path(parent) / "made")


def outcome(recipe: Recipe, folder: Path) -> dict[str, Any]:
    row: dict[str, Any] = {}
    try:
        with limited(3 * LIMIT_S):
            partitioned(recipe, folder)
        plan = read_plan(folder)
        row["share"] = round(split_share(folder, plan), 3)
        row["whole"] = [note for note in plan.notes if "each tensor rank computes" in note]
        with limited():
            compare(recipe, folder, plan)
    except AsyncPipeError as error:
        text = sentence(error)
        found = "differ" in text or "only the original has" in text
        kind = "wrong" if "share" in row else "unequal" if found else "refused"
        return row | {"outcome": kind, "reason": text}
    except (Exception, TooLong) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{sentence(error)} ({Path(where.filename).name}:{where.lineno})"
        return row | {"outcome": "crash", "reason": reason}
    return row | {"outcome": "exact"}


def partitioned(recipe: Recipe, folder: Path) -> None:
    asyncpipe.partition(
        recipe.build().train(),
        recipe.inputs(),
        stages=2,
        tensor_parallel=RANKS,
        output=folder,
        profile="analytic",
        save_weights=False,
    )


def compare(recipe: Recipe, folder: Path, plan: Plan) -> None:
    """Raises PlanError where two tensor ranks compute something else than one, for other data: two
    samples and, if the folder takes other batch sizes, four."""
    model, inputs = recipe.build().train(), recipe.inputs(seed=2)
    verify_parts(model, plan, folder, inputs, RANKS)
    if "batch" in plan.sizes:
        more = recipe.inputs(seed=3)
        both = {name: torch.cat([value, more[name]]) for name, value in inputs.items()}
        verify_parts(model, plan, folder, both, RANKS)


def counts_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    tried = [row for row in rows if "outcome" in row]
    count = Counter(row["outcome"] for row in tried)
    shares = [row["share"] for row in tried if row["outcome"] == "exact"]
    return {
        "tried": len(tried),
        **{name: count[name] for name in OUTCOMES},
        "exact_%": round(100 * count["exact"] / max(1, len(tried)), 1),
        "median_share": round(statistics.median(shares), 3) if shares else None,
        "least_share": min(shares, default=None),
        "untrained": len(rows) - len(tried),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, help="most models to try now")
    parser.add_argument("--only", default="", help="only classes whose name contains this text")
    parser.add_argument("--again", type=Path, help="result file whose exact rows are kept")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    known = json.loads(arguments.again.read_text())["rows"] if arguments.again else []
    rows = {row["class"]: row for row in known}
    work = [name for _, name in cases(["causal"], arguments.only)]
    random.Random(0).shuffle(work)
    work = [name for name in work if rows.get(name, {}).get("outcome") != "exact"]
    work = work[: arguments.models]
    for run, (name, answer) in enumerate(
        each(examine, work, processes=arguments.processes, limit_s=20 * LIMIT_S), start=1
    ):
        died = isinstance(answer, Died)
        rows[name] = {
            "class": name,
            **({"outcome": "crash", "reason": answer.why} if died else answer),
        }
        shown = {key: value for key, value in rows[name].items() if key != "whole"}
        print(f"{run}/{len(work)} {json.dumps(shown)}", flush=True)
        ordered = sorted(rows.values(), key=lambda row: str(row["class"]))
        counts = counts_of(ordered)
        figures = {"transformers": transformers.__version__, "counts": counts, "rows": ordered}
        write_result("split_coverage", figures)
    print(json.dumps(counts_of([*rows.values()])))


if __name__ == "__main__":
    main()
