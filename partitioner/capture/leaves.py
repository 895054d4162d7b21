"""Which modules are kept as one node: those of torch.nn, and those the user names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection

from torch import nn

from ...runtime.errors import CaptureError
from .hooks import has_forward_hooks

LeafRule = Callable[[nn.Module, str], bool]

# Modules of torch.nn that only call others: what they call is recorded.
_TRANSPARENT = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict,
    nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, nn.DataParallel,
)  # fmt: skip


def leaf_rule(model: nn.Module, names: Collection[str]) -> LeafRule:
    """A function of a module and its path that says whether the module is kept as one node.

    Raises CaptureError for a name that no module of the model has.
    """
    wanted = frozenset(names)
    known = {
        name for path, module in model.named_modules() for name in (path, *_class_names(module))
    }
    for name in sorted(wanted - known):
        near = difflib.get_close_matches(name, sorted(known - {""}), n=3)
        raise CaptureError(
            f"no module of {type(model).__name__} is called {name}.",
            f"Did you mean --leaf {' or '.join(near)}?" if near else "",
        )

    def is_leaf(module: nn.Module, path: str) -> bool:
        named = path in wanted or not wanted.isdisjoint(_class_names(module))
        return named or is_torch_leaf(module)

    return is_leaf


def is_torch_leaf(module: nn.Module) -> bool:
    """Whether a module is of torch.nn and does what its class says, without hooks,
    parametrizations or a forward of its own."""
    home = type(module).__module__
    return (
        home.startswith("torch.nn.")
        and not home.startswith("torch.nn.utils.")
        and not isinstance(module, _TRANSPARENT)
        and not has_forward_hooks(module)
        and "forward" not in vars(module)
    )


def _class_names(module: nn.Module) -> tuple[str, str]:
    kind = type(module)
    return kind.__name__, f"{kind.__module__}.{kind.__qualname__}"
