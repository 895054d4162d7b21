"""What modules, parameters and buffers are called: names that generated code can have too."""

from __future__ import annotations

from torch import nn

from ...runtime.errors import CaptureError
from ...runtime.hidden_text import hiding_in, one_line

_OWN = frozenset((*dir(nn.Module), *vars(nn.Module())))


def verify_names(model: nn.Module) -> None:
    """Raises CaptureError for a name that no attribute of a generated class could have, or that
    would not be seen for what it is."""
    for path, module in model.named_modules():
        kinds = {
            "module": module._modules, "parameter": module._parameters, "buffer": module._buffers
        }  # fmt: skip
        for kind, members in kinds.items():
            for name, member in members.items():
                if member is not None and (wrong := _wrong(name)):
                    raise CaptureError(
                        f"a {kind} of {one_line(path) or 'the model'} is called "
                        f'"{one_line(name)[:80]}", {wrong}.',
                        "Give it another name.",
                    )


def _wrong(name: str) -> str:
    """What is wrong with a name, in a clause; "" if nothing is."""
    if not name or "." in name:
        return "which cannot be told from a path"
    if hiding_in(name) or "\n" in name or "\t" in name:
        return "and such a character does not show"
    if name in _OWN:
        return f"as an attribute that every module has: {name} of nn.Module"
    return ""
