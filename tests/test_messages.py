"""Messages about mistakes of a user: one sentence with both values, and the cure.

The real command in this process prints them, unless it takes other processes. The tests of E14
(memory), E15 (a loss that is not a number) and E16 (a rank that stopped) are with those of running
ranks, the first half of E20 with those of checkpoints. `ELSEWHERE` lists the tests elsewhere.
"""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncpipe.runtime.distributed.rendezvous import free_port
from asyncpipe.tests.support.models.hand_folders import write_mlp, write_text
from asyncpipe.tests.support.processes.in_process import command, error_of
from asyncpipe.tests.support.processes.quick_python import bin_folder

ROOT = Path(__file__).parent.parent
ELSEWHERE = {
    "E1": ("test_cli", "test_e1_an_unknown_model_suggests_the_nearest"),
    "E2": ("partitioner/models/test_models", "test_e2_a_missing_extra_is_named_with_its_command"),
    "E3": (
        "partitioner/capture/test_diagnostics",
        "test_a_line_that_depends_on_values_is_quoted_with_the_ways_out",
    ),
    "E4": ("test_cli", "test_e4_more_stages_than_places_to_cut"),
    "E6": ("test_cli", "test_e6_a_plan_of_another_model_is_not_overwritten_without_force"),
    "E7": ("test_cli", "test_e7_a_folder_with_foreign_files_is_left_alone"),
    "E8": ("test_cli", "test_torchrun_joins_and_a_wrong_number_of_ranks_is_told"),
    "E14": (
        "runtime/test_failures",
        "test_a_rank_without_memory_says_how_much_it_wanted_and_for_what",
    ),
    "E15": (
        "runtime/test_failures",
        "test_a_loss_that_is_no_number_ends_all_and_is_not_tried_again",
    ),
    "E16": ("runtime/test_failures", "test_a_rank_that_is_stopped_is_named_and_ended"),
    "E18": ("runtime/transports/test_mpi", "test_an_mpi4py_without_a_library_is_said"),
    "E20": ("test_cli", "test_a_misspelled_option_names_the_right_one"),
    "E20, a checkpoint": (
        "runtime/checkpoint/test_checkpoints",
        "test_a_checkpoint_of_another_model_is_refused",
    ),
    "Ctrl-C": ("runtime/launch/test_training_launch", "test_an_interrupted_run_ends_with_one_line"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("messages")
    write_mlp(made / "mlp")
    write_mlp(made / "mlp4", stages=4)
    write_text(made / "text")
    return made


@pytest.mark.parametrize(("module", "name"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_is_told_elsewhere_is_tested_there(module: str, name: str) -> None:
    tree = ast.parse((ROOT / "tests" / f"{module}.py").read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_e5_what_does_not_fit_is_told_with_what_would(folder: Path) -> None:
    model = ["--model", "mlp", "--meta", "--stages", "2", "--memory-limit", "100KB"]
    printed = error_of(folder, "partition", *model)
    assert re.search(r"no 2-stage plan fits .* per device: the best needs .* on stage \d", printed)


def test_e9_more_ranks_than_gpus_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert error_of(folder, "train", "mlp", "--device", "cuda") == (
        "error: 2 ranks on this machine, but 1 GPU visible (CUDA_VISIBLE_DEVICES=0).\n"
        "Share them: --ranks-per-gpu 2 (slower), or --device cpu.\n"
    )


def test_e10_a_batch_that_does_not_divide_names_its_neighbours(folder: Path) -> None:
    batch = ["--global-batch-size", "100", "--micro-batch-size", "8", "--micro-batches", "3"]
    printed = error_of(folder, "train", "text", *batch)
    assert "global batch 100 = micro-batches × size × replicas has no answer" in printed
    assert "Nearest: --global-batch-size" in printed


def test_e11_few_micro_batches_are_warned_of(folder: Path) -> None:
    printed = command(folder, "train", "mlp4", "--micro-batches", "2", "--dry-run").out
    assert (
        "with 2 micro-batches, 1f1b leaves 4 ranks idle 60% of the time. Use --micro-batches 16"
    ) in printed


def test_e12_a_sequence_longer_than_the_plan_names_the_command(folder: Path) -> None:
    printed = error_of(folder, "train", "text", "--seq", "64")
    assert printed == (
        "error: --seq 64, but the plan was made for 32 tokens.\n"
        "asyncpipe-partition --model tiny_text --stages 2 --seq 64\n"
    )


def test_e13_tokens_of_another_tokenizer_are_named(folder: Path) -> None:
    np.arange(40_000, 42_000, dtype="<u2").tofile(folder / "data.bin")
    (folder / "data.bin.json").write_text('{"dtype": "uint16", "tokenizer": "llama3"}')
    printed = error_of(folder, "train", "text", "--data", "data.bin", "--schedule", "single")
    assert printed == (
        "error: token id 41999 in data.bin, but the model has 256 rows in wte. The data was made "
        "with another tokenizer (its header says: llama3).\n"
        "Tokenize it with the model's own, or partition a model with more rows.\n"
    )


def rank(folder: Path, number: int, *, port: int, head: str = "127.0.0.1") -> dict[str, str]:
    """The environment of one of two ranks, as set by a launcher."""
    return os.environ | {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": head,
        "MASTER_PORT": str(port),
    }


def joining(folder: Path, number: int, **where: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [bin_folder() / "asyncpipe-train", "mlp", "--timeout-s", "3", "--output", f"run{number}"],
        cwd=folder,
        env=rank(folder, number, **where),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_e17_a_port_that_another_program_has_is_named(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        printed = joining(folder, 0, port=port)
    assert (printed.returncode, printed.stderr) == (
        1,
        f"error: rank 0 cannot open 127.0.0.1:{port}: another program has this port.\n"
        f"Give --master-port {port + 1}, the same on all hosts.\n",
    )


def test_e17_a_head_that_nobody_reaches_is_told_with_each_address_tried(folder: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        port = nobody.getsockname()[1]
        printed = joining(folder, 1, port=port)
    here = socket.gethostname()
    assert printed.returncode == 1
    assert (
        f"error: rank 1 on {here} cannot reach rank 0 at 127.0.0.1:{port} in 3 s (127.0.0.1: "
        "connection refused"
    ) in printed.stderr
    assert "--master-addr with an address of rank 0's host" in printed.stderr


def test_e19_what_mpirun_says_stands_in_the_documents_with_its_cure() -> None:
    text = (ROOT / "docs" / "transports.md").read_text()
    assert re.search(r"There are not enough slots available.*mpirun --oversubscribe", text)
    assert re.search(r"run as root.*mpirun --allow-run-as-root", text)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return monkeypatch


def test_a_hub_that_is_not_reached_is_told_apart_from_a_name_that_is_not_there(
    folder: Path, no_hub: pytest.MonkeyPatch
) -> None:
    no_hub.setenv("HF_HUB_OFFLINE", "1")
    printed = error_of(folder, "partition", "--model", "someone/model", "--stages", "2")
    assert printed.startswith(
        "error: cannot download someone/model: no network (HF_HUB_OFFLINE set).\n"
        "Planning needs no weights: use --model FOLDER with its config.json"
    )


def test_a_gated_model_is_told_with_where_to_ask(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")

    class GatedRepoError(OSError):
        pass

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("You are trying to access a gated repo.") from GatedRepoError()

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    printed = error_of(folder, "partition", "--model", "someone/model", "--stages", "2")
    assert "cannot download someone/model: it is gated" in printed
    assert "https://huggingface.co/someone/model" in printed


def test_a_model_with_code_of_its_own_is_not_run(folder: Path) -> None:
    pytest.importorskip("transformers")
    own = folder / "own"
    own.mkdir()
    (own / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "code.Configuration"}}'
    )
    (own / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    printed = error_of(folder, "partition", "--model", "./own", "--stages", "2")
    assert printed.startswith(
        "error: ./own needs code from the model repository (trust_remote_code), which is not run.\n"
    )
    assert not (folder / "ran").exists()


def test_hosts_with_other_versions_are_told_when_they_meet(folder: Path) -> None:
    """Two ranks, the second of which has another asyncpipe: on either the odd one is named."""
    port = free_port()
    program = folder / "newer.py"
    program.write_text(
        "import sys\n"
        "import asyncpipe.runtime.distributed.cpu_affinity as module\n"
        "from asyncpipe import cli\n"
        "module.__version__ = '0.9'\n"
        "sys.argv = ['asyncpipe-train', 'mlp', '--timeout-s', '20']\n"
        "cli.train()\n"
    )
    commands = (
        [bin_folder() / "asyncpipe-train", "mlp", "--timeout-s", "20"],
        [bin_folder() / "python", program],
    )
    started = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=rank(folder, number, port=port),
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, command in enumerate(commands)
    ]
    here = socket.gethostname()
    for process in started:
        _, printed = process.communicate(timeout=60)
        assert process.returncode == 1
        assert printed.startswith(
            f"error: rank 1 on {here} has asyncpipe 0.9, rank 0 on {here} has 0.1.0.\n"
        ), printed
        assert "use one folder and one environment on all hosts" in printed
