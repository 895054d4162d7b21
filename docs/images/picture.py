"""A report.html -> one SVG that stands alone: the stages, and a step of two schedules.

asyncpipe-partition --model gpt2 --stages 4 --seq 64 --micro-batch-size 1
python docs/images/picture.py generated_models/gpt2_4p > docs/images/gpt2_4p.svg
"""

import re
import sys
from pathlib import Path

HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1060 {height}">
<!-- Drawn from report.html of a generated folder by docs/images/picture.py. -->
<style>
svg {{ --ink: #1b2330; --soft: #5b6676; --back: #fff; --card: #f5f7fa; --forward: #0072b2;
  --on-forward: #fff; --step: #009e73; --tied: #a3487f; --idle: #e3e7ee; }}
@media (prefers-color-scheme: dark) {{ svg {{ --ink: #e7eaf0; --soft: #a3adbb; --back: #11151b;
  --card: #1a2029; --forward: #3d9fd8; --on-forward: #04131d; --step: #2fbf93; --tied: #e19cc4;
  --idle: #262e3a; }} }}
text {{ fill: var(--ink); font: 12px system-ui, "DejaVu Sans", sans-serif; }}
.m {{ text-anchor: middle; }} .e {{ text-anchor: end; }}
.soft {{ fill: var(--soft); font-size: 11px; }}
.strong {{ font-weight: 700; }} .box {{ fill: var(--card); stroke: var(--soft); }}
.box.slowest {{ stroke: var(--ink); stroke-width: 3.5; }}
.next, .skip, .tied {{ fill: none; stroke: var(--soft); stroke-width: 1.6; }}
.skip {{ stroke-dasharray: 5 3; }} .tied {{ stroke: var(--tied); stroke-dasharray: 2 3; }}
text.halo {{ paint-order: stroke; stroke: var(--back); stroke-width: 4px; font-size: 11px; }}
.lane {{ fill: var(--idle); }} .F {{ fill: var(--forward); }} .B {{ fill: url(#striped); }}
.S {{ fill: var(--step); }} .F, .B {{ stroke: var(--back); stroke-width: .8; }}
text.on-F, text.on-B {{ font-size: 11px; text-anchor: middle; font-weight: 600; stroke: none; }}
text.on-F {{ fill: var(--on-forward); }} text.on-B {{ fill: #1b1200; }}
</style>
<defs><pattern id="striped" width="6" height="6" patternUnits="userSpaceOnUse"
  patternTransform="rotate(45)"><rect width="6" height="6" fill="#e69f00"/>
  <rect width="1.6" height="6" fill="#cf8f00"/></pattern></defs>
<rect width="1060" height="{height}" fill="var(--back)"/>
"""
MARGIN = 16
DRAWING = re.compile(
    r'<svg viewBox="0 0 (\d+) (\d+)"[^>]*aria-label="([^"]*)">\n?(.*?)</svg>', re.DOTALL
)


def drawings(page: str) -> list[tuple[int, int, str, str]]:
    """Width, height, caption and shapes of the stages and of the schedules 1f1b and async-1f1b."""
    graph = DRAWING.search(page)
    assert graph is not None, "this page has no drawing of stages"
    shapes = [(graph, "Stages and the bytes of one micro-batch between them")]
    for schedule in ("1f1b", "async-1f1b"):
        gantt = DRAWING.search(page, page.index(f'id="panel-{schedule}"'))
        assert gantt is not None, f"this page has no drawing of {schedule}"
        shapes.append((gantt, gantt[3].split(". ")[0].rstrip(".")))
    return [
        (int(match[1]), int(match[2]), caption, re.sub(r"<title>.*?</title>", "", match[4]))
        for match, caption in shapes
    ]


def picture(page: str) -> str:
    """The drawings one below the other, each under its caption."""
    parts = []
    y = MARGIN
    for width, height, caption, shapes in drawings(page):
        shown = min(1060, width * 1.1)
        tall = round(height * shown / width)
        left = (1060 - shown) / 2
        parts.append(f'<text class="soft" x="4" y="{y}">{caption}</text>')
        box = f'x="{left:g}" y="{y + 8}" width="{shown:g}" height="{tall}"'
        parts.append(f'<svg {box} viewBox="0 0 {width} {height}">\n{shapes}</svg>')
        y += tall + 8 + 2 * MARGIN
    return HEAD.format(height=y - MARGIN) + "\n".join(parts) + "\n</svg>\n"


if __name__ == "__main__":
    sys.stdout.write(picture((Path(sys.argv[1]) / "report.html").read_text(encoding="utf-8")))
