"""asyncpipe-inspect: shows the stages, costs and code of a generated folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.syntax import Syntax

from ..runtime.errors import PlanError
from ..runtime.formatting import visible
from ..runtime.limits import Whole, path
from ..runtime.plan.plan import read_plan
from ..runtime.reports.picture import picture
from ..runtime.reports.rendering import write_page
from ..runtime.user_code import source_of
from .console import make_console, print_findings, print_folder, print_text
from .options import limited, make_app, unwrapped

app = make_app("asyncpipe-inspect", "Show the stages, costs and code of a model.")


@app.default
@unwrapped
def inspect_command(
    folder: Annotated[Path, limited(path("generated_models/gpt2_4p"), "folder")],
    /,
    *,
    stage: Annotated[int | None, limited(Whole(0, 2**12, 0), "stage")] = None,
    explain: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    svg: Annotated[Path | None, limited(path("plan.svg"), "svg")] = None,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False,
) -> int:
    """Show the stages, boundaries, costs and code of a generated model.

    Parameters
    ----------
    folder
        Generated folder, such as generated_models/gpt2_4p.
    stage
        Print the code of this stage. [default: none]
    explain
        Explain the place of each cut and the limits of the plan, and show possible improvements if
        the model was partitioned with --explain.
    json
        Print the plan as JSON.
    svg
        Write a picture of the plan to this file: the modules with their cuts, one predicted
        step and the memory of each rank. [default: none]
    verbose
        Show the traceback of an error.
    """
    plan = read_plan(folder)
    console = make_console()
    if json:
        print_text(plan.to_json())
        return 0
    if svg is not None:
        write_page(svg, picture(plan), "Give --svg another file.")
        console.print(f"picture  {svg}", markup=False)
        return 0
    if stage is not None:
        if stage >= len(plan.stages):
            raise PlanError(
                f"{folder} has no stage {stage}: its stages are 0 to {len(plan.stages) - 1}."
            )
        source = source_of(folder / plan.stages[stage].file).replace("\r\n", "\n")
        code = visible(source.replace("\r", "\\r\n"))  # to Python that alone ends a line
        console.print(Syntax(code, "python", theme="ansi_dark", background_color="default"))
        return 0
    if explain:
        print_findings(console, plan.findings)
        return 0
    print_folder(console, plan, folder)
    return 0
