"""A model and example inputs -> fake tensors without data whose sizes are named symbols.

Sizes start as torch's own symbols in a `ShapeEnv`; arguments of the graph have them replaced by
sympy symbols with the user's names (`batch`, `sequence`). A symbol that forward pins to a number,
or to another symbol, is an error at the line that does it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ...runtime.errors import CaptureError
from .frames import place, source_text, user_frames
from .values import Size

Dynamic = Mapping[str, Mapping[int, str]]


class PinnedSizeError(CaptureError):
    """A size that should be free, but that forward holds at one value `where` it says."""

    def __init__(self, symbol: str, where: str, value: object, cure: str, more: str = "") -> None:
        super().__init__(
            f"{where} works for one {symbol} size only: {symbol} would always be {value}.{more}",
            cure,
        )
        self.symbol, self.where, self.value = symbol, where, value


class _NamedSizes(ShapeEnv):
    """A ShapeEnv that refuses to give up a named symbol; with `pins` it does, and keeps there what
    it would have said."""

    def __init__(self) -> None:
        super().__init__(specialize_zero_one=True, duck_shape=False, allow_scalar_outputs=False)
        self.pins: dict[str, PinnedSizeError] | None = None
        self.named: dict[sympy.Symbol, sympy.Symbol] = {}
        self.is_open = True
        self.top: FrameType | None = None
        self.decide: Callable[[sympy.Basic], bool | None] | None = None
        self.told: Callable[[sympy.Basic, sympy.Basic], None] | None = None

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
        """As torch does; what only values of tensors tell is decided by `decide`, and of the
        answers that follow from the sizes of the example `told` is told."""
        if self.is_open and self.decide and fallback_value is None and not size_oblivious:
            if any(symbol not in self.named for symbol in orig_expr.free_symbols):
                if self._maybe_evaluate_static(orig_expr) is None:
                    answer = self.decide(orig_expr)
                    if answer is not None:
                        return sympy.true if answer else sympy.false
        answer = super().evaluate_expr(
            orig_expr, hint, fx_node, size_oblivious, fallback_value, forcing_spec=forcing_spec
        )
        if self.is_open and self.told and orig_expr.free_symbols:
            if all(symbol in self.named for symbol in orig_expr.free_symbols):
                self.told(orig_expr, answer)
        return answer

    def _set_replacement(self, a: sympy.Symbol, tgt: sympy.Expr, msg: str) -> None:
        if self.is_open and a in self.named:
            error = self.pinned(self.named[a].name, tgt.xreplace(self.named))
            if self.pins is None:
                raise error
            self.pins.setdefault(error.symbol, error)
        super()._set_replacement(a, tgt, msg)

    def pinned(self, name: str, value: sympy.Expr) -> PinnedSizeError:
        """The error of a line that holds a size at one value."""
        frames = user_frames(self.top, sys._getframe(1))
        where = "forward"
        if frames:
            line = frames[0].f_lineno
            where = f"{place(frames[0], line)}, {source_text(frames[0], line)!r},"
        return PinnedSizeError(
            name,
            where,
            value,
            "Write it for the whole tensor: sizes as x.shape[0], without int(), range(), tolist() "
            "or a loop over samples.",
        )


class FakeWorld:
    """The fake twins of a model's parameters and buffers and of its inputs.

    `names` gives the first dotted name of each fake parameter and buffer by its `id`; `symbols`
    the size symbols by the user's name, `hints` their sizes in the example.
    """

    def __init__(self, model: nn.Module) -> None:
        self.env = _NamedSizes()
        self.mode = FakeTensorMode(
            shape_env=self.env, allow_non_fake_inputs=True, static_shapes=True
        )
        self.symbols: dict[str, Any] = {}
        self.hints: dict[str, int] = {}
        self.names: dict[int, str] = {}
        self.model = model
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}
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
        """Whether a module has its own parameters and buffers, and not others for one call, as
        `torch.func.functional_call` gives it."""
        return all(
            tensor is None or self._own.get((id(tensors), name)) is tensor
            for inner in module.modules()
            for tensors in (inner._parameters, inner._buffers)
            for name, tensor in tensors.items()
        )

    def _fake(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._fakes:
            self._fakes[id(tensor)] = (tensor, self._made_fake(tensor))
        return self._fakes[id(tensor)][1]

    def twin(self, tensor: Tensor) -> Tensor:
        """The fake twin of a parameter or buffer; any other tensor itself."""
        return self._fakes.get(id(tensor), (tensor, tensor))[1]

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
        """A fake input of the tensor's kind; sizes at `dims` are symbols, the others numbers."""
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
        """A SymInt or SymFloat of torch in the user's symbols; a number where it is one."""
        expr = self.env.replace(value.node.expr)
        if isinstance(value, torch.SymBool):
            return bool(value)
        return self.as_size(expr)

    def as_size(self, expr: sympy.Expr) -> Size | int | float:
        """An expression of the ShapeEnv in the user's symbols."""
        if expr.is_number:
            return int(expr) if expr.is_integer else float(expr)
        return Size(expr.xreplace(self.env.named))

    def is_number(self, value: torch.SymInt) -> bool:
        """Whether a SymInt has come to be one number."""
        return bool(self.env.replace(value.node.expr).is_number)

    def shape(self, tensor: Tensor) -> tuple[int | Size, ...]:
        return tuple(
            self.size(size) if isinstance(size, torch.SymInt) else size for size in tensor.shape
        )

    def is_data_dependent(self, shape: tuple[Any, ...]) -> bool:
        """Whether a size among them is known only when the values of tensors are."""
        known = self.symbols.keys()
        return any(isinstance(size, Size) and not size.symbols <= known for size in shape)

    @contextmanager
    def inside(self, top: FrameType) -> Iterator[None]:
        """Within, the model's parameters and buffers are the fake ones.

        `top` is the frame above all frames of the model's forward.
        """
        before = [
            (attributes, dict(attributes))
            for module in self.model.modules()
            for attributes in (module.__dict__, module._buffers, module._parameters)
        ]
        kept = [
            (value, list(value) if isinstance(value, list) else dict(value))
            for module in self.model.modules()
            for name, value in vars(module).items()
            if isinstance(value, (list, dict)) and not name.startswith("_")
        ]
        self.env.top, self.env.is_open = top, True
        try:
            for tensors, name, _, fake in self._swaps:
                tensors[name] = fake
            yield
        finally:
            # torch's caches keep the env, which must not keep the trace.
            self.env.top, self.env.decide, self.env.told, self.env.is_open = None, None, None, False
            for tensors, name, real, _ in self._swaps:
                tensors[name] = real
            for attributes, old in before:
                _drop_fakes(attributes, old)
            for container, items in kept:
                _restore(container, items)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Within a block of `inside`, the model has its real parameters and buffers again."""
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
        """Whether the model has no numbers to compute with."""
        return any(real.is_meta for _, _, real, _ in self._swaps)


def _restore(container: list[Any] | dict[Any, Any], items: list[Any] | dict[Any, Any]) -> None:
    """Gives a list or dict of a module, such as a cache, its items back."""
    if isinstance(container, list):
        container[:] = items
    else:
        container.clear()
        container.update(items)


def _drop_fakes(attributes: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Takes away what forward left on the model: fake tensors are of no use to it."""
    for name, value in list(attributes.items()):
        if isinstance(value, FakeTensor):
            if name in before:
                attributes[name] = before[name]
            else:
                del attributes[name]
