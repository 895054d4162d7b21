"""The options of a partition -> the model and its graph."""

from __future__ import annotations

import time

from ..runtime.formatting import write_large_count
from .capture import Capture
from .capture import capture as capture_model
from .models.load import ModelSource, load_model
from .output import OnPhase
from .planning.options import PartitionOptions


def load(spec: str, options: PartitionOptions, on_phase: OnPhase | None) -> ModelSource:
    """Builds the model that `spec` names, the first phase."""
    start = time.perf_counter()
    source = load_model(
        spec,
        model_args=options.model_args,
        micro_batch_size=options.micro_batch_size,
        seq=options.seq,
        seed=options.seed,
        meta=options.meta,
        pretrained=options.pretrained,
        inputs=options.inputs,
    )
    if on_phase:
        number = sum(parameter.numel() for parameter in source.model.parameters())
        detail = f"{spec} · {write_large_count(number)} parameters · weights: {source.weights}"
        on_phase("load", detail, time.perf_counter() - start, "capture")
    return source


def capture_source(source: ModelSource, options: PartitionOptions) -> Capture:
    """The graph of the model, not yet compared with it: `verify` compares more."""
    return capture_model(
        source.model,
        source.example_inputs,
        batch_dim=options.batch_dim,
        sequence_dim=options.sequence_dim,
        leaves=options.leaves,
        check=False,
        method=options.capture,
        mode=options.mode,
    )
