"""A job for SageMaker: a program that makes an estimator of version 2 of its Python interface.

The values of the job file become hyperparameters, texts that the container reads again as a job
file. SageMaker itself copies data, checkpoints and results between S3 and folders under /opt/ml.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ..config.execution_options import seconds_of
from ..options import options_of
from .job_file import JobDescription, JobError, value_of
from .steps import JobFolder
from .written import (
    WrittenJob,
    check_container_code,
    check_kept,
    label_of,
    passed_by_name,
    set_variables,
    urls_of,
)

PROGRAM = "sagemaker_job.py"
_INPUT = "/opt/ml/input"
_FOLDER = "/opt/ml/checkpoints"
"""The folder of a job, which SageMaker copies to S3 and back again."""
_LONGEST = 2500
"""The most characters of a hyperparameter."""

METRICS = {
    "train:loss": r"^step .* loss ([0-9.]+)",
    "train:grad_norm": r"^step .* grad ([0-9.]+)",
    "eval:loss": r"^eval at step .* loss ([0-9.]+)",
}
"""The metrics of a run -> the regular expressions that find them in its lines."""


def for_sagemaker(folder: JobFolder, *, trust: bool) -> WrittenJob:
    """The program, and the command that runs it. Raises JobError for a job that cannot run
    there."""
    job = folder.job
    _check(job, trust)
    words = ["asyncpipe-job", "run", f"{_INPUT}/config/hyperparameters.json"]
    words += ["--folder", _folder(job), *(["--trust"] if trust else [])]
    arguments = {"role": None, **_arguments(job), "container_entry_point": words}
    lines = [f"    {name}={_python(value)}," for name, value in arguments.items() if value]
    role = repr(job.sagemaker.role) if job.sagemaker.role else 'os.environ["SAGEMAKER_ROLE"]'
    inputs = "" if job.data.uri is None else repr({"training": job.data.uri})
    text = "\n".join(
        [
            f'"""Starts {job.name} as a training job; needs pip install "sagemaker<3"."""',
            "",
            "import os",
            "",
            "from sagemaker.estimator import Estimator",
            "",
            "estimator = Estimator(",
            f"    role={role},",
            *lines,
            f"    environment={_environment(job)},",
            ")",
            f"estimator.fit({inputs})",
        ]
    )
    path = shlex.quote(str(folder.path / PROGRAM))
    return WrittenJob({PROGRAM: f"{text}\n"}, (f"python {path}",))


def _check(job: JobDescription, trust: bool) -> None:
    check_kept(job)
    check_container_code(job, trust=trust)
    if job.instances.type is None:
        raise JobError(
            f"{job.file}: [resources] names no instances.",
            'instances = { type = "ml.g5.12xlarge", count = 1 }',
        )
    if job.hosts > 1:
        raise JobError(
            f"{job.file}: there are {job.hosts} instances, but instances share no folder, and the "
            "ranks of a run need one.",
            "Use one instance with more GPUs, or --on slurm or kubernetes.",
        )
    for key, url in urls_of(job).items():
        if not url.startswith("s3://"):
            raise JobError(f"{job.file}: {key} is {url}, not in S3.", "Use an s3:// URL.")


def _arguments(job: JobDescription) -> dict[str, Any]:
    """The arguments of the estimator by name; those without a value are left to its defaults."""
    own = job.sagemaker
    limit = job.resources.max_run
    return {
        "image_uri": job.container.image,
        "instance_count": job.instances.count,
        "instance_type": job.instances.type,
        "max_run": limit and (seconds_of(limit) or 0) + 600,
        # FastFile reads objects while they are used, as pipe does.
        "input_mode": "FastFile" if job.data.mode == "pipe" else "File",
        "output_path": job.storage.output,
        "checkpoint_s3_uri": job.storage.checkpoints_uri,
        "checkpoint_local_path": job.storage.checkpoints_uri and _folder(job),
        "enable_network_isolation": not job.container.network,
        "base_job_name": label_of(job),
        "hyperparameters": hyperparameters(job),
        "metric_definitions": [{"Name": name, "Regex": text} for name, text in METRICS.items()],
        "volume_size": own.volume_size,
        "volume_kms_key": own.volume_kms_key,
        "code_location": own.code_location,
    }


def hyperparameters(job: JobDescription) -> dict[str, str]:
    """The values of a job as `table.key` and texts, for a container of SageMaker."""
    tables: dict[str, Mapping[str, Any]] = {
        "model": job.model,
        "plan": job.plan,
        "train": job.train,
        "distribution": _given(job.distribution),
        "resources.instances": _given(job.instances),
    }
    values = dict(_flat(tables))
    if job.data.uri is not None:
        values |= {"data.uri": f"file://{_INPUT}/data/training", "data.mode": job.data.mode}
    values["storage.output"] = "file:///opt/ml/model"
    if job.resources.max_run is not None:
        values["resources.max_run"] = job.resources.max_run
    for name, text in values.items():
        if len(text) > _LONGEST:
            raise JobError(f"{job.file}: {name} has more than {_LONGEST} characters.")
    return values


def _folder(job: JobDescription) -> str:
    return job.storage.checkpoints or _FOLDER


def _given(table: Any) -> dict[str, Any]:
    defaults = {name: option.default for name, option in options_of(type(table)).items()}
    return {name: value for name, value in asdict(table).items() if value != defaults[name]}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            is_same = isinstance(value, str) and value_of(value) == value
            plain = list(value) if isinstance(value, tuple) else value
            yield f"{prefix}{key}", value if is_same else json.dumps(plain)


def _environment(job: JobDescription) -> str:
    names = [f'"{name}": os.environ["{name}"]' for name in passed_by_name(job)]
    pairs = [f"{name!r}: {value!r}" for name, value in set_variables(job).items()]
    return "{" + ", ".join([*names, *pairs]) + "}"


def _python(value: Any) -> str:
    """A value as Python, in lines if it has several parts."""
    if isinstance(value, dict) and value:
        inner = "".join(f"        {key!r}: {item!r},\n" for key, item in value.items())
        return "{\n" + inner + "    }"
    if isinstance(value, list) and value:
        return "[\n" + "".join(f"        {item!r},\n" for item in value) + "    ]"
    return repr(value)
