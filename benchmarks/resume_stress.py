"""Runs that are killed repeatedly -> whether each ends bit for bit like the undisturbed run.

A chain is one run that is killed at random moments: a rank, the command or all processes together,
also while a checkpoint is written; sometimes its newest checkpoint is then damaged. Each time it is
restarted with `--resume auto`. At its end the weights, everything in the last checkpoint
(optimizers, generators, buffers, position in the data), and the loss, learning rate and gradient
norm of every step must equal those of an undisturbed run, bit by bit. The folder of a chain that
differs is kept.

    python benchmarks/resume_stress.py --resumes 300 --load 1 --keep FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from machine import write_result
from safetensors.torch import load_file

from asyncpipe.runtime.checkpoint.folders import checkpoints_in, damage_of
from asyncpipe.tests.support.faults.run_faults import FaultyRun
from asyncpipe.tests.support.models.hand_folders import write_mlp, write_text
from asyncpipe.tests.support.processes.quick_python import bin_folder

ROOT = Path(__file__).resolve().parent.parent
RESULT = Path(__file__).parent / "results" / "resume_stress.json"
REAL = Path(sys.executable).parent
DRAWING = """
import random, numpy, torch
POINTS = torch.randn(300, 16)
class Samples:
    def __len__(self):
        return 300
    def __getitem__(self, index):
        noise = torch.randn(16) + float(numpy.random.normal()) + random.random()
        return {"x": POINTS[index] + 0.1 * noise, "target": POINTS[index, :4].argmax()}
def samples():
    return Samples(), Samples()
def criterion(outputs, target):
    return torch.nn.functional.cross_entropy(outputs, target) * (1 + 0.1 * torch.rand(()))
"""
_LIMIT_S = 300


@dataclass(frozen=True)
class Kind:
    """A kind of run: how its generated folder is made, its number of processes, and its options."""

    make: Callable[[Path], Any]
    ranks: int
    options: dict[str, Any] = field(default_factory=dict)


def _mlp(stages: int) -> Callable[[Path], Any]:
    return lambda folder: write_mlp(folder, stages=stages, slow_s=0.002, noisy=True)


def _residual(folder: Path) -> None:
    shutil.copytree(ROOT / "generated_models" / "residual_mlp_2p", folder)


def _drawing(folder: Path) -> None:
    write_mlp(folder, stages=2, slow_s=0.002, noisy=True)
    (folder.parent / "drawing.py").write_text(DRAWING)


ADAMW = {"optimizer": "adamw", "lr": 0.01}
WIDE = {"micro_batch_size": 256}
"""Makes boundary tensors of more than 8 KiB, which shared memory carries in slots."""
KINDS = {
    "1f1b, 2 stages": Kind(_mlp(2), 2, ADAMW | {"eval_every": 7, "eval_batches": 3}),
    "1f1b, 2 stages, large messages": Kind(_mlp(2), 2, ADAMW | WIDE),
    "1f1b, 2 stages over gloo": Kind(_mlp(2), 2, ADAMW | {"transport": "gloo"}),
    "1f1b, 2 stages, random samples and criterion": Kind(
        _drawing, 2, ADAMW | {"data": "drawing.py:samples", "criterion": "drawing.py:criterion"}
    ),
    "1f1b, residual_mlp_2p, all threads": Kind(
        _residual, 2, {"threads": None, "steps": 120, "micro_batches": 8}
    ),
    "1f1b, tied weights": Kind(write_text, 2, {"data": "python-docs", "optimizer": "adam"}),
    "1f1b, 4 stages": Kind(_mlp(4), 4, ADAMW),
    "gpipe, 2 stages": Kind(_mlp(2), 2, {"schedule": "gpipe", "recompute": "all"}),
    "async-1f1b with stash, 2 stages": Kind(
        _mlp(2), 2, ADAMW | {"schedule": "async-1f1b", "staleness": "stash"}
    ),
    "ddp, 2 replicas": Kind(_mlp(2), 2, ADAMW | {"schedule": "ddp", "replicas": 2}),
}
KILLS = ("rank", "rank", "everything", "command", "as a checkpoint is written")
DAMAGES = ("cut", "flipped bit", "no manifest", "file is missing", "empty folder")


class Place:
    """A folder for the runs of one kind."""

    def __init__(self, base: Path, kind: Kind) -> None:
        self.base, self.kind = base, kind
        base.mkdir(parents=True)
        kind.make(base / "model")

    def run(self, name: str, scripts: Path) -> FaultyRun:
        """The command that starts or resumes the run of that name."""
        usual = {"steps": 32, "save_every": 4, "micro_batches": 4, "schedule": "1f1b"}
        given = usual | {"resume": "auto", "timeout_s": 60} | self.kind.options
        for option in ("data", "criterion"):
            if str(given.get(option, "")).startswith("drawing.py"):
                given[option] = f"{self.base}/{given[option]}"
        shutil.rmtree(self.base / name / "ranks", ignore_errors=True)  # of the last attempt
        return FaultyRun(self.base / "model", self.base / name, given, scripts=scripts)

    @property
    def steps(self) -> int:
        return int(self.kind.options.get("steps", 32))


def left_by(output: Path) -> dict[str, Any]:
    """The final state of a run: every tensor and every number that must repeat."""
    found: dict[str, Any] = {}
    newest = checkpoints_in(output)[0]
    for folder in (output / "weights", newest / "weights", newest / "state"):
        for file in sorted(folder.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                found[f"{folder.relative_to(output)}/{name}"] = tensor
    facts = json.loads((newest / "checkpoint.json").read_text())
    for name in ("step", "samples", "length", "schedule", "trainer", "evaluation"):
        found[f"checkpoint.json: {name}"] = facts[name]
    for line in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()):
        if line["event"] in ("step", "eval"):
            for name in ("loss", "lr", "grad_norm", "epoch", "accuracy"):
                if name in line:
                    found[f"{line['event']} {line['step']}: {name}"] = line[name]
    return found


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The names of all entries that differ in any bit."""
    names = sorted(found.keys() ^ expected.keys())
    for name in found.keys() & expected.keys():
        one, other = found[name], expected[name]
        if isinstance(one, torch.Tensor):
            same = one.dtype == other.dtype and one.shape == other.shape
            same = same and one.numpy().tobytes() == other.numpy().tobytes()
        else:
            same = one == other
        if not same:
            names.append(name)
    return sorted(names)


