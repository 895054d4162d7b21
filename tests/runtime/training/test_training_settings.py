"""Options: one spelling, near misses named, and what does not fit a plan said with both numbers."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest

from asyncpipe.runtime.config.asynchronous_options import check_methods, with_methods
from asyncpipe.runtime.config.batch_layout import StepBatch, as_started, check_ranks
from asyncpipe.runtime.config.option_files import read_config
from asyncpipe.runtime.config.resolve import (
    batch_identity,
    check_devices,
    gpu_of_rank,
    resolve,
    sized_plan,
)
from asyncpipe.runtime.config.settings import RunConfig, Settings, SettingsError
from asyncpipe.runtime.config.tensor_options import check_tensor_ranks
from asyncpipe.runtime.distributed.placement import replicas_warning
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.experiments.variants import lists_of_file
from asyncpipe.runtime.optimizers.facts import OPTIMIZERS
from asyncpipe.runtime.options import options_of
from asyncpipe.runtime.plan.plan import Plan, TensorSpec
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.training.run_summary import describe_optimizer
from asyncpipe.tests.support.models.hand_folders import write_mlp, write_text
from asyncpipe.tests.support.run_configs import run_config


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return write_mlp(tmp_path_factory.mktemp("plans") / "mlp")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return write_text(tmp_path_factory.mktemp("plans") / "text")


def resolved(plan: Plan, **options: object) -> RunConfig:
    return resolve(Settings(folder="x", **options), plan)[0]  # type: ignore[arg-type]


def message(error: pytest.ExceptionInfo[AsyncPipeError]) -> str:
    return str(error.value)


def test_a_written_config_gives_the_same_settings(text: Plan, tmp_path: Path) -> None:
    settings = resolved(text, schedule="async-1f1b", lr=1e-5, data='a "quoted" name')
    (tmp_path / "config.toml").write_text(settings.to_toml())
    again = Settings(**read_config(tmp_path / "config.toml"))
    assert asdict(again) == asdict(settings)
    assert resolve(again, text)[0] == settings


def test_a_config_with_an_open_option_is_refused(text: Plan) -> None:
    settings = Settings(folder="x", lr=0.1)
    with pytest.raises(TypeError, match="not resolved: micro_batches, .*, optimizer, momentum"):
        RunConfig(**asdict(settings))


def test_a_short_last_step_consumes_fewer_samples() -> None:
    sizes = {"micro_batches": 4, "micro_batch_size": 4, "steps": 2}
    config = run_config(samples=30, remainder="proportional", **sizes)
    batch = StepBatch.of(config)
    assert [batch.position(step) for step in (1, 2)] == [16, 30]


def test_a_fixed_micro_batch_leaves_out_what_makes_no_whole_one(text: Plan) -> None:
    fixed = replace(text, inputs=tuple(replace(spec, shape=(2, 32)) for spec in text.inputs))
    given = {"samples": 21, "remainder": "proportional", "micro_batches": 4}
    for plan, left in ((text, 5), (fixed, 4)):
        config, _ = resolve(Settings(folder="x", **given), plan)
        assert (config.steps, config.left_over) == (3, left)


def test_the_config_leaves_out_what_concerns_one_call() -> None:
    settings = Settings(folder="x", output="runs/x/1", dry_run=True, json=True)
    assert tomllib.loads(settings.to_toml()).keys().isdisjoint({"output", "dry_run", "json"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("micro_batch = 8", "Did you mean micro_batches"),
        ("steps = 'many'", 'steps = "many" is not a whole number from 0 to'),
        ("steps = true", "steps = true is not a whole number"),
        ("betas = [0.9]", r"betas = \[0.9\] is not 2 values"),
        ("steps = ", "is not TOML"),
    ],
)
def test_a_wrong_config_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(SettingsError, match=words):
        read_config(tmp_path / "bad.toml")


def test_a_config_that_extends_others_equals_the_flat_one(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "common.toml").write_text("folder = 'x'\nlr = 0.1\nsteps = 9\nseed = 1")
    (tmp_path / "more" / "stale.toml").write_text(
        "base = '../common.toml'\nstaleness = 'none'\nlr = 0.2\n[sweep]\nseed = [1, 2]"
    )
    (tmp_path / "top.toml").write_text(
        "base = ['common.toml', 'more/stale.toml']\nepochs = 2\n[sweep]\nlr = [0.1, 0.3]"
    )
    flat = {"folder": "x", "lr": 0.2, "seed": 1, "staleness": "none", "epochs": 2.0}
    assert read_config(tmp_path / "top.toml") == flat
    assert lists_of_file(tmp_path / "top.toml") == {"seed": (1, 2), "lr": (0.1, 0.3)}


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("'b.toml'", r"base of .*b.toml .*a.toml: the file extends itself"),
        ("['c.toml']", r"base of .*a.toml .*c.toml: there is no such file"),
        ("7", r"a.toml: base is not a list of files"),
        ("'bad.toml'", r"bad.toml: steps = \"many\" is not a whole number"),
    ],
)
def test_a_wrong_base_of_a_config_is_named(tmp_path: Path, base: str, words: str) -> None:
    (tmp_path / "a.toml").write_text(f"base = {base}")
    (tmp_path / "b.toml").write_text("base = 'a.toml'")
    (tmp_path / "bad.toml").write_text("steps = 'many'")
    with pytest.raises(SettingsError, match=words):
        read_config(tmp_path / "a.toml")


def test_a_config_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="there is no such file"):
        read_config(tmp_path / "absent.toml")


def test_a_near_miss_of_a_choice_is_named() -> None:
    with pytest.raises(SettingsError, match="Did you mean gpipe"):
        Settings(folder="x", schedule="gpip")


def test_a_number_out_of_range_is_named() -> None:
    with pytest.raises(SettingsError, match="--log-every 0 is not a whole number from 1 to"):
        Settings(folder="x", log_every=0)
    with pytest.raises(SettingsError, match="--lr nan"):
        Settings(folder="x", lr=float("nan"))


def test_defaults_come_from_the_plan(text: Plan, mlp: Plan) -> None:
    language, vectors = resolved(text), resolved(mlp)
    assert (language.optimizer, language.clip, language.seq) == ("adamw", 1.0, 32)
    assert (vectors.clip, vectors.seq, vectors.criterion) == (0.0, None, "cross_entropy")


@pytest.mark.parametrize("name", ["lr", "decay", "final_lr_ratio", "clip"])
def test_the_help_has_the_defaults_of_text_and_of_other_data(
    text: Plan, mlp: Plan, name: str
) -> None:
    text_of_help = options_of(Settings)[name].help.replace("3e-4", "0.0003")
    text_of_help = text_of_help.replace("1e-3", "0.001")
    for plan, words in ((text, "for text"), (mlp, "for other data")):
        value = getattr(resolved(plan), name)
        assert f"{value if isinstance(value, str) else format(value, 'g')} {words}" in text_of_help


def test_the_teaching_example_has_its_published_optimizer(mlp: Plan) -> None:
    settings = resolved(replace(mlp, name="mlp"))
    assert (settings.optimizer, settings.lr, settings.momentum) == ("sgd", 0.1, 0.0)
    assert (settings.decay, settings.final_lr_ratio, settings.warmup) == ("linear", 0.3, 0)


def test_given_options_win_over_defaults(text: Plan) -> None:
    settings = resolved(text, optimizer="sgd", lr=0.5, clip=0.0)
    assert (settings.optimizer, settings.lr, settings.clip, settings.momentum) == (
        "sgd",
        0.5,
        0.0,
        0.9,
    )


@pytest.mark.parametrize(
    ("name", "of_text", "momentum", "decay", "refresh"),
    [
        ("sgd", 0.1, 0.9, 0.0, None),
        ("sutskever", 0.1, 0.9, 0.0, None),
        ("adam", 3e-4, 0.0, 0.0, None),
        ("adamw", 3e-4, 0.0, 0.01, None),
        ("nadam", 3e-4, 0.0, 0.01, None),
        ("muon", 3e-4, 0.95, 0.01, None),
        ("soap", 3e-4, 0.0, 0.01, 10),
    ],
)
def test_each_optimizer_has_defaults_of_its_own(
    text: Plan, name: str, of_text: float, momentum: float, decay: float, refresh: int | None
) -> None:
    settings = resolved(text, optimizer=name)
    assert (settings.lr, settings.momentum, settings.weight_decay, settings.refresh_every) == (
        of_text,
        momentum,
        decay,
        refresh,
    )
    # What was resolved is written down, and may be resolved again.
    assert resolve(settings, text)[0] == settings


def test_an_option_that_the_optimizer_has_not_is_refused(text: Plan, mlp: Plan) -> None:
    def refused(plan: Plan, **options: object) -> str:
        with pytest.raises(SettingsError) as error:
            resolved(plan, **options)
        return message(error)

    told = refused(text, optimizer="nadam", momentum=0.8)
    assert "--momentum 0.8, but nadam has no option momentum" in told
    assert "--momentum 0.8, but adamw" in refused(text, momentum=0.8)
    told = refused(mlp, optimizer="sutskever", betas=(0.8, 0.9))
    assert "--betas 0.8 0.9, but sutskever has no option betas" in told
    told = refused(mlp, optimizer="muon", refresh_every=5)
    assert "--refresh-every 5, but muon has no option refresh_every" in told
    with pytest.raises(SettingsError, match="--refresh-every 0 is not a whole number from 1 to"):
        Settings(folder="x", optimizer="soap", refresh_every=0)


def test_the_run_says_what_its_optimizer_is_for(text: Plan) -> None:
    told = describe_optimizer(resolved(text, optimizer="muon"))
    assert told.startswith(
        "Muon(lr=0.0003, momentum=0.95, weight_decay=0.01 on matrices) · "
        "AdamW for parameters other than hidden matrices"
    )
    soap = resolved(text, optimizer="soap", refresh_every=20)
    assert "new bases every 20 steps" in describe_optimizer(soap)
    assert "new bases every 13 to 50 steps" in describe_optimizer(soap, (3, 2, 1, 0))


def test_the_batch_identity_is_a_product(text: Plan) -> None:
    settings, task = resolve(Settings(folder="x", micro_batch_size=8), text)
    expected = "64 sequences per step = 8 micro-batches × 8 sequences × 1 replica"
    assert batch_identity(settings, task) == expected


def test_a_global_batch_is_divided_among_micro_batches(text: Plan) -> None:
    settings = resolved(text, global_batch_size=64, micro_batches=4)
    assert (settings.micro_batches, settings.micro_batch_size) == (4, 16)
    settings = resolved(text, global_batch_size=64, micro_batch_size=2)
    assert (settings.micro_batches, settings.micro_batch_size) == (32, 2)


def test_an_indivisible_global_batch_names_its_neighbours(text: Plan) -> None:
    with pytest.raises(SettingsError) as error:
        resolved(text, global_batch_size=100, micro_batches=8)
    assert "global batch 100 = micro-batches × size × replicas has no answer" in message(error)
    assert "100 / 8 = 12.5" in message(error)
    assert "--global-batch-size 96 or 104, or --micro-batches 4, 5, 10, 20, 25" in message(error)


def test_a_global_batch_that_its_micro_batches_do_not_divide_has_a_smaller_last_one(
    text: Plan,
) -> None:
    settings, task = resolve(Settings(folder="x", global_batch_size=30, micro_batch_size=8), text)
    assert (settings.micro_batches, settings.micro_batch_size) == (4, 8)
    assert StepBatch.of(settings).sizes == (8, 8, 8, 6)
    expected = "30 sequences per step = (3 micro-batches × 8 + 6) sequences × 1 replica"
    assert batch_identity(settings, task) == expected
    again, _ = resolve(settings, text)
    assert asdict(again) == asdict(settings)


def test_a_global_batch_with_another_number_of_micro_batches_has_no_answer(text: Plan) -> None:
    with pytest.raises(SettingsError) as error:
        resolved(text, global_batch_size=30, micro_batch_size=8, micro_batches=3)
    assert "has no answer with 3 micro-batches of 8" in message(error)
    assert "--global-batch-size 24 or 48" in message(error)


def test_replicas_multiply_the_micro_batches_of_a_step(text: Plan) -> None:
    settings, task = resolve(Settings(folder="x", replicas=3, micro_batches=4), text)
    assert batch_identity(settings, task) == (
        "24 sequences per step = 4 micro-batches × 2 sequences × 3 replicas"
    )
    batch = StepBatch.of(settings)
    assert [batch.first_of(1, replica) for replica in range(3)] == [12, 16, 20]
    settings = resolved(text, replicas=2, global_batch_size=64, micro_batches=4)
    assert settings.micro_batch_size == 8
    settings, task = resolve(
        Settings(folder="x", replicas=2, global_batch_size=30, micro_batch_size=8), text
    )
    assert settings.micro_batches == 2 and resolve(settings, text)[0] == settings
    assert [StepBatch.of(settings).sizes_of(replica) for replica in (0, 1)] == [(8, 8), (8, 6)]
    assert batch_identity(settings, task) == (
        "30 sequences per step = 2 micro-batches × 8 sequences × 2 replicas - 2 in the last "
        "micro-batch of the last"
    )


def test_a_batch_that_does_not_fit_the_replicas_names_its_neighbours(text: Plan) -> None:
    with pytest.raises(SettingsError) as error:
        resolved(text, replicas=3, global_batch_size=40, micro_batches=4)
    assert "with 4 micro-batches and 3 replicas (40 / 12 = 3.33333)" in message(error)
    assert "--global-batch-size 36 or 48" in message(error)
    with pytest.raises(SettingsError) as error:
        resolved(text, replicas=2, global_batch_size=20, micro_batch_size=8)
    assert "with 1 micro-batches of 8 and 2 replicas" in message(error)
    assert "--global-batch-size 16 or 32" in message(error)


def test_ddp_is_replicas_of_single_that_share_the_micro_batches(text: Plan) -> None:
    settings = resolved(text, schedule="ddp", micro_batches=8)
    assert (settings.schedule, settings.replicas, settings.micro_batches) == ("single", 2, 4)
    assert resolve(settings, text)[0] == settings
    assert resolved(text, schedule="ddp", replicas=3).micro_batches == 3
    uneven = resolved(text, schedule="ddp", global_batch_size=30, micro_batch_size=8)
    assert (uneven.micro_batches, uneven.global_batch_size) == (2, 30)
    with pytest.raises(SettingsError) as error:
        resolved(text, schedule="ddp", replicas=3, micro_batches=8)
    assert message(error) == (
        "8 micro-batches cannot be shared out evenly among 3 processes.\n--micro-batches 6 or 9"
    )
    with pytest.raises(SettingsError, match="under ddp each process has all stages"):
        resolved(text, schedule="ddp", ranks=2)
    assert as_started(Settings(folder="x", schedule="ddp"), 4).replicas == 4
    assert as_started(Settings(folder="x", schedule="ddp", replicas=2), 4).replicas == 2


def test_replicas_that_cannot_be_are_refused(text: Plan) -> None:
    with pytest.raises(SettingsError, match="--check-replicas 5, but there is 1 replica"):
        resolved(text, check_replicas=5)
    assert resolved(text, schedule="ddp", check_replicas=5).check_replicas == 5


def test_a_plan_for_one_batch_size_has_no_smaller_last_micro_batch(text: Plan) -> None:
    inputs = tuple(replace(spec, shape=(2, *spec.shape[1:])) for spec in text.inputs)
    with pytest.raises(SettingsError) as error:
        resolved(replace(text, inputs=inputs), global_batch_size=5, micro_batch_size=2)
    assert "global batch 5 = micro-batches × size × replicas has no answer" in message(error)


def test_stages_recompute_as_planned_or_as_asked(text: Plan) -> None:
    stages = tuple(
        replace(stage, in_flight=2 - stage.index, activation_bytes=8) for stage in text.stages
    )
    text = replace(text, stages=stages)

    def seen(chosen: str) -> list[tuple[bool, float]]:
        plan = sized_plan(text, run_config(recompute=chosen))
        return [(stage.recompute, stage.backward_ms) for stage in plan.stages]

    assert seen("auto") == seen("none") == [(False, 2.0), (False, 2.0)]
    assert seen("all") == [(True, 3.0), (True, 2.0)]  # nothing is in flight at the last stage
    assert seen("0") == [(True, 3.0), (False, 2.0)]
    assert seen("1, 0") == seen("all")
    planned = sized_plan(text, run_config(recompute="all"))
    again = sized_plan(planned, run_config(recompute="none"))
    assert again.stages == text.stages


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ("0,2", "stage 2 does not exist, the plan has stages 0 to 1"),
        ("some", "is not auto, all, none or numbers of stages"),
        ("-1", "is not auto, all, none or numbers of stages"),
        ("", "is not auto, all, none or numbers of stages"),
    ],
)
def test_stages_that_do_not_exist_cannot_recompute(text: Plan, chosen: str, words: str) -> None:
    with pytest.raises(SettingsError) as error:
        resolved(text, recompute=chosen)
    assert words in message(error)


def test_batch_norms_that_do_not_exist_cannot_be_updated_once_a_mini_batch(text: Plan) -> None:
    with pytest.raises(SettingsError) as error:
        resolved(text, batch_norm="mini-batch")
    assert "tiny_text has no batch norm" in message(error)
    with pytest.raises(SettingsError, match="--batch-norm mini is not one of"):
        Settings(folder="x", batch_norm="mini")


def test_a_global_batch_smaller_than_its_micro_batches_names_the_next(text: Plan) -> None:
    with pytest.raises(SettingsError) as error:
        resolved(text, global_batch_size=3, micro_batches=8)
    assert "--global-batch-size 8, or --micro-batches 1, 3" in message(error)


def test_a_sequence_longer_than_the_plan_is_refused(text: Plan) -> None:
    with pytest.raises(SettingsError) as error:
        resolved(text, seq=64)
    assert "--seq 64, but the plan was made for 32 tokens." in message(error)
    assert "asyncpipe-partition --model tiny_text --stages 2 --seq 64" in message(error)


def test_a_shorter_sequence_resizes_the_plan(text: Plan) -> None:
    settings = resolved(text, seq=16, micro_batch_size=3)
    assert sized_plan(text, settings).sizes == {"batch": 3, "sequence": 16}


def test_a_sequence_for_a_model_without_one_is_refused(mlp: Plan) -> None:
    with pytest.raises(SettingsError, match="no input of tiny_mlp has a free sequence length"):
        resolved(mlp, seq=64)


def test_another_micro_batch_needs_a_plan_with_a_free_batch(mlp: Plan) -> None:
    fixed = replace(mlp, inputs=(TensorSpec("x", "float32", (4, 16)),))
    assert resolved(fixed).micro_batch_size == 4
    with pytest.raises(SettingsError, match="made for 4 and no other size"):
        resolved(fixed, micro_batch_size=8)


def test_staleness_belongs_to_asynchronous_schedules(text: Plan) -> None:
    assert resolved(text).staleness is None
    assert resolved(text, schedule="async-1f1b").staleness == "stash"
    with pytest.raises(SettingsError, match="under 1f1b no weights are stale"):
        resolved(text, staleness="stash")


@pytest.mark.parametrize(
    ("options", "methods"),
    [
        ({"optimizer": "muon", "micro_batches": 1, "ahead": "2x"}, "stash+hidden-delay-rate"),
        ({"optimizer": "muon", "micro_batches": 2, "momentum": 0.0}, "stash+delay-rate"),
        ({"optimizer": "muon", "micro_batches": 1, "staleness_cap": 0}, "stash"),
        ({"optimizer": "muon", "micro_batches": 2}, "stash+partial-gradient+delay-rate"),
        ({"optimizer": "muon", "micro_batches": 2, "replicas": 2}, "stash+msnag+delay-rate"),
        ({"optimizer": "adamw", "micro_batches": 1, "ahead": "2x"}, "stash"),
        ({"optimizer": "adamw", "micro_batches": 2}, "stash+partial-gradient"),
        ({"optimizer": "adamw", "micro_batches": 2, "staleness_cap": 0}, "stash"),
        ({"optimizer": "adamw", "micro_batches": 2, "replicas": 2}, "stash"),
        ({"optimizer": "sgd", "micro_batches": 2}, "stash"),
        ({"schedule": "2bw", "micro_batches": 2}, "2bw"),
        ({"schedule": "1f1b"}, None),
    ],
)
def test_the_recommended_methods_go_by_optimizer_and_delay(
    text: Plan, options: dict[str, object], methods: str | None
) -> None:
    given = {"schedule": "async-1f1b", "staleness": "auto"} | options
    assert resolved(text, **given).staleness == methods


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_the_recommended_methods_are_never_refused(text: Plan, optimizer: str) -> None:
    for k, replicas, tensor_ranks, momentum in product((1, 2, 4), (1, 2), (1, 2), (None, 0.0)):
        config = run_config(
            schedule="async-1f1b",
            staleness="auto",
            optimizer=optimizer,
            momentum=OPTIMIZERS[optimizer].momentum if momentum is None else momentum,
            micro_batches=k,
            replicas=replicas,
            tensor_parallel=tensor_ranks,
            clip=1.0,
        )
        chosen = with_methods(config, text)
        check_methods(chosen, text)
        check_tensor_ranks(chosen)


def test_what_an_asynchronous_run_clips_by_is_its_own_option(text: Plan) -> None:
    alone = {"schedule": "async-1f1b", "clip": 1.0}
    assert resolved(text, **alone).clip_by == "stage"
    assert resolved(text, **alone, clip_by="known").clip_by == "known"
    assert resolved(text, clip=1.0).clip_by is None
    with pytest.raises(SettingsError) as error:
        resolved(text, clip=1.0, clip_by="known")
    assert "under 1f1b all stages step by the norm of all" in message(error)
    with pytest.raises(SettingsError) as error:
        resolved(text, schedule="async-1f1b", clip=0.0, clip_by="known")
    assert "nothing is clipped" in message(error)


def test_the_steps_of_a_lower_rate_are_five_warm_ups_or_a_quarter_of_the_run(text: Plan) -> None:
    lower = {"schedule": "async-1f1b", "staleness": "stash+pipemare-rate", "steps": 200}
    assert resolved(text, **lower, warmup=8).annealing_steps == 40
    assert resolved(text, **lower, warmup=0).annealing_steps == 50
    assert resolved(text, **lower, annealing_steps=7).annealing_steps == 7
    with pytest.raises(SettingsError) as error:
        resolved(text, schedule="async-1f1b", annealing_steps=7)
    assert "no method lowers the learning rate" in message(error)


def test_methods_that_fit_two_versions_are_added_to_them(text: Plan) -> None:
    two = {"schedule": "2bw", "micro_batches": 8}
    assert resolved(text, **two).staleness == "2bw"
    assert resolved(text, **two, staleness="2bw+error-feedback").staleness == "2bw+error-feedback"
    with pytest.raises(SettingsError) as error:
        resolved(text, **two, staleness="stash")
    assert "has its own versions of the weights" in message(error)


def test_a_warmup_longer_than_the_run_is_refused(text: Plan) -> None:
    with pytest.raises(SettingsError, match="--warmup 20 is longer than --steps 10"):
        resolved(text, steps=10, warmup=20)


def test_a_plan_without_a_loss_asks_for_a_criterion(mlp: Plan, text: Plan) -> None:
    with pytest.raises(AsyncPipeError, match="--criterion cross_entropy"):
        resolved(replace(mlp, criterion=None))
    with pytest.raises(SettingsError, match="makes its own loss"):
        resolved(text, criterion="mse")


def test_a_wrong_number_of_ranks_is_refused(text: Plan) -> None:
    pipelined = make_schedule("1f1b", stages=2, micro_batches=4)
    single = make_schedule("single", stages=2, micro_batches=4)
    check_ranks(text, pipelined, 2)
    check_ranks(text, single, 1)
    with pytest.raises(AsyncPipeError) as error:
        check_ranks(text, pipelined, 6)
    assert "the plan has 2 stages, 6 ranks were started." in message(error)
    assert "Use 2 ranks, or --replicas 3, or partition again: asyncpipe-partition" in message(error)
    assert "--stages 6" in message(error)
    check_ranks(text, pipelined, 6, replicas=3)
    check_ranks(text, single, 3, replicas=3)
    check_ranks(text, pipelined, 8, replicas=2, tensor_ranks=2)
    with pytest.raises(AsyncPipeError, match="2 stages × 2 tensor ranks = 4 ranks, 2 ranks were"):
        check_ranks(text, pipelined, 2, tensor_ranks=2)
    with pytest.raises(AsyncPipeError) as error:
        check_ranks(text, pipelined, 7, replicas=2)
    assert message(error) == (
        "the plan has 2 stages × 2 replicas = 4 ranks, 7 ranks were started.\n"
        "Use 4 ranks, or another multiple of 2 with --replicas."
    )
    with pytest.raises(AsyncPipeError, match="1 rank was started"):
        check_ranks(text, pipelined, 1)
    with pytest.raises(AsyncPipeError, match="in 1 process, 2 ranks were started"):
        check_ranks(text, single, 2)


def test_more_ranks_than_gpus_are_refused(mlp: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    on_gpus = Settings(folder="x", device="cuda")
    check_devices(Settings(folder="x"), mlp, range(4), 0)
    check_devices(on_gpus, mlp, range(2), 2)
    with pytest.raises(SettingsError) as error:
        check_devices(on_gpus, mlp, range(4), 2)
    assert message(error) == (
        "4 ranks on this machine, but 2 GPUs visible (CUDA_VISIBLE_DEVICES=0,1).\n"
        "Share them: --ranks-per-gpu 2 (slower), or --device cpu, or partition again with "
        "--stages 2."
    )
    check_devices(replace(on_gpus, ranks_per_gpu=2), mlp, range(4), 2)
    with pytest.raises(SettingsError, match="5 ranks on this machine, but 2 GPUs") as error:
        check_devices(replace(on_gpus, ranks_per_gpu=2), mlp, range(5), 2)
    assert "--ranks-per-gpu 3 (slower)" in message(error)
    with pytest.raises(SettingsError, match="but no GPUs visible") as error:
        check_devices(on_gpus, mlp, range(4), 0)
    assert error.value.cure == "--device cpu."


def on_ranks(plan: Plan, *ranks: tuple[int, ...]) -> Plan:
    stages = [replace(plan.stages[0], index=index, ranks=own) for index, own in enumerate(ranks)]
    return replace(plan, stages=tuple(stages))


def test_stages_that_the_plan_has_on_one_rank_share_its_gpu(mlp: Plan) -> None:
    mixed = on_ranks(mlp, (0,), (1,), (0,))
    assert gpu_of_rank(mixed, range(3)) == (0, 1, 0)
    assert gpu_of_rank(mixed, range(1)) == (0,)  # all stages in one process
    assert gpu_of_rank(on_ranks(mlp, (0, 1), (2, 3)), range(2)) == (0, 1)
    assert gpu_of_rank(mlp, range(2)) == (0, 1)
    assert gpu_of_rank(mlp, range(5), 2) == (0, 0, 1, 1, 2)
    assert gpu_of_rank(mixed, range(6)) == (0, 1, 0, 2, 3, 2)  # two replicas
    assert gpu_of_rank(mixed, range(6), tensor_ranks=2) == (0, 1, 2, 3, 0, 1)


def test_a_plan_with_replicas_of_which_one_is_trained_says_so(mlp: Plan) -> None:
    uneven = on_ranks(mlp, (0, 1, 2), (3,))
    assert resolved(uneven).replicas is None  # the plan's own
    warning = replicas_warning(uneven, resolved(uneven, replicas=1).replicas or 0)
    assert "the plan has stage 0 on 3 ranks, but this run has 1 replica of each" in warning
    assert replicas_warning(on_ranks(mlp, (0,), (1,), (0,)), 1) == ""


def test_a_plan_of_whole_pipelines_side_by_side_is_followed(mlp: Plan) -> None:
    side_by_side = on_ranks(mlp, (0, 2), (1, 3))
    assert resolved(side_by_side).replicas == 2
    assert resolved(side_by_side, replicas=1).replicas == 1
    assert resolved(side_by_side, schedule="single").replicas == 1
    assert resolved(side_by_side, schedule="async-1f1b").replicas == 2
    assert resolved(side_by_side, schedule="ddp").replicas == 4
    assert replicas_warning(side_by_side, 2) == ""
    assert "has 1 replica of each stage" in replicas_warning(side_by_side, 1)
