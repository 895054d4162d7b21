"""All that is read from outside, changed at random: a result or one sentence, never a traceback, a
hang, a huge allocation or a stranger's code. `mutations.py` says how to run more of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from asyncpipe.commands.options import CommandOptions, PartitionFlags
from asyncpipe.partitioner.planning.cluster_file import read_cluster
from asyncpipe.partitioner.profile.roofline import device_spec
from asyncpipe.runtime.config.option_files import read_config
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.data.task import architecture_of, find_task
from asyncpipe.runtime.data.text import TextWindows
from asyncpipe.runtime.data.tokens import encode_bytes, read_bin, read_corpus
from asyncpipe.runtime.errors import AsyncPipeError, DataError
from asyncpipe.runtime.experiments.compare import read_runs
from asyncpipe.runtime.job.job_file import read_job
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.runtime.plan.structure import evaluate_size
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.schedule.text import from_text, to_text
from asyncpipe.runtime.serialization import read_json_lines
from asyncpipe.runtime.tensor_files import INDEX, read_tensors
from asyncpipe.tests.partitioner.graph.test_graph_files import PIPEDREAM, dnn_node
from asyncpipe.tests.support.faults.input_mutations import (
    ODD,
    WORDS,
    bounded,
    changed_bytes,
    changed_documents,
    changed_lines,
    fuzzed,
    many,
)
from asyncpipe.tests.support.models.hand_folders import write_mlp, write_text
from asyncpipe.tests.support.processes.in_process import command

ROOT = Path(__file__).parent.parent
GRAPH: dict[str, Any] = {
    "format": "asyncpipe cost graph",
    "schema": 1,
    "name": "three",
    "micro_batch_size": 4,
    "nodes": [
        {
            "name": f"n{j}",
            "forward_ms": 1.0 + j,
            "backward_ms": 2.0,
            "weight_ms": 1.0,
            "output_bytes": 64,
            "parameters": {f"w{j}": 256},
            "saved": {f"n{j}": 64},
            "modules": ["h"],
            "block": "h",
            "times_on": {"fast": [0.5, 1.0]},
        }
        for j in range(3)
    ],
    "edges": [
        {"source": f"n{j}", "target": f"n{j + 1}", "tensors": {f"n{j}": 64}, "grads": {f"n{j}": 64}}
        for j in range(2)
    ],
}
PUBLISHED = {
    "maxFPGAs": 2, "maxCPUs": 0, "maxSizePerFPGA": 1e9,
    "nodes": [dnn_node(1, 3.0), dnn_node(2, 2.0), dnn_node(12, 4.0, 1, 2), dnn_node(11, 6.0, 1, 1)],
    "edges": [
        {"sourceId": 1, "destId": 2, "cost": 0.5},
        {"sourceId": 2, "destId": 12, "cost": 9.0},
        {"sourceId": 12, "destId": 11, "cost": 1.0},
    ],
}  # fmt: skip
RUN = {
    "key": "ab", "method": "stash", "optimizer": "sgd", "lr": 0.1, "seed": 1, "stages": 2,
    "micro_batches": 4, "steps": 3,
    "curve": {"steps": [1, 3], "evaluated": [2.0, 1.5], "trained": [2.1, 1.6], "end": ""},
}  # fmt: skip
TOML_VALUES = (
    "= true", "= -1", '= "x"', "= nan", "= inf", "= 1e400", "= " + "9" * 400, "= []", "= [1]",
    "= {}", "=", "[[", "]]", "= 0", "= 1_000_000_000_000", '= "*"', '= ["*", "*"]',
    '= "\\u001b[2J"', "= " + "[" * 3000 + "]" * 3000, "= 1979-05-27", '= ""',
)  # fmt: skip
SIZES = ("batch", "2", "**", "(", ")", "//", "-", "max", ",", "0", "9" * 30, "%", "x", "9**9", "if")


def held(read: Callable[[], Any]) -> Any:
    """The result of a reader, or None where it explains in one sentence why there is none."""
    with bounded():
        try:
            return read()
        except AsyncPipeError as error:
            assert error.what.endswith((".", "?", ")", ":")) or "\n" in error.what, error.what
            assert len(error.what) < 3000 and "\x1b" not in error.what
            return None


def run(folder: Path, name: str, *arguments: str) -> None:
    """A command, which ends with a result, one sentence or a word on its usage."""
    with bounded():
        outcome = command(folder, name, *arguments)
    assert outcome.code in (0, 1, 2), outcome
    assert outcome.code == 0 or outcome.err.startswith("error: "), outcome
    assert "\x1b" not in outcome.out + outcome.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fuzzed")
    write_mlp(made / "mlp")
    write_text(made / "text")
    (made / "mlp" / "stage_0.py").write_text(f"open({str(made / 'touched')!r}, 'w')\n")
    return made


@pytest.mark.parametrize("name", ["mlp", "text"])
@fuzzed
@given(data=st.data())
def test_a_changed_plan_is_shown_and_resolved_or_refused(
    folder: Path, name: str, data: st.DataObject
) -> None:
    path = folder / name / "plan.json"
    before = path.read_text()
    try:
        path.write_text(data.draw(changed_documents(json.loads(before))))
        held(lambda: read_plan(folder / name))
        run(folder, "inspect", name)
        run(folder, "train", name, "--dry-run", "--data", "x.py:f", "--transport", "local")
        run(
            folder,
            "train",
            name,
            "--schedule",
            "async-1f1b",
            "--print-schedule",
            "--data",
            "x.py:f",
        )
    finally:
        path.write_text(before)
    assert not (folder / "touched").exists()


@fuzzed
@given(data=st.data())
def test_changed_bytes_of_a_plan_are_read_or_refused(folder: Path, data: st.DataObject) -> None:
    path = folder / "mlp" / "plan.json"
    before = path.read_bytes()
    try:
        path.write_bytes(data.draw(changed_bytes(before)))
        run(folder, "inspect", "mlp")
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("graph", [GRAPH, PUBLISHED], ids=["ours", "dnn-partitioning"])
@fuzzed
@given(data=st.data())
def test_a_changed_cost_graph_is_planned_or_refused(
    tmp_path_factory: pytest.TempPathFactory, graph: dict[str, Any], data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "graph.json"
    path.write_text(data.draw(changed_documents(graph)))
    run(path.parent, "partition", "--graph", path.name, "--stages", "2", "--method", "chain")
    run(path.parent, "partition", "--graph", path.name, "--stages", "2", "--json")


@fuzzed
@given(
    text=changed_lines(PIPEDREAM, ("--", "nan", "1e400", "=[", "a=[,", "\tnode9", "Input0", "-1"))
)
def test_a_changed_graph_of_pipedream_is_planned_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "graph.txt"
    path.write_text(text)
    run(path.parent, "partition", "--graph", path.name, "--stages", "2", "--json")


@fuzzed
@given(
    text=changed_lines(
        to_text(make_schedule("1f1b", stages=2, micro_batches=3)),
        (
            "0F99999999",
            "9F0",
            "0F0@v9",
            "0S2",
            "rank",
            "1:",
            "x" * 99,
            "-1F0",
            "0B٣",
            "9" * 5000,
            ":",
        ),
    )
)
def test_a_changed_schedule_is_valid_or_refused(folder: Path, text: str) -> None:
    held(lambda: from_text(text))
    (folder / "own.txt").write_text(text)
    run(folder, "train", "mlp", "--dry-run", "--data", "x.py:f", "--schedule", "./own.txt",
        "--micro-batches", "3", "--transport", "local")  # fmt: skip


DEVICES = (ROOT / "examples" / "two_hosts.toml").read_text()
CARD = (ROOT / "partitioner" / "profile" / "devices" / "rtx3090.toml").read_text()


@fuzzed
@given(text=changed_lines(DEVICES, TOML_VALUES) | changed_lines(CARD, TOML_VALUES))
def test_changed_devices_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "devices.toml"
    path.write_text(text)
    held(lambda: read_cluster(path))
    held(lambda: device_spec(path))


CONFIG = Settings(folder="mlp", data="x.py:f", micro_batches=3, trace="1-2", clip=1.0).to_toml()


@fuzzed
@given(text=changed_lines(CONFIG, TOML_VALUES))
def test_a_changed_configuration_is_used_or_refused(folder: Path, text: str) -> None:
    path = folder / "run.toml"
    path.write_text(text)
    held(lambda: read_config(path))
    run(folder, "train", "mlp", "--config", "run.toml", "--dry-run", "--transport", "local")


JOB = (
    (ROOT / "examples" / "pipeline_job.toml").read_text().replace('"???"', "3")
    + """
