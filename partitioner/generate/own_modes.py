"""Modules whose mode is not that of the model -> a `train` that keeps them so.

A detector freezes its batch norms by overriding `train`: they stay in evaluation mode while the
rest is trained. The stage overrides it too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from ..capture import Capture
from ..capture.leaves import is_torch_leaf
from ..split import StageGraph
from .layout import Code, bracket, lay_out
from .quoting import quoted

_MODES = {(False, False): "False", (True, True): "True", (False, True): "not mode"}
_SAYS = {
    "False": "evaluation mode",
    "True": "training mode",
    "not mode": "the opposite mode",
}


def train_method(capture: Capture, stage: StageGraph) -> tuple[str, ...]:
    """The lines of `train` for a stage; none where all of its modules follow the mode."""
    modules = dict(_modules(capture, stage))
    unlike: dict[str, list[str]] = defaultdict(list)
    for path in modules:
        if path in capture.flags:
            unlike[_MODES[capture.flags[path]]].append(path)
    if not unlike:
        return ()
    kept = " and ".join(_SAYS[mode] for mode in unlike)
    return (
        "    def train(self, mode: bool = True) -> Self:",
        f'        """Keeps modules in {kept}, as the original does."""',
        "        super().train(mode)",
        *(line for mode, paths in unlike.items() for line in _loop(modules, paths, mode)),
        "        return self",
    )


def _modules(capture: Capture, stage: StageGraph) -> Iterator[tuple[str, nn.Module]]:
    """The modules that the stage calls as a whole, and what they hold, by path."""
    called = dict.fromkeys(str(node.target) for node in stage.nodes if node.op == "call_module")
    for path in called:
        for inner, module in capture.model.get_submodule(path).named_modules():
            yield f"{path}.{inner}" if inner else path, module


def _loop(modules: Mapping[str, nn.Module], paths: Sequence[str], mode: str) -> Iterable[str]:
    """By class where all modules of those classes are in the mode, else by name."""
    kinds = dict.fromkeys(type(modules[path]) for path in paths)
    alike = [path for path, module in modules.items() if isinstance(module, tuple(kinds))]
    if len(alike) > 1 and alike == list(paths) and all(is_torch_leaf(modules[p]) for p in paths):
        names = " | ".join(f"nn.{kind.__name__}" for kind in kinds)
        yield "        for module in self.modules():"
        yield f"            if isinstance(module, {names}):"
        yield f"                module.training = {mode}"
    elif len(paths) == 1:
        yield f"        self.get_submodule({quoted(paths[0])}).training = {mode}"
    else:
        listed = bracket("(", tuple(Code(quoted(path)) for path in paths), ")")
        yield lay_out("for path in ", listed, ":", indent=8)
        yield f"            self.get_submodule(path).training = {mode}"
