"""What a model's loss is: which of its results, and which labels and targets it reads.

The labels of text may have to be the next tokens, and a cross entropy may leave out some targets.
Both are the model's own business; a run has to know them to read text, and to weight the losses of
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ..runtime.plan.plan import TensorSpec
from ..runtime.plan.targets import LABELS, CountedTargets, is_mean
from ..runtime.tensor_parallel import split_cross_entropy, split_nll_loss
from .capture import Capture, Size, read_arguments
from .capture.batch_dimension import on_a_copy
from .capture.graph import is_external
from .capture.model_state import is_on_meta
from .capture.sizes import BATCH, dynamic_of, resized
from .models.load import ModelSource


def loss_output(capture: Capture, criterion: object) -> str | None:
    """The result that is the loss, a single number: the one under "loss"; without a criterion, also
    the only result, or the only number of several that `_is_loss_beside`."""
    (output,) = capture.graph.find_nodes(op="output")
    returned = output.args[0]
    numbers = [node for node in output.all_input_nodes if node.meta.get("shape") == ()]
    if isinstance(returned, Mapping) and "loss" in returned:
        return returned["loss"].name if returned["loss"] in numbers else None
    if criterion is not None or len(numbers) != 1:
        return None
    (number,) = numbers
    others = {*output.all_input_nodes} - {number}
    is_loss = isinstance(returned, fx.Node) or _is_loss_beside(capture, number, others)
    return number.name if is_loss else None


def _is_loss_beside(capture: Capture, number: fx.Node, others: Set[fx.Node]) -> bool:
    """True for a number computed from what a loss function returns, if it also depends on labels
    (an input that the other results do not read) or on every parameter that these depend on.
    Another number is a penalty beside them."""
    inputs = {spec.name for spec in capture.inputs}
    own, rest = _read_by(capture, {number}), _read_by(capture, others)
    return _is_made_of_losses(capture, number) and (
        not inputs.isdisjoint(own - rest) or own >= rest - inputs
    )


def criterion_inputs(capture: Capture, criterion: object) -> tuple[fx.Node, ...]:
    """The outputs that forward computes and that a criterion outside the model reads, in the order
    of the program; none if the model returns a loss."""
    (output,) = capture.graph.find_nodes(op="output")
    if loss_output(capture, criterion) is not None:
        return ()
    returned = {*output.all_input_nodes}
    return tuple(node for node in capture.graph.nodes if node in returned and not is_external(node))


_ARITHMETIC = frozenset(
    "add iadd sub isub mul imul div truediv itruediv neg mean sum stack float to".split()
)


def _is_made_of_losses(capture: Capture, number: fx.Node) -> bool:
    """True for what a loss function returns, and for sums, products and means with such a part."""
    reached, unread = {number}, [number]
    while unread:
        node = unread.pop()
        if _is_loss_function(capture, node):
            return True
        if _name(node) in _ARITHMETIC:
            unread += [source for source in node.all_input_nodes if source not in reached]
            reached.update(node.all_input_nodes)
    return False


def _read_by(capture: Capture, nodes: Set[fx.Node]) -> set[str]:
    """The inputs, and the parameters that train or the modules of such, from which nodes are
    computed."""
    reached = {*nodes}
    unread = [*reached]
    while unread:
        sources = {*unread.pop().all_input_nodes} - reached
        reached |= sources
        unread += sources
    inputs = {node.name for node in reached if node.op == "placeholder"}
    held = {str(node.target) for node in reached if node.op in ("get_attr", "call_module")}
    names = [f"{name}." for name, each in capture.model.named_parameters() if each.requires_grad]
    return inputs | {target for target in held if any(n.startswith(f"{target}.") for n in names)}


def _is_loss_function(capture: Capture, node: fx.Node) -> bool:
    """True for a call of a function such as `cross_entropy`, or of a module such as `MSELoss`."""
    if node.op == "call_module":
        return isinstance(capture.model.get_submodule(str(node.target)), nn.modules.loss._Loss)
    name = getattr(node.target, "__name__", "")
    is_of_torch = node.op == "call_function" and getattr(F, name, None) is node.target
    return is_of_torch and name.endswith(("cross_entropy", "cross_entropy_with_logits", "_loss"))


_FUNCTIONS = (F.cross_entropy, F.nll_loss, split_cross_entropy, split_nll_loss)
_MEANS: tuple[Callable[..., Any], ...] = _FUNCTIONS
_SAME = ("contiguous", "to", "long", "clone", "detach")
_RESHAPED = ("view", "reshape", "flatten", "ravel", "squeeze", "unsqueeze", "transpose", "permute")
_KEPT = {False: _SAME, True: (*_SAME, *_RESHAPED)}
"""Functions that keep all numbers of a target, by whether they may change places: not before the
index that leaves out the first position."""


def counted_targets(capture: Capture, loss: str | None) -> CountedTargets | None:
    """The targets over which the loss of a model is the mean; None unless it is a cross entropy of
    one of the inputs, or of all but its first position."""
    node = next((node for node in capture.graph.nodes if node.name == loss), None)
    while node is not None and _name(node) in ("float", "to"):
        node = _source(node)
    arguments = _arguments(capture, node) if node is not None else None
    if arguments is None or not is_mean(arguments):
        return None
    ignored, weights = arguments.get("ignore_index", -100), arguments.get("weight")
    read = _read(arguments.get("target"), ignored)
    numbers = {spec.name for spec in capture.inputs if spec.dtype.startswith("int")}
    if read is None or read[0] not in numbers:
        return None
    if weights is None:
        return CountedTargets(read[0], ignored, read[1])
    is_buffer = isinstance(weights, fx.Node) and weights.op == "get_attr"
    name = str(weights.target) if is_buffer else ""
    is_known = name in dict(capture.model.named_buffers())
    smoothed = bool(arguments.get("label_smoothing"))
    return CountedTargets(read[0], ignored, read[1], name, smoothed) if is_known else None


def _read(target: Any, ignored: int) -> tuple[str, int | None] | None:
    """The input that the target of a loss has all numbers of, or all but those of the first
    position in a dimension, and that dimension; None if the target has others."""
    moved: int | None = None
    while isinstance(target, fx.Node) and target.op != "placeholder":
        name = _name(target)
        if name == "getitem" and moved is None:
            if (moved := _dimension_of_moving(target)) is None:
                return None
        elif not (_pads(target, ignored) if name == "pad" else name in _KEPT[moved is None]):
            return None
        target = _source(target)
    return (target.name, moved) if isinstance(target, fx.Node) else None


def _pads(node: fx.Node, ignored: int) -> bool:
    """True for a `pad` that adds targets at the end which do not count."""
    given = signature(F.pad).bind(*node.args, **node.kwargs).arguments
    is_at_end = len(given["pad"]) == 2 and given["pad"][0] == 0
    return is_at_end and given.get("mode") != "circular" and given.get("value") == ignored


def is_sum(capture: Capture, loss: str | None) -> bool:
    """True for the loss of a model that adds up over samples: sums over all numbers of a tensor
    with a batch, loss functions of torch with the reduction "sum", and sums and multiples of
    these."""
    terms = _sums(capture, loss)
    return bool(terms) and all(terms)


def notes_of_sums(capture: Capture, loss: str | None) -> Iterator[str]:
    """A note on a loss of which a part adds up over samples, and another does not."""
    terms = _sums(capture, loss)
    if any(terms) and not all(terms):
        yield (
            "the loss adds up over samples in a part of its terms, which therefore count less with "
            "more micro-batches a step: divide these by the number of samples"
        )


def _sums(capture: Capture, loss: str | None) -> list[bool]:
    """For each term of a model's loss, whether it adds up over samples."""
    node = next((node for node in capture.graph.nodes if node.name == loss), None)
    has_samples = any(spec.batch_dim is not None for spec in capture.inputs)
    return [_adds_up(capture, term) for term in _terms(node)] if node and has_samples else []


