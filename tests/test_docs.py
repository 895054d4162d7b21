"""Every command and every Python block shown in the documents runs.

Commands are the lines of `sh` blocks. They run in order, in one folder per document, with the
examples next to them. Only the numbers of steps, epochs and evaluated batches and the sizes of gpt2
and of residual MLPs are made small, a stand-in of a few kilobytes replaces pip's downloads, and the
processes are forks with the imports done. A command that ends in `# exit code 1` fails, and the
document shows its message. A partition that several documents begin with runs in one of them.
"""

import contextlib
import doctest
import importlib
import io
import os
import pkgutil
import re
import shlex
import signal
import subprocess
import urllib.request
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import asyncpipe
from asyncpipe.tests.support.models.copies import made_once
from asyncpipe.tests.support.models.finetune_archives import write_stand_in
from asyncpipe.tests.support.processes.in_process import command, error_of
from asyncpipe.tests.support.processes.quick_python import AS_NOTEBOOK, bin_folder

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL_GPT2 = ("n_layer=2", "n_embd=64", "n_head=4", "vocab_size=512")
SETUP = {"make", "git", "cd", "pip", "less"}
SHELL = {"sed", "rm"}


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(), re.DOTALL)


def lines_of_shell(document: Path) -> list[str]:
    text = "\n".join(blocks(document, "sh")).replace("\\\n", " ")
    return [line for line in text.splitlines() if shlex.split(line, comments=True)]


def commands(document: Path) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in lines_of_shell(document)]


def shortened(command: list[str]) -> list[str]:
    """The command with two steps of training, two batches of evaluation, and small models."""
    text = re.sub(r"--steps \d+", "--steps 2", shlex.join(command))
    text = re.sub(r"--epochs \d+", "--epochs 1", text)
    text = re.sub(r"\bwidth=\d+", "width=64", text)
    for size in SMALL_GPT2:
        text = re.sub(rf"\b{size.partition('=')[0]}=\d+", size, text)
    if "--model gpt2" in text:
        for size in ("n_layer=1", *SMALL_GPT2[1:]):
            text += "" if size.partition("=")[0] in text else f" --model-arg {size}"
    if "vit_dataloader.py" in text:
        text += " --depth 2 --width 16"
    if "asyncpipe-train" in command and not {"report", "predict", "export"} & set(command):
        text += "" if {"--steps", "--samples", "--epochs"} & set(command) else " --steps 2"
        text += "" if "--eval-batches" in command else " --eval-batches 2"
    return shlex.split(text)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_shown_runs(document: Path, tmp_path: Path) -> None:
    for folder in ("examples", "benchmarks"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    if ["pip", "download"] in [command[:2] for command in commands(document)]:
        write_stand_in(tmp_path)
    shown = [
        (line, command)
        for line, command in zip(lines_of_shell(document), commands(document), strict=True)
        if command[0] not in SETUP
    ]
    for number, (line, words) in enumerate(shown):
        run = partial(run_shown, document, line, words, tmp_path)
        begins = number == 0 and words[0] == "asyncpipe-partition" and "exit code" not in line
        if begins and not {"--stop-after", "--output"} & set(words):
            made_once(shlex.join(sorted(words)), tmp_path / "generated_models", run)
        else:
            run()


def run_shown(document: Path, line: str, command: list[str], folder: Path) -> None:
    scripts = bin_folder()
    is_ours = command[0] not in SHELL
    assert not is_ours or (scripts / command[0]).exists(), f"{command[0]} is not a command"
    name, *arguments = shortened(command)
    if name == "python":
        arguments = ["-c", AS_NOTEBOOK, *arguments]
    process = subprocess.Popen(
        [scripts / name if is_ours else name, *arguments],
        cwd=folder,
        env=os.environ | {"PATH": f"{scripts}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if name == "asyncpipe-view":
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        with urllib.request.urlopen(address, timeout=60) as answer:
            assert b"<html" in answer.read()
        process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=300)
    result = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
    expected = int(line.rpartition("# exit code ")[2]) if "# exit code " in line else 0
    transcript = f"{shlex.join(command)}\n{result.stdout}\n{result.stderr}"
    assert result.returncode == expected, transcript
    if expected:
        assert f"```text\n{result.stderr}```" in document.read_text(), transcript


def test_every_make_target_shown_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {
        command[1]
        for document in DOCUMENTS
        for command in commands(document)
        if command[0] == "make"
    }
    assert {"quickstart", "test"} <= shown <= targets


EXAMPLE = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_python_block_shown_runs_and_prints_what_is_shown(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    names = {"torch": torch, "model": model, "x": torch.randn(6, 8)}

    def run(match: re.Match[str]) -> str:
        code, shown = match.groups()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, document.name, "exec"), names)
        if shown is None:
            return match[0]
        return f"```python\n{code}```\n\n```text\n{printed.getvalue().rstrip()}\n```"

    text = document.read_text()
    made = EXAMPLE.sub(run, text)
    if os.environ.get("ASYNCPIPE_UPDATE_GOLDEN"):
        document.write_text(made)
    # Another version of transformers has its lines elsewhere.
    lines = re.compile(r"(?<=modeling_gpt2\.py:)\d+")
    assert lines.sub("", made) == lines.sub("", text)


EXCERPT = re.compile(r"<!-- (\S+) -->\n```text\n(.*?)```", re.DOTALL)


def test_every_excerpt_of_a_file_stands_in_it() -> None:
    found = [
        (document, *match.groups())
        for document in DOCUMENTS
        for match in EXCERPT.finditer(document.read_text())
    ]
    assert len(found) >= 5
    for document, file, excerpt in found:
        text, lines = (ROOT / file).read_text(), excerpt.splitlines()
        rows = all(line.startswith("|") for line in lines)  # A table may leave some out.
        is_there = set(lines) <= set(text.splitlines()) if rows else excerpt in text
        assert is_there, f"{document.name} shows of {file}: {excerpt}"


def test_every_link_to_a_file_leads_somewhere() -> None:
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name} links to {link}"