def undisturbed(place: Place, name: str, scripts: Path) -> dict[str, Any]:
    with place.run(name, scripts) as run:
        ended = run.finish(limit_s=_LIMIT_S)
    assert ended.code == 0, ended.error
    return left_by(place.base / name)


def killed(run: FaultyRun, place: Place, chance: random.Random, how: str, real: bool) -> str:
    """Kills a run that was started this way, at a random moment; returns how, or "" if the run
    ended before."""
    last = run.left.last_step()
    goal = chance.randint(max(0, last - 2), place.steps)
    with suppress(AssertionError):  # it is over
        if how == "as a checkpoint is written":
            run.wait_for_checkpoint()
        elif chance.random() < 0.15:
            time.sleep(chance.random())  # while ranks start
        else:
            run.wait_for(lambda: run.step >= goal, limit_s=_LIMIT_S)
    time.sleep(chance.choice((0.0, 0.01, 0.05)) * chance.random())
    if run.process.poll() is not None:
        return ""
    targets = [process for process in run.left.processes() if process in run.processes()]
    if how == "command" and real:
        targets = [run.process.pid]
    elif how in ("command", "everything") or not targets:
        how, targets = "everything", sorted(run.processes())
    else:
        targets = [chance.choice(targets)]
    for process in targets:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return how


