"""A model -> the complaint about what it does outside of forward, which a graph cannot hold.

Hooks of forward are code like any other and are recorded. Hooks of backward, and state that is no
tensor, would be lost without a word.
"""

from __future__ import annotations

from torch import nn

from ...runtime.errors import CaptureError


def has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def verify_hooks(model: nn.Module) -> None:
    """Raises CaptureError for a hook of backward, for extra state and for a state_dict that has
    other names than the parameters and buffers."""
    for path, module in model.named_modules():
        name = path or type(model).__name__
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"{name} has a backward hook, which a graph cannot hold.",
                "Write it as a torch.autograd.Function, or remove the hook for the capture.",
            )
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CaptureError(
                f"{name} has extra state (get_extra_state of {type(module).__name__}), which is "
                "no tensor under a name.",
                "Keep it as a buffer: self.register_buffer(name, tensor).",
            )
    _verify_names(model)
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CaptureError(
                f"the parameter {name} has a hook, which the generated stages would not have.",
                "Remove it for the capture, and register it on the parameter of the stage.",
            )


def _verify_names(model: nn.Module) -> None:
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for name in model.state_dict():
        if name not in own:
            raise CaptureError(
                f"the state_dict has {name}, which is no parameter and no buffer: a hook of "
                f"{type(model).__name__} changes its names.",
                "Give the model without the wrapper or hook that does it.",
            )
