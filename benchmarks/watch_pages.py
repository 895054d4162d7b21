"""The page that follows runs, in headless Chromium: a run that continues, one that stalls, one that
is killed, and two compared; then the reports of a plan, a run and a comparison.

Trains residual_mlp in two stages, checks what the pages show in each case, and stops with an error
if a page shows something else, is wider than its window, or has a script that fails. Writes the
seconds until the page shows each change to benchmarks/results/watch_pages.json, and the pictures of
docs/images/pages, each at three widths.

    python benchmarks/watch_pages.py
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from browser import Browser
from machine import write_result

from asyncpipe.partitioner.report import render_report
from asyncpipe.runtime.plan.plan import read_plan

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "images" / "pages"
GPT2 = ROOT / "docs" / "images" / "gpt2_4p"
COMMANDS = Path(sys.executable).parent
MODEL = ROOT / "generated_models" / "residual_mlp_2p"
DATA = "examples/residual_mlp.py:data"
SLOW = """
import importlib.util, pathlib, time
spec = importlib.util.spec_from_file_location("made", {file!r})
made = importlib.util.module_from_spec(spec)
spec.loader.exec_module(made)

class Slow:
    def __init__(self, samples):
        self.samples = samples
    def __len__(self):
        return len(self.samples["x"])
    def __getitem__(self, index):
        while pathlib.Path("stop").exists():
            time.sleep(0.05)
        time.sleep(0.0002)
        return {{name: values[index] for name, values in self.samples.items()}}

def data():
    train, evaluation = made.data()
    return Slow(train), evaluation
