"""The figures of a GPU report -> a page in Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_ASIDE = ("row", "cause", "skipped")


def page_of(report: Mapping[str, Any]) -> str:
    """The page: the machine, what failed and how to repeat it, and a table for each part."""
    parts: Mapping[str, Any] = report["parts"]
    lines = ["# GPU report", "", _described(report), "", *_summary(parts), ""]
    failures = failures_of(report)
    lines += ["## Failures", ""]
    if not failures:
        lines += ["None.", ""]
    for failure in failures:
        place = ", ".join(filter(None, (failure["part"], failure["row"])))
        lines += [
            f"- **{place}**: {failure['cause']}",
            f"  Again: `{failure['command']}`; log: `{failure['log']}`",
        ]
    for name, part in parts.items():
        lines += ["", f"## {name}", "", part["about"], ""]
        lines += _table(part["rows"])
    return "\n".join(lines) + "\n"


def failures_of(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """Each failure: its part and row, the first cause, the command that repeats it, its log."""
    return [
        {
            "part": name,
            "row": row,
            "cause": cause,
            "command": part["command"],
            "log": part["log"],
        }
        for name, part in report["parts"].items()
        for row, cause in [
            *((row["row"], row["cause"]) for row in part["rows"] if "cause" in row),
            *([("", part["cause"])] if part["cause"] else []),
        ]
    ]


def _described(report: Mapping[str, Any]) -> str:
    machine, setting = report["machine"], report["setting"]
    where = f"{setting['gpus']} x {machine['gpu']} ({setting['gib']:g} GiB)"
    if setting["device"] == "cpu":
        where = "A dry run on the CPU, whose times say nothing"
    return (
        f"{where}; {machine['processor']}, {machine['cores']} cores; Python {machine['python']}, "
        f"torch {machine['torch']}. {report['seconds']:.0f} s."
    )


def _summary(parts: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, part in parts.items():
        counts = {
            "passed": sum(1 for row in part["rows"] if not {"cause", "skipped"} & row.keys()),
            "failed": sum(1 for row in part["rows"] if "cause" in row) + bool(part["cause"]),
            "cannot run here": sum(1 for row in part["rows"] if "skipped" in row),
        }
        said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        rows.append((name, said or "nothing", f"{part['seconds']:.0f}"))
    return _lines(("part", "rows", "seconds"), rows)


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row if name not in _ASIDE))
    cells = []
    for row in rows:
        note = f"failed: {row['cause']}" if "cause" in row else row.get("skipped", "")
        cells.append((row["row"], *(_cell(row.get(name)) for name in names), note))
    return _lines(("", *(name.replace("_", " ") for name in names), "note"), cells) if rows else []


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return "; ".join(map(_cell, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        for row in (head, ["---"] * len(head), *rows)
    ]