def _terms(node: Any) -> list[Any]:
    """The terms of a sum, without their factors."""
    parts: Sequence[Any] = getattr(node, "args", ())
    name = _name(node) if isinstance(node, fx.Node) else ""
    match name:
        case "add" | "iadd" | "sub" | "isub":
            return [term for part in parts if part != 0 for term in _terms(part)]
        case "neg" | "float" | "to":
            return _terms(parts[0])
        case "mul" | "imul" | "truediv" | "itruediv" | "div":
            numbers = [part for part in parts if isinstance(part, int | float)]
            if len(numbers) == 1 and (name in ("mul", "imul") or parts[1] is numbers[0]):
                return _terms(parts[parts[0] is numbers[0]])
    return [node]


def _adds_up(capture: Capture, node: Any) -> bool:
    """True for a sum over all numbers of a tensor with a batch."""
    source = _source(node) if isinstance(node, fx.Node) else None
    if source is None or not _has_batch(source):
        return False
    if _name(node) == "sum":
        return len(node.args) == 1 and not node.kwargs
    return _is_loss_function(capture, node) and _reduction(capture, node) == "sum"


def _has_batch(node: fx.Node) -> bool:
    return any(isinstance(size, Size) and BATCH in str(size) for size in node.meta.get("shape", ()))


