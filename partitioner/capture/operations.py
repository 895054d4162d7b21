"""How single operations are recorded and run on fake tensors.

`as_node` turns a torch function, as the mode sees it, into the fx call that a person would write.
`traced` and `runnable` replace functions that on fake tensors differ, fix a size, or are slow;
`refusal` is the error for functions that no graph can hold.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .arguments import tensors_in
from .random_numbers import OWN_GENERATOR
from .source_lines import is_augmented_assignment

_ARITHMETIC = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor",
    "lshift", "rshift",
)  # fmt: skip
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_PYTHONS = {name: getattr(operator, f"__{name}__") for name in (*_ARITHMETIC, *_COMPARISONS)}
_BINARY = {
    **{f"__{name}__": function for name, function in _PYTHONS.items()},
    **{name: _PYTHONS[name] for name in ("add", "sub", "mul", "matmul", "pow", *_COMPARISONS)},
    "div": operator.truediv, "__div__": operator.truediv, "remainder": operator.mod,
    "bitwise_and": operator.and_, "bitwise_or": operator.or_, "bitwise_xor": operator.xor,
    "__getitem__": operator.getitem,
}  # fmt: skip
_REVERSED = {f"__r{name}__": _PYTHONS[name] for name in _ARITHMETIC}
_REVERSED["__rdiv__"] = operator.truediv
_IN_PLACE = {
    **{f"__i{name}__": getattr(operator, f"__i{name}__") for name in _ARITHMETIC},
    "add_": operator.iadd, "sub_": operator.isub, "mul_": operator.imul,
    "div_": operator.itruediv, "true_divide_": operator.itruediv, "__idiv__": operator.itruediv,
    "floor_divide_": operator.ifloordiv, "remainder_": operator.imod, "pow_": operator.ipow,
    "bitwise_and_": operator.iand, "bitwise_or_": operator.ior, "bitwise_xor_": operator.ixor,
}  # fmt: skip
_UNARY = {
    **dict.fromkeys(("neg", "__neg__"), operator.neg),
    **dict.fromkeys(("bitwise_not", "__invert__"), operator.invert),
}
_METHODS = (FunctionType, MethodDescriptorType, WrapperDescriptorType)
_PLACES = {slice, type(...), type(None)}

Call = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


def as_node(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
) -> Call:
    """Op, target, arguments and keyword arguments of the fx node for a call of `func`.

    `frame` is the user's: it distinguishes `y += 1` from `y.add_(1)`, which are equal to torch.
    """
    if func is torch.ops.aten.detach.default:  # torch.autograd.Variable(x)
        func = Tensor.detach
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return "call_function", getattr, (args[0], func.__self__.__name__), {}
    if name == "__set__":  # `x.requires_grad = True`; other properties are refused before
        return "call_method", "requires_grad_", (args[0], args[1]), {}
    method = getattr(Tensor, name, None)
    if method is not func or not isinstance(method, _METHODS):
        return "call_function", func, args, kwargs
    if name.endswith("item__") and isinstance(args[1], list) and _PLACES & {*map(type, args[1])}:
        args = (args[0], tuple(args[1]), *args[2:])  # as torch reads it
    if name == "__setitem__":
        return "call_function", operator.setitem, args, {}
    if not kwargs:
        if len(args) == 2 and name in _IN_PLACE:
            written = name.startswith("__") or (frame and is_augmented_assignment(frame))
            if written:
                return "call_function", _IN_PLACE[name], args, {}
        if len(args) == 2 and name in _BINARY:
            return "call_function", _BINARY[name], args, {}
        if len(args) == 2 and name in _REVERSED:
            return "call_function", _REVERSED[name], args[::-1], {}
        if len(args) == 1 and name in _UNARY:
            return "call_function", _UNARY[name], args, {}
    return "call_method", name, args, kwargs


def traced(func: Callable[..., Any], arguments: Any) -> Callable[..., Any]:
    """The function that a tracer runs for `func`, only for the shape and dtype of its result.

    With arguments, `func` itself if no tensor among them lacks data: a module that reads values
    needs those of its functions.
    """
    other = _SHORT_CUTS.get(func) or _STAND_INS.get(func)
    return other if other and (arguments is None or _lack_data(arguments)) else func


def runnable(func: Callable[..., Any], arguments: Any) -> Callable[..., Any]:
    """The function to call for `func`: its stand-in, if there is one and a tensor among the
    arguments has no data."""
    other = _STAND_INS.get(func)
    return other if other and _lack_data(arguments) else func


def _lack_data(arguments: Any) -> bool:
    """True if a tensor among the arguments has no data, or a size no number."""
    tensors = tensors_in(arguments)
    has_none = any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)
    return has_none or _is_symbolic(pytree.tree_leaves(arguments))


def _like_grouped_mm(left: Tensor, right: Tensor, **kwargs: Any) -> Tensor:
    return left @ (right[0] if right.dim() == 3 else right)


def _like_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return F.dropout(input, p, training, inplace) if training and p else input


def _like_ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    # torch.ctc_loss has numbers for the names of reductions.
    if reduction in ("none", 0) and log_probs.dim() == 3:
        return log_probs.sum((0, 2))
    return log_probs.sum()


def _like_gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    if isinstance(var, Tensor) and var.dim() < input.dim():
        var = var.unsqueeze(-1)
    loss = input - target + var
    return loss if reduction == "none" else loss.sum()


_OF_ISTFT = ("win_length", "window", "center", "normalized", "onesided", "length", "return_complex")


def _like_istft(
    input: Tensor, n_fft: int, hop_length: int | None = None, *others: Any, **named: Any
) -> Tensor:
    given = dict(zip(_OF_ISTFT, others, strict=False)) | named
    length = given.get("length")
    if length is None:
        step = n_fft // 4 if hop_length is None else hop_length
        length = n_fft % 2 + step * (input.shape[-1] - 1)
        length += 0 if given.get("center", True) else n_fft - n_fft % 2
    like = input if given.get("return_complex") else input.real
    return _made_from(like, (like,), (*input.shape[:-2], length))


def _at_any_index(func: Callable[..., Any]) -> Callable[..., Any]:
    """An indexing function with 0 for each number that forward reads or draws: torch asks for
    their values, on which no shape depends."""

    def known(index: Any) -> Any:
        if isinstance(index, (tuple, list)):
            return type(index)(map(known, index))
        if isinstance(index, torch.SymInt):
            return index if index.node.has_hint() else 0
        is_tensor = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)
        return 0 if is_tensor and not index.dim() else index

    def indexed(tensor: Tensor, where: Any, *others: Any, **named: Any) -> Any:
        given = {name: known(value) for name, value in named.items()}
        return func(tensor, known(where), *map(known, others), **given)

    return indexed


def _recurrent(func: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrent layer that computes the first position alone. torch goes through all of them on
    fake tensors, one by one, and so fixes their number."""

    def result(*args: Any, **named: Any) -> Any:
        if named or not isinstance(args[3], bool):  # else packed sequences
            return func(*args, **named)
        input, time = args[0], int(args[-1])  # batch_first
        output, *states = func(input.narrow(time, 0, 1), *args[1:])
        steps = output.transpose(0, time).expand(input.shape[time], -1, -1)
        return steps.clone(memory_format=torch.contiguous_format).transpose(0, time), *states

    return result


