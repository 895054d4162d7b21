"""Compares training on tensor ranks with training in one process, for the same folders.

Partitions each model of `split_models.py` for two tensor ranks, trains it for 20 steps with AdamW
in separate processes (2 stages x 2 tensor ranks; some also 1 stage x 2 tensor ranks x 2 replicas
with --zero 1 and 2), and trains the same folder in one process. All differences are relative to the
largest value of their kind; gradients, merged over micro-batches, tensor ranks and replicas, to the
largest gradient of the step. A row has

    step_loss, step_gradients  the largest differences in 20 steps that each begin with the weights
                   of the run on one process: what one step on tensor ranks computes differently
    loss, gradients, weights   the largest differences of a run of 20 steps on its own weights
    one_ulp        the same for the run on one process from weights that are each moved up or down
                   by one unit in the last place: how much the model amplifies rounding
    worst          the weights that differ most, and their largest gradient in the run
    share          the share of the parameters that the tensor ranks share out
    rank_bytes     the parameters of the fullest rank, and in `one_rank_bytes` without the split
    sums           the all-reduces of a micro-batch among the tensor ranks of all stages
    sent_bytes     the bytes that all tensor ranks give to them in a step
    formula_bytes  4 sums of batch x tokens x width for each block of a transformer
    whole          the layers that each tensor rank computes whole, with the reason

A row is within the tolerance if all steps and the run are, or in float32 if all steps are and the
run differs by less than ten times what one unit in the last place makes of it. AdamW divides a
gradient by its own size, so that a gradient of rounding alone, such as that of a bias of keys,
moves a weight by a whole learning rate.

`--time` measures the step of one larger model in one process, with DDP, as a pipeline and on tensor
ranks, in alternating runs with fresh processes. The two cores of a machine share its memory, so
there is no fast link from which a wide layer would gain.

`--memory` compares the memory of each rank of a wide GPT, and of one with long sequences, split and
whole, with its plan, for the micro-batches of the plan (`rank_memory.py`).

    python benchmarks/tensor_parallel.py
    python benchmarks/tensor_parallel.py --models gpt2 resnet18 --dtypes float64
    python benchmarks/tensor_parallel.py --models --time 3
    python benchmarks/tensor_parallel.py --models --memory
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import split_models
import torch
from gpt import GPT, tokens_of
from machine import busy_core_seconds, write_result
from rank_memory import of_ranks
from recorded_gradients import RECORDED_IN, TENSOR_RANKS, WEIGHTS_OF, read
from safetensors.torch import load_file, save_file
from split_folders import RANKS, elements_of_ranks, share_of

import asyncpipe
from asyncpipe.runtime.monitoring.run_files import read_run
from asyncpipe.runtime.plan.plan import read_plan

HERE = Path(__file__).parent
STEPS, MICRO_BATCHES = 20, 4
AMPLIFIED = 10
"""How much more than one unit in the last place rounding in each product may make of a run."""
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
ITEM_BYTES = {"float64": 8, "float32": 4}


class Case(NamedTuple):
    """A model with its data.

    blocks: the blocks of a transformer, to which the formula applies
    tokens: the length of its sequences
    with_replicas: trained on replicas that share out optimizer state, too
    dtypes: those that all its operations have
    """

    model: str
    data: str
    blocks: int = 0
    tokens: int = split_models.TOKENS
    with_replicas: bool = False
    dtypes: tuple[str, ...] = ("float64", "float32")
    options: tuple[str, ...] = ()


def small(name: str, data: str, **facts: Any) -> Case:
    file = HERE / "split_models.py"
    return Case(f"{file}:{name}", f"{file}:{data}", **facts)


_RESIDUAL = HERE.parent / "examples" / "residual_mlp.py"
_PATCHES = (split_models.PIXELS // 8) ** 2
_LAYERS = split_models.LAYERS
CASES = {
    "mlp": Case("mlp", "clusters"),
    "residual_mlp": Case(
        f"{_RESIDUAL}:build", f"{_RESIDUAL}:data", options=("--loss", "cross_entropy")
    ),
    "gpt2": small("gpt2", "text", blocks=_LAYERS, with_replicas=True),
    "llama": small("llama", "text", blocks=_LAYERS, with_replicas=True),
    "bert": small("bert", "text", blocks=_LAYERS),
    "t5": small("t5", "text", blocks=_LAYERS),
    "vit": small("vit", "pictures", blocks=_LAYERS, tokens=_PATCHES + 1),
    # The grouped product of its experts has no float64 on a CPU.
    "mixtral": small("mixtral", "text", blocks=_LAYERS, dtypes=("float32",)),
    "resnet18": small("resnet18", "pictures"),
}
CASES |= {
    f"{name}_sequence": CASES[name]._replace(options=("--sequence-parallel",))
    for name in ("gpt2", "llama", "bert", "t5")
}
"""Those of transformers once more with parts of the positions between split layers."""


def call(
    folder: Path, program: str, *words: str, environment: Mapping[str, str] | None = None
) -> None:
    path = shutil.which(program, path=f"{sys.prefix}/bin")
    assert path is not None
    done = subprocess.run(
        [path, *words, "--quiet"],
        cwd=folder,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{program} {' '.join(words)}: {done.stderr.strip()}")


def partition(folder: Path, case: Case, stages: int) -> Path:
    net = folder / f"net_{stages}p"
    call(
        folder,
        *("asyncpipe-partition", "--model", case.model, "--stages", str(stages)),
        *("--tensor-parallel", str(RANKS), "--profile", "analytic", "--schedule", "1f1b"),
        *("--micro-batch-size", "2", "--output", str(net), "--force", *case.options),
    )
    return net


class Run(NamedTuple):
    """A finished run.

    folder: its records and weights
    gradients: what `recorded_gradients.py` wrote
    ranks: the tensor ranks
    """

    folder: Path
    gradients: Path
    ranks: int


def train(
    case: Case, net: Path, dtype: str, *options: str, ranks: int = RANKS, follow: Run | None = None
) -> Run:
    """A run on tensor ranks; each step begins with the weights of the run to follow, if any."""
    place = Path(tempfile.mkdtemp(dir=net.parent))
    run = Run(place / "run", place / "gradients", ranks)
    recorded = {RECORDED_IN: str(run.gradients), TENSOR_RANKS: str(ranks)}
    call(
        net.parent,
        *("asyncpipe-train", str(net), "--data", case.data, "--steps", str(STEPS)),
        *("--optimizer", f"{HERE / 'recorded_gradients.py'}:adamw", "--dtype", dtype),
        *("--log-every", "1", "--eval-batches", "0", "--threads", "1", "--pin", "none"),
        *("--trace", "1", "--output", str(run.folder), "--tensor-parallel", str(ranks), *options),
        environment=recorded | ({WEIGHTS_OF: str(follow.gradients)} if follow else {}),
    )
    return run


def plain(case: Case, net: Path, dtype: str, replicas: int = 1) -> Run:
    batches = str(MICRO_BATCHES * replicas)
    options = ("--schedule", "single", "--micro-batches", batches)
    return train(case, net, dtype, *options, ranks=1)


def moved_by_one_ulp(net: Path) -> Path:
    """A copy of a folder with other weights."""
    moved = net.with_name(f"{net.name}_moved")
    shutil.copytree(net, moved)
    generator = torch.Generator().manual_seed(0)
    for file in (moved / "weights").glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                signs = torch.randint(2, tensor.shape, generator=generator) * 2 - 1
                tensors[name] = torch.nextafter(tensor, signs * torch.inf)
        save_file(tensors, file)
    return moved


def losses_and_gradients(one: Run, other: Run) -> tuple[float, float]:
    """The largest differences over all steps."""
    losses = [[step["loss"] for step in read_run(run.folder).steps] for run in (one, other)]
    assert [len(each) for each in losses] == [STEPS, STEPS]
    gradients = 0.0
    for step in range(STEPS):
        expected, actual = (
            read(run.gradients, "gradients", step, run.ranks) for run in (one, other)
        )
        assert expected.keys() == actual.keys()
        largest = max(float(tensor.abs().max()) for tensor in expected.values())
        differences = (float((expected[n] - actual[n]).abs().max()) for n in expected)
        gradients = max(gradients, max(differences) / largest)
    return (
        max(abs(a - b) for a, b in zip(*losses, strict=True)) / max(map(abs, losses[0])),
        gradients,
    )


def differences(one: Run, other: Run) -> dict[str, Any]:
    """The largest differences between the losses, merged gradients and weights of two runs."""
    loss, gradients = losses_and_gradients(one, other)
    weights, others = weights_of(one.folder), weights_of(other.folder)
    assert weights.keys() == others.keys()
    by_name = {
        name: float((weights[name].double() - others[name].double()).abs().max())
        for name in weights
        if weights[name].is_floating_point()
    }
    worst = max(by_name, key=lambda name: by_name[name])
    largest = max(float(weights[name].abs().max()) for name in by_name)
    return {
        "loss": loss,
        "gradients": gradients,
        "weights": by_name[worst] / largest,
        "worst": {"name": worst, "gradient": largest_gradient(one, worst)},
    }


def largest_gradient(run: Run, name: str) -> float | None:
    """The largest gradient of a parameter in all steps, relative to that of all parameters."""
    steps = [read(run.gradients, "gradients", step, run.ranks) for step in range(STEPS)]
    if name not in steps[0]:
        return None  # a buffer
    of_all = max(float(tensor.abs().max()) for step in steps for tensor in step.values())
    return max(float(step[name].abs().max()) for step in steps) / of_all


def compared(
    case: Case, net: Path, one: Run, dtype: str, *options: str
) -> tuple[Run, dict[str, Any]]:
    """A run on tensor ranks, and its differences from a plain one."""
    split = train(case, net, dtype, *options)
    followed = train(case, net, dtype, *options, follow=one)
    step_loss, step_gradients = losses_and_gradients(one, followed)
    steps = {"step_loss": step_loss, "step_gradients": step_gradients}
    return split, steps | differences(one, split)


def weights_of(run: Path) -> dict[str, Any]:
    parts = [load_file(file) for file in sorted((run / "weights").glob("*.safetensors"))]
    return {name: tensor for part in parts for name, tensor in part.items()}


def messages(case: Case, run: Path, dtype: str) -> dict[str, Any]:
    """The sums over tensor ranks in the last step, and their bytes by the formula."""
    trace = json.loads((run / "trace.json").read_text())
    events = trace if isinstance(trace, list) else trace["traceEvents"]
    sums = sum("over the tensor ranks" in event["name"] for event in events)
    message = split_models.BATCH * case.tokens * split_models.WIDTH * ITEM_BYTES[dtype]
    return {
        "sums": sums / RANKS / MICRO_BATCHES,
        "sent_bytes": read_run(run).steps[-1]["sent_bytes"]["tensor ranks"],
        "formula_bytes": 4 * case.blocks * message * MICRO_BATCHES * RANKS or None,
    }


def rows_of(name: str, dtypes: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    case = CASES[name]
    net = partition(folder, case, 2)
    plan = read_plan(net)
    facts = {
        "share": round(share_of(net, plan), 3),
        "whole": [note for note in plan.notes if "each tensor rank computes" in note],
    }
    for dtype in (dtype for dtype in case.dtypes if dtype in dtypes):
        item = ITEM_BYTES[dtype]
        sizes = {
            "rank_bytes": item * max(elements_of_ranks(net, plan, RANKS)),
            "one_rank_bytes": item * max(elements_of_ranks(net, plan, 1)),
        }
        one = plain(case, net, dtype)
        options = ("--schedule", "1f1b", "--micro-batches", str(MICRO_BATCHES))
        split, found = compared(case, net, one, dtype, *options)
        if dtype == "float32":
            moved = differences(one, plain(case, moved_by_one_ulp(net), dtype))
            found["one_ulp"] = {name: moved[name] for name in _OF_RUN}
        row = {"model": name, "layout": "2 stages x 2", "dtype": dtype, **found}
        yield {**row, **sizes, **messages(case, split.folder, dtype), **facts}
    if case.with_replicas:
        yield from rows_with_replicas(name, case, dtypes[0], folder)


def rows_with_replicas(name: str, case: Case, dtype: str, folder: Path) -> Iterator[dict[str, Any]]:
    net = partition(folder, case, 1)
    one = plain(case, net, dtype, replicas=2)
    for zero in ("1", "2"):
        options = ("--schedule", "1f1b", "--replicas", "2", "--micro-batches", str(MICRO_BATCHES))
        _, found = compared(case, net, one, dtype, *options, "--zero", zero)
        layout = f"1 stage x 2 x 2 replicas, zero {zero}"
        yield {"model": name, "layout": layout, "dtype": dtype, **found}


def planted_fault(folder: Path, model: str, pattern: str, replacement: str) -> dict[str, Any]:
    """The differences of a model with another text in its first stage."""
    case = CASES[model]
    net = partition(folder, case, 2)
    one = plain(case, net, "float64")
    file = net / "stage_0.py"
    text, edits = re.subn(pattern, replacement, file.read_text())
    assert edits
    file.write_text(text)
    split = train(case, net, "float64", "--micro-batches", str(MICRO_BATCHES))
    return differences(one, split)


FAULTS = {
    "no sums of products": ("gpt2", r"= sum_over_ranks\((\w+)\)", r"= \1"),
    "no sums of the gradients of norms": (
        *("gpt2_sequence", r"shared_module\((nn.LayerNorm\(\d+\))\)", r"\1"),
    ),
}
_OF_STEPS, _OF_RUN = ("step_loss", "step_gradients"), ("loss", "gradients", "weights")


def within(row: dict[str, Any]) -> bool:
    tolerance, moved = TOLERANCE[row["dtype"]], row.get("one_ulp", {})
    return all(row[name] <= tolerance for name in _OF_STEPS) and all(
        row[name] <= max(tolerance, AMPLIFIED * moved.get(name, 0.0)) for name in _OF_RUN
    )


def show(row: dict[str, Any]) -> None:
    def figures(values: dict[str, Any], names: tuple[str, ...]) -> str:
        return "  ".join(f"{name} {values[name]:.1e}" for name in names)

    print(
        f"{row['model']:13}{row['layout']:34}{row['dtype']}  {figures(row, _OF_STEPS)}\n"
        f"{'':56}{figures(row, _OF_RUN)}{'' if within(row) else '  over the tolerance'}",
        flush=True,
    )
    if moved := row.get("one_ulp"):
        print(f"{'one unit in the last place':>54}  {figures(moved, _OF_RUN)}", flush=True)


# --- times ----------------------------------------------------------------------------------

_STEP = ("--steps", "6", "--log-every", "1", "--eval-batches", "0", "--pin", "none")
_GPT = (
    "asyncpipe-partition",
    *("--model", f"{HERE / 'gpt.py'}:build", "--model-arg", "micro_batch_size=1"),
    *("--schedule", "1f1b", "--profile", "analytic"),
)
CONFIGURATIONS = {
    "one process, 1 thread": ("one", "--schedule", "single", "--threads", "1"),
    "one process, 2 threads": ("one", "--schedule", "single", "--threads", "2"),
    "DDP, 2 replicas": ("one", "--schedule", "ddp", "--replicas", "2", "--threads", "1"),
    "1f1b, 2 stages": ("two", "--schedule", "1f1b", "--threads", "1"),
    "1 stage x 2 tensor ranks": ("split", "--schedule", "1f1b", "--threads", "1"),
    "1 stage x 2 tensor ranks, sums over gloo": (
        *("split", "--schedule", "1f1b", "--threads", "1", "--transport", "gloo"),
    ),
    "1 stage x 2 tensor ranks, without sums": (
        *("split", "--schedule", "1f1b", "--threads", "1", "--transport", "none"),
    ),
}


def timed(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """The median step of each configuration, with the share of the cores that others used."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
    call(folder, *_GPT, "--stages", "1", "--output", "one")
    call(folder, *_GPT, "--stages", "2", "--output", "two")
    call(folder, *_GPT, "--stages", "1", "--tensor-parallel", "2", "--output", "split")
    steps: dict[str, list[float]] = {name: [] for name in CONFIGURATIONS}
    busy: dict[str, list[float]] = {name: [] for name in CONFIGURATIONS}
    for number in range(rounds):
        for name, (net, *options) in CONFIGURATIONS.items():
            run, before = folder / f"{net}_{number}", busy_core_seconds()
            words = (net, "--data", "text.txt", "--micro-batches", "8", *_STEP)
            call(folder, "asyncpipe-train", *words, "--output", str(run), *options)
            busy[name].append(busy_core_seconds() - before)
            steps[name] += [step["step_ms"] for step in read_run(run).steps[1:]]
            shutil.rmtree(run)
    return [
        {
            "configuration": name,
            "step_ms": round(statistics.median(steps[name]), 1),
            "least_ms": round(min(steps[name]), 1),
            "most_ms": round(max(steps[name]), 1),
            "machine_core_s": [round(each, 1) for each in busy[name]],
        }
        for name in CONFIGURATIONS
    ]


