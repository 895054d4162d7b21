"""Options as other tools call them: accepted as ours, or answered with ours."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from asyncpipe.commands.options import Reader
from asyncpipe.runtime.config.option_files import checked
from asyncpipe.runtime.config.settings import Settings, SettingsError
from asyncpipe.runtime.experiments.variants import lists_from_texts
from asyncpipe.runtime.known_names import PARTITION, TRAIN, VALUES, KnownNames
from asyncpipe.runtime.limits import Choice
from asyncpipe.runtime.options import options_of
from asyncpipe.tests.support.processes.in_process import command

TABLES = {"train": TRAIN, "partition": PARTITION}


def app_of(name: str) -> App:
    app: App = importlib.import_module(f"asyncpipe.commands.{name}").app
    return app


def arguments(name: str) -> dict[str, Any]:
    """The arguments of a command by their flags."""
    return {
        flag: argument
        for argument in app_of(name).assemble_argument_collection()
        for flag in argument.names
    }


@pytest.mark.parametrize(("name", "table"), TABLES.items())
def test_each_accepted_name_stands_for_an_option_of_ours_and_a_legal_value(
    name: str, table: KnownNames
) -> None:
    own = arguments(name)
    for theirs, ours in table.same.items():
        flag, *values = ours.split()
        assert flag in own, ours
        reader = own[flag].parameter.converter
        assert not values or (isinstance(reader, Reader) and reader.limit.has(values[0])), ours
        assert f"--{theirs}" not in own, f"--{theirs} is an option of asyncpipe-{name} itself"


@pytest.mark.parametrize(("name", "table"), TABLES.items())
def test_each_answer_names_options_that_exist(name: str, table: KnownNames) -> None:
    all_flags = {flag for each in TABLES for flag in arguments(each)}
    for theirs, answer in table.answers.items():
        named = set(re.findall(r"--[a-z][a-z-]+", answer))
        assert named <= all_flags, answer
        assert answer.endswith(".") and theirs not in table.same
        assert f"--{theirs}" not in arguments(name), theirs


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("--learning-rate 1e-3", "--lr 1e-3"),
        ("--learning_rate=1e-3", "--lr 1e-3"),
        ("--bf16", "--precision bfloat16"),
        ("--fp16", "--precision float16"),
        ("--max-steps 7", "--steps 7"),
        ("--grad-accum 4", "--micro-batches 4"),
        ("--gradient-accumulation-steps 4", "--micro-batches 4"),
        ("--seq-len 64", "--seq 64"),
        ("--grad-clip 1", "--clip 1"),
        ("--max-grad-norm 1", "--clip 1"),
        ("--loss mse", "--criterion mse"),
        ("--num-workers 2", "--workers 2"),
        ("--warmup-steps 5", "--warmup 5"),
        ("-- --bf16", "-- --bf16"),
        ("--data file.py:f --quiet", "--data file.py:f --quiet"),
    ],
)
def test_a_name_that_means_the_same_is_accepted(given: str, ours: str) -> None:
    assert TRAIN.in_ours(given.split(), arguments("train").__contains__) == ours.split()


def test_accepted_names_reach_the_run(tmp_path: Path) -> None:
    outcome = command(tmp_path, "train", "nowhere", "--learning-rate", "abc")
    assert outcome.err.startswith("error: --lr abc is not a number from 0 to")
    outcome = command(tmp_path, "partition", "--num-stages", "0", "--model", "mlp")
    assert outcome.err.startswith("error: --stages 0 is not a whole number")
    words = ["--mixed-precision", "bf16", "--device", "GPU", "--optimizer", "AdamW", "--max-steps"]
    outcome = command(tmp_path, "train", "nowhere", *words, "x")
    assert outcome.err.startswith("error: --steps x is not")  # the others are legal
    assert "nowhere does not exist" in command(tmp_path, "train", "nowhere", *words[:-1]).err


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--batch-size", ("--micro-batch-size", "--global-batch-size")),
        ("--lr-scheduler", ("--decay", "--warmup")),
        ("--lr_scheduler_type", ("--decay",)),
        ("--gradient-checkpointing", ("--recompute all",)),
        ("--model", ("asyncpipe-partition --model",)),
        ("--beta1", ("--betas",)),
        ("--shedule", ("Did you mean --schedule?",)),
        ("--micro-batch", ("Did you mean --micro-batches?",)),
    ],
)
def test_a_name_that_means_something_else_is_answered(
    option: str, named: tuple[str, ...], tmp_path: Path
) -> None:
    outcome = command(tmp_path, "train", "nowhere", option, "3")
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: Unknown option: {option}. ")
    assert all(words in outcome.err for words in named), outcome.err


@pytest.mark.parametrize("word", ["dropout", "zoom"])
def test_a_word_that_is_close_to_nothing_gets_no_suggestion(word: str, tmp_path: Path) -> None:
    outcome = command(tmp_path, "train", "nowhere", f"--{word}", "3")
    assert outcome.err.splitlines() == [
        f"error: Unknown option: --{word}.",
        "asyncpipe-train --help",
    ]


def test_a_command_without_the_option_keeps_the_name_as_it_was_given(tmp_path: Path) -> None:
    outcome = command(tmp_path, "compare", "nowhere", "--save-steps", "3")
    assert outcome.err.startswith("error: Unknown option: --save-steps.\n")
    outcome = command(tmp_path, "compare", "nowhere", "--max-steps", "x")
    assert outcome.err.startswith("error: --steps x is not")


def test_an_option_of_another_subcommand_is_answered_with_its_command(tmp_path: Path) -> None:
    def answer(*words: str) -> str:
        outcome = command(tmp_path, *words)
        assert outcome.code == 2
        return outcome.err.splitlines()[0].removeprefix("error: Unknown option: ")

    owners = "asyncpipe-train predict and asyncpipe-train export"
    assert answer("train", "nowhere", "--force") == f"--force. It is an option of {owners}."
    assert answer("train", "export", "x", "--lr") == "--lr. It is an option of asyncpipe-train."
    assert answer("train", "predict", "x", "--bf16") == "--bf16."
    assert answer("train", "predict", "x", "--forc") == "--forc. Did you mean --force?"


@pytest.mark.parametrize("words", ["job run", "comm bench"])
def test_commands_without_an_action_of_their_own_refuse_unknown_options(
    words: str, tmp_path: Path
) -> None:
    outcome = command(tmp_path, *words.split(), "--zoom")
    assert (outcome.code, outcome.err.splitlines()[0]) == (2, "error: Unknown option: --zoom.")


def test_a_file_and_a_sweep_answer_with_the_name_of_ours() -> None:
    with pytest.raises(SettingsError, match="learning_rate is not .*\nDid you mean lr?"):
        checked("learning_rate", 0.1, "run.toml")
    with pytest.raises(SettingsError, match='bf16 is not .*\nDid you mean precision = "bfloat16"?'):
        checked("bf16", True, "run.toml")
    with pytest.raises(SettingsError, match="warmup_ratio is not .*\nUse --warmup"):
        lists_from_texts(["warmup_ratio=0.1,0.2"])


def test_a_choice_is_read_in_any_case_and_in_the_words_of_others() -> None:
    for name, option in options_of(Settings).items():
        if isinstance(option.limit, Choice):
            for value in option.limit.names:
                assert option.limit.read(value.upper()) == value, name
    precision, device = (options_of(Settings)[name].limit for name in ("precision", "device"))
    assert precision.read("BF16") == precision.read("bf16-mixed") == "bfloat16"
    assert device.read("gpu") == "cuda"
    assert device.read("fp16") == "fp16"
    with pytest.raises(SettingsError, match="Did you mean --optimizer adamw?"):
        Settings(folder="x", optimizer="AdamW")
    with pytest.raises(SettingsError, match="Did you mean --device cuda?"):
        Settings(folder="x", device="gpu")


def test_each_value_of_others_is_a_choice_of_some_option() -> None:
    limits = [option.limit for option in options_of(Settings).values()]
    choices = {name for limit in limits if isinstance(limit, Choice) for name in limit.names}
    assert set(VALUES.values()) <= choices
