"""How single operations are recorded and run on fake tensors.

`as_node` turns a torch function, as the mode sees it, into the fx call that a person would write.
`traced` and `runnable` replace functions that behave differently or are slow on fake tensors;
`refusal` is the error for functions that no graph can hold.

`run_opaque` gives fake results for a module that cannot run on fake tensors: a module kept as one
node may branch on values or loop over them. It runs on invented inputs of several sizes, and each
size of its results is fitted by an expression in the free sizes: `a*m + b`, where m is a free size
or a product of two.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
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
from torch.utils._python_dispatch import _disable_current_modes

from ...runtime.errors import CaptureError
from ...runtime.rng import number_state
from .arguments import map_leaves, tensors_in
from .fake_inputs import FakeWorld
from .model_state import unchanged
from .random_numbers import OWN_GENERATOR
from .source_lines import is_augmented_assignment
from .values import Size

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
    "neg": operator.neg, "__neg__": operator.neg, "__invert__": operator.invert,
    "bitwise_not": operator.invert,
}  # fmt: skip
_METHODS = (FunctionType, MethodDescriptorType, WrapperDescriptorType)

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
    if name == "__set__":
        # `x.requires_grad = True`; the other properties that can be set are refused before.
        return "call_method", "requires_grad_", (args[0], args[1]), {}
    method = getattr(Tensor, name, None)
    if method is not func or not isinstance(method, _METHODS):
        return "call_function", func, args, kwargs
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
    return any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors_in(arguments))


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


_INDEXING = (
    Tensor.__getitem__, Tensor.__setitem__, operator.getitem, operator.setitem, Tensor.select,
    torch.select,
)  # fmt: skip
_STAND_INS: dict[Any, Callable[..., Any]] = {
    **{func: _at_any_index(func) for func in _INDEXING},
    **{func: _recurrent(func) for func in (torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu)},
    # On fake tensors torch asks for the values of the lengths.
    F.ctc_loss: _like_ctc_loss,
    torch.ctc_loss: _like_ctc_loss,
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
        with _StandIns() if isinstance(module, nn.RNNBase) else nullcontext():
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
        return _GRADIENT
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
_GRADIENT = ("computes a gradient inside forward.", _AS_A_NODE)
_REFUSED = {
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


Sizes = dict[str, int]


def run_opaque(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], world: FakeWorld
) -> tuple[Any, bool, bool]:
    """Fake results of a call, and whether it drew random numbers of torch, and of Python or NumPy.

    Raises CaptureError if the shapes of the results depend on more than the sizes of the arguments.
    """
    name = type(module).__name__
    if world.is_on_meta:
        raise CaptureError(
            f"{name} depends on tensor values, and the model has none: it is on meta.",
            "Give the model weights; random ones are enough.",
        )
    samples = _samples(world.hints)
    results, changes, drew, drew_numbers = [], [], False, False
    with _disable_current_modes(), world.outside(), torch.no_grad():
        for sizes in samples:
            given = map_leaves(lambda leaf: _real(leaf, world, sizes), (args, kwargs))  # noqa: B023
            with unchanged(module, dict(module.named_parameters())):
                reached = [*tensors_in(given), *module.parameters(), *module.buffers()]
                versions = [tensor._version for tensor in reached]
                states = torch.get_rng_state(), number_state()
                results.append(module(*given[0], **given[1]))
                drew |= not torch.equal(states[0], torch.get_rng_state())
                drew_numbers |= not torch.equal(states[1], number_state())
                pairs = zip(reached, versions, strict=True)
                changes = [tensor._version != version for tensor, version in pairs]
    shapes = [
        [leaf.shape for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        for result in results
    ]
    if len({len(values) for values in shapes}) != 1 or not _are_alike(results):
        raise _unsure(name)
    resolved = iter([_fit(name, values, samples) for values in zip(*shapes, strict=True)])
    needs_grad = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (*tensors_in((args, kwargs)), *module.parameters())
    )

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = [_symbolic(world, *size) for size in next(resolved)]
        empty = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
        return empty.requires_grad_(needs_grad and (leaf.is_floating_point() or leaf.is_complex()))

    for tensor, changed in zip(
        (*tensors_in((args, kwargs)), *module.parameters(), *module.buffers()),
        changes,
        strict=True,
    ):
        if changed:
            with torch.no_grad():
                tensor.copy_(tensor)  # so that the change is seen
    return pytree.tree_map(fake, results[0]), drew, drew_numbers


def _are_alike(results: Sequence[Any]) -> bool:
    """True if the leaves other than tensors are equal in all results."""
    plain = [
        [None if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(result)]
        for result in results
    ]
    return all(item == plain[0] for item in plain)


def _samples(hints: Sizes) -> list[Sizes]:
    """The sizes of the example, then each size changed by two amounts, then all changed."""
    alone = [{**hints, name: hints[name] + more} for name in hints for more in (1, 3)]
    return [hints, *alone, {name: size + 2 for name, size in hints.items()}]


def _real(leaf: Any, world: FakeWorld, sizes: Sizes) -> Any:
    if isinstance(leaf, Tensor):
        shape = [
            int(size.evaluate(sizes)) if isinstance(size, Size) else size
            for size in world.shape(leaf)
        ]
        if leaf.is_floating_point() or leaf.is_complex():
            return torch.randn(shape, device=leaf.device).to(leaf.dtype)
        return torch.ones(shape, dtype=leaf.dtype, device=leaf.device)
    if isinstance(leaf, torch.SymInt):
        size = world.size(leaf)
        return size.evaluate(sizes) if isinstance(size, Size) else size
    return leaf


def _fit(
    name: str, shapes: Sequence[torch.Size], samples: Sequence[Sizes]
) -> list[tuple[tuple[str, ...], int, int]]:
    """For each dimension the free sizes to multiply, the factor a and the rest b."""
    if len({len(shape) for shape in shapes}) != 1:
        raise _unsure(name)
    return [_fit_one(name, sizes, samples) for sizes in zip(*shapes, strict=True)]


def _fit_one(
    name: str, values: Sequence[int], samples: Sequence[Sizes]
) -> tuple[tuple[str, ...], int, int]:
    symbols = list(samples[0])
    pairs = itertools.combinations_with_replacement(symbols, 2)
    for factors in [(), *((symbol,) for symbol in symbols), *pairs]:
        terms = [_product(factors, sizes) for sizes in samples]
        slope, rest = 0, values[0]
        if terms[-1] != terms[0]:
            slope = (values[-1] - values[0]) // (terms[-1] - terms[0])
            rest = values[0] - slope * terms[0]
        if all(slope * term + rest == value for term, value in zip(terms, values, strict=True)):
            return factors, slope, rest
    raise _unsure(name)


def _product(factors: Sequence[str], sizes: Any) -> Any:
    product = 1
    for factor in factors:
        product = product * sizes[factor]
    return product


def _symbolic(world: FakeWorld, factors: tuple[str, ...], slope: int, rest: int) -> Any:
    return slope * _product(factors, world.symbols) + rest if slope else rest


def _unsure(name: str) -> CaptureError:
    return CaptureError(
        f"the shapes of the results of {name} depend on tensor values.",
        "Keep the module around it as one node, so that these results stay inside.",
    )
