"""The root is the package: its list of packages equals the disk, and its wheel works elsewhere."""

import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCE_FOLDERS = ("commands", "partitioner", "runtime", "templates")


def packages_on_disk() -> set[str]:
    folders = {
        path.parent.relative_to(ROOT)
        for name in SOURCE_FOLDERS
        for path in (ROOT / name).rglob("*.py")
    }
    return {"asyncpipe"} | {".".join(("asyncpipe", *folder.parts)) for folder in folders}


def test_the_package_list_equals_the_disk() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_only_init_and_the_entry_points_lie_at_the_root() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "cli.py"}


def test_the_version_is_told_once() -> None:
    import asyncpipe

    assert asyncpipe.__version__ == PROJECT["project"]["version"]


def test_a_wheel_installed_elsewhere_runs_both_commands(tmp_path: Path) -> None:
    source = tmp_path / "source"  # building writes beside the sources
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "runs")
    )
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(source)], check=True, capture_output=True, timeout=200)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (path for name in SOURCE_FOLDERS for path in (ROOT / name).rglob("*.py")):
        assert f"asyncpipe/{path.relative_to(ROOT)}" in names
    for path in (ROOT / "templates").glob("*.j2"):
        assert f"asyncpipe/templates/{path.name}" in names
    for path in (ROOT / "partitioner" / "profile" / "devices").glob("*.toml"):
        assert f"asyncpipe/partitioner/profile/devices/{path.name}" in names
    assert not [name for name in names if name.split("/")[1] in {"tests", "generated_models"}]

    home = tmp_path / "elsewhere"
    venv.create(home, system_site_packages=False, with_pip=False, symlinks=True)
    site = next((home / "lib").glob("python*")) / "site-packages"
    # Dependencies come from the running environment, asyncpipe from the wheel alone.
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(dependencies))
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install"]
    subprocess.run([*pip, "-q", "--no-deps", "--no-index", str(wheel)], check=True, timeout=200)

    def run(*command: str) -> str:
        result = subprocess.run(
            [home / "bin" / command[0], *command[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert result.returncode == 0, result.stderr + result.stdout
        return result.stdout

    where = run("python", "-c", "import asyncpipe; print(asyncpipe.__file__)")
    assert where.startswith(str(home))
    small = ["--model", "mlp", "--stages", "2", "--model-arg", "dim_in=32"]
    run("asyncpipe-partition", *small, "--output", "made")
    train = ["made", "--steps", "3", "--data", "clusters", "--micro-batches", "2"]
    assert "3 steps" in run("asyncpipe-train", *train)
