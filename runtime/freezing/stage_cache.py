"""A stage with frozen blocks -> the same stage, which computes them once for each sample.

The key of a sample is the content of its rows in the stage's inputs, so data, order, replicas and
ranks have nothing to agree on. The arena keeps the tensors of the frozen blocks that the rest of
the stage reads (`reads.py`). If it has all samples of a micro-batch, the blocks are left out: each
one returns the cached tensors, and NaN for tensors that nothing reads. If the samples were cached
when fewer blocks were frozen, only the blocks after these run.

The first micro-batch at a depth is computed, and its blocks once more with its samples at other
places: if a kernel's last bits depend on the place of a sample or on the other samples, these
become part of its key. So results are equal to the last bit with and without a cache.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..executor.instrumented import CACHE_ASKED, CACHE_BYTES, CACHE_HITS, Activity
from ..executor.run import in_eval_mode
from ..plan.plan import Plan, StageSpec
from ..rng import GeneratorState, generator_state
from ..schedule.schedule import Action
from .arena import Entry
from .cached_samples import (
    OF_BATCH,
    OF_SAMPLE,
    Form,
    Inputs,
    ShownInputs,
    Site,
    Writing,
    orders,
    reordered,
    sample_keys,
)
from .marks import Leaf
from .reads import NotCachedError, StageReads, replaced
from .use import Shared, Use

Call = Callable[[tuple[Tensor, ...]], Any]
"""Runs the stage's module."""
_MOST_CHANGES = 3
"""How often frozen parameters may be written to at a depth."""
_SITE_BYTES = 4
_Forwards = dict[nn.Module, Callable[..., Any]]


class _EnoughError(Exception):
    """Ends a forward after its last frozen block."""