FOLDERS = "partitioner|runtime|commands|templates|tests|benchmarks|docs|examples"


def test_every_file_that_a_document_names_exists() -> None:
    for document in DOCUMENTS:
        for name in re.findall(rf"`((?:{FOLDERS})/[\w/.-]+\.\w+)`", document.read_text()):
            assert (ROOT / name).exists(), f"{document.name} names {name}"


PICTURES = sorted((ROOT / "docs" / "images").glob("*.svg"))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_every_picture_is_small_and_stands_alone(picture: Path) -> None:
    text = picture.read_text()
    ElementTree.fromstring(text)
    assert len(text) < 40_000
    assert "<script" not in text
    assert "href" not in text
    assert any(f"images/{picture.name}" in document.read_text() for document in DOCUMENTS)


def test_the_picture_of_the_readme_is_what_its_command_draws(tmp_path: Path) -> None:
    assert (ROOT / "README.md").read_text().splitlines()[2].endswith("(docs/images/gpt2_4p.svg)")
    made = tmp_path / "made.svg"
    folder = ROOT / "docs" / "images" / "gpt2_4p"
    assert command(tmp_path, "inspect", str(folder), "--svg", str(made)).code == 0
    assert made.read_text() == (folder.parent / "gpt2_4p.svg").read_text()
    refused = error_of(tmp_path, "inspect", str(folder), "--svg", "no/made.svg")
    assert "no/made.svg cannot be written" in refused and "Give --svg another file." in refused


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 250


def has_examples(name: str) -> bool:
    path = ROOT.joinpath(*name.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ">>> " in file.read_text()


MODULES = [
    module.name
    for module in pkgutil.walk_packages(asyncpipe.__path__, "asyncpipe.")
    if module.name.split(".")[1] in {"partitioner", "runtime"} and has_examples(module.name)
]


@pytest.mark.parametrize("name", MODULES)
def test_every_docstring_example_is_true(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted and not found.failed
