"""A capture against its model at other sizes, in each mode: equal outputs, buffers and gradients.

Graph and model run the same operations in the same order, so that they agree to the last bits; the
tolerance only covers threads that add in another order.

`compare` compares the tensors of the original with those of the generated stages by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ...runtime.errors import CaptureError, PlanError
from ...runtime.tensor_files import as_real, dense
from .arguments import Arguments, plain_structure, tensors_in
from .graph import Capture, is_refusal, refused_sizes, run, sizes_of
from .model_state import (
    Noise,
    UnfitNoise,
    WorkingCopies,
    device_of,
    in_mode,
    seed_all,
    unchanged,
    verify_finite,
    without_cache,
    working_copies,
)
from .random_numbers import Draw
from .sizes import (
    Sample,
    accepted,
    dynamic_of,
    first_accepted,
    larger_sizes,
    nearby_sizes,
    refused_by_model,
    smaller_sizes,
)

# Below this, gradients are compared too: above, the check would take longer than the capture.
MAX_PARAMETERS_WITH_GRADIENTS = 5_000_000
_SEEDS, _SEEDS_TRIED = 4, 200
_KEEP = "Keep the module that computes it as one node (--leaf Class); please report the model."


def check_capture(capture: Capture, inputs: Mapping[str, Tensor]) -> list[str]:
    """Runs graph and model on inputs of other sizes, in each mode, from equal seeds.

    `inputs` are the tensors among forward's arguments by name. If random numbers decide, several
    seeds make each decision both ways. Parameters and buffers have noise added, if the model runs
    with it. Returns the symbols at whose size 1 graph and model differ.

    Raises CaptureError if an output, a buffer or (below five million parameters) a gradient
    differs, and if the model itself fails on its example.
    """
    for noise in Noise:
        with working_copies(capture.model, noise, capture.changed) as copies:
            try:
                return _Check(capture, inputs, copies, is_own=noise is Noise.NONE).run()
            except UnfitNoise:
                continue
    raise AssertionError("Noise.NONE always fits")


class _Check:
    """One comparison of graph and model.

    With `is_own` the model has its own numbers; otherwise they have noise, and a failure may be due
    to the noise: it raises UnfitNoise.
    """

    def __init__(
        self,
        capture: Capture,
        inputs: Mapping[str, Tensor],
        copies: WorkingCopies,
        *,
        is_own: bool,
    ) -> None:
        model = capture.model
        device = device_of(model)
        self._capture, self._copies, self._is_own = capture, copies, is_own
        self._small = sum(p.numel() for p in model.parameters()) < MAX_PARAMETERS_WITH_GRADIENTS
        self._real = {name: real(value, device) for name, value in inputs.items()}
        self._dims = dynamic_of(capture.inputs)

    def run(self) -> list[str]:
        """Compares at smaller and larger sizes; returns the symbols whose size 1 differs."""
        sample = self._sample()
        if not self._is_own:
            verify_finite(value for seen in sample.result.values() for value in seen.values())
        for seed in _seeds(self._capture, sample.inputs):
            expected = self._original(sample.inputs, seed) if seed else sample.result
            self._compare(sample.inputs, expected, seed)
        sizes = self._capture.sizes
        for larger in larger_sizes(sizes, all_of_them=True) if self._small else ():
            if (further := accepted(self._original, self._real, self._dims, larger)) is not None:
                try:
                    self._compare(further.inputs, further.result, 0)
                except (CaptureError, UnfitNoise) as error:
                    # Other values may take another branch, whatever the sizes are.
                    if not is_refusal(error):
                        raise
                break
        return [symbol for symbol in sizes if self._differs_at_one(symbol)]

    def _sample(self) -> Sample[dict[bool, dict[str, Tensor]]]:
        """Inputs of other sizes that the model accepts, with its results in each mode."""
        model, sizes = self._capture.model, self._capture.sizes
        choices = (smaller_sizes(sizes), nearby_sizes(sizes))
        try:
            return first_accepted(self._original, self._real, self._dims, sizes, choices)
        except Exception as error:
            if not self._is_own:
                raise UnfitNoise from error
            raise CaptureError(*refused_by_model(model, sizes, error)) from error

    def _differs_at_one(self, symbol: str) -> bool:
        """True if graph and model differ where the size of a symbol is 1."""
        sizes = {**smaller_sizes(self._capture.sizes), symbol: 1}
        if (single := accepted(self._original, self._real, self._dims, sizes)) is not None:
            try:
                self._compare(single.inputs, single.result, 0)
            except (CaptureError, UnfitNoise):
                return True
        return False

    def _observed(
        self,
        given: Mapping[str, Tensor],
        training: bool,
        forward: Callable[[dict[str, Tensor]], Any],
        seed: int,
    ) -> dict[str, Tensor]:
        """All effects of a forward, with those on parameters."""
        model = self._capture.model
        with unchanged(model):
            self._copies.reset()
            seen = _observe(model, given, training, training and self._small, forward, seed)
            changed = {f"parameter {name}": value for name, value in self._copies.changed().items()}
            return seen | changed

    def _original(self, given: dict[str, Tensor], seed: int = 0) -> dict[bool, dict[str, Tensor]]:
        """The effects of the model's forward in each mode."""
        capture = self._capture
        if why := refused_sizes(capture.graph, sizes_of(capture, given)):
            raise CaptureError(why)
        call = partial(capture.arguments.call, capture.model)
        return {training: self._observed(given, training, call, seed) for training in capture.modes}

    def _compare(
        self, given: dict[str, Tensor], results: dict[bool, dict[str, Tensor]], seed: int
    ) -> None:
        """Raises CaptureError if the graph's effects differ from the model's `results`."""
        for training, expected in results.items():
            graph = partial(run, self._capture, training=training)
            mode = "training" if training else "evaluation"
            where = f"in {mode} mode at {_sizes_text(self._capture, given)}"
            try:
                actual = self._observed(given, training, graph, seed)
            except Exception as error:
                if not self._is_own:
                    raise UnfitNoise from error  # perhaps a guard: noise may change a branch
                raise CaptureError(
                    f"the captured graph fails {where}: {type(error).__name__}: {error}",
                    _KEEP,
                ) from error
            for name in expected | actual:
                value = expected.get(name)
                if value is None or not _equal(value, actual.get(name)):
                    raise CaptureError(
                        f"the captured graph is not the model: {name} differs {where} "
                        f"({_difference(value, actual.get(name))}).",
                        _KEEP,
                    )


