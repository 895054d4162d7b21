"""A job in a container of this machine: the file of its image, and the command that runs it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from .job_file import JobDescription
from .steps import JobFolder, local_path
from .written import (
    STOP_S,
    WORK,
    WrittenJob,
    check_container_code,
    check_reachable,
    label_of,
    passed_by_name,
    quoted,
    set_variables,
    urls_of,
    words_in_container,
)

CONTAINERFILE = "Containerfile"


def for_docker(folder: JobFolder, *, trust: bool) -> WrittenJob:
    """The build file, if the job has an image of its own, and the commands of docker."""
    job = folder.job
    check_reachable(job)
    check_container_code(job, trust=trust)
    words = words_in_container(folder, trust=trust)
    last = f"{shlex.quote(job.container.image)} {shlex.join(words)}"
    run = " \\\n    ".join([*_run_words(folder), last])
    if not builds_image(job):
        return WrittenJob(commands=(f"mkdir -p {quoted(folder.path)}", run))
    file = shlex.quote(str(folder.path / CONTAINERFILE))
    build = f"docker build --file {file} --tag {shlex.quote(job.container.image)} ."
    return WrittenJob({CONTAINERFILE: containerfile(job)}, (build, run))


def builds_image(job: JobDescription) -> bool:
    """True if the job has an image of its own to build."""
    own = job.container
    return bool(own.base or own.source or own.dependencies)


def containerfile(job: JobDescription) -> str:
    """The text of the build file; its context is the current folder."""
    own = job.container
    lines = [
        f"# The image of {job.name}: {own.image}.",
        f"FROM {own.base or 'asyncpipe'}",
        f"WORKDIR {WORK}",
    ]
    if own.dependencies:
        install = ["pip", "install", "--no-cache-dir", *own.dependencies]
        lines.append(f"RUN {json.dumps(install)}")
    if own.source:
        places = [own.source.rstrip("/") + "/", f"{WORK}/"]
        lines.append(f"COPY {json.dumps(places)}")
    return "\n".join(lines) + "\n"


def _run_words(folder: JobFolder) -> list[str]:
    job = folder.job
    words = [f"docker run --rm --init --stop-timeout {STOP_S}"]
    if job.resources.gpus:
        words += [f"--gpus {job.resources.gpus}", "--ipc host"]
    if not job.container.network:
        words.append("--network none")
    words += [f"--env {name}" for name in passed_by_name(job)]
    name = label_of(job)
    pairs = set_variables(job, f"{WORK}/jobs/{name}/state").items()
    words += [f"--env {shlex.quote(f'{key}={value}')}" for key, value in pairs]
    words.append(f"--volume {quoted(job.file)}:{WORK}/{name}.toml:ro")
    words.append(f"--volume {quoted(folder.path)}:{WORK}/jobs/{name}")
    if (own := job.storage.checkpoints) is not None and Path(own).is_absolute():
        words.append(f"--volume {shlex.quote(f'{own}:{own}')}")
    for path in dict.fromkeys(map(local_path, urls_of(job).values())):
        if path is not None:
            words.append(f"--volume {shlex.quote(f'{path}:{path}')}")
    return [*words, f"--workdir {WORK}"]
