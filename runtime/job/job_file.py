"""A job file and `table.key=value` of the command line -> a Job description, or the first mistake.

    [model]                              options of asyncpipe-partition for the model
    model = "gpt2"
    [plan]                               its other options
    stages = 4
    [train]                              options of asyncpipe-train
    steps = 1000
    seed = "???"                         to be given: train.seed=3
    [data], [storage], [resources], [container], [distribution], [sagemaker]    `tables.py`

Values may be texts where numbers are meant, as hyperparameters of other systems are. A job file may
be anyone's: the code that it names runs only after a command line has named it, or with --trust.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..config.option_files import TO_BE_GIVEN, check_code, checked, code_of
from ..config.settings import Settings
from ..errors import AsyncPipeError
from ..limits import Limit, ListOf, Number, Whole, flag_of, refusal
from ..options import options_of
from ..plan.trust import TrustError, is_known_code, remember_code
from ..serialization import Origin, parse_json, parse_toml, read_text, shaped
from ..user_code import names_object
from .tables import (
    KEYS,
    PASSED,
    TABLES,
    JobContainer,
    JobData,
    JobDistribution,
    JobInstances,
    JobResources,
    JobSageMaker,
    JobStorage,
    answer_for_train,
    is_secret,
    secret_in,
)

T = TypeVar("T")

_INSTANCES = "resources.instances"
_NOT_OF_JOB = {"output", "graph", "stop_after", "help", "version"}
_PLAIN = (bool, int, float, str, list, dict)


class JobError(AsyncPipeError):
    """A job file, or a job, that cannot be run."""


@dataclass(frozen=True, kw_only=True)
class JobDescription:
    """The content of a job file with the values of the command line in it.

    file: the path of the file.
    overrides: the values of the command line, as they were typed.
    model, plan: options of asyncpipe-partition.
    train: options of asyncpipe-train.
    """

    file: str
    overrides: tuple[str, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    data: JobData = JobData()
    storage: JobStorage = JobStorage()
    resources: JobResources = JobResources()
    instances: JobInstances = JobInstances()
    container: JobContainer = JobContainer()
    distribution: JobDistribution = JobDistribution()
    sagemaker: JobSageMaker = JobSageMaker()

    @property
    def name(self) -> str:
        """The name of the job: that of its file."""
        return Path(self.file).stem

    @property
    def hosts(self) -> int:
        """The number of machines."""
        return self.resources.hosts if self.instances.type is None else self.instances.count


def read_job(path: str | Path, overrides: Sequence[str] = ()) -> JobDescription:
    """The job of a file. Raises JobError, or SettingsError for an option of [train]."""
    path = Path(path)
    if not path.is_file():
        raise JobError(f"{path}: there is no such file.", "docs/job-files.md shows one.")
    tables = _read(path)
    for text in overrides:
        _override(tables, text, "the command line")
    for name, value in _leaves(tables):
        _check_value(path, name, value)
    instances = tables.get("resources", {}).pop("instances", {})
    tables[_INSTANCES] = _table(path, _INSTANCES, instances)
    own = {name: _values(path, name, tables.get(name, {})) for name in TABLES}
    job = JobDescription(
        file=str(path),
        overrides=tuple(overrides),
        model=tables.get("model", {}),
        plan=tables.get("plan", {}),
        train=_train(path, tables.get("train", {})),
        instances=own.pop(_INSTANCES),
        **own,
    )
    _check(job)
    return job


def check_code_of(job: JobDescription, folder: str, *, trust: bool) -> None:
    """Raises TrustError when the file names code that no command line here has named.

    folder: the generated folder of the job.
    """
    if trust:
        return
    typed = {text.partition("=")[0] for text in job.overrides}
    for name, spec in _code_of_model(job):
        if name not in typed and not is_known_code(spec):
            raise TrustError(
                f"{job.file} would run code that no command line here has named: {name} = {spec}.",
                f"Read it. Trust it from then on: --trust, or {name}={spec}",
            )
    of_train = {name.removeprefix("train.") for name in typed if name.startswith("train.")}
    check_code({**job.train, "folder": folder}, of_train, f"[train] of {job.file}")


def remember_code_named_by(job: JobDescription) -> None:
    """Marks the code that a job names as known, if the mark can be written."""
    for _, spec in code_named_by(job):
        remember_code(spec)


def code_named_by(job: JobDescription) -> Iterator[tuple[str, str]]:
    """Each option of a job that names code, with the name."""
    yield from _code_of_model(job)
    yield from code_of(job.train)


def _code_of_model(job: JobDescription) -> Iterator[tuple[str, str]]:
    """Each option of asyncpipe-partition that names code, as a key of the job, with the name."""
    for table, options in (("model", job.model), ("plan", job.plan)):
        for key, value in options.items():
            for text in value if isinstance(value, list) else (value,):
                if isinstance(text, str) and names_object(text):
                    yield f"{table}.{key}", text


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of a TOML file, or of a JSON file of `table.key` and texts, as hyperparameters
    are."""
    origin = Origin(str(path), JobError)
    text = read_text(path, origin)
    if path.suffix != ".json":
        raw = parse_toml(text, origin)
        return {name: _table(path, name, value) for name, value in raw.items()}
    tables: dict[str, dict[str, Any]] = {}
    values = shaped(dict[str, str], parse_json(text, origin), origin)
    for name, value in values.items():
        _override(tables, f"{name}={value}", str(path))
    return tables


