"""A capture beside its model at other sizes, in both modes: equal outputs, buffers and gradients.

The two run the same operations in the same order, so that they agree to the last bits; what is
allowed for is only that threads add in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...runtime.errors import CaptureError
from .graph import Capture
from .guards import is_refusal, refused_sizes
from .interpret import run, sizes_of
from .random_numbers import Draw
from .restore import in_mode, seed_all, unchanged, without_cache
from .samples import (
    dynamic_of,
    first_taken,
    larger_sizes,
    nearby_sizes,
    refused_by_model,
    smaller_sizes,
    taken,
)
from .structure import plain_structure, tensors_in
from .working_copies import Noise, UnfitNoise, WorkingCopies, verify_finite, working_copies

# Below this, gradients are compared too: above, the check would take longer than the capture.
MAX_PARAMETERS_WITH_GRADIENTS = 5_000_000
_SEEDS, _SEEDS_TRIED = 4, 200
_KEEP = "Keep the module that makes it as one node (--leaf Class), and please report the model."


def check_capture(capture: Capture, inputs: Mapping[str, Tensor]) -> list[str]:
    """Runs graph and model on inputs of other sizes, in each mode, from equal seeds: one, or more
    where random numbers decide, so that each decision is made both ways. The result is the symbols
    at whose size 1 the two differ.

    `inputs` are the tensors among forward's arguments by name. Both have parameters and buffers
    moved by noise where the model runs with such.

    Raises CaptureError where an output, a buffer or (below five million parameters) a gradient
    differs, and where the model itself does not run on its example.
    """
    for noise in Noise:
        with working_copies(capture.model, noise, capture.changed) as copies:
            try:
                return _check(capture, inputs, copies, is_own=noise is Noise.NONE)
            except UnfitNoise:
                continue
    raise AssertionError("without noise the model is what it is")


def _check(
    capture: Capture, inputs: Mapping[str, Tensor], copies: WorkingCopies, *, is_own: bool
) -> list[str]:
    model = capture.model
    tensors = [*model.parameters(), *model.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    small = sum(p.numel() for p in model.parameters()) < MAX_PARAMETERS_WITH_GRADIENTS

    def observed(
        given: Mapping[str, Tensor],
        training: bool,
        forward: Callable[[dict[str, Tensor]], Any],
        seed: int,
    ) -> dict[str, Tensor]:
        with unchanged(model):
            copies.reset()
            seen = _observe(model, given, training, training and small, forward, seed)
            changed = {f"parameter {name}": value for name, value in copies.changed().items()}
            return seen | changed

    def original(given: dict[str, Tensor], seed: int = 0) -> dict[bool, dict[str, Tensor]]:
        if why := refused_sizes(capture.graph, sizes_of(capture, given)):
            raise CaptureError(why)
        call = partial(capture.arguments.call, model)
        return {training: observed(given, training, call, seed) for training in capture.modes}

    choices = (smaller_sizes(capture.sizes), nearby_sizes(capture.sizes))
    real = {name: _real(value, device) for name, value in inputs.items()}
    try:
        sample = first_taken(original, real, dynamic_of(capture.inputs), capture.sizes, choices)
    except Exception as error:
        if not is_own:
            raise UnfitNoise from error
        raise CaptureError(*refused_by_model(model, capture.sizes, error)) from error
    if not is_own:
        verify_finite(value for seen in sample.result.values() for value in seen.values())

    def compare(
        given: dict[str, Tensor], results: dict[bool, dict[str, Tensor]], seed: int
    ) -> None:
        for training, expected in results.items():
            graph = partial(run, capture, training=training)
            mode = "training" if training else "evaluation"
            where = f"in {mode} mode at {_sizes_text(capture, given)}"
            try:
                found = observed(given, training, graph, seed)
            except Exception as error:
                if not is_own:
                    raise UnfitNoise from error  # a guard, perhaps: other numbers go another way
                raise CaptureError(
                    f"the captured graph does not run {where}: {type(error).__name__}: {error}",
                    _KEEP,
                ) from error
            for name in expected | found:
                value = expected.get(name)
                if value is None or not _equal(value, found.get(name)):
                    raise CaptureError(
                        f"the captured graph is not the model: {name} differs {where} "
                        f"({_difference(value, found.get(name))}).",
                        _KEEP,
                    )

    for seed in _seeds(capture, sample.inputs):
        compare(sample.inputs, original(sample.inputs, seed) if seed else sample.result, seed)
    dims = dynamic_of(capture.inputs)
    for sizes in larger_sizes(capture.sizes, all_of_them=True) if small else ():
        if (further := taken(original, real, dims, sizes)) is not None:
            try:
                compare(further.inputs, further.result, 0)
            except (CaptureError, UnfitNoise) as error:
                # Other values may go another way, which is no matter of sizes.
                if not is_refusal(error):
                    raise
            break
    differing = []
    for symbol in capture.sizes:
        sizes = {**smaller_sizes(capture.sizes), symbol: 1}
        if (one := taken(original, real, dims, sizes)) is not None:
            try:
                compare(one.inputs, one.result, 0)
            except (CaptureError, UnfitNoise):
                differing.append(symbol)
    return differing


def _seeds(capture: Capture, sample: Mapping[str, Tensor]) -> list[int]:
    """Seeds with which each decision is made both ways, as far as some hundred seeds go."""
    nodes = capture.graph.nodes
    decisions = [node for node in nodes if "decision" in node.meta]
    if not decisions:
        return [0]
    if any(node.op == "placeholder" for node in _ancestors(decisions)):
        return list(range(_SEEDS))
    drawing = [node for node in nodes if isinstance(node.target, Draw)]
    needed = [node for node in nodes if node in _ancestors([*decisions, *drawing])]
    found: dict[tuple[fx.Node, bool], int] = {}
    with unchanged(capture.model), torch.no_grad():
        for seed in range(_SEEDS_TRIED):
            seed_all(seed)
            env: dict[fx.Node, Any] = {}
            run(capture, sample, training=True, nodes=needed, env=env)
            for node in decisions:
                found.setdefault((node, bool(env[node])), seed)
            if len(found) == 2 * len(decisions):
                break
    return list(dict.fromkeys([0, *found.values()]))


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    waiting = list(nodes)
    seen = set(waiting)
    while waiting:
        fresh = [used for used in waiting.pop().all_input_nodes if used not in seen]
        seen.update(fresh)
        waiting += fresh
    return seen


def is_on_meta(model: nn.Module) -> bool:
    """Whether the model has no numbers to compute with."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _real(value: Tensor, device: torch.device) -> Tensor:
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
    """Everything a forward does, by name: outputs, buffers after it, gradients."""
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


def _gradients(model: nn.Module, outputs: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of a weighted sum of the outputs; a plain sum of a softmax would have none."""
    total = torch.zeros(())
    for output in outputs:
        if output.requires_grad:
            weights = torch.arange(output.numel(), device=output.device).cos()
            total = total + (output.flatten().float() * weights).sum().to(total.device)
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.grad = None
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
        return {
            f"gradient of {name}": parameter.grad.to_dense()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _equal(expected: Tensor, found: Tensor | None) -> bool:
    if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(expected, found)
    tolerance = 1e-5 if torch.finfo(expected.dtype).bits >= 32 else 1e-2
    scale = float(expected.nan_to_num(0, 0, 0).abs().max()) if expected.numel() else 0.0
    return torch.allclose(expected, found, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _difference(expected: Tensor | None, found: Tensor | None) -> str:
    if found is None or expected is None:
        return f"the {'graph' if found is None else 'model'} has none"
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return (
            f"{expected.dtype} {tuple(expected.shape)} of the model, "
            f"{found.dtype} {tuple(found.shape)} of the graph"
        )
    return f"by up to {float((expected.double() - found.double()).abs().max()):.3g}"


def _sizes_text(capture: Capture, sample: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes_of(capture, sample).items())
