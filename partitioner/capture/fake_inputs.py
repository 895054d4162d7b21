"""A model and example inputs -> fake tensors with named sizes, and errors of a run on them.

Sizes start as torch's own symbols in a `ShapeEnv`; arguments of the graph have them replaced by
sympy symbols with the user's names (`batch`, `sequence`). If forward fixes a symbol at a number,
or equates it with another one, an error names the line.

`explained` turns an exception of forward on fake tensors into a CaptureError with the user's line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._ops import HigherOrderOperator
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv

from ...runtime.errors import CaptureError
from .arguments import Arguments, PassedError, describe_arguments, map_leaves, tensors_in
from .leaf_modules import is_constructible, is_importable
from .model_state import attributes_kept
from .source_lines import place, source_text, user_frame_of, user_frames
from .values import Size

Dynamic = Mapping[str, Mapping[int, str]]


class PinnedSizeError(CaptureError):
    """A free size that forward allows at one value only.

    symbol: the symbol of the size
    where: the line in words
    value: the value
    """

    def __init__(self, symbol: str, where: str, value: object, cure: str, more: str = "") -> None:
        super().__init__(
            f"{where} works for one {symbol} size only: {symbol} would always be {value}.{more}",
            cure,
        )
        self.symbol, self.where, self.value = symbol, where, value


class _NamedSizes(ShapeEnv):
    """A ShapeEnv that raises PinnedSizeError if a named symbol is replaced.

    pins: collects these errors instead, by symbol, if it is not None
    named: the user's symbol for each symbol of torch
    is_open: True while forward runs
    top: the frame above all frames of forward
    decide: answers questions that depend on the values of tensors
    on_answer: called with every question about sizes and its answer
    """

    def __init__(self) -> None:
        super().__init__(specialize_zero_one=True, duck_shape=False, allow_scalar_outputs=False)
        self.pins: dict[str, PinnedSizeError] | None = None
        self.named: dict[sympy.Symbol, sympy.Symbol] = {}
        self.is_open = True
        self.top: FrameType | None = None
        self.decide: Callable[[sympy.Basic], bool | None] | None = None
        self.on_answer: Callable[[sympy.Basic, sympy.Basic], None] | None = None

    def evaluate_expr(
        self,
        orig_expr: sympy.Basic,
        hint: Any = None,
        fx_node: Any = None,
        size_oblivious: bool = False,
        fallback_value: bool | None = None,
        *,
        forcing_spec: bool = False,
    ) -> sympy.Basic:
        """As torch, but `decide` answers questions about values of tensors, and `on_answer` gets
        the answers that follow from the sizes of the example."""
        if self.is_open and self.decide and fallback_value is None and not size_oblivious:
            if any(symbol not in self.named for symbol in orig_expr.free_symbols):
                if self._maybe_evaluate_static(orig_expr) is None:
                    answer = self.decide(orig_expr)
                    if answer is not None:
                        return sympy.true if answer else sympy.false
        answer = super().evaluate_expr(
            orig_expr, hint, fx_node, size_oblivious, fallback_value, forcing_spec=forcing_spec
        )
        if self.is_open and self.on_answer and orig_expr.free_symbols:
            if all(symbol in self.named for symbol in orig_expr.free_symbols):
                self.on_answer(orig_expr, answer)
        return answer

    def _set_replacement(self, a: sympy.Symbol, tgt: sympy.Expr, msg: str) -> None:
        if self.is_open and a in self.named:
            error = self.pinned(self.named[a].name, tgt.xreplace(self.named))
            if self.pins is None:
                raise error
            self.pins.setdefault(error.symbol, error)
        super()._set_replacement(a, tgt, msg)

    def pinned(self, name: str, value: sympy.Expr) -> PinnedSizeError:
        """The error for the user's line that fixes a size."""
        frames = user_frames(self.top, sys._getframe(1))
        where = "forward"
        if frames:
            line = frames[0].f_lineno
            where = f"{place(frames[0], line)}, {source_text(frames[0], line)!r},"
        cure = (
            "sizes as x.shape[0], without int(), range(), tolist() or a loop over samples."
            if torch._C._functorch.peek_interpreter_stack() is None
            else "torch.vmap asks for sizes as numbers here."
        )
        return PinnedSizeError(name, where, value, f"Write it for the whole tensor: {cure}")


