"""asyncpipe-train predict and export: uses of trained weights."""

from __future__ import annotations

import json as jsons
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from ..runtime.formatting import counted, write_bytes
from ..runtime.limits import Text, Whole, path
from .console import make_console, print_text
from .options import limited, unwrapped

_SOURCE = path("runs/gpt2_4p/1")
_FOLDER = path("generated_models/gpt2_4p")


@unwrapped
def predict_command(
    run: Annotated[Path, limited(_SOURCE, "run")],
    /,
    *,
    data: Annotated[str | None, limited(Text("data", "my_file.py:data"), "data")] = None,
    split: Literal["train", "evaluation"] | None = None,
    batch_size: Annotated[int | None, limited(Whole(1, 2**24, 64), "batch_size")] = None,
    output: Annotated[Path, limited(path("predictions.safetensors"), "output")] = Path(
        "predictions.safetensors"
    ),
    folder: Annotated[Path | None, limited(_FOLDER, "folder")] = None,
    force: Annotated[bool, Parameter(negative=())] = False,
    trust: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False,
) -> int:
    """Write a trained model's outputs for all samples of data, in their order.

    Runs the stages forward in a process each, in evaluation mode. Samples need no target.

    Parameters
    ----------
    run
        Run, checkpoint, folder of Pipeline.save, or generated folder with weights.
    data
        Samples, as my_file.py:function, digits or clusters. [default: the data of the run]
    split
        Part of the data. [default: evaluation if the data has such a part, else train]
    batch_size
        Samples of a batch. [default: a micro-batch of the plan for each stage]
    output
        Safetensors file to write; its tensors have the names of the model's outputs. [default:
        predictions.safetensors]
    folder
        Generated folder of the model. [default: the one that the run names]
    force
        Replace an output file that exists.
    trust
        Run code of the generated folder and of the run's data that was not made or named here.
    json
        Print what was written as one line of JSON.
    verbose
        Show the traceback of an error.
    """
    from ..runtime.launch.prediction import Prediction, predict

    prediction = Prediction(run, output, data, split, batch_size, folder)
    predicted = predict(prediction, trust=trust, force=force)
    if json:
        print_text(jsons.dumps(asdict(predicted), default=str))
        return 0
    console = make_console()
    for name, (dtype, shape) in predicted.tensors.items():
        console.print(f"{name}  {dtype} {list(shape)}", markup=False)
    if left_out := ", ".join(predicted.left_out):
        console.print(f"left out, without a dimension of samples: {left_out}", markup=False)
    samples = counted(predicted.samples, "sample")
    written = f"written  {predicted.output} · {samples} · {predicted.weights}"
    console.print(written, markup=False)
    return 0


@unwrapped
def export_command(
    run: Annotated[Path, limited(_SOURCE, "run")],
    target: Annotated[Path, limited(path("exported/gpt2"), "target")],
    /,
    *,
    folder: Annotated[Path | None, limited(_FOLDER, "folder")] = None,
    force: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False,
) -> int:
    """Write trained weights as a folder that from_pretrained of transformers loads.

    Starts no ranks, and runs no code of the generated folder.

    Parameters
    ----------
    run
        Run, checkpoint, folder of Pipeline.save, or generated folder with weights.
    target
        Folder to write, new or empty.
    folder
        Generated folder of the model. [default: the one that the run names]
    force
        Replace the weights and configuration in a folder that is not empty.
    json
        Print what was written as one line of JSON.
    verbose
        Show the traceback of an error.
    """
    from ..runtime.checkpoint.trained import export

    exported = export(run, target, folder=folder, force=force)
    if json:
        print_text(jsons.dumps(asdict(exported), default=str))
        return 0
    size = f"{counted(exported.tensors, 'tensor')}, {write_bytes(exported.bytes)}"
    written = f"written  {exported.folder} · {size} · from {exported.weights}"
    make_console().print(written, markup=False)
    return 0
