"""Micro-batches against the whole batch: the models of coverage.py, with masked labels.

Every model that coverage.py found exact is cut into two stages, and makes a step of two
micro-batches of one sample each. The loss and every gradient are compared with those of the plain
model for both samples together. In the second sample of a text only the first three labels count
(the others are -100), so that the mean of the losses of the micro-batches is not the loss of the
batch. Dropout and random depth are off.

    equal         to 1e-4: the loss relative to itself, a gradient to the largest gradient
    batch norm    a model with batch norm, which normalizes each micro-batch by itself
    differs       any other model whose loss or gradients are others
    refused       the cut or the step raises

    python benchmarks/whole_batch.py                  results/whole_batch.json
    python benchmarks/whole_batch.py --only Llama
"""

import argparse
import json
import os
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import transformers
from machine import write_result
from tiny_models import Recipe
from torch import Tensor, nn
from trials import LIMIT_S, TooLong, limited, sentence
from workers import Died, each

import asyncpipe

COVERAGE = Path(__file__).parent / "results" / "coverage.json"
TEXTS = ("causal", "seq2seq", "masked", "speech")
TOLERANCE = 1e-4
OUTCOMES = ("equal", "batch norm", "differs", "refused")


def examine(recipe: Recipe) -> dict[str, Any]:
    """The outcome of one model, and what it is weighted by."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    try:
        with limited(), tempfile.TemporaryDirectory() as parent:
            return compared(recipe, Path(parent) / "made")
    except (Exception, TooLong) as error:
        return {"outcome": "refused", "reason": sentence(error)}


def compared(recipe: Recipe, folder: Path) -> dict[str, Any]:
    batch, model = recipe.inputs(), plain(recipe)
    if recipe.task in TEXTS:
        batch["labels"] = batch["labels"].clone()
        batch["labels"][1, 3:] = -100
    plan = asyncpipe.partition(
        plain(recipe), recipe.inputs(), stages=2, output=folder, profile="analytic"
    )
    by = "targets" if plan.targets else "sum" if plan.loss_is_sum else "samples"
    if any("BatchNorm" in type(module).__name__ for module in model.modules()):
        return {"outcome": "batch norm", "weighted_by": by}
    loss = model(**batch)["loss"]
    loss.backward()
    expected = dict(model.named_parameters(remove_duplicate=False))
    largest = max(norm(parameter.grad) for parameter in expected.values())
    pipe = asyncpipe.Pipeline(folder, micro_batches=2)
    of_loss = abs(pipe.step(dict(batch)).loss / loss.item() - 1)
    of_gradient = max(
        norm(parameter.grad - expected[name].grad) / largest
        for name, parameter in pipe.named_parameters()
        if parameter.grad is not None and expected[name].grad is not None
    )
    is_equal = max(of_loss, of_gradient) < TOLERANCE
    return {
        "outcome": "equal" if is_equal else "differs",
        "weighted_by": by,
        "loss": of_loss,
        "gradient": of_gradient,
    }


def plain(recipe: Recipe) -> nn.Module:
    """The model in training mode, without random numbers."""
    model = recipe.build(dropout=False).train()
    for module in model.modules():
        if hasattr(module, "layerdrop"):
            module.layerdrop = 0.0
    return model


def norm(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.norm())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="only classes whose name contains this text")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    recipes = [
        Recipe(row["task"], row["class"], row["attempt"])
        for row in json.loads(COVERAGE.read_text())["rows"]
        if row.get("2 stages") == "exact" and arguments.only in row["class"]
    ]
    rows = []
    for recipe, answer in each(
        examine, recipes, processes=arguments.processes, limit_s=10 * LIMIT_S
    ):
        found = {"outcome": "refused", "reason": answer.why} if isinstance(answer, Died) else answer
        rows.append({"task": recipe.task, "class": recipe.class_name, **found})
        print(f"{len(rows)}/{len(recipes)} {json.dumps(rows[-1])}", flush=True)
    rows.sort(key=lambda row: (row["task"], row["class"]))
    counts = Counter(row["outcome"] for row in rows)
    weighted = Counter(row["weighted_by"] for row in rows if row["outcome"] == "equal")
    print(*(f"{outcome} {counts[outcome]}" for outcome in OUTCOMES), dict(weighted), sep="\n")
    if not arguments.only:
        facts = {"transformers": transformers.__version__, "counts": counts, "equal_by": weighted}
        write_result("whole_batch", {**facts, "rows": rows})


if __name__ == "__main__":
    main()
