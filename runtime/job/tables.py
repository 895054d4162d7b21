"""The tables of a job file, each with its keys, and the names that other tools have for them.

The tables [model], [plan] and [train] have the options of asyncpipe-partition and asyncpipe-train,
which are declared there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from ..config.execution_options import ExecutionOptions, seconds_of
from ..config.learning_options import LearningOptions
from ..known_names import KnownNames
from ..limits import Choice, Flag, ListOf, Text, Whole, form, path
from ..options import option, options_of

_key = partial(option, scope="call and job")

_WITHOUT_PASSWORD = r"[a-z0-9+]+://(?![^/]*@)\S+"
"""A URL without a user and a password, which would be written into files and shown."""


def _url(example: str) -> Text:
    return Text("a URL without credentials", example, form(_WITHOUT_PASSWORD))


@dataclass(frozen=True, kw_only=True)
class JobData:
    """[data]: the data of the run, if they are at a URL."""

    uri: str | None = _key(
        None, _url("s3://bucket/corpus"), "File or folder with the data, at any URL of fsspec."
    )
    mode: str = _key(
        "file",
        Choice(("file", "pipe")),
        "file copies the data before the run starts, except those of a file:// URL; pipe reads "
        "them during training.",
    )


@dataclass(frozen=True, kw_only=True)
class JobStorage:
    """[storage]: the places of checkpoints and results."""

    checkpoints: str | None = _key(
        None, path("/opt/ml/checkpoints"), "Folder of the run on the machine. [default: JOB/run]"
    )
    checkpoints_uri: str | None = _key(
        None,
        _url("s3://bucket/job/checkpoints"),
        "URL to which checkpoints are copied, and from which a new machine continues.",
    )
    output: str | None = _key(
        None,
        _url("s3://bucket/job/output"),
        "URL to which weights, metrics, report and plan are copied at the end.",
    )


@dataclass(frozen=True, kw_only=True)
class JobResources:
    """[resources]: the machines of the job."""

    hosts: int = _key(1, Whole(1, 2**16, 2), "Number of hosts.")
    gpus: int = _key(0, Whole(0, 2**10, 8), "GPUs of a host, for containers that train on GPUs.")
    max_run: str | None = _key(
        None,
        Text("a time of days, hours, minutes and seconds", "3h50m", seconds_of),
        "Longest duration of the job, such as 3h50m; it ends with a checkpoint and exit code 143.",
    )


@dataclass(frozen=True, kw_only=True)
class JobInstances:
    """[resources.instances]: machines of a cloud, in place of `hosts` and `gpus`."""

    type: str | None = _key(
        None,
        Text("the name of an instance type", "ml.g5.12xlarge", form(r"[a-z0-9.-]+")),
        "Instance type. If its GPUs are known, the plan is made for them, unless [plan] names "
        "devices or [distribution] a pipeline.",
    )
    count: int = _key(1, Whole(1, 2**16, 2), "Number of instances.")


_PACKAGE = r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._-]+\])?([<>=!~]=?[A-Za-z0-9.*+!,<>=~]+)?"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*(=.*)?"
_IMAGE = Text("the name of an image", "asyncpipe:1", form(r"[a-zA-Z0-9][\w.:/@-]*"))


@dataclass(frozen=True, kw_only=True)
class JobContainer:
    """[container]: the image that the job runs in on other systems."""

    image: str = _key("asyncpipe", _IMAGE, "Image to run, which has asyncpipe.")
    base: str | None = _key(
        None,
        _IMAGE,
        "Image from which `image` is built, with `source` and `dependencies`. [default: asyncpipe, "
        "if there are any of these]",
    )
    source: str | None = _key(
        None, path("src"), "Folder with your code, copied to the working folder of the image."
    )
    dependencies: tuple[str, ...] = _key(
        (),
        ListOf(Text("a requirement of pip", "datasets>=4", form(_PACKAGE))),
        "Packages that pip installs into the image.",
    )
    env: tuple[str, ...] = _key(
        (),
        ListOf(Text("NAME or NAME=VALUE", "AWS_PROFILE", form(_VARIABLE))),
        "Environment variables: a NAME passes the value of the machine that starts the job, which "
        "is never written; NAME=VALUE sets one that is not secret.",
    )
    network: bool = _key(True, Flag(), "Access to a network. [default: true]")


@dataclass(frozen=True, kw_only=True)
class JobDistribution:
    """[distribution]: the processes."""

    pipeline: int | None = _key(
        None,
        Whole(1, 2**12, 4),
        "Processes that share the stages: --stages, or --ranks if [plan] has stages.",
    )
    replicas: int | None = _key(None, Whole(1, 2**16, 2), "Copies of the pipeline: --replicas.")
    tensor: int | None = _key(
        None,
        Whole(1, 2**12, 2),
        "Processes that share out the layers of each stage: --tensor-parallel.",
    )
    launcher: str | None = _key(
        None,
        Choice(("torchrun", "mpi", "srun")),
        "Program that starts the processes. [default: asyncpipe-train]",
    )

    @property
    def processes(self) -> int | None:
        """The number of processes, as far as it is known."""
        if self.pipeline is None:
            return None
        return self.pipeline * (self.replicas or 1) * (self.tensor or 1)


@dataclass(frozen=True, kw_only=True)
class JobSageMaker:
    """[sagemaker]: options of that system alone."""

    role: str | None = _key(
        None,
        Text("a role", "arn:aws:iam::123456789012:role/training", form(r"[\w+=,.@:/-]+")),
        "Role of the training job. [default: $SAGEMAKER_ROLE]",
    )
    volume_size: int | None = _key(None, Whole(1, 2**20, 100), "Disk of an instance, in GB.")
    volume_kms_key: str | None = _key(
        None, Text("a key", "alias/mine", form(r"[\w:/-]+")), "Key that encrypts the disk."
    )
    code_location: str | None = _key(
        None, _url("s3://bucket/code"), "URL for the code that the interface uploads."
    )


TABLES: Mapping[str, type] = {
    "data": JobData,
    "storage": JobStorage,
    "resources": JobResources,
    "resources.instances": JobInstances,
    "container": JobContainer,
    "distribution": JobDistribution,
    "sagemaker": JobSageMaker,
}
"""The tables with keys of their own."""

PASSED = ("model", "plan", "train")
"""The tables with the options of our other commands."""

_OF_JOB = {
    "folder": "The job has a folder of its own: --folder.",
    "output": "Use [storage] checkpoints for the folder of the run.",
    "resume": "A job always resumes from its newest checkpoint.",
    "save_to": "Use [storage] checkpoints_uri.",
    "max_run": "Use [resources] max_run.",
    "time_limit": "Use [resources] max_run.",
    "nodes": "Use [resources] hosts.",
}


def answer_for_train(name: str) -> str:
    """The key to use in place of an option of asyncpipe-train that a job sets itself, or that
    applies to a single call; "" for other options."""
    if name in _OF_JOB:
        return _OF_JOB[name]
    declared = {**options_of(ExecutionOptions), **options_of(LearningOptions)}.get(name)
    is_of_call = declared is not None and declared.scope == "call"
    return "It applies to a single call: leave it out." if is_of_call else ""


_DISTRIBUTION = (
    'Use [distribution]: {mpi} is launcher = "mpi", {smdistributed.dataparallel} is replicas, and '
    "{smdistributed.modelparallel} is pipeline. There is no {parameter_server}: asynchronous "
    'training is [train] schedule = "async-1f1b".'
)

ESTIMATOR: Mapping[str, str] = {
    "base_job_name": "The name of the job file is the name of the job.",
    "checkpoint_local_path": "Use [storage] checkpoints.",
    "checkpoint_s3_uri": "Use [storage] checkpoints_uri.",
    "code_location": "Use [sagemaker] code_location.",
    "container_log_level": "Use [train] log_every.",
    "dependencies": "Use [container] dependencies.",
    "distribution": _DISTRIBUTION,
    "enable_network_isolation": "Use [container] network = false.",
    "enable_sagemaker_metrics": "Metrics are always defined for the lines of a run.",
    "entry_point": "asyncpipe-job is the entry point; name your code by [model] model, [train] "
    "data and the like.",
    "environment": "Use [container] env.",
    "framework_version": "Use [container] image: its tag says the version.",
    "git_config": "Check out the commit, and name its folder with [container] source.",
    "hyperparameters": "Use [train], where numbers may be texts.",
    "image_uri": "Use [container] image.",
    "input_mode": 'Use [data] mode = "file" or "pipe".',
    "inputs": "Use [data] uri.",
    "instance_count": "Use [resources] instances = { type = .., count = .. }.",
    "instance_type": "Use [resources] instances = { type = .., count = .. }.",
    "max_run": "Use [resources] max_run.",
    "output_path": "Use [storage] output.",
    "py_version": "Use [container] image: its tag says the version.",
    "role": "Use [sagemaker] role.",
    "source_dir": "Use [container] source.",
    "volume_kms_key": "Use [sagemaker] volume_kms_key.",
    "volume_size": "Use [sagemaker] volume_size.",
}
"""The names of SageMaker's estimator -> the key to use."""

