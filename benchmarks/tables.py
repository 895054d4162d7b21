"""Writes six tables of docs/benchmarks.md from the committed results: throughput, the schedules
that torch has too, `auto`, compiled stages, predictions, and the time before the first step.

python benchmarks/tables.py
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- made by benchmarks/tables.py -->\n", "<!-- end -->\n"
MODELS = {"GPT": "gpt", "Llama": "llama", "T5": "t5", "ResNet": "resnet", "ViT": "vit"}
ROWS = {
    "ceiling: independent copies": "two independent copies",
    "async-1f1b, stash, as far ahead as by default": "`async-1f1b`",
    "async-1f1b, stash": "`async-1f1b --ahead 1x`",
    "auto, 2 a rank": "`auto`, 2 stages per rank",
    "auto, 4 a rank": "`auto`, 4 stages per rank",
    "interleaved, 2 a rank": "`interleaved`, 2 stages per rank",
    "interleaved, 4 a rank": "`interleaved`, 4 stages per rank",
    "torch Interleaved1F1B": "torch's Interleaved1F1B",
    "zb-v": "`zb-v`, 2 stages per rank",
    "torch ZBVZeroBubble": "torch's ZBVZeroBubble",
    "1f1b": "`1f1b`",
    "torch 1F1B": "torch's 1F1B",
    "gpipe": "`gpipe`",
    "torch GPipe": "torch's GPipe",
    "DDP": "torch's DDP",
}
NAMES = {
    "bert-base-uncased": "bert-base",
    "gpt.py:build": "GPT",
    "llama.py:build": "Llama",
    "t5.py:build": "T5",
    "images.py:resnet": "ResNet",
    "images.py:vit": "ViT",
}


def shares_of(family: str, label: str) -> Mapping[str, float]:
    """The rate of each configuration of a model as a share of the independent copies'."""
    file = HERE / "results" / f"runtime_{family}-m8_{label}.json"
    table = json.loads(file.read_text())["table"]
    return {entry["configuration"]: entry["of_ceiling"] for entry in table}


def throughput(label: str) -> str:
    """The table of the results with a label for all models, with geometric means."""
    shares = {model: shares_of(family, label) for model, family in MODELS.items()}
    lines = [f"| | {' | '.join(MODELS)} | mean |", f"|---|{'--:|' * (len(MODELS) + 1)}"]
    for name, label in ROWS.items():
        own = [of_model[name] for of_model in shares.values() if name in of_model]
        if len(own) == len(MODELS):
            numbers = [f"{share:.1%}" for share in (*own, geometric_mean(own))]
            lines.append(f"| {label} | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def auto_schedules() -> str:
    """The table of `auto` and the named schedules on the same stages."""
    lines = [
        "| | ranks | stages per rank | `auto` of the best named | the best named | of the worst |",
        "|---|--:|--:|--:|---|--:|",
    ]
    results = json.loads((HERE / "results" / "auto_schedule.json").read_text())["models"]
    for label in MODELS:
        for ranks in (2, 4):
            of_model = results.get(f"{label.lower()}, {ranks} ranks")
            for each in (1, 2) if of_model else ():
                rates = _of_each(of_model["samples_per_s"], each)
                auto = rates.pop("auto")
                best, worst = (pick(rates, key=rates.__getitem__) for pick in (max, min))
                shares = f"{auto / rates[best]:.1%} | `{best}` | {auto / rates[worst]:.1%}"
                lines.append(f"| {label} | {ranks} | {each} | {shares} |")
    return "\n".join(lines) + "\n"


def _of_each(rates: Mapping[str, float], each: int) -> dict[str, float]:
    """The rates of the schedules with so many stages a rank, by name."""
    end = f", {each} a rank"
    return {name.removesuffix(end): rate for name, rate in rates.items() if name.endswith(end)}


def compiled() -> str:
    """The table of stages with `--compile`: steps and losses beside plain ones, and starts."""
    lines = [
        "| | compiled step of plain step | losses differ by | partition | first step, empty cache "
        "| full cache | compiled whole model, empty cache |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    table = json.loads((HERE / "results" / "compiled.json").read_text())["table"]
    for model, row in table.items():
        first, *later = (run["first_step_s"] for run in row["runs"]["compiled"])
        whole_s = row["first_step_of_compiled_model_s"]
        seconds = (row["partition_s"], first, median(later), whole_s)
        difference = f"{row['largest_relative_difference_of_losses']:.0e}"
        cells = (f"{row['ratio']:.2f}", difference, *(f"{each:.1f} s" for each in seconds))
        lines.append(f"| {NAMES.get(model, model)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def predictions() -> str:
    """The table of predicted / measured - 1, for plans of two and of four stages."""
    lines = [
        "| | 2 stages: stages | step | memory | 4 stages: stages | step | memory |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    results = json.loads((HERE / "results" / "prediction.json").read_text())["rows"]
    rows = {(row["model"], row["stages"]): row for row in results}
    for model in dict.fromkeys(model for model, _ in rows):
        cells = [
            cell
            for row in (rows[model, 2], rows[model, 4])
            for cell in (
                _range_of(row["stage_ms"]),
                f"{row['step_ms']['error']:+.1%}",
                _range_of(row["peak_mib"]),
            )
        ]
        lines.append(f"| {NAMES.get(model, model)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _range_of(figures: Sequence[Mapping[str, float]]) -> str:
    errors = [figure["error"] for figure in figures]
    return f"{min(errors):+.0%} to {max(errors):+.0%}"


def start_times() -> str:
    """The table of the seconds of each phase before the first step, beside a former version's."""
    result = json.loads((HERE / "results" / "start_times.json").read_text())
    table, former = result["median_seconds"], result["former_median_seconds"]
    phases = list(dict.fromkeys(phase for row in table.values() for phase in row))
    lines = [f"| | former | ratio | {' | '.join(phases)} |", f"|---|{'--:|' * (len(phases) + 2)}"]
    for name, row in table.items():
        before_s = former[name]["total"]
        cells = [f"{before_s:.1f}", f"{row['total'] / before_s:.2f}"]
        cells += [f"{row[phase]:.1f}" if phase in row else "" for phase in phases]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with the tables of the present results."""
    first, *rest = page.split(BEGIN)
    after = (part.partition(END)[2] for part in rest)
    tables = (
        *(throughput("models"), throughput("named")),
        *(auto_schedules(), compiled(), predictions(), start_times()),
    )
    made = zip(tables, after, strict=True)
    return first + "".join(f"{BEGIN}\n{table}\n{END}{text}" for table, text in made)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