def _seeds(capture: Capture, sample: Mapping[str, Tensor]) -> list[int]:
    """Seeds with which each decision is made both ways, if the first 200 seeds have them."""
    nodes = capture.graph.nodes
    decisions = [node for node in nodes if "decision" in node.meta]
    if not decisions:
        return [0]
    if any(node.op == "placeholder" for node in _ancestors(decisions)):
        return list(range(_SEEDS))
    drawing = [node for node in nodes if isinstance(node.target, Draw)]
    needed = [node for node in nodes if node in _ancestors([*decisions, *drawing])]
    seed_of: dict[tuple[fx.Node, bool], int] = {}
    with unchanged(capture.model), torch.no_grad():
        for seed in range(_SEEDS_TRIED):
            seed_all(seed)
            env: dict[fx.Node, Any] = {}
            run(capture, sample, training=True, nodes=needed, env=env)
            for node in decisions:
                seed_of.setdefault((node, bool(env[node])), seed)
            if len(seed_of) == 2 * len(decisions):
                break
    return list(dict.fromkeys([0, *seed_of.values()]))


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    waiting = list(nodes)
    seen = set(waiting)
    while waiting:
        fresh = [used for used in waiting.pop().all_input_nodes if used not in seen]
        seen.update(fresh)
        waiting += fresh
    return seen


def real(value: Tensor, device: torch.device) -> Tensor:
    if value.device.type != "meta":
        return value.to(device)
    if value.is_floating_point():
        return torch.rand(value.shape, dtype=value.dtype, device=device)
    return torch.ones(value.shape, dtype=value.dtype, device=device)