def _reduction(capture: Capture, node: fx.Node) -> Any:
    """The reduction of a loss function's call."""
    if node.op == "call_module":
        return getattr(capture.model.get_submodule(str(node.target)), "reduction", None)
    target: Any = node.target
    return signature(target).bind(*node.args, **node.kwargs).arguments.get("reduction")


def _name(node: fx.Node) -> str:
    """The name of the function or method that a node calls."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _source(node: fx.Node) -> fx.Node | None:
    source = node.args[0] if node.args else None
    return source if isinstance(source, fx.Node) else None


def _arguments(capture: Capture, node: fx.Node) -> Mapping[str, Any] | None:
    """The arguments of a node that calls a cross entropy, by name; None for another node."""
    if node.op == "call_module":
        module = capture.model.get_submodule(str(node.target))
        if not isinstance(module, nn.CrossEntropyLoss | nn.NLLLoss):
            return None
        names = ("weight", "ignore_index", "reduction", "label_smoothing")
        given = dict(zip(("input", "target"), node.args, strict=False)) | node.kwargs
        return {**given, **{name: getattr(module, name, None) for name in names}}
    if node.op != "call_function" or node.target not in _MEANS:
        return None
    return signature(node.target).bind(*node.args, **node.kwargs).arguments


def _dimension_of_moving(node: fx.Node) -> int | None:
    """The dimension in which an index leaves out the first position and nothing else; None for
    another index."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    whole, moved = (slice(None), slice(0, None), slice(None, None, 1)), slice(1, None)
    rank = len(node.meta["shape"])
    if Ellipsis in index:
        place = index.index(Ellipsis)
        index = (*index[:place], *(slice(None),) * (rank - len(index) + 1), *index[place + 1 :])
    dims = [dim for dim, each in enumerate(index) if each not in whole]
    return dims[0] if len(dims) == 1 and index[dims[0]] == moved else None


def next_labels(source: ModelSource, capture: Capture) -> str | None:
    """The input with the labels of a language model whose loss compares its result at a position
    with the label there, so that this label has to be the next token; None if there is none.

    A loss that moves the labels, as in transformers, never reads the first one, and a model that
    moves its inputs computes the first result without the first token. So the model runs with
    another first token, another first label, and both: in such models the change of the loss by a
    label does not depend on the token.
    """
    model = source.model
    is_known = getattr(model, "main_input_name", None) in capture.arguments.tensors
    texts = {
        spec.name: spec
        for spec in capture.inputs
        if len(spec.shape) == 2 and spec.dtype.startswith("int") and spec.batch_dim is not None
    }
    label = next((texts.pop(name) for name in LABELS if name in texts), None)
    alike = [name for name in texts if label is not None and texts[name].shape == label.shape]
    tokens = texts["input_ids" if "input_ids" in alike else alike[0]] if alike else None
    if label is None or tokens is None or is_known or is_on_meta(model):
        return None
    given = read_arguments(model, source.example_inputs)
    if (runs := on_a_copy(model, given)) is None:
        return None
    few = {name: min(size, 2 if name == BATCH else 16) for name, size in capture.sizes.items()}
    tensors = resized(given.tensors, dynamic_of(capture.inputs), few)
    token = {tokens.name: _with_another_first(tokens, tensors)}
    answer = {label.name: _with_another_first(label, tensors)}
    loss, with_token, with_answer, with_both = (
        _losses(runs({**tensors, **changed}))
        for changed in ({}, token, answer, {**token, **answer})
    )
    if not loss.is_floating_point():
        return None
    difference = (with_both - with_token) - (with_answer - loss)
    rounding = 16 * torch.finfo(loss.dtype).eps * loss.abs()
    return label.name if bool((difference.abs() > rounding).any()) else None


def _with_another_first(spec: TensorSpec, tensors: Mapping[str, Tensor]) -> Tensor:
    """Whole numbers of a batch of texts, of which each has another of their values first."""
    changed = tensors[spec.name].clone()
    values = torch.unique(changed)
    other = values[-1] if len(values) > 1 else (values[0] == 0).to(values.dtype)
    first = changed.select(1 - (spec.batch_dim or 0), 0)
    first.copy_(torch.where(first == other, values[0], other))
    return changed


def _losses(results: list[Tensor] | None) -> Tensor:
    """The results that are a single number; none if the model does not run."""
    numbers = [result.flatten() for result in results or () if result.numel() == 1]
    return torch.cat(numbers) if numbers else torch.zeros(0)
