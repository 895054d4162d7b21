"""A job for another system: files to look at, and the commands that start it there."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..plan.trust import STATE_VARIABLE, TrustError
from .job_file import JobDescription, JobError, code_named_by
from .steps import JobFolder, local_path

WORK = "/work"
"""The working folder in a container."""

STOP_S = 120
"""Seconds that a job may take to write a checkpoint after SIGTERM."""


@dataclass(frozen=True)
class WrittenJob:
    """A job for another system.

    files: the texts to write, by name.
    commands: what to type, one command a line.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Writes the files into the folder of the job."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")


def words_in_container(folder: JobFolder, *more: str, trust: bool) -> list[str]:
    """The command of the job in a container, where its file and its folder are in WORK."""
    name = label_of(folder.job)
    words = ["asyncpipe-job", "run", f"{name}.toml", *folder.job.overrides]
    return [*words, "--folder", f"jobs/{name}", *more, *(["--trust"] if trust else [])]


def urls_of(job: JobDescription) -> Mapping[str, str]:
    """The URLs of a job by their keys."""
    storage = job.storage
    urls = {
        "[data] uri": job.data.uri,
        "[storage] checkpoints_uri": storage.checkpoints_uri,
        "[storage] output": storage.output,
    }
    return {key: url for key, url in urls.items() if url is not None}


def check_reachable(job: JobDescription) -> None:
    """Raises JobError if a job without a network needs one."""
    if job.container.network:
        return
    for key, url in urls_of(job).items():
        if local_path(url) is None:
            raise JobError(
                f"{job.file}: [container] network is false, but {key} is {url}.",
                "Use file:// URLs, or network = true.",
            )


def check_container_code(job: JobDescription, *, trust: bool) -> None:
    """Raises TrustError if the job names code, because a new machine has no record of trusted
    code."""
    named = [spec for _, spec in code_named_by(job)]
    if named and not trust:
        raise TrustError(
            f"{job.file} would run code that its new machine cannot recognize: {', '.join(named)}.",
            "Read it, and give --trust.",
        )


def check_kept(job: JobDescription) -> None:
    """Raises JobError if the results of a job would be lost with its machine."""
    if job.storage.output is None:
        raise JobError(
            f"{job.file}: [storage] names no output, and the machine of the job is lost at its "
            "end.",
            'output = "s3://bucket/job/output"',
        )


def passed_by_name(job: JobDescription) -> list[str]:
    """The variables whose values stay on the machine that starts the job."""
    return [text for text in job.container.env if "=" not in text]


def set_variables(job: JobDescription, state: str | None = None) -> dict[str, str]:
    """The variables that the job file sets, and with `state` the folder that keeps what is trusted:
    a container of the job continues with the plan that another one made."""
    pairs = (text.partition("=") for text in job.container.env if "=" in text)
    own = {name: value for name, _, value in pairs}
    return own if state is None else {STATE_VARIABLE: state, **own}


def label_of(job: JobDescription) -> str:
    """The name of a job as a label of DNS.

    >>> label_of(JobDescription(file="My job_1.toml"))
    'my-job-1'
    """
    label = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[:50].strip("-")
    return label or "asyncpipe"


_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_NOT_TEXT = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def to_yaml(value: Any, indent: int = 0) -> str:
    """Dicts, lists, texts and numbers as YAML.

    >>> print(to_yaml({"kind": "Job", "args": ["a b", {"count": 1, "on": "yes"}], "n": {}}), end="")
    kind: Job
    args:
      - "a b"
      - count: 1
        "on": "yes"
    "n": {}
    """
    return "".join(f"{' ' * indent}{line}\n" for line in _yaml_lines(value))


def _yaml_lines(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            if isinstance(inner, dict | list) and inner:
                yield f"{_yaml_text(key)}:"
                yield from (f"  {line}" for line in _yaml_lines(inner))
            elif isinstance(inner, str) and _is_block(inner):
                yield f"{_yaml_text(key)}: |"
                yield from (f"  {line}".rstrip() for line in inner.splitlines())
            else:
                yield f"{_yaml_text(key)}: {_yaml_text(inner)}"
    elif isinstance(value, list) and value:
        for item in value:
            first, *others = _yaml_lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in others)
    else:
        yield _yaml_text(value)


def _is_block(text: str) -> bool:
    """True for lines that a literal block of YAML keeps as they are."""
    lines = text.split("\n")
    is_even = len(lines) > 2 and not lines[-1] and lines[-2] != "" and lines[0][:1] not in ("", " ")
    return is_even and all(line.isprintable() and line == line.rstrip() for line in lines)


def _yaml_text(value: Any) -> str:
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value)
    if is_plain and value.lower() not in _NOT_TEXT:
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def quoted(path: str | Path) -> str:
    """A path for the shell, under the current folder if it is relative."""
    return (
        shlex.quote(str(path)) if Path(path).is_absolute() else f'"$PWD"/{shlex.quote(str(path))}'
    )