def _table(path: Path | str, name: str, value: Any) -> dict[str, Any]:
    """A copy of a table. Raises JobError for an unknown one, and for another value."""
    if name not in (*PASSED, *TABLES):
        known = [table for table in (*PASSED, *TABLES) if "." not in table]
        tables = f"Tables: {', '.join(known)}."
        kind = "table" if isinstance(value, dict) else "key"
        raise JobError(
            f"{path}: {name} is not a {kind} of a job file.", KEYS.meant(name, known, tables)
        )
    if not isinstance(value, dict):
        raise JobError(f"{path}: {name} is {value!r}, not a table.", f"[{name}]")
    return dict(value)


def _override(tables: dict[str, dict[str, Any]], text: str, place: str) -> None:
    """Puts `table.key=value` into the tables."""
    name, is_assigned, value = text.partition("=")
    table, *keys = name.split(".")
    if not is_assigned or not keys or not all(keys):
        raise JobError(f"{text} is not TABLE.KEY=VALUE.", "For example train.lr=1e-3")
    values = tables.setdefault(table, _table(place, table, {}))
    for key in keys[:-1]:
        inner = values.get(key, {})
        values[key] = dict(inner) if isinstance(inner, dict) else {}
        values = values[key]
    values[keys[-1]] = value_of(value)


def value_of(text: str) -> Any:
    """A value of the command line: as in TOML, or else a text.

    >>> [value_of(text) for text in ("1e-3", "[1, 2]", "s3://bucket/x", "true", "gpt2")]
    [0.001, [1, 2], 's3://bucket/x', True, 'gpt2']
    """
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, _PLAIN) else text


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each single value of the tables, with its key."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, name)
    else:
        yield name, value


def _check_value(path: Path, name: str, value: Any) -> None:
    """Raises JobError for a value that is still to be given, and for a credential. The latter is
    not shown."""
    if value == TO_BE_GIVEN:
        raise JobError(f"{name} is {TO_BE_GIVEN} in {path}: it is required.", f"{name}=VALUE")
    if isinstance(value, str) and name != "container.env" and is_secret(value):
        raise JobError(
            f"{path}: {name} has a value that looks like a credential.",
            'Name an environment variable of the machine with it: [container] env = ["NAME"].',
        )


def _values(path: Path, name: str, table: Mapping[str, Any]) -> Any:
    """The values of a table with keys of its own."""
    kind = TABLES[name]
    declared = options_of(kind)
    values = {}
    for key, value in table.items():
        if key not in declared:
            keys = f"Keys: {', '.join(declared)}."
            raise JobError(
                f"{path}: [{name}] has no {key}.", KEYS.meant(key, tuple(declared), keys)
            )
        limit = declared[key].limit
        value = _value(limit, value)
        if fault := refusal(limit, key, value, f"{path}: [{name}]"):
            raise JobError(*fault)
        values[key] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _train(path: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    """The options of asyncpipe-train, each checked."""
    declared, place = options_of(Settings), f"{path}: [train]"
    options = {}
    for key, value in table.items():
        if answer := answer_for_train(key):
            raise JobError(f"{place} {key} is not an option of a job.", answer)
        if key in declared:
            value = _value(declared[key].limit, value)
        options[key] = checked(key, value, place)
    return options


def _value(limit: Limit, value: Any) -> Any:
    """A value, also where a number is written as a text."""
    if isinstance(limit, ListOf):
        if isinstance(value, str):
            is_of_numbers = isinstance(limit.item, Whole | Number)
            return limit.read(value) if is_of_numbers else [value]
        return [_value(limit.item, item) for item in value] if isinstance(value, list) else value
    return limit.read(value) if isinstance(value, str) else value


def _check(job: JobDescription) -> None:
    """Raises JobError for values that contradict each other, and for a secret."""
    own, train = job.distribution, job.train
    if not isinstance(job.model.get("model"), str):
        raise JobError(f"{job.file}: [model] names no model.", 'model = "gpt2"')
    for text in job.container.env:
        if name := secret_in(text):
            raise JobError(
                f"{job.file}: [container] env gives a value to {name}, which looks like a secret.",
                f'env = ["{name}"] passes the variable by its name.',
            )
    for key, number, name in (
        ("replicas", own.replicas, "replicas"),
        ("tensor", own.tensor, "tensor_parallel"),
    ):
        if number is not None and train.get(name, number) != number:
            raise JobError(
                f"{job.file}: [train] {name} is {train[name]}, but [distribution] {key} is "
                f"{number}.",
                "Leave one out.",
            )
    if job.instances.type is None and job.instances.count != 1:
        raise JobError(f"{job.file}: [resources.instances] has a count but no type.", "type = ..")
    if job.instances.type is not None and job.resources.hosts not in (1, job.instances.count):
        raise JobError(
            f"{job.file}: [resources] hosts is {job.resources.hosts}, but there are "
            f"{job.instances.count} instances.",
            "Leave hosts out.",
        )
    for key in _NOT_OF_JOB & {*job.model, *job.plan}:
        raise JobError(
            f"{job.file}: {key} is not an option of a job's plan.",
            "The plan is written to the folder of the job: --folder.",
        )
    if job.data.uri is None and job.data.mode == "pipe":
        raise JobError(f'{job.file}: [data] mode = "pipe" needs a uri.', 'uri = "s3://bucket/data"')


def flag_words(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line.

    >>> flag_words({"stages": 2, "explain": True, "leaf": ["A", "B"], "model_arg": {"n_layer": 4}})
    ['--stages', '2', '--explain', '--leaf', 'A', '--leaf', 'B', '--model-arg', 'n_layer=4']
    """
    words: list[str] = []
    for name, value in options.items():
        flag = flag_of(name)
        if isinstance(value, dict):
            value = [f"{key}={_word(inner)}" for key, inner in value.items()]
        for item in value if isinstance(value, list) else [value]:
            if item is True:
                words.append(flag)
            elif item is not False:
                word = _word(item)
                words += [f"{flag}={word}"] if word.startswith("-") else [flag, word]
    return words


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
