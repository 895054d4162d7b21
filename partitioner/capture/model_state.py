"""The state of a model: blocks that change and restore it, and noisy copies.

`in_mode`, `unchanged`, `without_cache` and `silent` are context managers that restore the model.

`working_copies` gives a model copies of its parameters and buffers with a little noise. Without
noise, a gate or a head of zeros, or a copy that still equals its source, would hide differences
behind it. The copies also keep changes by forward away from the caller's memory.
"""

from __future__ import annotations

import copy
import logging
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...runtime.errors import CaptureError
from ...runtime.formatting import one_line
from ...runtime.rng import numbers_kept, seed_numbers, seed_torch
from .arguments import holds

_CACHES = ("use_cache", "use_mems_eval", "use_mems_train")


def seed_all(seed: int) -> None:
    """Seeds the generators of torch, Python and NumPy."""
    seed_torch(seed)
    seed_numbers(seed)


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Sets training or evaluation mode for the block, and restores the mode of each module."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


def verify_strided(tensors: Mapping[str, Any], kind: str) -> None:
    """Raises CaptureError for a tensor that is not strided, such as a sparse one."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.layout != torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            raise CaptureError(
                f"the {kind} {one_line(name)} has the layout {layout}, and stages hold and send "
                "strided tensors alone.",
                "Keep it dense.",
            )


@contextmanager
def unchanged(model: nn.Module, changing: Collection[str] = ()) -> Iterator[None]:
    """Restores buffers, attributes, hooks, gradients, modes and random generators after the block.

    Only the parameters that `changing` names have their values restored: a copy of all would
    double the memory of a large model.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    verify_strided(parameters, "parameter")
    verify_strided(dict(model.named_buffers()), "buffer")
    tensors = [
        *(parameters[name] for name in changing if name in parameters),
        *(tensor for _, tensor in model.named_buffers()),
    ]
    places, plain = _mutable_state(model)
    values = [
        (tensor, tensor.data, tensor.detach().clone())
        for tensor in {id(tensor): tensor for tensor in (*tensors, *plain)}.values()
        if not (isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.layout != torch.strided)
    ]
    own = [
        (parameter, parameter.grad, parameter.requires_grad) for parameter in parameters.values()
    ]
    with same_draws(model):
        try:
            yield
        finally:
            for place, before in places:
                _refill(place, before)
            for parameter, gradient, requires_grad in own:
                parameter.grad = gradient
                if parameter.requires_grad != requires_grad:
                    parameter.requires_grad_(requires_grad)
            with torch.no_grad():
                for tensor, memory, value in values:
                    if tensor.data_ptr() != memory.data_ptr():
                        tensor.data = memory
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)


@contextmanager
def same_draws(model: nn.Module) -> Iterator[None]:
    """Restores the random generators of torch, Python and NumPy after the block."""
    tensors = (*model.parameters(), *model.buffers())
    devices = {tensor.device.index for tensor in tensors if tensor.is_cuda}
    indices = [index for index in devices if index is not None]
    with torch.random.fork_rng(devices=indices), numbers_kept():
        yield


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restores what the block stores on the modules, also in containers. If it replaces modules,
    which stay, so do the attributes that go with them, but for fake tensors."""
    modules = list(model.modules())
    places, _ = _mutable_state(model)
    try:
        yield
    finally:
        has_replaced = list(model.modules()) != modules
        for place, before in places:
            if has_replaced and isinstance(place, dict) and isinstance(before, dict):
                for name in [name for name in place if holds(place[name], FakeTensor)]:
                    del place[name]
                    place.update({name: before[name]} if name in before else {})
            else:
                _refill(place, before)


_Place = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
_CONTAINERS = (dict, list, set, deque)
_DEEPEST, _LARGEST = 3, 10_000


def _mutable_state(model: nn.Module) -> tuple[list[tuple[_Place, _Place]], list[Tensor]]:
    """The dicts, lists, sets and deques of the modules, each with a copy, and the tensors in them
    that are neither parameters nor buffers."""
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    containers: dict[int, tuple[_Place, _Place]] = {}
    tensors: list[Tensor] = []

    def visit(value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            if id(value) not in registered and value.grad_fn is None:
                tensors.append(value)
        elif isinstance(value, _CONTAINERS) and id(value) not in containers and depth:
            containers[id(value)] = (value, copy.copy(value))
            if len(value) <= _LARGEST:
                for item in list(value.values() if isinstance(value, dict) else value):
                    visit(item, depth - 1)

    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            visit(module.__dict__, _DEEPEST)
    return list(containers.values()), tensors


def plain_tensors(model: nn.Module) -> list[Tensor]:
    """The tensors in attributes of the modules that are neither parameters nor buffers."""
    return _mutable_state(model)[1]


def _refill(place: _Place, before: _Place) -> None:
    """Restores the items of a container, if they have changed."""
    if isinstance(place, dict):
        assert isinstance(before, dict)
        same = len(place) == len(before) and all(
            name in before and before[name] is value for name, value in place.items()
        )
        if not same:
            place.clear()
            place.update(before)
    elif len(place) != len(before) or any(
        item is not other for item, other in zip(place, before, strict=True)
    ):
        place.clear()
        (place.update if isinstance(place, set) else place.extend)(before)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Switches off, for the block, the key-value caches and segment memories of transformers
    models, which training does not need."""
    owned: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in owned}.values()
    on = [(config, name) for config in configs for name in _CACHES if getattr(config, name, None)]
    for config, name in on:
        setattr(config, name, False)
    try:
        yield
    finally:
        for config, name in on:
            setattr(config, name, True)


