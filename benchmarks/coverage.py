"""Coverage of transformers: every class of six tasks, as a tiny model with random weights.

Each model that builds from a shrunk configuration and trains a step by itself is partitioned into
2 and into 4 stages. The generated files are imported from disk, chained with every boundary
detached, and compared with the original: loss, outputs, every gradient and the buffers, in
training with dropout under equal seeds and in evaluation. `partition` makes this comparison before
it writes, and may refuse; its result is then compared once more with a separate model and other
data, at the captured sizes and at others. A model that fails this comparison is wrong, not refused.

For comparison the same models go through `torch.distributed.pipelining.pipeline` in the same run,
split before the middle block, with the loss and every gradient compared at the captured sizes and
with dropout off, as that front end promises.

    python benchmarks/coverage.py
    python benchmarks/coverage.py --tasks masked image --only bert
    python benchmarks/coverage.py --again benchmarks/results/coverage.json --only Seamless
    python benchmarks/coverage.py --device cuda --only Llama

`--again FILE` repeats only the rows of an earlier result that were not exact or took longer than
SLOW_S, and keeps the others.
"""

import argparse
import contextlib
import inspect
import json
import logging
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import transformers
from machine import write_result
from tiny_models import Recipe, find_recipe
from torch import Tensor
from torch.distributed.pipelining import SplitPoint, pipeline
from transformers.models.auto import modeling_auto
from trials import LIMIT_S, TooLong, Wrong, limited, middle, sentence
from workers import Died, each

import asyncpipe
from asyncpipe.partitioner.verify import verify
from asyncpipe.runtime.plan.plan import read_plan

TASKS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "sequence": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}
STAGES = (2, 4)
PEER = "pipelining"
COLUMNS = (*(f"{stages} stages" for stages in STAGES), PEER)
SLOW_S = 20
OUTCOMES = ("exact", "refused", "wrong")


def examine(device: str, case: tuple[str, str]) -> dict[str, Any]:
    """The row of one model: `reason` if it cannot train by itself, else the outcome of each cut."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    started = time.process_time()
    try:
        with limited():
            recipe = find_recipe(*case)
    except (Exception, TooLong) as error:
        return {"reason": sentence(error)}
    row: dict[str, Any] = {"attempt": recipe.attempt}
    partition_s: list[float] = []
    for stages in STAGES:
        row[f"{stages} stages"] = outcome(cut, recipe, stages, device, partition_s)
    row[PEER] = outcome(peer, recipe)
    spent_s = round(time.process_time() - started, 1)
    return row | {"partition_cpu_s": max(partition_s, default=None), "cpu_s": spent_s}


def outcome(check: Callable[..., None], *arguments: Any) -> str:
    """Returns "exact", or "refused: " or "wrong: " and the reason in one sentence."""
    try:
        with limited(), open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            check(*arguments)
    except Wrong as error:
        return f"wrong: {error}"
    except (Exception, TooLong) as error:
        return f"refused: {sentence(error)}"
    return "exact"


def cut(recipe: Recipe, stages: int, device: str, partition_s: list[float]) -> None:
    """Compares the cut with the original; appends the CPU seconds that `partition` takes."""

    def on_device(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(device) for name, value in inputs.items()}

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "made"
        model = recipe.build().to(device).train()
        started = time.process_time()
        asyncpipe.partition(
            model,
            on_device(recipe.inputs()),
            stages=stages,
            output=folder,
            profile="analytic",
            save_weights=False,
        )
        partition_s.append(round(time.process_time() - started, 1))
        plan = read_plan(folder)
        for sizes in (plan.sizes, None):  # None: others that the model takes
            model = recipe.build().to(device).train()
            with torch.no_grad():  # Some make tables for the size of their first call.
                model(**on_device(recipe.inputs()))
            try:
                verify(model, plan, folder, on_device(recipe.inputs(seed=2)), sizes=sizes)
            except Exception as error:
                raise Wrong(
                    f"at {dict(sizes) if sizes else 'other sizes'}: {sentence(error)}"
                ) from error


def peer(recipe: Recipe) -> None:
    inputs = recipe.inputs()
    model = recipe.build(dropout=False).train()
    expected = model(**inputs)["loss"]
    expected.backward()
    expected_of: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            expected_of.setdefault(parameter.grad, []).append(name)
    model.zero_grad(set_to_none=True)
    split_spec = {middle(model): SplitPoint.BEGINNING}
    split = pipeline(model, (), inputs, split_spec=split_spec).split_gm
    # Its own forward refuses, and a Pipe's detaches between stages: no gradients would pass.
    output = type(split).forward(split, **inputs)
    loss = output["loss"] if isinstance(output, dict) else output[0]
    loss.backward()
    made = {
        name.partition(".")[2]: parameter
        for name, parameter in split.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }
    try:
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        for gradient, names in expected_of.items():
            copies = {made[name] for name in names if name in made}
            if not copies:
                raise AssertionError(f"no gradient of {names[0]}")
            total = torch.stack([copy.grad for copy in copies]).sum(0)
            torch.testing.assert_close(total, gradient, rtol=1e-3, atol=1e-5)
    except AssertionError as error:
        raise Wrong(sentence(error)) from error


def cases(tasks: list[str], only: str) -> list[tuple[str, str]]:
    """(task, class name) pairs, each once although several configurations may use a class."""
    found: dict[tuple[str, str], None] = {}
    for task in tasks:
        for kind, names in TASKS[task].items():
            class_name = names if isinstance(names, str) else names[0]
            known = inspect.isclass(getattr(transformers, class_name, None))
            if known and (only in kind or only in class_name):
                found[task, class_name] = None
    return [*found]


def is_good(row: dict[str, Any]) -> bool:
    """True if the model is exact in both cuts, none of which took long."""
    is_exact = all(row.get(f"{stages} stages") == "exact" for stages in STAGES)
    return is_exact and not is_slow(row)


def is_slow(row: dict[str, Any]) -> bool:
    return (row.get("partition_cpu_s") or 0) > SLOW_S


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Prints the table and every reason; returns the counts."""
    trained = [row for row in rows if "reason" not in row]
    tasks = [*dict.fromkeys(row["task"] for row in rows), "all"]
    titles = [f"{column}: exact refused wrong" for column in COLUMNS]
    print(f"\n{'task':9} {'tried':>5} {'train':>5}  " + "  ".join(titles))
    counts: dict[str, Any] = {}
    for task in tasks:
        tried = [row for row in rows if task in (row["task"], "all")]
        those = [row for row in trained if task in (row["task"], "all")]
        counts[task] = {"tried": len(tried), "build_and_train": len(those)}
        line = f"{task:9} {len(tried):5} {len(those):5}"
        for column, title in zip(COLUMNS, titles, strict=True):
            count = Counter(row[column].partition(":")[0] for row in those)
            share = round(100 * count["exact"] / max(1, len(those)), 1)
            counts[task][column] = {name: count[name] for name in OUTCOMES} | {"exact_%": share}
            cells = f"{count['exact']} ({share:.1f}%) {count['refused']:4} {count['wrong']:4}"
            line += f"  {cells:>{len(title)}}"
        print(line)
    for column in COLUMNS[:-1]:
        reasons = [f"{row['task']} {row['class']} {row[column]}" for row in trained]
        _list(f"Not exact at {column}", [text for text in reasons if not text.endswith(" exact")])
    slow = [row for row in trained if is_slow(row)]
    slow_lines = [f"{row['task']} {row['class']}: {row['partition_cpu_s']} s" for row in slow]
    _list(f"A partition takes more than {SLOW_S} s of CPU time", slow_lines)
    untrained = [row for row in rows if "reason" in row]
    reasons = [f"{row['task']} {row['class']}: {row['reason']}" for row in untrained]
    _list("Does not build or train by itself", reasons)
    return counts