[storage]
checkpoints_uri = "s3://bucket/checkpoints"
output = "s3://bucket/output"
[container]
dependencies = ["datasets>=4"]
env = ["HF_TOKEN", "GREETING=hello"]
network = true
[resources.instances]
type = "ml.g5.xlarge"
"""
)


@fuzzed
@given(
    text=changed_lines(JOB, TOML_VALUES),
    system=st.sampled_from(("local", "docker", "kubernetes", "sagemaker")),
)
def test_a_changed_job_is_shown_or_refused(folder: Path, text: str, system: str) -> None:
    path = folder / "job.toml"
    path.write_text(text)
    held(lambda: read_job(path))
    run(folder, "job", "run", "job.toml", "--on", system, "--print")


@many
@given(
    option=st.sampled_from([each.name for each in fields(Settings)[1:]]),
    word=st.sampled_from(WORDS),
    schedule=st.sampled_from(("1f1b", "async-1f1b", "auto")),
)
def test_odd_words_for_an_option_of_a_run_are_used_or_refused(
    folder: Path, option: str, word: str, schedule: str
) -> None:
    own = {"--data": "x.py:f", "--transport": "local", "--output": "out", "--dry-run": "true"}
    own["--schedule"] = schedule
    own["--" + option.replace("_", "-")] = word
    run(folder, "train", "mlp", *(f"{name}={value}" for name, value in own.items()))


@many
@given(
    option=st.sampled_from(
        [entry.name for entry in (*fields(CommandOptions), *fields(PartitionFlags))]
    ),
    word=st.sampled_from(WORDS),
)
def test_odd_words_for_an_option_of_a_plan_are_used_or_refused(
    folder: Path, option: str, word: str
) -> None:
    (folder / "g.json").write_text(json.dumps(GRAPH))
    own = {"--graph": "g.json", "--stages": "2", "--" + option.replace("_", "-"): word}
    run(folder, "partition", *(f"{name}={value}" for name, value in own.items()))


@fuzzed
@given(data=st.data())
def test_changed_lines_of_json_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_text(data.draw(changed_documents(RUN)) + "\n" + json.dumps(RUN) + "\n")
    held(lambda: read_runs(path))
    held(lambda: list(read_json_lines(path, DataError)))
    path.write_bytes(data.draw(changed_bytes(path.read_bytes())))
    held(lambda: read_runs(path))


@fuzzed
@given(data=st.data())
def test_changed_weights_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    weights = tmp_path_factory.getbasetemp() / "weights"
    weights.mkdir(exist_ok=True)
    content = save({"w": torch.ones(3, 4), "b": torch.zeros(4)})
    (weights / "part.safetensors").write_bytes(data.draw(st.just(content) | changed_bytes(content)))
    index = {"metadata": {"total_size": 64}, "weight_map": {"w": "part.safetensors"}}
    (weights / INDEX).write_text(data.draw(changed_documents(index)))
    held(lambda: read_tensors(weights, ["w"]))
    held(lambda: read_tensors(weights / "part.safetensors", ["w", "b"]))


@fuzzed
@given(data=st.data())
def test_changed_tokens_are_windows_or_refused(folder: Path, data: st.DataObject) -> None:
    path, plan = folder / "tokens.bin", read_plan(folder / "text")
    header = {"dtype": "uint16", "vocab_size": 300, "tokenizer": "t", "mask": 0, "starts": [0, 50]}
    path.write_bytes(data.draw(changed_bytes(np.arange(900, dtype="<u2").tobytes())))
    path.with_name("tokens.bin.json").write_text(data.draw(changed_documents(header)))
    task = find_task(plan, criterion=None)

    def read() -> None:
        windows = TextWindows(read_bin(path), task, plan, evaluation=False, seed=1)
        windows.get([0, len(windows) - 1], windows.fields)

    held(read)


@fuzzed
@given(content=changed_bytes("Wörter, words and mots. ".encode() * 200))
def test_changed_text_is_windows_or_refused(folder: Path, content: bytes) -> None:
    (folder / "words.txt").write_bytes(content)
    plan = read_plan(folder / "text")
    task = find_task(plan, criterion=None)

    def read() -> None:
        tokens = encode_bytes(read_corpus(str(folder / "words.txt")))
        windows = TextWindows(tokens, task, plan, evaluation=True, seed=1)
        windows.get([0], windows.fields)

    held(read)


@fuzzed
@given(data=st.data())
def test_a_changed_configuration_of_transformers_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    hf = tmp_path_factory.getbasetemp() / "hf"
    hf.mkdir(exist_ok=True)
    (hf / "config.json").write_text(data.draw(changed_documents({"architectures": ["A"], "n": 1})))
    held(lambda: architecture_of(hf.parent))


@fuzzed
@given(words=st.lists(st.sampled_from(SIZES), max_size=12), size=st.integers(0, 2**40))
def test_any_text_is_a_size_or_refused(words: list[str], size: int) -> None:
    found = held(lambda: evaluate_size(" ".join(words), {"batch": size}))
    assert found is None or abs(found) < 2**63


@pytest.mark.parametrize("text", ["-" * 499 + "1", "(" * 250 + "1" + ")" * 249, "1+" * 249 + "1"])
def test_a_deep_size_is_a_size_or_refused(text: str) -> None:
    held(lambda: evaluate_size(text, {}))


def test_odd_values_hold_all_that_json_has() -> None:
    assert {type(value) for value in ODD} >= {type(None), bool, int, float, str, list, dict}