def damaged(output: Path, chance: random.Random) -> str:
    """Damages the newest valid checkpoint, if there is an older one; returns how, or ""."""
    whole = [path for path in checkpoints_in(output) if not damage_of(path)]
    if len(whole) < 2:
        return ""
    newest, how = whole[0], chance.choice(DAMAGES)
    file = chance.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
    match how:
        case "cut":
            os.truncate(file, file.stat().st_size // 2)
        case "flipped bit":
            content = bytearray(file.read_bytes())
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            file.write_bytes(content)
        case "no manifest":
            (newest / "manifest.json").unlink()
        case "file is missing":
            file.unlink()
        case _:
            shutil.rmtree(newest)
            newest.mkdir()
    return how


def chain(
    place: Place,
    name: str,
    expected: dict[str, Any],
    *,
    seed: int,
    kills: int,
    scripts: Path,
) -> dict[str, Any]:
    """One run, killed at most this often: its kills, and the entries that differ."""
    chance, real = random.Random(seed), scripts == REAL
    output, done, damages = place.base / name, list[str](), list[str]()
    resumes = orphans = 0
    for attempt in range(kills + 1):
        resumes += bool(checkpoints_in(output))
        with place.run(name, scripts) as run:
            if attempt < kills and (how := killed(run, place, chance, chance.choice(KILLS), real)):
                done.append(how)
                run.process.communicate(timeout=_LIMIT_S)
                orphans += end_all(run)
            else:
                ended = run.finish(limit_s=_LIMIT_S)
                assert ended.code == 0, ended.error
        if attempt < kills and len(done) <= attempt:
            break
        if attempt < kills and chance.random() < 0.35 and (how := damaged(output, chance)):
            damages.append(how)
    different = differences(left_by(output), expected)
    return {
        "seed": seed,
        "interpreter": "its own" if real else "forked",
        "kills": done,
        "damages": damages,
        "resumes": resumes,
        "orphans": orphans,
        "different": different[:20],
    }


def end_all(run: FaultyRun, within_s: float = 2.0) -> int:
    """Waits until no process of a run is left, and kills the rest; returns the number killed."""
    end_s = time.monotonic() + within_s
    while run.processes() and time.monotonic() < end_s:
        time.sleep(0.02)
    orphans = run.processes()
    for process in orphans:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return len(orphans)


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """This number of processes, which alternately compute and sleep."""
    code = (
        "import random, time\n"
        "while True:\n"
        "    end = time.monotonic() + random.random()\n"
        "    while time.monotonic() < end: pass\n"
        "    time.sleep(random.random())\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def table_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each kind of run."""
    table = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        kills = Counter(how for row in own for how in row["kills"])
        table.append(
            {
                "run": kind,
                "chains": len(own),
                "kills": dict(sorted(kills.items())),
                "damaged checkpoints": sum(len(row["damages"]) for row in own),
                "resumes": sum(row["resumes"] for row in own),
                "processes left behind": sum(row["orphans"] for row in own),
                "chains that differ": sum(bool(row["different"]) for row in own),
            }
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--resumes", type=int, default=300)
    parser.add_argument("--kills", type=int, default=4, help="most kills of a chain")
    parser.add_argument("--load", type=int, default=1, help="processes that keep the cores busy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--forked", action="store_true", help="fork processes from this interpreter"
    )
    parser.add_argument("--only", default="", help="only kinds whose name contains this text")
    parser.add_argument("--keep", type=Path, help="place for the folders of chains that differ")
    given = parser.parse_args()
    kinds = {name: kind for name, kind in KINDS.items() if given.only in name}
    rows = known_rows()
    with tempfile.TemporaryDirectory() as folder, busy(given.load):
        places, expected = {}, {}
        for number, (name, kind) in enumerate(kinds.items()):
            places[name] = place = Place(Path(folder) / str(number), kind)
            expected[name] = undisturbed(place, "whole", bin_folder())
            again = differences(undisturbed(place, "again", REAL), expected[name])
            assert not again, f"two undisturbed runs differ: {name}: {again[:20]}"
        seed = given.seed
        while sum(row["resumes"] for row in rows) < given.resumes:
            name = list(kinds)[seed % len(kinds)]
            is_real = not given.forked and seed // len(kinds) % 4 == 0
            scripts = REAL if is_real else bin_folder()
            row = chain(
                places[name],
                f"run-{seed}",
                expected[name],
                seed=seed,
                kills=given.kills,
                scripts=scripts,
            )
            rows.append({"kind": name} | row)
            output = places[name].base / f"run-{seed}"
            if row["different"] and given.keep is not None:
                shutil.copytree(places[name].base, given.keep / f"seed-{seed}")
            shutil.rmtree(output)
            print(sum(each["resumes"] for each in rows), rows[-1], flush=True)
            command = " ".join(["python", "benchmarks/resume_stress.py", *sys.argv[1:]])
            write_result("resume_stress", {"command": command} | figures_of(rows))
            seed += 1
    for line in table_of(rows):
        print(line)


def known_rows() -> list[dict[str, Any]]:
    """The rows of an earlier call, which this one continues."""
    return json.loads(RESULT.read_text())["rows"] if RESULT.is_file() else []


def figures_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole result: sums, a table by kind, and every chain."""
    return {
        "resumes": sum(row["resumes"] for row in rows),
        "chains": len(rows),
        "chains that differ": sum(bool(row["different"]) for row in rows),
        "table": table_of(rows),
        "rows": rows,
    }


if __name__ == "__main__":
    main()