KEYS = KnownNames(
    same={"url": "uri", "path": "uri"},
    answers={name.replace("_", "-"): answer for name, answer in ESTIMATOR.items()}
    | {"elastic": "Use [train] restarts."}
    | {"sequence": "Use [distribution] tensor, pipeline and replicas."},
)
"""Names of other tools for tables and keys of a job file."""

_SECRET_NAME = re.compile(r"KEY|SECRET|TOKEN|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_SECRET_TEXT = re.compile(
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\b(?:gh[pousr]|hf)_\w{20,}|://[^/\s]*:[^/\s]*@|BEGIN .*KEY"
)


def is_secret(text: str) -> bool:
    """True for a text that looks like a credential, such as a URL with a password.

    >>> is_secret("s3://me:mine@bucket/x"), is_secret("hf_" + 20 * "a"), is_secret("s3://bucket/x")
    (True, True, False)
    """
    return _SECRET_TEXT.search(text) is not None


def secret_in(variable: str) -> str:
    """The name of a variable whose given value looks like a credential; "" for other values.

    >>> secret_in("AWS_SECRET_ACCESS_KEY=x"), secret_in("AWS_SECRET_ACCESS_KEY"), secret_in("N=1")
    ('AWS_SECRET_ACCESS_KEY', '', '')
    """
    name, is_set, value = variable.partition("=")
    return name if is_set and (_SECRET_NAME.search(name) or is_secret(value)) else ""