class StageCache:
    """Runs one stage at a depth, with what its frozen blocks have computed before.

    use: whether it does, or computes everything
    """

    def __init__(
        self,
        module: nn.Module,
        spec: StageSpec,
        plan: Plan,
        reads: StageReads,
        shared: Shared,
    ) -> None:
        self.use = Use(shared, plan.sizes["batch"])
        self._module, self._spec, self._reads = module, spec, reads
        self._shared, self._arena, self._activities = shared, shared.arena, shared.activities
        self._parts = {number: module.get_submodule(path) for number, path in reads.paths.items()}
        self._frozen = [each for each in module.parameters() if not each.requires_grad]
        specs = {tensor.name: tensor for tensor in (*plan.inputs, *plan.values)}
        self._inputs = [specs[name] for name in spec.inputs]
        self._shapes = [tensor.resolve(plan.sizes) for tensor in self._inputs]
        self._other: list[tuple[int, ...]] = []
        self._read: list[int] = []
        self._samples = plan.sizes["batch"]
        self._of_model = {tensor.name for tensor in plan.inputs}
        self._loads = shared.loads
        self._device = torch.device("cpu")
        self._scope = OF_SAMPLE
        self._versions: list[int] = []
        self._changes = 0
        self._returned: dict[int, tuple[list[Any], Any]] = {}
        self._forms: dict[Leaf, Form] = {}
        self._constants: dict[Leaf, Tensor] = {}
        self._stand_ins: dict[Leaf, Tensor] = {}
        self._sites: dict[int, Site | None] = {}
        self._target: Site | None = None
        self._shown, self._ahead_s = ShownInputs(), 0.0

    @property
    def sample_bytes(self) -> int:
        """The bytes that are kept of a sample; 0 before the first micro-batch."""
        return self._target.sample_bytes if self._target is not None else 0

    @property
    def why_not(self) -> str:
        """Why it computes everything, or has done so until now; "" for another one."""
        if self.use.why_not or self._target is not None:
            return self.use.why_not
        for tensor, planned, other in zip(self._inputs, self._shapes, self._other, strict=False):
            if planned != other:
                return (
                    f"{tensor.name} of a micro-batch has the sizes {list(other)}, and the plan has "
                    f"{list(planned)}"
                )
        return ""

    def __call__(self, arguments: tuple[Tensor, ...], call: Call) -> Any:
        """The result of a call of the module with these arguments."""
        if self.use.why_not:
            return call(arguments)
        if not self._fits(arguments):
            self._other = self._other or [tuple(each.shape) for each in arguments]
            return call(arguments)
        self._activities.cached[CACHE_ASKED] += 1
        if self._target is None or not self._is_as_learned:
            return self._first(arguments, call)
        begin_s = self._clock()
        with self._loading(), self._arena.reading():
            facts, inputs = self._identity(arguments)
            shown = self._shown.take(facts, inputs)
            keys = shown or sample_keys(facts, inputs, self._samples, self._scope)
            entries, start, places = self._found(keys)
            if start is not None and shown is None:
                self._arena.prefetch(places, start.sample_bytes)
            values = start.load(self._arena, places, self._device) if start is not None else {}
        load_s = self._clock() - begin_s + self._ahead_s
        self._ahead_s = 0.0
        if start is not self._target:
            self.use.miss(is_new=start is None)
            writing = Writing(self._arena, self._target, keys, entries)
            return self._compute(arguments, call, start, values, writing, load_s)
        self._activities.cached[CACHE_HITS] += 1
        self.use.hit(load_s)
        if self._reads.outputs:
            made = tuple(self._value(leaf, values) for leaf in self._reads.outputs)
            return made if len(made) > 1 else made[0]
        with replaced(self._given(start, values)):
            return call(arguments)

    def look_ahead(self, arguments: tuple[Tensor, ...], index: int) -> None:
        """Lets the kernel read from the disk what a call to come will load."""
        if self.use.why_not or self._target is None or not self._is_as_learned:
            return
        if not self._fits(arguments):
            return
        begin_s = perf_counter()
        with self._loading(index), self._arena.reading():
            facts, inputs = self._identity(arguments)
            keys = sample_keys(facts, inputs, self._samples, self._scope)
            self._shown.add(facts, inputs, keys)
            _, start, places = self._found(keys)
            if start is not None:
                self._arena.prefetch(places, start.sample_bytes)
        self._ahead_s += perf_counter() - begin_s

    def _fits(self, arguments: tuple[Tensor, ...]) -> bool:
        return [tuple(each.shape) for each in arguments] == self._shapes

    @property
    def _is_as_learned(self) -> bool:
        return self._versions == [each._version for each in self._frozen]

    def _found(self, keys: Sequence[bytes]) -> tuple[list[Entry | None], Site | None, list[int]]:
        """The entries of these samples in the arena, their common site and their places."""
        entries = [self._arena.find(key) for key in keys]
        return entries, self._common(entries), [each.place for each in entries if each is not None]

    def _compute(
        self,
        arguments: tuple[Tensor, ...],
        call: Call,
        start: Site | None,
        values: Mapping[Leaf, Tensor],
        writing: Writing,
        load_s: float,
    ) -> Any:
        """Runs the blocks after `start`, and keeps what the target needs."""
        with self._loading():
            for leaf, value in values.items():
                writing.write(leaf, value)
        begin_s, compute_s = self._clock() - writing.seconds, 0.0

        def follow(number: int, returned: Any) -> None:
            nonlocal compute_s
            compute_s = self._clock() - begin_s - writing.seconds
            with self._loading():
                for leaf, value in _leaves(number, returned):
                    writing.write(leaf, value)

        with replaced(self._given(start, values) | self._followed(follow, after=start)):
            result = call(arguments)
        if self._reads.outputs:
            follow(self._reads.whole, result)
        with self._loading():
            writing.finish()
        if start is None and writing.is_whole:
            self.use.time(load_s + writing.seconds, compute_s)
        return result

    def _first(self, arguments: tuple[Tensor, ...], call: Call) -> Any:
        """Computes everything, and learns how the frozen blocks can be left out."""
        self._changes += bool(self._versions)
        if self._changes > _MOST_CHANGES:
            self.use.why_not = "its frozen parameters are written to again and again"
            return call(arguments)
        self._versions = [each._version for each in self._frozen]
        self._device = arguments[0].device if arguments else self._device
        try:
            kept = set(self._reads.kept(self._reads.last))
        except NotCachedError as error:
            self.use.why_not = error.what
            return call(arguments)
        found: dict[Leaf, Tensor] = {}
        drawing = set[str]()
        start = state = self._generator_state()

        def begin() -> None:
            nonlocal state
            state = self._generator_state()

        def follow(number: int, returned: Any) -> None:
            if not torch.equal(state, self._generator_state()):
                drawing.add(self._reads.paths.get(number, "the stage"))
            values, structure = tree_flatten(returned)
            bare = [None if isinstance(value, Tensor) else value for value in values]
            self._returned[number] = bare, structure
            for leaf, value in _leaves(number, returned):
                self._forms[leaf] = Form.of(value, self._reads.rows.get(leaf))
                if leaf in kept or leaf in self._reads.constants:
                    found[leaf] = value.detach().clone()

        with replaced(self._followed(follow, begin)):
            result = call(arguments)
        if self._reads.outputs:
            state = start
            follow(self._reads.whole, result)
        try:
            if drawing:
                raise NotCachedError(f"{min(drawing)} draws random numbers")
            self._learn(arguments, call, found)
        except NotCachedError as error:
            self.use.why_not = error.what
            return result
        assert self._target is not None
        with self._loading(), self._arena.reading():
            keys = sample_keys(*self._identity(arguments), self._samples, self._scope)
            entries = [self._arena.find(key) for key in keys]
            writing = Writing(self._arena, self._target, keys, entries)
            for leaf in kept:
                writing.write(leaf, found[leaf])
            writing.finish()
        return result

    def _learn(
        self, arguments: tuple[Tensor, ...], call: Call, found: Mapping[Leaf, Tensor]
    ) -> None:
        """Learns from what the frozen blocks have returned for these arguments."""
        self._sites, self._stand_ins = {}, {}
        self._constants = {leaf: found[leaf] for leaf in self._reads.constants & found.keys()}
        target = self._site_of(self._reads.last)
        for scope, order in orders(self._samples).items():
            other = tuple(
                reordered(argument, tensor.batch_dim, order)
                for argument, tensor in zip(arguments, self._inputs, strict=True)
            )
            again = self._computed(other, call, target)
            places = [at for at, of in enumerate(order) if scope == OF_SAMPLE or at == of]
            if all(
                np.array_equal(
                    target.forms[leaf].bytes_of(found[leaf])[order][places],
                    target.forms[leaf].bytes_of(again[leaf])[places],
                )
                for leaf in target.offsets
            ):
                self._scope = scope
                break
        else:
            self._scope = OF_BATCH
        self._target, self._read = target, sorted(self._reads.inputs)

    def _computed(
        self, arguments: tuple[Tensor, ...], call: Call, target: Site
    ) -> dict[Leaf, Tensor]:
        """The results of frozen blocks for other arguments; nothing else changes."""
        found: dict[Leaf, Tensor] = {}
        end = None if self._reads.outputs else max(self._parts)
        state = GeneratorState(self._device, self._generator_state(), self._spec.draws_numbers)

        def follow(number: int, returned: Any) -> None:
            for leaf, value in _leaves(number, returned):
                if leaf in target.forms:
                    found[leaf] = value.detach().clone()
            if number == end:
                raise _EnoughError

        with in_eval_mode([self._module]), state.drawing(), replaced(self._followed(follow)):
            with suppress(_EnoughError):
                follow(self._reads.whole, call(arguments))
        return found

    def _site_of(self, last: int) -> Site:
        """The cached tensors that replace the blocks up to one of them. Raises NotCachedError."""
        leaves, paths = self._reads.kept(last), self._reads.paths
        if missing := [leaf for leaf in leaves if leaf not in self._forms]:
            raise NotCachedError(f"{paths.get(missing[0].block, 'the stage')} runs only at times")
        forms = {leaf: self._forms[leaf] for leaf in leaves}
        is_whole = leaves[-1].block == self._reads.whole
        code = [type(part).forward.__code__.co_code for part in self._parts.values()]
        of_stage = self._spec.sha256 if is_whole else ""
        names = [(paths.get(leaf.block, ""), leaf.number, form) for leaf, form in forms.items()]
        text = repr((names, set(code), of_stage)).encode()
        order = 2 * (max((n for n in paths if n <= last), default=-1) + 1) + is_whole
        digest = hashlib.blake2b(text, digest_size=_SITE_BYTES).digest()
        return Site(order << 8 * _SITE_BYTES | int.from_bytes(digest, "big"), last, forms)

    def _common(self, entries: Sequence[Entry | None]) -> Site | None:
        """The site of all samples of a micro-batch, if they have one that is known here."""
        numbers = {None if entry is None else entry.site for entry in entries}
        number = numbers.pop()
        if numbers or number is None:
            return None
        assert self._target is not None
        if number == self._target.number:
            return self._target
        if number not in self._sites:
            last = (number >> 8 * _SITE_BYTES) // 2 - 1
            self._sites[number] = None
            if last in self._returned:
                with suppress(NotCachedError):
                    site = self._site_of(last)
                    self._sites[number] = site if site.number == number else None
        return self._sites[number]

    def _identity(self, arguments: tuple[Tensor, ...]) -> tuple[object, Inputs]:
        """The facts that all keys have in common, and the tensors that distinguish samples."""
        names = [self._inputs[place].name for place in self._read]
        facts = (
            self._loads,
            "" if self._of_model.issuperset(names) else self._spec.sha256,
            [
                (name, self._shapes[at], arguments[at].dtype)
                for name, at in zip(names, self._read, strict=True)
            ],
            (self._scope, torch.get_num_threads(), torch.is_grad_enabled(), self._device.type),
            (os.getpid(), self._changes) if self._changes else (),
        )
        inputs = [(arguments[place], self._inputs[place].batch_dim) for place in self._read]
        return facts, inputs

    def _given(self, start: Site | None, values: Mapping[Leaf, Tensor]) -> _Forwards:
        """Forwards that return what was kept, for the blocks up to that of `start`."""

        def returns(number: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                bare, structure = self._returned[number]
                leaves = (Leaf(number, place) for place in range(len(bare)))
                made = [
                    self._value(leaf, values) if leaf in self._forms else other
                    for leaf, other in zip(leaves, bare, strict=True)
                ]
                return tree_unflatten(made, structure)

            return forward

        return {
            part: returns(number)
            for number, part in self._parts.items()
            if start is not None and number <= start.last
        }

    def _value(self, leaf: Leaf, values: Mapping[Leaf, Tensor]) -> Tensor:
        if leaf in values:
            return values[leaf]
        if leaf in self._constants:
            return self._constants[leaf].clone()
        if leaf not in self._stand_ins:
            self._stand_ins[leaf] = self._forms[leaf].stand_in(self._device)
        return self._stand_ins[leaf]

    def _followed(
        self,
        follow: Callable[[int, Any], None],
        begin: Callable[[], None] = lambda: None,
        after: Site | None = None,
    ) -> _Forwards:
        """Forwards of the blocks after `after`, each of which passes its result to `follow`."""

        def following(number: int, part: nn.Module) -> Callable[..., Any]:
            own = type(part).forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                begin()
                result = own(part, *args, **kwargs)
                follow(number, result)
                return result

            return forward

        return {
            part: following(number, part)
            for number, part in self._parts.items()
            if after is None or number > after.last
        }

    def _clock(self) -> float:
        if self.use.is_timed and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()

    def _generator_state(self) -> Tensor:
        return generator_state(self._device, self._spec.draws_numbers)

    @contextmanager
    def _loading(self, index: int | None = None) -> Iterator[None]:
        index = self._activities.now[0].index if index is None else index
        action = Action(self._spec.index, "F", index)
        with self._activities.during(Activity("cache", action, index)):
            yield
            self._activities.cached[CACHE_BYTES] += self._arena.take_growth()


def _leaves(number: int, returned: Any) -> Iterator[tuple[Leaf, Tensor]]:
    """The tensors among what a block returns."""
    for place, value in enumerate(tree_flatten(returned)[0]):
        if isinstance(value, Tensor):
            yield Leaf(number, place), value
