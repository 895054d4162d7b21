"""Token ids -> samples of a language model: windows, and the labels of its objective.

The embedding of a stage is checked to have a row for every token in its first forward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DataError
from ..plan.plan import Plan, StageSpec
from .task import TARGET, Task, seeded_generator
from .tokens import Tokens

EVALUATION_SHARE = 0.05
IGNORED = -100
_MASKED_SHARE = 0.15


class WindowFields:
    """Windows of token ids -> the inputs of a plan.

    stride: the tokens of a window.

    causal    `input_ids` and equal `labels` (the model shifts them), or a shifted `target`
    masked    15% of the tokens hidden, `labels` -100 but there
    seq2seq   a window twice as long: `input_ids` its first half, `labels` its second
    classify  `labels` says which of the model's classes the window's document falls into
    """

    def __init__(self, task: Task, plan: Plan, *, seed: int, mask: int) -> None:
        self._task, self._seed, self._mask = task, seed, mask
        self._shapes = {spec.name: spec.sample_sizes(plan.sizes) for spec in plan.inputs}
        self._input = self._shapes[task.sample][0]
        self.stride = self._input + self._answer_length()

    def field(
        self, name: str, indices: Sequence[int], windows: Tensor, classes: Sequence[int] = ()
    ) -> Tensor:
        """One field of these windows; `indices` are their numbers, `classes` those of their
        documents."""
        if name == self._task.sample:
            return self._sample(indices, windows)
        if name == self._task.label:
            return self._label(indices, windows, classes)
        size = (len(indices), *self._shapes[name])
        if name.endswith("attention_mask"):
            return torch.ones(size, dtype=torch.int64)
        if name == "token_type_ids":
            return torch.zeros(size, dtype=torch.int64)
        if name == "position_ids":
            return torch.arange(size[-1]).expand(size)
        if name == "decoder_input_ids":
            answer = windows[:, self._input :]
            return torch.cat([torch.zeros_like(answer[:, :1]), answer[:, :-1]], dim=1)
        raise DataError(
            f"no text gives the model's input {name}.", "--data my_file.py:function with that field"
        )

    def _answer_length(self) -> int:
        """Tokens of a window after the input's own."""
        if self._task.objective == "seq2seq":
            answer = "labels" if "labels" in self._shapes else "decoder_input_ids"
            return self._shapes[answer][0] if answer in self._shapes else self._input
        return 1 if self._task.label == TARGET else 0

    def _sample(self, indices: Sequence[int], windows: Tensor) -> Tensor:
        sample = windows[:, : self._input]
        if self._task.objective == "masked":
            return sample.masked_fill(self._hidden(indices), self._mask)
        return sample

    def _label(self, indices: Sequence[int], windows: Tensor, classes: Sequence[int]) -> Tensor:
        match self._task.objective:
            case "seq2seq":
                return windows[:, self._input :]
            case "masked":
                return windows.masked_fill(~self._hidden(indices), IGNORED)
            case "classify":
                return torch.tensor(classes)
        return windows[:, 1:] if self._task.label == TARGET else windows

    def _hidden(self, indices: Sequence[int]) -> Tensor:
        """Which tokens are masked: a function of the seed and the window alone."""
        rows = [
            torch.rand(self._input, generator=seeded_generator(self._seed, "mask", index))
            for index in indices
        ]
        return torch.stack(rows) < _MASKED_SHARE


class TextWindows:
    """Windows of a text, one after the other, as the inputs of a plan.

    The last 5% of the text is for evaluation; where documents are classes, every 20th window.
    """

    def __init__(
        self, tokens: Tokens, task: Task, plan: Plan, *, evaluation: bool, seed: int
    ) -> None:
        self._tokens = tokens
        self._task = task
        self._made = WindowFields(task, plan, seed=seed, mask=tokens.mask)
        self._stride = self._made.stride
        whole = len(tokens.ids)
        if task.objective == "classify":
            every = round(1 / EVALUATION_SHARE)
            starts = range(0, whole - self._stride + 1, self._stride)
            self._starts = [
                start for index, start in enumerate(starts) if (index % every == 1) == evaluation
            ]
        else:
            border = whole - max(int(whole * EVALUATION_SHARE), self._stride)
            first, last = (border, whole) if evaluation else (0, border)
            self._starts = list(range(first, last - self._stride + 1, self._stride))
        if not self._starts:
            raise DataError(
                f"the text has {whole} tokens, too few for windows of {self._stride} to train on "
                "and to evaluate.",
                "Give a longer text, or a smaller --seq.",
            )

    @property
    def fields(self) -> tuple[str, ...]:
        return self._task.fields

    def __len__(self) -> int:
        return len(self._starts)

    def get(self, indices: Sequence[int], fields: Collection[str]) -> dict[str, Tensor]:
        ids = self._tokens.ids
        starts = [self._starts[index] for index in indices]
        rows = [ids[start : start + self._stride].astype("int64") for start in starts]
        windows = torch.stack([torch.from_numpy(row) for row in rows])
        is_classified = self._task.objective == "classify"
        classes = [self._class_of(start) for start in starts] if is_classified else []
        return {name: self._made.field(name, indices, windows, classes) for name in fields}

    def _class_of(self, start: int) -> int:
        documents = self._tokens.starts
        document = bisect_right(documents, start) - 1
        return document * min(self._task.classes or 2, len(documents)) // len(documents)


def check_vocabulary(
    module: nn.Module,
    spec: StageSpec,
    ids_input: str,
    largest_token: int,
    *,
    source: str,
    tokenizer: str,
) -> None:
    """Watches the stage's next forward for embeddings that read the token ids.

    Which do is only seen there: tables of positions are embeddings too, but read other numbers.
    That forward raises DataError when such an embedding has too few rows.
    """
    place = spec.inputs.index(ids_input)
    ids: list[Tensor] = []

    def begin(stage: nn.Module, arguments: tuple[Any, ...]) -> None:
        ids.append(arguments[place])

    def look(name: str, embedding: nn.Embedding, read: Tensor) -> None:
        rows = embedding.num_embeddings
        if rows <= largest_token and read.shape == ids[-1].shape and torch.equal(read, ids[-1]):
            raise DataError(
                f"token id {largest_token} in {source}, but the model has {rows} rows in {name}. "
                f"The data was made with another tokenizer ({tokenizer}).",
                "Tokenize it with the model's own, or partition a model with more rows.",
            )

    def end(stage: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        for hook in hooks:
            hook.remove()

    hooks = [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    for name, embedding in module.named_modules():
        if isinstance(embedding, nn.Embedding):
            hooks.append(
                embedding.register_forward_pre_hook(
                    lambda child, arguments, name=name: look(name, child, arguments[0])
                )
            )