_LOGGERS = (
    "torch._dynamo", "torch._guards", "torch._subclasses.fake_tensor", "torch.fx",
    "torch.fx.experimental.symbolic_shapes",
)  # fmt: skip


@contextmanager
def silent() -> Iterator[None]:
    """Silences torch's log of untraceable code for the block: our own errors report it."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.level = logging.CRITICAL
        loggers[0].setLevel(logging.CRITICAL)  # makes all loggers forget: five times would be slow
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.level = level
        loggers[0].setLevel(levels[0])


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; the CPU for a model without any."""
    return next((t.device for t in chain(model.parameters(), model.buffers())), torch.device("cpu"))


def local_device(model: nn.Module) -> torch.device:
    """The device that `LocalDevice` stands for: the CPU for a model on meta, for its twins are
    there."""
    tensors = chain(model.parameters(), model.buffers())
    real = (tensor.device for tensor in tensors if not tensor.is_meta)
    return next(real, torch.device("cpu"))


def is_on_meta(model: nn.Module) -> bool:
    """True if the model has no values: some parameter or buffer is on meta."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


MOST_BYTES, SMALL = 2**31, 2**20
_WORTH_THREADS = 2**26  # bytes
_PERIOD = 32_749  # short enough for operations on one thread, which wait for no other
_TILE = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(17)).clamp(-3, 3)
_SHARE, _OF_ZERO, _LARGEST_COPY = 0.1, 0.05, 1e6


class Noise(Enum):
    """The tensors of floating point that get noise.

    ALL: parameters and buffers that the state_dict saves
    PARAMETERS: only parameters, for a model whose buffers hold indices or depend on the weights
    NONE: none

    Buffers outside the state_dict never get noise: they follow from the configuration.
    """

    ALL = "all"
    PARAMETERS = "parameters"
    NONE = "none"


class UnfitNoise(Exception):
    """The model fails, or gives infinite results, with this noise."""


Result = TypeVar("Result")


class WorkingCopies:
    """The copies that a model has in the block; `reset` gives them their first values again."""

    def __init__(self, model: nn.Module, noise: Noise, changing: Collection[str] | None) -> None:
        self._noise = noise
        self._spreads: dict[int, Spread] = {}
        self._kept: dict[int, Tensor] = {}
        self._parameters = dict(model.named_parameters())
        self._unsaved = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        named = [*self._parameters.items(), *model.named_buffers()]
        strided = [(name, tensor) for name, tensor in named if _is_plain(tensor)]
        self._users = Counter(tensor.untyped_storage()._cdata for _, tensor in strided)
        total = sum(tensor.numel() * tensor.element_size() for _, tensor in strided)
        self._keeps_first = total <= MOST_BYTES // 2
        self._is_shared_out = total >= _WORTH_THREADS and device_of(model).type == "cpu"
        self._places = [
            (place, name, tensor, tensor.data)
            for place, (name, tensor) in enumerate(strided)
            if self._users[tensor.untyped_storage()._cdata] == 1
            and (
                total <= MOST_BYTES
                or tensor.numel() <= SMALL
                or name in (changing or ())
                or _is_constant(tensor)
            )
        ]

    def reset(self) -> None:
        self._of_each(self._reset_one)

    def _reset_one(self, place: int, name: str, tensor: Tensor, own: Tensor) -> None:
        first = self._first(place, name, own)
        if tensor.data_ptr() == own.data_ptr() or not torch.equal(tensor, first):
            tensor.data = first.clone() if place in self._kept else first

    def changed(self) -> dict[str, Tensor]:
        """The values of the parameters that differ from their first values."""
        found = self._of_each(self._changed_one)
        names = [name for _, name, _, _ in self._places]
        return {name: value for name, value in zip(names, found, strict=True) if value is not None}

    def _changed_one(self, place: int, name: str, tensor: Tensor, own: Tensor) -> Tensor | None:
        is_same = name not in self._parameters or torch.equal(tensor, self._first(place, name, own))
        return None if is_same else tensor.detach().clone()

    def _of_each(self, function: Callable[[int, str, Tensor, Tensor], Result]) -> list[Result]:
        """The results for all tensors; large ones are shared out over threads, which wait for each
        other only at the end, unlike those of a single operation."""
        if not self._is_shared_out:
            return [function(*place) for place in self._places]
        threads, one = torch.get_num_threads(), partial(torch.set_num_threads, 1)
        try:
            with ThreadPoolExecutor(os.cpu_count(), initializer=one) as pool:
                return list(pool.map(lambda place: function(*place), self._places))
        finally:
            torch.set_num_threads(threads)

    def give_back(self) -> None:
        for _, _, tensor, own in self._places:
            tensor.data = own

    def _first(self, place: int, name: str, own: Tensor) -> Tensor:
        """The first value; made again each time only where keeping all would take much memory."""
        if place not in self._kept:
            first = self._made(place, name, own)
            if not self._keeps_first:
                return first
            self._kept[place] = first
        return self._kept[place]

    def _made(self, place: int, name: str, own: Tensor) -> Tensor:
        is_parameter = name in self._parameters
        is_kept = name in self._unsaved or (self._noise is Noise.PARAMETERS and not is_parameter)
        if self._noise is Noise.NONE or is_kept:
            return own.clone()
        if place not in self._spreads and own.is_floating_point() and own.numel():
            self._spreads[place] = spread_of(own)
        return moved(own, place, any_sign=is_parameter, spread=self._spreads.get(place))


@contextmanager
def working_copies(
    model: nn.Module, noise: Noise, changing: Collection[str] | None = None
) -> Iterator[WorkingCopies]:
    """Gives the model copies for the block, and its own memory back afterwards.

    If the model has more than 2 GiB, only small tensors, tensors of one value, and the parameters
    that `changing` names are copied and get noise.
    """
    copies = WorkingCopies(model, noise, changing)
    try:
        copies.reset()
        yield copies
    finally:
        copies.give_back()


def moved(
    value: Tensor, place: int, *, any_sign: bool = True, spread: Spread | None = None
) -> Tensor:
    """A copy of `value` with noise that depends on `place`; `spread` is that of the value.

    If all numbers have one sign they keep it, and zeros among them stay zero; a tensor of zeros
    gets positive numbers, or numbers of any sign. Infinite and large numbers, as in masks, stay.
    """
    noisy = value.detach().clone()
    if noisy.is_complex():
        parts = moved(torch.view_as_real(noisy.resolve_conj()), place, any_sign=any_sign)
        return torch.view_as_complex(parts)
    if not value.is_floating_point() or not value.numel():
        return noisy
    spread, flat = spread or spread_of(value), noisy.reshape(-1)
    noise = repeated_noise(min(len(flat), _PERIOD), place).to(value.device)
    for part in torch.split(flat, _PERIOD):
        part.copy_(_with_noise(_exact(part), noise[: len(part)], spread, any_sign))
    return noisy if noisy.is_contiguous() else noisy.copy_(flat.view(value.shape))


Spread = tuple[float, float, float, bool]
"""The least and the largest of some numbers, their usual size, and whether all are usual ones."""


def spread_of(value: Tensor) -> Spread:
    """The spread of a tensor's numbers. The usual size leaves out the fill values of masks."""
    usual = exact = _exact(value.detach())
    low, high = (float(bound) for bound in torch.aminmax(exact))
    if not (is_usual := max(-low, high) <= _LARGEST_COPY):
        low, high = (float(bound) for bound in torch.aminmax(exact.nan_to_num()))
        usual = torch.where(exact.abs() <= _LARGEST_COPY, exact, 0)
    return low, high, float(usual.norm()) / usual.numel() ** 0.5, is_usual


