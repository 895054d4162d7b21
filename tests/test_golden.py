"""The committed folder is what its own command makes, byte for byte."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from safetensors.torch import load_file
from torch.testing import assert_close

from asyncpipe.tests.support.processes.quick_python import bin_folder

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "generated_models" / "residual_mlp_2p"


def files(folder: Path) -> dict[str, Path]:
    return {
        str(path.relative_to(folder)): path
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_command_of_the_committed_folder_makes_it_again(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command, *arguments = shlex.split(json.loads((GOLDEN / "plan.json").read_text())["command"])
    subprocess.run([bin_folder() / command, *arguments], cwd=tmp_path, check=True, timeout=120)
    made = files(tmp_path / "generated_models" / GOLDEN.name)
    if os.environ.get("ASYNCPIPE_UPDATE_GOLDEN"):
        shutil.rmtree(GOLDEN)
        shutil.copytree(tmp_path / "generated_models" / GOLDEN.name, GOLDEN)
    assert made.keys() == files(GOLDEN).keys()
    for name, path in files(GOLDEN).items():
        if path.suffix == ".safetensors":
            assert_close(load_file(made[name]), load_file(path), rtol=1e-6, atol=1e-6)
        else:
            assert made[name].read_text() == path.read_text(), name