def _observe(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    training: bool,
    with_gradients: bool,
    forward: Callable[[dict[str, Tensor]], Any],
    seed: int,
) -> dict[str, Tensor]:
    """All effects of a forward by name: outputs, inputs and buffers after it, gradients."""
    given = {name: tensor.clone() for name, tensor in inputs.items()}
    seen: dict[str, Tensor] = {}
    with (
        in_mode(model, training),
        without_cache(model),
        torch.set_grad_enabled(with_gradients),
    ):
        seed_all(seed)
        output = plain_structure(forward(given))
        outputs = list(tensors_in(output))
        names = list(output) if isinstance(output, dict) else range(len(outputs))
        labels = names if len(names) == len(outputs) else range(len(outputs))
        for label, tensor in zip(labels, outputs, strict=True):
            seen[f"output {label}"] = tensor.detach().clone()
        seen |= {f"input {name}": tensor.clone() for name, tensor in given.items()}
        seen |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
        if with_gradients:
            seen |= _gradients(model, outputs)
    return seen


def ignores_gradients(model: nn.Module, given: Arguments, training: bool) -> bool:
    """True if a forward that records gradients has the effects of one that does not, on the
    example: it may ask, but only for another way to the same results."""
    call = partial(given.call, model)
    for noise in Noise:
        with working_copies(model, noise) as copies:
            seen = []
            for recorded in (True, False):
                with unchanged(model):
                    copies.reset()
                    try:
                        effects = _observe(model, given.tensors, training, recorded, call, 0)
                        verify_finite(effects.values())
                    except Exception:
                        break
                    seen.append(effects)
        if len(seen) == 2:
            return all(_equal(value, seen[0].get(name)) for name, value in seen[1].items())
    return False


