"""The first forward of a stage -> the proof that its embedding has a row for every token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DataError
from ..plan import StageSpec


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
                "Tokenise it with the model's own, or partition a model with more rows.",
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
