"""Which models of transformers can be cut: every class of five tasks, tiny, of random weights.

Each model that builds from a shrunk configuration and trains a step by itself is partitioned; the
generated files are imported from disk and must give the loss, the outputs, every gradient and the
buffers of the original, in training with dropout and in evaluation, at other sizes than the
captured ones. Beside it the same models through `torch.distributed.pipelining.pipeline`, split
before the middle block, with the loss and every gradient compared at the captured size and dropout
off, which is what that front end promises.

    python benchmarks/coverage.py
    python benchmarks/coverage.py --tasks masked image --only bert
"""

import argparse
import contextlib
import inspect
import json
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import transformers
from machine import write_result
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline
from transformers.models.auto import configuration_auto, modeling_auto

import asyncpipe
from asyncpipe.runtime.errors import AsyncPipeError

TASKS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "sequence": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
STAGES = (2, 4)
LARGEST = 30e6
LIMIT_S = 240
_WIDTH = ("hidden_size", "d_model", "n_embd", "dim", "moe_intermediate_size", "emb_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
_LAYERS += ("decoder_layers", "num_decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_experts")
_HEADS += ("encoder_attention_heads", "decoder_attention_heads")
_HEADS += ("num_local_experts", "n_routed_experts")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "hidden_dim")
_INNER += ("decoder_ffn_dim", "max_position_embeddings", "n_positions", "n_ctx")
SMALL = {
    **dict.fromkeys(_WIDTH, 32),
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_INNER, 64),
    "vocab_size": 99,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "rotary_dim": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "use_cache": False,
    "d_kv": 8,
    "head_dim": 8,
    "embedding_size": 32,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class TooLong(BaseException):
    """A model took longer than LIMIT_S; no Exception, so that nothing on the way catches it."""


def build(kind: str, class_name: str) -> nn.Module:
    """A tiny model of random weights; ValueError if its configuration does not shrink."""
    config_class = configuration_auto.CONFIG_MAPPING[kind]
    known = config_class().to_dict()
    small = {name: value for name, value in SMALL.items() if name in known}
    try:
        config = config_class(**small)
    except Exception:
        config = config_class()
        for name, value in small.items():
            with contextlib.suppress(Exception):
                setattr(config, name, value)
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} M parameters after shrinking")
    torch.manual_seed(0)
    model: nn.Module = model_class(config)
    return model


def inputs_of(task: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 90, (2, 10), generator=generator)
    classes = torch.tensor([0, 1])
    match task:
        case "causal" | "masked":
            return {"input_ids": tokens, "labels": tokens}
        case "sequence":
            mask = torch.ones_like(tokens)
            return {"input_ids": tokens, "attention_mask": mask, "labels": classes}
        case "image":
            pixels = torch.randn(2, 3, 32, 32, generator=generator)
            return {"pixel_values": pixels, "labels": classes}
    return {"input_ids": tokens, "decoder_input_ids": tokens, "labels": tokens}


def examine(case: tuple[str, str, str]) -> dict[str, Any]:
    """One model's row: `reason` if it does not train by itself, else what became of each cut."""
    task, kind, class_name = case
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    row: dict[str, Any] = {"task": task, "model": kind, "class": class_name}
    started = time.perf_counter()
    inputs = inputs_of(task)
    try:
        with limited():
            model = build(kind, class_name).train()
            model(**inputs).loss.backward()
    except (Exception, TooLong) as error:
        return row | {"reason": sentence(error)}
    for stages in STAGES:
        row[f"{stages} stages"] = outcome(cut, kind, class_name, inputs, stages)
    row["pipelining"] = outcome(peer, kind, class_name, inputs)
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def outcome(check: Any, *arguments: Any) -> str:
    """ "exact", or why not in one sentence."""
    try:
        with limited(), open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            check(*arguments)
    except (Exception, TooLong) as error:
        return sentence(error)
    return "exact"


def cut(kind: str, class_name: str, inputs: dict[str, Tensor], stages: int) -> None:
    model = build(kind, class_name).train()
    with tempfile.TemporaryDirectory() as folder:
        asyncpipe.partition(
            model,
            inputs,
            stages=stages,
            output=Path(folder) / "made",
            profile="analytic",
            save_weights=False,
        )


def peer(kind: str, class_name: str, inputs: dict[str, Tensor]) -> None:
    model = build(kind, class_name).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
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
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    made = {
        name.partition(".")[2]: parameter
        for name, parameter in split.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }
    for gradient, names in expected_of.items():
        copies = {made[name] for name in names if name in made}
        if not copies:
            raise AssertionError(f"no gradient of {names[0]}")
        total = torch.stack([copy.grad for copy in copies]).sum(0)
        torch.testing.assert_close(total, gradient, rtol=1e-3, atol=1e-5)


def middle(model: nn.Module) -> str:
    """The name of the block in the middle of the longest list of blocks."""
    lists = [
        (len(module), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and name
    ]
    length, name = max(lists)
    return f"{name}.{length // 2}"


@contextlib.contextmanager
def limited() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TooLong(f"took over {LIMIT_S} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)


def sentence(error: BaseException) -> str:
    what = error.what if isinstance(error, AsyncPipeError) else f"{type(error).__name__}: {error}"
    lines = what.strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def cases(tasks: list[str], only: str) -> list[tuple[str, str, str]]:
    found = []
    for task in tasks:
        for kind, names in TASKS[task].items():
            class_name = names if isinstance(names, str) else names[0]
            known = inspect.isclass(getattr(transformers, class_name, None))
            if only in kind and known and kind in configuration_auto.CONFIG_MAPPING:
                found.append((task, kind, class_name))
    return found


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    trained = [row for row in rows if "reason" not in row]
    columns = [*(f"{stages} stages" for stages in STAGES), "pipelining"]
    exact = {column: Counter[str]() for column in columns}
    for row in trained:
        for column in columns:
            exact[column][row["task"]] += row[column] == "exact"
    total = Counter(row["task"] for row in trained)
    print(f"{'task':10} {'build and train':>16} " + " ".join(f"{name:>11}" for name in columns))
    for task in total:
        counts = " ".join(f"{exact[column][task]:11}" for column in columns)
        print(f"{task:10} {total[task]:16} {counts}")
    counts = " ".join(f"{exact[column].total():11}" for column in columns)
    print(f"{'all':10} {total.total():16} {counts}")
    return {
        "transformers": transformers.__version__,
        "tried": len(rows),
        "build_and_train": total.total(),
        "exact": {column: exact[column].total() for column in columns},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=[*TASKS])
    parser.add_argument("--only", default="", help="a part of the model's name")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    work = cases(arguments.tasks, arguments.only)
    rows = []
    with multiprocessing.get_context("spawn").Pool(
        arguments.processes, maxtasksperchild=20
    ) as pool:
        for row in pool.imap_unordered(examine, work):
            rows.append(row)
            shown = {key: value for key, value in row.items() if value != "exact"}
            print(json.dumps(shown), flush=True)
    rows.sort(key=lambda row: work.index((row["task"], row["model"], row["class"])))
    summary = report(rows)
    if len(work) == len(cases([*TASKS], "")):
        write_result("coverage", {**summary, "rows": rows})


if __name__ == "__main__":
    main()