def _gradients(model: nn.Module, outputs: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of a weighted sum of the outputs; the plain sum of a softmax has none."""
    total = torch.zeros(())
    for output in outputs:
        if output.requires_grad:
            numbers = as_real(output.resolve_conj()).flatten().float()
            weights = torch.arange(len(numbers), device=output.device).cos()
            total = total + (numbers * weights).sum().to(total.device)
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        take_gradients(model)  # the caller's
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
        return {f"gradient of {name}": value for name, value in take_gradients(model).items()}
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of the parameters, which have none afterwards."""
    gradients = {
        name: parameter.grad.to_dense()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    for parameter in model.parameters():
        parameter.grad = None
    return gradients


def _equal(expected: Tensor, actual: Tensor | None) -> bool:
    if actual is None or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    expected, actual = as_real(dense(expected)), as_real(dense(actual))
    if not expected.is_floating_point():
        return torch.equal(expected, actual)
    tolerance = 1e-5 if torch.finfo(expected.dtype).bits >= 32 else 1e-2
    atol = tolerance * finite_magnitude(expected)
    return torch.allclose(expected, actual, rtol=tolerance, atol=atol, equal_nan=True)


def _difference(expected: Tensor | None, actual: Tensor | None) -> str:
    if actual is None or expected is None:
        return f"the {'graph' if actual is None else 'model'} has none"
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return (
            f"{expected.dtype} {tuple(expected.shape)} of the model, "
            f"{actual.dtype} {tuple(actual.shape)} of the graph"
        )
    expected, actual = as_real(dense(expected)), as_real(dense(actual))
    return f"by up to {float((expected.double() - actual.double()).abs().max()):.3g}"


def _sizes_text(capture: Capture, sample: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes_of(capture, sample).items())


_REPORT = (
    "No rule of asyncpipe explains this: please report the model. Keeping the module that makes it "
    "as one node (--leaf Class) may help until then."
)


def leaves_of(outputs: Any) -> dict[str, Tensor]:
    """Every tensor and number in an output structure by its path; None entries are left out."""
    paths, _ = pytree.tree_flatten_with_path(plain_structure(outputs))
    return {
        pytree.keystr(path) or "output": leaf if isinstance(leaf, Tensor) else torch.tensor(leaf)
        for path, leaf in paths
        if isinstance(leaf, (Tensor, int, float))
    }


def total_of(outputs: Mapping[str, Tensor]) -> Tensor:
    """The loss, or a weighted sum of all outputs when there is none."""
    for path, value in outputs.items():
        if "loss" in path and value.dim() == 0 and value.requires_grad:
            return value
    terms = [_weighted(value) for value in outputs.values() if value.requires_grad]
    return torch.stack(terms).sum()


def _weighted(value: Tensor) -> Tensor:
    numbers = as_real(value.resolve_conj()).double()
    weights = torch.linspace(0.5, 1.5, numbers.numel(), device=value.device)
    return (numbers * weights.view_as(numbers)).mean()


def detached(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the outputs without a graph, by path."""
    return {path: value.detach().clone() for path, value in outputs.items()}


class Differs(PlanError):
    """A value of the stages that is not the original's.

    difference: the largest difference, relative to the largest magnitude in the value
    is_of_gradient: the value is a gradient
    """

    def __init__(self, kind: str, name: str, difference: float, tolerance: float) -> None:
        super().__init__(
            f"the {kind} {name} of the generated stages differs from the original's by "
            f"{difference:.1e} of its largest magnitude; {tolerance:.0e} is allowed.",
            _REPORT,
        )
        self.difference, self.is_of_gradient = difference, kind.startswith("gradient")


def compare(
    expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], tolerance: float, kind: str
) -> float:
    """The largest relative difference; raises Differs for the first value beyond tolerance."""
    if expected.keys() != actual.keys():
        name = sorted(expected.keys() ^ actual.keys())[0]
        where = "the original" if name in expected else "the stages"
        raise PlanError(f"only {where} has the {kind} {name}.")
    largest, floor = 0.0, 1e-6
    if kind.startswith("gradient"):
        # A gradient of rounding errors only, as of a key's bias before a softmax, has no scale.
        floor = max([floor, *(1e-4 * finite_magnitude(theirs) for theirs in expected.values())])
    for name, theirs in expected.items():
        ours = actual[name]
        if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
            raise PlanError(
                f"the {kind} {name} is {theirs.dtype} {tuple(theirs.shape)} in the original, "
                f"{ours.dtype} {tuple(ours.shape)} in the stages."
            )
        if theirs.numel() == 0 or theirs.is_meta:
            continue
        is_whole = not theirs.is_floating_point() and not theirs.is_complex()
        if is_whole or theirs.itemsize == 1:  # torch has few functions of float8
            theirs, ours = theirs.double(), ours.double()
        # Before a batch norm, the gradient of a bias consists of rounding errors only. Their scale
        # is that of the terms of its weight's gradient.
        weight = expected.get(f"{name.removesuffix('bias')}weight", theirs)
        of_terms = finite_magnitude(weight) if kind.startswith("gradient") else 0.0
        if not math.isfinite(_magnitude(theirs)):
            # Infinite logits of masked positions, the loss of an impossible target.
            alike = ~theirs.isfinite() & ((theirs == ours) | (theirs.isnan() & ours.isnan()))
            theirs, ours = theirs.masked_fill(alike, 0), ours.masked_fill(alike, 0)
        scale = max(finite_magnitude(theirs), floor, of_terms)
        difference = _magnitude(theirs - ours) / scale
        if not difference <= tolerance:
            raise Differs(kind, name, difference, tolerance)
        largest = max(largest, difference)
    return largest


def finite_magnitude(value: Tensor) -> float:
    """The largest absolute value among the finite ones."""
    magnitude = _magnitude(value)
    return magnitude if math.isfinite(magnitude) else _magnitude(value.nan_to_num(0, 0, 0))


def _magnitude(value: Tensor) -> float:
    """The largest absolute value, nan if there is one; in one pass, if torch supports it."""
    if not value.numel():
        return 0.0
    if value.is_complex():
        return float(value.abs().max())
    least, most = torch.aminmax(value.detach())
    return float(torch.maximum(-least, most))
