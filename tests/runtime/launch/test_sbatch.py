"""The batch script for Slurm: the resources it requests, and its run under a stand-in for Slurm."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from asyncpipe.runtime.config.option_files import read_config
from asyncpipe.runtime.config.settings import Settings, SettingsError
from asyncpipe.runtime.launch.slurm import batch_script, sbatch_script, train_command
from asyncpipe.runtime.plan.plan import Plan, read_plan
from asyncpipe.runtime.plan.setting import RankSpec
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.processes import fake_slurm
from asyncpipe.tests.support.processes.quick_python import bin_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated") / "mlp4"
    write_mlp(folder, stages=4)
    return folder


def asked(script: str) -> dict[str, str]:
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH --")]
    parts = (line.removeprefix("#SBATCH --").partition("=") for line in lines)
    return {name: value for name, _, value in parts}


def on_hosts(plan: Plan, *hosts: str) -> Plan:
    ranks = tuple(RankSpec("cpu", host=host) for host in hosts)
    return replace(plan, setting=replace(plan.setting, ranks=ranks))


def checked(script: str) -> str:
    """The script, when bash can read it."""
    result = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (result.returncode, result.stderr) == (0, ""), script
    return script


def test_a_plan_of_one_host_asks_for_one_node(folder: Path) -> None:
    script = checked(batch_script(Settings(folder=str(folder), threads=6)))
    assert asked(script) == {
        "job-name": "tiny_mlp",
        "nodes": "1",
        "ntasks": "4",
        "ntasks-per-node": "4",
        "cpus-per-task": "6",
        "time": "24:00:00",
        "output": "%x-%j.log",
        "open-mode": "append",
        "requeue": "",
        "signal": "USR1@120",
    }
    single = batch_script(Settings(folder=str(folder), schedule="single"))
    assert asked(single)["ntasks"] == "1"


def test_ranks_go_where_the_plan_has_them(folder: Path) -> None:
    plan = on_hosts(read_plan(folder), "h1", "h1", "h2", "h2")
    on_gpus = Settings(folder="x", device="cuda", ranks_per_gpu=2, time_limit="2-00:00:00")
    script = checked(sbatch_script(on_gpus, plan, 4))
    assert "ranks 0-1 on host 1, ranks 2-3 on host 2" in script
    found = asked(script)
    assert (found["nodes"], found["ntasks-per-node"], found["gpus-per-node"]) == ("2", "2", "1")
    assert found["time"] == "2-00:00:00"
    assert "--distribution=block" in script and "HOSTFILE" not in script


def test_replicas_ask_for_as_many_more(folder: Path) -> None:
    script = checked(batch_script(Settings(folder=str(folder), replicas=3)))
    assert (asked(script)["nodes"], asked(script)["ntasks"]) == ("1", "12")
    assert "--replicas 3" in script
    by_node = checked(batch_script(Settings(folder=str(folder), replicas=3, nodes=3)))
    assert "ranks 0-3 on host 1, ranks 4-7 on host 2, ranks 8-11 on host 3" in by_node
    plan = on_hosts(read_plan(folder), "h1", "h1", "h1", "h2")
    script = checked(sbatch_script(Settings(folder="x", replicas=2), plan, 8))
    hosts = ["ranks 0-2 on host 1", "rank 3 on host 2", "ranks 4-6 on host 3", "rank 7 on host 4"]
    assert ", ".join(hosts) in script
    ddp = batch_script(Settings(folder=str(folder), schedule="ddp", replicas=2))
    assert asked(ddp)["ntasks"] == "2" and "--schedule ddp" in ddp


def test_unequal_hosts_are_listed_by_rank(folder: Path) -> None:
    plan = on_hosts(read_plan(folder), "h1", "h2", "h2", "h1")
    script = checked(sbatch_script(Settings(folder="x"), plan, 4))
    assert '"${hosts[0]}" "${hosts[1]}" "${hosts[1]}" "${hosts[0]}"' in script
    assert "--distribution=arbitrary" in script
    plan = on_hosts(read_plan(folder), "h1", "h1", "h1", "h2")
    script = checked(sbatch_script(Settings(folder="x"), plan, 4))
    assert asked(script)["ntasks-per-node"] == "3" and "arbitrary" in script


def test_other_numbers_of_nodes_are_asked_for_with_an_option(folder: Path) -> None:
    plan = on_hosts(read_plan(folder), "h1", "h1", "h2", "h2")
    assert asked(sbatch_script(Settings(folder="x", nodes=4), plan, 4))["nodes"] == "4"
    with pytest.raises(SettingsError, match="4 ranks cannot be divided evenly among --nodes 3"):
        sbatch_script(Settings(folder="x", nodes=3), plan, 4)
    for time in ("soon", "1:2", ""):
        with pytest.raises(SettingsError, match="is not a time limit of Slurm"):
            sbatch_script(Settings(folder="x", time_limit=time), plan, 4)


def test_the_command_repeats_all_that_was_asked_for(tmp_path: Path) -> None:
    given = Settings(
        folder="my models/x", steps=5, lr=1e-3, betas=(0.8, 0.9), quiet=True, json=True,
        data="own.py:data", nodes=2, print_sbatch=True, output="runs/a b",
    )  # fmt: skip
    assert train_command(given) == [
        "asyncpipe-train", "my models/x", "--data", "own.py:data", "--steps", "5", "--lr", "0.001",
        "--betas", "0.8", "0.9", "--output", "runs/a b", "--json",
    ]  # fmt: skip
    config = tmp_path / "config.toml"
    config.write_text(given.to_toml())
    assert "print_sbatch" not in read_config(config)


def test_the_script_in_the_document_is_the_one_that_is_printed(folder: Path) -> None:
    given = Settings(folder="generated_models/mlp_4p", steps=50, nodes=2, threads=2)
    script = sbatch_script(given, replace(read_plan(folder), name="mlp"), 4)
    document = Path(__file__).parents[3] / "docs" / "clusters.md"
    assert f"```text\n{script}```" in document.read_text()


def test_a_run_of_the_script_goes_on_in_a_folder_of_the_job(folder: Path) -> None:
    script = checked(batch_script(Settings(folder=str(folder), max_run="3h")))
    assert (
        '--max-run 3h \\\n    --resume auto --output runs/mlp4/slurm-"$SLURM_JOB_ID" ||' in script
    )
    own = batch_script(Settings(folder=str(folder), output="runs/own"))
    assert "--output runs/own \\\n    --resume auto ||" in own


def test_a_job_that_is_told_of_its_end_goes_on_when_it_is_queued_again(
    folder: Path, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    write_mlp(slow, stages=2, slow_s=0.01)
    tools = fake_slurm.install(tmp_path)
    environment = os.environ | fake_slurm.job(["localhost"], tasks_per_node=2)
    environment |= {"PATH": f"{tools}:{bin_folder()}:{os.environ['PATH']}"}

    def submitted(name: str, **more: str) -> subprocess.CompletedProcess[str]:
        settings = Settings(folder=str(slow), steps=20, micro_batches=2, threads=1, output=name)
        (tmp_path / "job.sh").write_text(batch_script(settings))
        return subprocess.run(
            ["bash", "job.sh"], cwd=tmp_path, env=environment | more, capture_output=True,
            text=True, timeout=120,
        )  # fmt: skip

    straight = submitted("straight")
    assert straight.returncode == 0, straight.stdout + straight.stderr
    ended = submitted("job", FAKE_SLURM_USR1_WHEN=str(tmp_path / "job" / "ranks" / "0.step"))
    assert ended.returncode == 143, ended.stdout + ended.stderr
    assert (tmp_path / "requeued").read_text() == environment["SLURM_JOB_ID"]
    assert [path.name[:5] for path in (tmp_path / "job" / "checkpoints").iterdir()] == ["step-"]
    again = submitted("job", SLURM_RESTART_COUNT="1")
    assert again.returncode == 0 and "step 20/20" in again.stdout, again.stdout + again.stderr
    for name in ("straight", "job"):
        assert (tmp_path / name / "weights").is_dir()
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name / "weights").iterdir()}
        for name in ("straight", "job")
    )
    assert one == two


@pytest.mark.parametrize("hosts", ["h1 h1 h2 h2", "h2 h1 h1 h1"])
def test_the_script_trains(folder: Path, tmp_path: Path, hosts: str) -> None:
    settings = Settings(folder=str(folder), steps=2, threads=1, output=str(tmp_path / "run"))
    script = tmp_path / "job.sh"
    script.write_text(sbatch_script(settings, on_hosts(read_plan(folder), *hosts.split()), 4))
    tools = fake_slurm.install(tmp_path)
    environment = os.environ | fake_slurm.job(["localhost", "localhost2"], tasks_per_node=2)
    # Both hosts are this machine: the ranks see it by its one name.
    environment |= {"PATH": f"{tools}:{bin_folder()}:{os.environ['PATH']}"}
    result = subprocess.run(
        ["bash", str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 processes by srun" in result.stdout and "step 2/2" in result.stdout
