"""Records of a run -> its title, how it ended, and its numbers in short."""

from __future__ import annotations

import json
import math

from .measures import idle_shares, rate_field, rate_of, step_times
from .records import RunRecords, number, part

UNITS = {"tok_per_s": "tokens/s", "samples_per_s": "samples/s"}


def title_of(run: RunRecords) -> str:
    """The run's own folder and the one that it is in, as `gpt2_4p/3`."""
    return "/".join(run.folder.resolve().parts[-2:])


def status_of(run: RunRecords) -> str:
    """How the run ended, as far as its records know."""
    if run.end:
        return f"✓ {run.last_step} steps"
    asked = number(run.config, "steps")
    of = f" of {asked:g}" if math.isfinite(asked) else ""
    how = "ended after" if run.failure else "not at its end:"
    return f"{how} step {run.last_step}{of}"


def last(run: RunRecords, name: str) -> float:
    """A field of the last recorded step."""
    return number(run.steps[-1], name) if run.steps else math.nan


def last_evaluation(run: RunRecords, name: str = "loss") -> float:
    """A field of the last evaluation."""
    return number(run.evals[-1], name) if run.evals else math.nan


def to_json(run: RunRecords) -> str:
    """The numbers of a run as text."""
    return json.dumps(summary_of(run), indent=1, default=str)


def summary_of(run: RunRecords) -> dict[str, object]:
    """The numbers of a run, for other programs; what is not known is left out."""
    step, idle = step_times(run), idle_shares(run)
    found = {
        "last_loss": last(run, "loss"),
        "eval_loss": last_evaluation(run),
        "seconds": last(run, "elapsed_s"),
        rate_field(run) or "rate": rate_of(run),
        "epoch": last(run, "epoch"),
        "step_ms": step.measured,
        "predicted_step_ms": step.predicted,
        "idle_share": idle.measured,
        "predicted_idle_share": idle.predicted,
        "mem_bytes": last(run, "mem_bytes"),
    }
    return {
        "run": str(run.folder),
        "status": status_of(run),
        "failure": run.failure,
        "last_step": run.last_step,
        **{name: value for name, value in found.items() if math.isfinite(value)},
        "versions": versions_of(run),
        "config": dict(run.config),
    }


def versions_of(run: RunRecords) -> dict[str, str]:
    """Packages and their versions, as the run's start tells them."""
    versions = part(part(run.start, "environment"), "versions")
    return {str(name): str(version) for name, version in versions.items()}