# --- memory ---------------------------------------------------------------------------------

_WIDE = {"layers": 4, "width": 1024, "heads": 16, "tokens": 128, "vocabulary": 8192}
_SEQUENCES = {"n_layer": 4, "n_embd": 256, "n_head": 8, "n_positions": 256, "vocab_size": 1024}


class Layout(NamedTuple):
    """Ranks whose memory is measured.

    stages, size: the stages and the tensor ranks of each
    has_sequences: the model is a GPT-2 with dropout and eight sequences in a micro-batch, of which
        a step has one; otherwise a wide GPT with one sequence in each of several micro-batches
    sequence: the tensor ranks keep parts of the positions
    """

    stages: int
    size: int
    has_sequences: bool = False
    sequence: bool = False


LAYOUTS = (
    *(Layout(1, 1), Layout(1, 2), Layout(2, 2)),
    *(Layout(1, 1, True), Layout(1, 2, True), Layout(1, 2, True, True)),
)


def memory_of_ranks(folder: Path, layout: Layout) -> Iterator[dict[str, Any]]:
    """The memory of each rank in MiB, planned and measured."""
    stages, size, has_sequences, sequence = layout
    if has_sequences:
        model = split_models.with_loss("GPT2LMHeadModel", "GPT2Config", **_SEQUENCES)
        samples, micro_batches, tokens = 8, 1, (_SEQUENCES["n_positions"], 1024)
    else:
        model, samples, micro_batches = GPT(**_WIDE), 1, MICRO_BATCHES
        tokens = (_WIDE["tokens"], _WIDE["vocabulary"])
    net = folder / "_".join(map(str, layout))
    asyncpipe.partition(
        model,
        tokens_of(samples, *tokens),
        stages=stages,
        tensor_parallel=size,
        sequence_parallel=sequence,
        output=net,
        schedule="1f1b",
        micro_batches=micro_batches,
        profile="analytic",
    )
    options = {"schedule": "1f1b", "micro_batches": micro_batches, "optimizer": "adamw"}
    options["tensor_parallel"] = size
    batch = tokens_of(samples * micro_batches, *tokens)
    tight, ordinary = (
        of_ranks(net, stages * size, options, batch, steps=2, is_tight=is_tight)
        for is_tight in (True, False)
    )
    for rank, (each, kept) in enumerate(zip(tight, ordinary, strict=True)):
        planned, measured = each["planned_mib"], each["measured_mib"]
        yield {
            "model": "sequences" if has_sequences else "wide",
            "layout": f"{stages} stage{'s' * (stages > 1)} x {size} tensor ranks",
            "sequence_parallel": sequence,
            "rank": rank,
            "planned_mib": planned,
            "measured_mib": measured,
            "difference": round(measured / planned - 1, 3),
            "ordinary_mib": kept["measured_mib"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=[*CASES], choices=[*CASES])
    parser.add_argument("--dtypes", nargs="+", default=[*TOLERANCE], choices=[*TOLERANCE])
    parser.add_argument("--fault", action="store_true", help="leave out a sum")
    parser.add_argument("--time", type=int, default=0, metavar="ROUNDS", help="measure steps")
    parser.add_argument("--memory", action="store_true", help="measure the memory of ranks")
    arguments = parser.parse_args()
    result = HERE / "results" / "tensor_parallel.json"
    known = json.loads(result.read_text()) if result.exists() else {}
    known.pop("machine", None)
    rows = [row for row in known.get("rows", ()) if row["model"] not in arguments.models]
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as place:
            for row in rows_of(name, arguments.dtypes, Path(place)):
                show(row)
                rows.append(row)
                write_result("tensor_parallel", known | {"rows": rows})
    with tempfile.TemporaryDirectory() as place:
        if arguments.fault or arguments.models == [*CASES]:
            sums, shared = FAULTS.values()
            known["planted_fault"] = planted_fault(Path(place), *sums)
            known["planted_sequence_fault"] = planted_fault(Path(place), *shared)
            for name in ("planted_fault", "planted_sequence_fault"):
                print(f"{name}: {known[name]}")
        if arguments.time:
            known["times"] = timed(Path(place), arguments.time)
            print(*known["times"], sep="\n")
        if arguments.memory:
            known["memory"] = [
                row for layout in LAYOUTS for row in memory_of_ranks(Path(place), layout)
            ]
            print(*known["memory"], sep="\n")
    print(write_result("tensor_parallel", known | {"rows": rows}))


if __name__ == "__main__":
    main()
