"""A folder and options in Python -> the job and the world of a pipeline in a user's own loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import torch.distributed as dist

from ..config.batch_layout import as_started, check_ranks
from ..config.resolve import resolve
from ..config.segments import make_segment
from ..config.settings import Settings, SettingsError
from ..data.task import GIVEN, architecture_of
from ..distributed.process_groups import World, join, stay_alone
from ..distributed.ranks import RankInfo, given_rank_info
from ..formatting import did_you_mean
from ..known_names import TRAIN
from ..plan.plan import Plan, read_plan
from ..plan.trust import code_hashes, is_trusted, remember, untrusted
from ..user_code import names_object
from .evaluation import CRITERIA
from .setup import Job


class PipelineKeywords(TypedDict, total=False):
    """The options of asyncpipe-train that a `Pipeline` takes, by their names there."""

    schedule: str
    ranks: int | None
    replicas: int | None
    tensor_parallel: int | None
    zero: int | None
    staleness: str | None
    annealing_steps: int | None
    ahead: str | None
    staleness_cap: int | None
    flush_every: int
    sync_start: str | None
    sync_end: str | None
    micro_batches: int | None
    micro_batch_size: int | None
    seq: int | None
    steps: int
    optimizer: str | None
    lr: float | None
    momentum: float | None
    betas: tuple[float, float]
    eps: float
    nesterov: bool
    refresh_every: int | None
    weight_decay: float | None
    warmup: int | None
    decay: str | None
    final_lr_ratio: float | None
    freeze: str | None
    freeze_every: int | str | None
    freeze_most: int | None
    cache: str
    clip: float | None
    clip_by: str | None
    batch_norm: str
    recompute: str
    seed: int
    init_from: str | None
    device: str
    ranks_per_gpu: int
    threads: int | None
    pin: str
    timeout_s: float
    stall_s: float
    dtype: str | None
    precision: str
    loss_scale: float | None
    boundary_dtype: str | None
    transport: str
    mpi_memory: str
    interface: str | None
    master_addr: str | None
    master_port: int | None
    rank: int | None
    world_size: int | None
    rendezvous: str | None


def joined_job(
    folder: str | Path, loss: Callable[..., Any] | str | None, options: Mapping[str, Any]
) -> Job:
    """The job of a pipeline whose loop has the data. Raises AsyncPipeError if options contradict
    the folder."""
    check_keywords("Pipeline", options, PipelineKeywords)
    planned = read_plan(str(folder))
    _check_objects(planned, loss, options.get("optimizer"))
    _check_has_length(options)
    settings = Settings(
        folder=str(folder),
        data=GIVEN,
        criterion=loss if isinstance(loss, str) or loss is None else GIVEN,
        **{"clip": None if "optimizer" in options else 0.0, **options},
    )
    settings = _for_existing_ranks(settings, find_rank_info_of(settings))
    if not settings.has_network:
        raise SettingsError(
            "--transport none is for asyncpipe-train, which keeps no weights without a network.",
            'transport="auto"',
        )
    config, task = resolve(settings, planned, architecture=architecture_of(folder))
    job = Job(config, task, planned, Path(folder), code_hashes(folder))
    info = find_rank_info_of(settings)
    if info is not None and info.ranks > 1:
        schedule = make_segment(job.plan, config, steps=1)
        check_ranks(planned, schedule, info.ranks, config.pipelines, config.tensor_ranks)
    return job


def _check_objects(plan: Plan, loss: object, optimizer: object) -> None:
    """Raises SettingsError for a loss or an optimizer of another kind than a pipeline takes."""
    if isinstance(loss, type):
        raise SettingsError(
            f"loss is the class {loss.__name__}.", f"Give an object of it: loss={loss.__name__}()."
        )
    if isinstance(loss, str) and loss not in CRITERIA and not names_object(loss):
        raise SettingsError(
            f"the loss {loss!r} is not known.",
            did_you_mean(loss, CRITERIA)
            or f"It is {', '.join(CRITERIA)}, or a function of the output and the target.",
        )
    if loss is None and plan.loss is None and plan.criterion is None:
        raise SettingsError(
            f"{plan.name} returns no loss, and none was given.",
            'Give Pipeline(..., loss="cross_entropy"), or a function of the output and the target, '
            "or return {'loss': loss} from forward.",
        )
    if optimizer is not None and not isinstance(optimizer, str):
        raise SettingsError(
            f"optimizer is an object of class {type(optimizer).__name__}, but a pipeline takes the "
            "name of a built-in one.",
            "Give yours to the step: pipe.step(batch, optimizer=optimizer).",
        )


def _check_has_length(options: Mapping[str, Any]) -> None:
    """Raises SettingsError for a part of the run without the length of the run."""
    for name in ("sync_start", "sync_end"):
        value = str(options.get(name) or "")
        if value and "steps" not in options and (name == "sync_end" or "%" in value):
            raise SettingsError(
                f"{name}={value!r} depends on the number of steps, which was not given.",
                "Give it to the pipeline, for example steps=1000.",
            )


def check_keywords(call: str, options: Mapping[str, Any], keywords: type[Any]) -> None:
    """Raises SettingsError for an option that a call does not have; `keywords` is its TypedDict."""
    known = list(keywords.__annotations__)
    for name in options:
        if name not in known:
            raise SettingsError(
                f"{call} has no option {name}.",
                TRAIN.meant(name, known, f"It has {', '.join(known)}."),
            )


def find_rank_info_of(settings: Settings) -> RankInfo | None:
    """The rank of this process in the process group that exists, or as its launcher says; None for
    a process that is alone."""
    info = given_rank_info(settings)
    if not dist.is_initialized():
        return info
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if info is not None and (info.rank, info.ranks) == (rank, ranks):
        return info
    return RankInfo(rank, ranks, 0, 0, head="", launcher="torch.distributed")


def _for_existing_ranks(settings: Settings, info: RankInfo | None) -> Settings:
    """The settings for the ranks that there are; a process that is alone runs all stages."""
    if info is not None and info.ranks > 1:
        return as_started(settings, info.ranks)
    asked = [
        f"{number} {what}"
        for number, what in (
            (settings.ranks, "ranks"),
            (settings.replicas, "replicas"),
            (settings.tensor_parallel, "tensor ranks"),
        )
        if number not in (None, 1)
    ]
    if asked:
        raise SettingsError(
            f"{' and '.join(asked)} were asked for, but this process is alone.",
            "Start the script with torchrun --nproc-per-node N, or with asyncpipe.launch.",
        )
    if settings.is_async:
        return replace(settings, ranks=1, replicas=1, tensor_parallel=1)
    return replace(settings, schedule="single", ranks=None, tensor_parallel=1)


def own_world(job: Job, *, trust: bool) -> World:
    """The world of this process: with the ranks of its launcher or of the process group that it is
    in already, or alone.

    Raises TrustError for a folder whose code no rank trusts, and as `join`.
    """
    config = job.config
    if trust:
        remember(config.folder)
    info = find_rank_info_of(config)
    if info is not None and info.ranks > 1:
        return join(info, config, job.plan, job.code)
    if not is_trusted(config.folder):
        raise untrusted(config.folder)
    return stay_alone(config, job.plan, job.code)