def _list(title: str, lines: list[str]) -> None:
    if lines:
        print(f"\n{title} ({len(lines)}):", *lines, sep="\n  ")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=[*TASKS])
    parser.add_argument(
        "--only", default="", help="only models whose name or class contains this text"
    )
    parser.add_argument("--again", type=Path, help="result file whose other rows are kept")
    parser.add_argument("--device", default="cpu", help="the device of the models and inputs")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    earlier = json.loads(arguments.again.read_text()) if arguments.again else {"rows": []}
    if earlier.get("transformers", transformers.__version__) != transformers.__version__:
        parser.error(f"--again is of transformers {earlier['transformers']}, not of this version")
    kept = {(row["task"], row["class"]): row for row in earlier["rows"]}
    work = [
        case for case in cases(arguments.tasks, arguments.only) if not is_good(kept.get(case, {}))
    ]
    started = time.perf_counter()
    rows = dict(kept)
    examined = partial(examine, arguments.device)
    for run, (case, answer) in enumerate(
        each(examined, work, processes=arguments.processes, limit_s=20 * LIMIT_S), start=1
    ):
        row = {"task": case[0], "class": case[1]}
        if isinstance(answer, Died):
            row |= dict.fromkeys(COLUMNS, f"refused: {answer.why}")
        else:
            row |= answer
        rows[case] = row
        shown = {key: value for key, value in row.items() if value != "exact"}
        print(f"{run}/{len(work)} {json.dumps(shown)}", flush=True)
    order = cases([*TASKS], "")
    ordered = [rows[case] for case in order if case in rows]
    counts = report(ordered)
    minutes = round((time.perf_counter() - started) / 60, 1)
    print(f"\n{minutes} minutes with {arguments.processes} processes")
    if len(ordered) == len(order):
        versions = {
            "transformers": transformers.__version__,
            "minutes": round(earlier.get("minutes", 0) + minutes, 1),
        }
        name = "coverage" if arguments.device == "cpu" else f"coverage_{arguments.device}"
        write_result(name, {**versions, "counts": counts, "rows": ordered})


if __name__ == "__main__":
    main()
