"""The page that follows runs, in headless Chromium: runs that go on, stall and are killed, and two
compared.

Trains residual_mlp in two stages, checks what the page shows in each case, and writes pictures at
three widths. Stops with an error if the page shows something else, or if a script of it fails.

    python benchmarks/watch_pages.py [FOLDER_OF_PICTURES]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from browser import Browser

ROOT = Path(__file__).parent.parent
COMMANDS = Path(sys.executable).parent
MODEL = ROOT / "generated_models" / "residual_mlp_2p"
DATA = f"{ROOT / 'examples' / 'residual_mlp.py'}:data"
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


def train(folder: Path, name: str, *more: str, data: str = DATA) -> subprocess.Popen[str]:
    """Starts a run in the folder `name`."""
    return subprocess.Popen(
        [
            *(COMMANDS / "asyncpipe-train", MODEL, "--data", data, "--output", name),
            *(
                "--threads",
                "1",
                "--micro-batches",
                "2",
                "--micro-batch-size",
                "64",
                "--trust",
                *more,
            ),
        ],
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


def shoot(browser: Browser, pictures: Path, name: str, top: str = "body") -> None:
    """Writes a picture of each width, light, and dark at the narrowest."""
    for width in (360, 1280, 1920):
        browser.look(width, 1100, dark=width == 360)
        browser.value(f"document.querySelector('{top}').scrollIntoView()")
        time.sleep(0.3)
        assert browser.value("document.documentElement.scrollWidth") <= width
        browser.shoot(pictures / f"{name}-{width}.webp", quality=50)
    browser.look(1280)


def follow(browser: Browser, folder: Path, pictures: Path) -> None:
    """A run that goes on: its curve grows, without the page being loaded again."""
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
    shoot(browser, pictures, "live")
    zoom(browser)
    run.communicate()
    assert run.returncode == 0
    browser.wait(f"{STATUS} === '✓ 300 steps'")
    assert "measured above predicted" in browser.value(
        "document.querySelector('#part-step h2').textContent"
    )
    assert browser.value("window.isSame")
    browser.wait("document.querySelector('.hint button').hidden")
    shoot(browser, pictures, "step", "#part-step")
    zoom(browser)
    print(f"going on: a new point after {seconds:.1f} s")


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


def stall(browser: Browser, folder: Path, pictures: Path) -> None:
    """A run whose data loader hangs: the page says which ranks hold it up, until it goes on."""
    run = train(folder, "stalled", "--steps", "4000", "--stall-s", "8", "--watch", data=SLOWED)
    browser.open(address_in(run))
    browser.wait(f"{STATUS}.startsWith('running: step')")
    (folder / "stop").touch()
    browser.wait(f"{STATUS}.startsWith('stalled')")
    why = browser.value("document.querySelector('.stall').textContent")
    assert "No progress for" in why and "reads the data" in why, why
    shoot(browser, pictures, "stalled")
    (folder / "stop").unlink()
    browser.wait(f"{STATUS}.startsWith('running: step')")
    print(f"stalled: {why}")
    kill(browser, run, pictures)


def kill(browser: Browser, run: subprocess.Popen[str], pictures: Path) -> None:
    """A run that is killed: the page says so, and stays."""
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    seconds = browser.wait(f"{STATUS}.startsWith('killed after step')")
    why = browser.value("document.querySelector('.stall').textContent")
    assert "was killed after step" in why, why
    shoot(browser, pictures, "killed")
    print(f"killed: shown after {seconds:.1f} s")


def compare(browser: Browser, folder: Path, pictures: Path) -> None:
    """Two runs, of which one goes on."""
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
        shoot(browser, pictures, "compared")
        browser.open(f"{address}1/")
        assert browser.value(STATUS) == "✓ 200 steps"
    browser.wait("document.getElementById('connection').textContent.startsWith('not connected')")
    print("compared: two curves")


SLOWED = "slow.py:data"


def main() -> None:
    pictures = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, Browser() as browser:
        folder = Path(name) / "runs"
        folder.mkdir()
        file = str(ROOT / "examples" / "residual_mlp.py")
        (folder / "slow.py").write_text(SLOW.format(file=file))
        browser.look(1280)
        for case in (follow, stall, compare):
            case(browser, folder, pictures)
    print(f"pictures: {pictures}")


if __name__ == "__main__":
    main()