_DEFAULTS = {
    "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False,
    "count_include_pad": True, "divisor_override": None,
}  # fmt: skip


def _pooling(func: Callable[..., Any], dimensions: int) -> Callable[..., Any]:
    """A pooling over windows of a symbolic size, as in `F.avg_pool2d(x, x.shape[2:])`."""

    def pooled(input: Tensor, kernel_size: Any, *others: Any, **named: Any) -> Any:
        windows = kernel_size if isinstance(kernel_size, Sequence) else [kernel_size] * dimensions
        is_plain = not others and all(_DEFAULTS[name] == named[name] for name in named)
        if not is_plain or not _is_symbolic(windows):
            return func(input, kernel_size, *others, **named)
        sizes = zip(input.shape[-dimensions:], windows, strict=True)
        counts = ((size - window) // window + 1 for size, window in sizes)
        return _made_from(input, (input,), (*input.shape[:-dimensions], *counts))

    return pooled


def _max_pool1d(input: Tensor, *args: Any, return_indices: bool = False, **named: Any) -> Any:
    given = {name: value for name, value in named.items() if value is not None}
    results = torch.max_pool1d_with_indices(input, *args, **given)
    return results if return_indices else results[0]


def _counted(
    func: Callable[..., Any], place: int, name: str, length: Callable[[Any], Any] = lambda n: n
) -> Callable[..., Any]:
    """A function with an argument that gives the length of its result."""

    def made(*args: Any, **named: Any) -> Any:
        given = args[place] if len(args) > place else named.get(name)
        if not isinstance(given, torch.SymInt):
            return func(*args, **named)
        return _zeros((length(given),), named)

    return made


def _triangle(func: Callable[..., Any]) -> Callable[..., Any]:
    """`triu_indices` or `tril_indices` of a square."""

    def made(row: Any, col: Any, offset: int = 0, **named: Any) -> Any:
        is_square = _is_symbolic([row]) and _is_symbolic([col]) and row.node.expr == col.node.expr
        if not is_square or row <= abs(offset):
            return func(row, col, offset, **named)
        side = row - abs(offset)
        corner = side * (side + 1) // 2
        is_corner = offset >= 0 if func is torch.triu_indices else offset <= 0
        count = corner if is_corner else row * row - corner + side
        return _zeros((2, count), named, torch.int64)

    return made


def _tensor_of(func: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.tensor` or `torch.as_tensor` of sizes."""

    def made(data: Any, dtype: Any = None, device: Any = None, **named: Any) -> Any:
        numbers, named = pytree.tree_leaves(data), {"device": device, **named}
        if not _is_symbolic(numbers) or any(isinstance(each, Tensor) for each in numbers):
            return func(data, dtype=dtype, **named)
        has_fractions = any(isinstance(each, (float, torch.SymFloat)) for each in numbers)
        return _zeros(_shape(data), named, dtype or (None if has_fractions else torch.int64))

    return made


def _new_tensor(like: Tensor, data: Any, **named: Any) -> Any:
    if not _is_symbolic(pytree.tree_leaves(data)):
        return like.new_tensor(data, **named)
    return _zeros(_shape(data), {"device": like.device, **named}, like.dtype)


def _shape(data: Any) -> tuple[int, ...]:
    return (len(data), *_shape(data[0])) if isinstance(data, (list, tuple)) else ()


def _affine_grid(theta: Tensor, size: Any, align_corners: bool | None = None) -> Tensor:
    if not _is_symbolic(size):
        return F.affine_grid(theta, size, align_corners)
    return _made_from(theta, (theta,), (size[0], *size[2:], len(size) - 2))


def _is_symbolic(values: Any) -> bool:
    return any(isinstance(value, (torch.SymInt, torch.SymFloat)) for value in values)


def _zeros(shape: tuple[Any, ...], named: Mapping[str, Any], dtype: Any = None) -> Tensor:
    options = {name: named[name] for name in ("device", "requires_grad") if name in named}
    return torch.zeros(shape, dtype=named.get("dtype") or dtype, **options)


_INDEXING = (
    Tensor.__getitem__, Tensor.__setitem__, operator.getitem, operator.setitem, Tensor.select,
    torch.select,
)  # fmt: skip
_WINDOWS = (torch.hann_window, torch.hamming_window, torch.blackman_window, torch.bartlett_window)
_STAND_INS: dict[Any, Callable[..., Any]] = {
    **{func: _at_any_index(func) for func in _INDEXING},
    # torch wants numbers where the following have symbolic sizes.
    **{func: _recurrent(func) for func in (torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu)},
    **{func: _pooling(_max_pool1d, 1) for func in (F.max_pool1d, torch.max_pool1d)},
    **{func: _pooling(func, 2) for func in (F.max_pool2d, torch.max_pool2d, F.avg_pool2d)},
    **{func: _pooling(func, 3) for func in (F.max_pool3d, torch.max_pool3d, F.avg_pool3d)},
    F.avg_pool1d: _pooling(F.avg_pool1d, 1),
    **{func: _counted(func, 2, "steps") for func in (torch.linspace, torch.logspace)},
    **{func: _counted(func, 0, "window_length") for func in _WINDOWS},
    torch.fft.fftfreq: _counted(torch.fft.fftfreq, 0, "n"),
    torch.fft.rfftfreq: _counted(torch.fft.rfftfreq, 0, "n", lambda n: n // 2 + 1),
    **{func: _triangle(func) for func in (torch.triu_indices, torch.tril_indices)},
    **{func: _tensor_of(func) for func in (torch.tensor, torch.as_tensor)},
    Tensor.new_tensor: _new_tensor,
    Tensor.fill_diagonal_: lambda square, value, wrap=False: square.fill_(value),
    F.affine_grid: _affine_grid,
    torch.istft: _like_istft,
    # On fake tensors torch asks for the values of the variances, and of the lengths.
    F.gaussian_nll_loss: _like_gaussian_nll_loss,
    **dict.fromkeys((F.ctc_loss, torch.ctc_loss), _like_ctc_loss),
    # torch copies fake tensors, but returns a real argument itself.
    F.dropout: _like_dropout,
    # On fake tensors torch 2.13 accepts bfloat16 only, on real ones others too.
    getattr(F, "grouped_mm", None): _like_grouped_mm,
    getattr(torch, "_grouped_mm", None): _like_grouped_mm,
}


def _attention_result(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Shape, dtype, gradient and draws of an attention, without its fifteen operators."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind) or query.dim() != 4:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    batch: Any = query.shape[:2]
    if not enable_gqa:
        batch = torch.broadcast_shapes(batch, key.shape[:2])  # type: ignore[no-untyped-call]
    shape = (*batch, query.shape[2], value.shape[3])
    result = _made_from(query, (query, key, value, attn_mask), shape)
    return F.dropout(result, dropout_p) if dropout_p else result


def _linear_result(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Shape, dtype and gradient of a product with a weight, without unfolding it."""
    is_plain = weight.dim() == 2 and input.dtype == weight.dtype
    fits = is_plain and input.shape[-1] == weight.shape[1]
    if not fits or torch.is_autocast_enabled(input.device.type):
        return F.linear(input, weight, bias)
    return _made_from(input, (weight, bias, input), (*input.shape[:-1], weight.shape[0]))


def _made_from(like: Tensor, given: tuple[Tensor | None, ...], shape: tuple[Any, ...]) -> Tensor:
    """A tensor of the dtype of `like`, with a gradient if one of the given has one."""
    trained = (tensor for tensor in given if tensor is not None and tensor.requires_grad)
    return like.new_empty(shape) + next(trained, like).sum().to(like.dtype)


_SHORT_CUTS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear_result,
    F.scaled_dot_product_attention: _attention_result,
}


class _StandIns(TorchFunctionMode):
    """Runs the stand-ins of the functions that a module of torch calls."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        return runnable(func, (args, kwargs))(*args, **kwargs)


@contextmanager
def on_fakes(module: nn.Module) -> Iterator[None]:
    """Lets a module of torch run on fake tensors in the block: a recurrent one with the stand-in
    of its function, a batch norm without momentum with one, instead of a count without value."""
    is_fake = detect_fake_mode() is not None or any(tensor.is_meta for tensor in module.buffers())
    if not is_fake or not isinstance(module, _BatchNorm) or module.momentum is not None:
        with _StandIns() if isinstance(module, (nn.RNNBase, nn.MaxPool1d)) else nullcontext():
            yield
        return
    module.momentum = 0.1
    try:
        yield
    finally:
        module.momentum = None


def refusal(func: Any, given: Sequence[Any]) -> tuple[str, str] | None:
    """What a call does that no graph can hold, and the cure."""
    generators = (value for value in given if isinstance(value, torch.Generator))
    if any(generator is not torch.default_generator for generator in generators):
        return OWN_GENERATOR
    name = getattr(func, "__name__", "")
    if name == "__set__" and func.__self__.__name__ in ("data", "grad"):
        return _ASSIGNMENT
    if func is torch.autograd.grad:
        return "computes a gradient inside forward.", _AS_A_NODE
    return _REFUSED.get(name)


_AS_A_NODE = "Keep the module as one node: --leaf Class."
_HOOK = (
    "registers a hook on a tensor, which a graph cannot hold.",
    "Write it as a torch.autograd.Function, or keep the module as one node: --leaf Class.",
)
_ASSIGNMENT = (
    "assigns the data or the gradient of a tensor, which a graph cannot hold.",
    "Compute a new tensor instead, or copy into this one: x.copy_(y).",
)
_REFUSED = {
    "dequantize": (
        "reads a quantized tensor, which no stage can send.",
        "Use torch.fake_quantize_per_tensor_affine.",
    ),
    "backward": ("calls backward inside forward.", _AS_A_NODE),
    "register_hook": _HOOK,
    "register_post_accumulate_grad_hook": _HOOK,
    "_pack_padded_sequence": (
        "packs a padded sequence, whose sizes depend on the values of its lengths.",
        "Mask the padding instead, or keep the module that packs and unpacks as one node: "
        "--leaf Class.",
    ),
    "_nested_tensor_from_mask_left_aligned": (
        "calls a torch.nn.TransformerEncoder that in evaluation skips the masked positions, whose "
        "outputs then differ from those in training.",
        "Build it with enable_nested_tensor=False.",
    ),
}