"""
STATUS = "document.querySelector('.status').textContent"
LOSS = "document.querySelector('#part-curves .curve0 path')?.getAttribute('d')"


def train(
    folder: Path, name: str, *more: str, data: str = DATA, size: int = 64
) -> subprocess.Popen[str]:
    """Starts a run in the folder `name`."""
    options = f"--threads 1 --micro-batches 2 --micro-batch-size {size} --trust".split()
    return subprocess.Popen(
        [COMMANDS / "asyncpipe-train", MODEL, "--data", data, "--output", name, *options, *more],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def address_in(run: subprocess.Popen[str]) -> str:
    """The address that --watch prints."""
    assert run.stdout is not None
    for line in run.stdout:
        if "http://127.0.0.1" in line:
            return line.split()[-1]
    raise RuntimeError("the run has printed no address")


@contextmanager
def viewing(folder: Path, *runs: str) -> Iterator[str]:
    """The address of asyncpipe-view while it serves runs."""
    command = [COMMANDS / "asyncpipe-view", *runs]
    view = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    assert view.stdout is not None
    try:
        yield view.stdout.readline().strip()
    finally:
        view.send_signal(signal.SIGINT)
        assert view.wait() == 0


def shoot(browser: Browser, name: str = "") -> None:
    """Checks that the page fits widths of 360 to 1920; with a name, writes a picture of three of
    them, light, and dark at the narrowest."""
    for width in (360, 768, 1280, 1920):
        browser.look(width, 1100, dark=width == 360)
        time.sleep(0.3)
        assert browser.value("document.documentElement.scrollWidth") <= width
        if name and width != 768:
            browser.shoot(PICTURES / f"{name}-{width}.webp", quality=50)
    browser.look(1280)


def follow(browser: Browser, folder: Path) -> dict[str, float]:
    """A run that continues: its curve grows, without the page being loaded again."""
    run = train(
        folder, "live", "--steps", "300", "--watch", "--schedule", "async-1f1b", data=SLOWED
    )
    browser.open(address_in(run))
    browser.wait("document.getElementById('connection').textContent === 'live'")
    browser.wait(f"{STATUS}.startsWith('running: step')")
    browser.value("window.isSame = true")
    before = browser.value(LOSS)
    seconds = browser.wait(f"{LOSS} !== {json.dumps(before)}")
    browser.wait("document.querySelectorAll('#part-ranks tbody tr').length === 2")
    browser.value("document.querySelector('#part-curves [data-curve]').click()")
    browser.wait(f"{LOSS} !== '' && Number({STATUS}.match(/step (\\d+)/)[1]) > 20")
    assert browser.value("document.querySelector('#part-curves .curve0').matches('.off')")
    browser.value("document.querySelector('#part-curves [data-curve]').click()")
    shoot(browser)
    zoom(browser)
    point(browser)
    run.communicate()
    assert run.returncode == 0
    browser.wait(f"{STATUS} === '✓ 300 steps'")
    assert "measured above predicted" in browser.value(
        "document.querySelector('#part-step h2').textContent"
    )
    assert browser.value("window.isSame")
    browser.wait("document.querySelector('.hint button').hidden")
    shoot(browser)
    zoom(browser)
    return {"new_point_s": seconds}


def zoom(browser: Browser) -> None:
    """Drags over the step: actions become wider, and the crosshair is in all drawings."""
    width = "document.querySelector('#part-step .moves rect').getAttribute('width')"
    browser.value("document.querySelector('#part-step .timed').scrollIntoView({block: 'center'})")
    box = "document.querySelector('#part-step .timed').getBoundingClientRect()"
    left, top, wide = (browser.value(f"{box}.{name}") for name in ("left", "top", "width"))
    before = float(browser.value(width))
    browser.move(left + wide * 0.2, top + 9, "mousePressed", 1)
    browser.move(left + wide * 0.4, top + 9, "mouseMoved", 1)
    browser.move(left + wide * 0.4, top + 9, "mouseReleased")
    browser.move(left + wide * 0.3, top + 9)
    assert float(browser.value(width)) > 1.5 * before
    drawings = browser.value("document.querySelectorAll('#part-step svg.timed').length")
    assert browser.value("document.querySelectorAll('#part-step .crosshair').length") == drawings
    assert "ms" in browser.value("document.querySelector('.hover').textContent")


def point(browser: Browser) -> None:
    """Points at a module: the page shows its times and its source line."""
    browser.value("document.querySelector('#part-cut svg').scrollIntoView({block: 'center'})")
    box = "document.querySelectorAll('#part-cut .module')[1].getBoundingClientRect()"
    left, top = (browser.value(f"{box}.{name}") for name in ("left", "top"))
    browser.move(left + 4, top + 9)
    hover = browser.value("document.querySelector('.hover').textContent")
    assert "forward" in hover and "residual_mlp.py:" in hover, hover


def stall(browser: Browser, folder: Path) -> dict[str, float]:
    """A run whose data loader hangs: the page says which ranks hold it up, until it continues."""
    run = train(folder, "stalled", "--steps", "4000", "--stall-s", "8", "--watch", data=SLOWED)
    browser.open(address_in(run))
    browser.wait(f"{STATUS}.startsWith('running: step')")
    (folder / "stop").touch()
    browser.wait(f"{STATUS}.startsWith('stalled')")
    why = browser.value("document.querySelector('.stall').textContent")
    assert "No progress for" in why and "reads the data" in why, why
    shoot(browser, "watch")
    (folder / "stop").unlink()
    browser.wait(f"{STATUS}.startsWith('running: step')")
    return kill(browser, run)


def kill(browser: Browser, run: subprocess.Popen[str]) -> dict[str, float]:
    """A run that is killed: the page says so, and stays."""
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    seconds = browser.wait(f"{STATUS}.startsWith('killed after step')")
    why = browser.value("document.querySelector('.stall').textContent")
    assert "was killed after step" in why, why
    shoot(browser)
    return {"killed_s": seconds}


def compare(browser: Browser, folder: Path) -> dict[str, float]:
    """Two runs, of which one continues."""
    run = train(folder, "second", "--steps", "200", "--lr", "0.02", data=SLOWED)
    while not (folder / "second" / "metrics.jsonl").is_file():
        time.sleep(0.1)
    with viewing(folder, "live", "second") as address:
        browser.open(address)
        browser.wait("document.getElementById('connection').textContent === 'live'")
        browser.wait("document.querySelectorAll('#part-compared .curve1').length > 0")
        states = "[...document.querySelectorAll('#part-runs dd')].map((one) => one.textContent)"
        first, second = browser.value(states)
        assert first == "✓ 300 steps" and second.startswith("running: step"), (first, second)
        run.communicate()
        browser.wait(f"{states}[1] === '✓ 200 steps'")
        shoot(browser)
        browser.open(f"{address}1/")
        assert browser.value(STATUS) == "✓ 200 steps"
    ended = "document.getElementById('connection').textContent.startsWith('disconnected')"
    return {"end_of_view_s": browser.wait(ended)}


def reports(browser: Browser, folder: Path) -> dict[str, float]:
    """The reports of a plan, of a run and of a comparison, which are files."""
    (folder / "plan.html").write_text(render_report(read_plan(GPT2), {}))
    longer = ("--steps", "60", "--eval-every", "20", "--log-every", "4")
    for name, schedule in (("1f1b", "1f1b"), ("stash", "async-1f1b")):
        run = train(folder, name, *longer, "--schedule", schedule, size=512)
        output, _ = run.communicate()
        assert run.returncode == 0, output
    compared = [COMMANDS / "asyncpipe-train", "report", "1f1b", "stash"]
    subprocess.run(compared, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    pages = {"plan": "plan.html", "run": "stash/report.html", "comparison": "comparison.html"}
    for name, page in pages.items():
        browser.open((folder / page).as_uri())
        shoot(browser, name)
    return {}


SLOWED = "slow.py:data"


def main() -> None:
    shutil.rmtree(PICTURES, ignore_errors=True)
    PICTURES.mkdir(parents=True)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name, Browser() as browser:
        folder = Path(name) / "runs"
        folder.mkdir()
        (folder / "examples").symlink_to(ROOT / "examples")
        file = str(ROOT / "examples" / "residual_mlp.py")
        (folder / "slow.py").write_text(SLOW.format(file=file))
        browser.look(1280)
        for case in (follow, stall, compare, reports):
            figures |= case(browser, folder)
            print(f"{case.__name__}: passed", flush=True)
    passed = ["continues", "stalls", "is killed", "two compared", "reports"]
    write_result("watch_pages", {"passed": passed, **figures})


if __name__ == "__main__":
    main()