def _with_noise(exact: Tensor, noise: Tensor, spread: Spread, any_sign: bool) -> Tensor:
    low, high, usual, is_usual = spread
    if low == high == 0:
        other = _OF_ZERO * (noise if any_sign else noise.abs())
    elif low >= 0 or high <= 0:
        other = exact * (_SHARE * noise).exp()
    else:
        other = exact + _SHARE * usual * noise
    return other if is_usual else torch.where(exact.abs() <= _LARGEST_COPY, other, exact)


def _exact(value: Tensor) -> Tensor:
    return value if value.dtype == torch.float64 else value.float()


def repeated_noise(count: int, place: int) -> Tensor:
    """Numbers around zero, repeated, because drawing one for each weight would take long."""
    return _TILE.roll(7_919 * place % _PERIOD).repeat(-(-count // _PERIOD))[:count]


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not tensor.is_inference()
    )


def _is_constant(tensor: Tensor) -> bool:
    if tensor.is_floating_point() and tensor.numel():
        return bool(torch.eq(*torch.aminmax(_exact(tensor.detach()))))
    return False


def verify_finite(tensors: Iterable[Tensor]) -> None:
    """Raises UnfitNoise if a tensor has a number that is not finite."""
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            extremes = torch.aminmax(_exact(tensor.detach()))  # isfinite writes a tensor
            if not all(map(math.isfinite, map(float, extremes))):
                raise UnfitNoise