@cache
def _run_first_backward() -> None:
    """torch starts a thread with its first backward for each GPU, and no fork of this process can
    run a backward then, as the ranks of a notebook do. With fake tensors it makes up a GPU where
    there is none: a backward before that starts no thread."""
    if torch.version.cuda and not torch.cuda.is_available():
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


class _FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A FakeTensorMode with a faster cache for symbolic sizes.

    torch makes each result again from its new entry, to see that both have the same dispatch keys,
    which takes as long as the operation itself: here it does not. A view from the cache is made as
    a tensor whose storage is then replaced, in 1.3 ms: here `as_strided` makes it, in 0.05 ms.
    """

    _result: Any = None
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in registered_hop_fake_fns and isinstance(func, HigherOrderOperator):
            # Its rule is by the exact class of the mode.
            return func.python_key_table[FakeTensorMode](self, *args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs or {})

    def _get_output_info_for_cache_entry(self, *arguments: Any) -> Any:
        self._result = arguments[-1]
        try:
            return super()._get_output_info_for_cache_entry(*arguments)
        finally:
            self._result = None

    def _output_from_cache_entry(self, *arguments: Any) -> Any:
        if self._result is None:
            return super()._output_from_cache_entry(*arguments)
        return self._result

    def _get_output_tensor_from_cache_entry(
        self, state: Any, entry: Any, key: Any, func: Any, args: Any
    ) -> Any:
        metadata = entry.metadata
        source = None if entry.view_idx is None else args[entry.view_idx]
        if (
            not isinstance(source, FakeTensor)
            or source.dtype is not metadata.dtype
            or metadata.layout is not torch.strided
            or metadata.requires_grad
            or any((metadata.is_conj, metadata.is_neg, source.is_conj(), source.is_neg()))
        ):
            return super()._get_output_tensor_from_cache_entry(state, entry, key, func, args)

        def known(value: Any) -> Any:
            is_number = isinstance(value, int)
            return value if is_number else value.extract(key, state.shape_env)

        shape, strides = map(known, metadata.shape), map(known, metadata.stride)
        offset = known(metadata.storage_offset)
        with in_kernel_invocation_manager(self), state.shape_env.suppress_guards():
            view = torch.as_strided(source, [*shape], [*strides], offset)
        return FakeTensor(self, view, metadata.device)


class FakeWorld:
    """The fake twins of a model's parameters, buffers and inputs.

    env: the ShapeEnv of the symbols
    mode: the FakeTensorMode of the tensors
    symbols: torch's size symbols by the user's name
    hints: the sizes of the symbols in the example, by the user's name
    names: the first dotted name of each fake parameter and buffer, by its `id`
    model: the model
    fakes: tensors with the fake ones that stand in for them, by `id`
    """

    def __init__(self, model: nn.Module) -> None:
        _run_first_backward()
        self.env = _NamedSizes()
        self.mode = _FakeMode(shape_env=self.env, allow_non_fake_inputs=True, static_shapes=True)
        self.symbols: dict[str, Any] = {}
        self.hints: dict[str, int] = {}
        self.names: dict[int, str] = {}
        self.model = model
        self.fakes: dict[int, tuple[Tensor, Tensor]] = {}
        self._swaps: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        self._own: dict[tuple[int, str], Tensor] = {}
        for path, module in model.named_modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    fake = self._fake(tensor)
                    self._swaps.append((tensors, name, tensor, fake))
                    self._own[id(tensors), name] = fake
                    self.names.setdefault(id(fake), f"{path}.{name}" if path else name)

    def is_itself(self, module: nn.Module) -> bool:
        """True if a module has its own parameters and buffers, and not replacements for one call,
        as in `torch.func.functional_call`."""
        return all(
            tensor is None or self._own.get((id(tensors), name)) is tensor
            for inner in module.modules()
            for tensors in (inner._parameters, inner._buffers)
            for name, tensor in tensors.items()
        )

    def _fake(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self.fakes:
            self.fakes[id(tensor)] = (tensor, self._made_fake(tensor))
        return self.fakes[id(tensor)][1]

    def twin(self, value: Any) -> Any:
        """The fake twin of a parameter or buffer; any other value unchanged."""
        return self.fakes.get(id(value), (value, value))[1]

    def twins(self, value: Any) -> Any:
        """A structure of values with the twins of parameters and buffers, which forward may also
        reach through a list, an object or a closure."""
        if any(id(tensor) in self.fakes for tensor in tensors_in(value)):
            return map_leaves(self.twin, value)
        return value

    def _made_fake(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "meta":
            with self.mode:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
        else:
            fake = self.mode.from_tensor(tensor, static_shapes=True)
        if isinstance(tensor, nn.Parameter) and not isinstance(fake, nn.Parameter):
            return nn.Parameter(fake, tensor.requires_grad)
        return fake

    def input(self, tensor: Tensor, dims: Mapping[int, str]) -> Tensor:
        """A fake input like the tensor; sizes at `dims` are symbols, other sizes are numbers."""
        shape = [
            self._symbol(dims[dim], size) if dim in dims else size
            for dim, size in enumerate(tensor.shape)
        ]
        device = "cpu" if tensor.device.type == "meta" else tensor.device
        with self.mode:
            return torch.empty(
                shape, dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad
            )

    def _symbol(self, name: str, size: int) -> Any:
        if name not in self.symbols:
            self.hints[name] = size
            source = ConstantSource(name)
            symbol = self.env.create_symbol(
                size, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
            )
            self.env.named[symbol] = sympy.Symbol(name, integer=True, positive=True)
            self.symbols[name] = self.env.create_symintnode(symbol, hint=size, source=source)
        return self.symbols[name]

    def size(self, value: Any) -> Size | int | float | bool:
        """A SymInt or SymFloat of torch in the user's symbols, or a number."""
        expr = self.env.replace(value.node.expr)
        if isinstance(value, torch.SymBool):
            return bool(value)
        return self.as_size(expr)

    def as_size(self, expr: sympy.Expr) -> Size | int | float:
        """An expression of the ShapeEnv in the user's symbols, or a number."""
        if expr.is_number:
            return int(expr) if expr.is_integer else float(expr)
        return Size(expr.xreplace(self.env.named))

    def is_number(self, value: torch.SymInt) -> bool:
        """True if a SymInt has become a number."""
        return bool(self.env.replace(value.node.expr).is_number)

    def shape(self, tensor: Tensor) -> tuple[int | Size, ...]:
        return tuple(
            self.size(size) if isinstance(size, torch.SymInt) else size for size in tensor.shape
        )

    def is_data_dependent(self, shape: tuple[Any, ...]) -> bool:
        """True if a size depends on the values of tensors."""
        known = self.symbols.keys()
        return any(isinstance(size, Size) and not size.symbols <= known for size in shape)

    @contextmanager
    def inside(self, top: FrameType) -> Iterator[None]:
        """Replaces the model's parameters and buffers by the fake ones for the block.

        `top` is the frame above all frames of the model's forward.
        """
        self.env.top, self.env.is_open = top, True
        with attributes_kept(self.model):
            try:
                for tensors, name, _, fake in self._swaps:
                    tensors[name] = fake
                yield
            finally:
                # torch's caches keep the env, which must not keep the trace.
                self.env.top = self.env.decide = self.env.on_answer = None
                self.env.is_open = False
                for tensors, name, real, _ in self._swaps:
                    tensors[name] = real

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Restores the real parameters and buffers for a block within `inside`."""
        now = [(tensors, name, tensors[name]) for tensors, name, _, _ in self._swaps]
        for tensors, name, real, _ in self._swaps:
            tensors[name] = real
        try:
            yield
        finally:
            for tensors, name, current in now:
                tensors[name] = current

    @property
    def is_on_meta(self) -> bool:
        """True if the model has no values: some parameter or buffer is on meta."""
        return any(real.is_meta for _, _, real, _ in self._swaps)


class UnseenError(CaptureError):
    """A forward that may run, but does something that the tracer cannot see."""


class ValuesError(UnseenError):
    """A forward that reads values out of tensors."""


class RandomDecisionError(UnseenError):
    """A forward whose random decision cannot be written as `if` and `else`."""


# Not in range(): a graph has a fixed number of iterations, with or without int().
_NUMBER = re.compile(r"^(?!.*\brange\().*?\b(int|float)\(")
DATA_DEPENDENT = (
    fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)  # fmt: skip


def explained(
    error: Exception,
    model: nn.Module,
    given: Arguments,
    drawn: Collection[sympy.Basic] = (),
    state: str = "",
) -> CaptureError:
    """An exception of the model's forward as a CaptureError with its line and cure.

    `drawn` are the symbols of numbers that Python or NumPy draws, `state` is the parameter or
    buffer on which a condition depends.
    """
    frame_and_line = user_frame_of(error.__traceback__)
    if frame_and_line is None:
        return UnseenError(
            f"cannot trace {type(model).__name__}: {type(error).__name__}: {_first_line(error)}",
            f"Does it run on inputs like these? {describe_arguments(given.tensors)}",
        )
    frame, line = frame_and_line
    where, text = place(frame, line), source_text(frame, line)
    leaf = _leaf(frame, model)
    symbols = error.cond.free_symbols if isinstance(error, GuardOnDataDependentSymNode) else set()
    if not symbols.isdisjoint(drawn):
        return ValuesError(
            f'cannot trace {where}: "{text}" depends on a number drawn at random, by more than an '
            "if that compares it.",
            f"Keep it inside one stage: {leaf} · or draw with torch and compute with tensors, "
            "such as torch.rand([]).sqrt()",
        )
    if isinstance(error, DATA_DEPENDENT):
        number = _NUMBER.search(text)
        other = f"write .item() without {number[1]}()" if number else "use torch.where"
        whose = f", those of {state}, which may change from call to call" if state else ""
        return ValuesError(
            f'cannot trace {where}: "{text}" depends on tensor values{whose}.',
            f"Keep it inside one stage: {leaf} · or {other} · details: -v",
        )
    if "numpy() is not supported" in str(error):
        return UnseenError(
            f'cannot trace {where}: "{text}" passes the values of a tensor to NumPy, and a graph '
            "cannot hold NumPy's operations.",
            f"Compute it with torch, or keep it inside one stage: {leaf}.",
        )
    if isinstance(error, PassedError):
        return UnseenError(
            f'cannot trace {where}: "{text}" passes a {error} to a function, and a graph '
            "cannot hold what the function does with it.",
            f"Keep the module that calls the function as one node: {leaf}.",
        )
    return UnseenError(
        f'cannot trace {where}: "{text}" raised {type(error).__name__}: {_first_line(error)}',
        "If the model runs on inputs like these outside asyncpipe "
        f"({describe_arguments(given.tensors)}), keep the module as one node: {leaf}.",
    )


def _leaf(frame: FrameType, model: nn.Module) -> str:
    """The advice that keeps the module whose forward a frame runs as one node.

    The model itself cannot be one node, nor can a module if only another method of it is called.
    """
    while frame.f_back is not None and not _is_forward(frame):
        frame = frame.f_back
    owner = frame.f_locals.get("self")
    path = next((path for path, module in model.named_modules() if path and module is owner), None)
    if not isinstance(owner, nn.Module) or path is None:
        return "move it into a module of its own and use --leaf"
    kind = type(owner).__name__
    if is_constructible(owner, path, model) or not is_importable(type(owner)):
        return f"--leaf {kind}"
    return (
        f"store the arguments of {kind}.__init__ as attributes of their names, then --leaf {kind}"
    )


def _is_forward(frame: FrameType) -> bool:
    is_module = isinstance(frame.f_locals.get("self"), nn.Module)
    return is_module and frame.f_code.co_name == "forward"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
