"""A model class of transformers -> a tiny model with random weights that trains, and its inputs."""

import inspect
from dataclasses import dataclass

import torch
import transformers
from tiny_configs import ATTEMPTS, END, OF_INPUTS, SMALL, shrunk
from torch import Tensor, nn
from transformers import PreTrainedConfig

LARGEST = 20e6


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model and its values: enough to build the same one again."""

    task: str
    class_name: str
    attempt: int = 0

    def config(self, dropout: bool = True) -> PreTrainedConfig:
        model_class = getattr(transformers, self.class_name)
        rules = SMALL | {"dropout": 0.1 if dropout else 0.0}
        if self.task == "causal":
            rules["is_decoder"] = True
        return shrunk(model_class.config_class(), rules | ATTEMPTS[self.attempt])

    def build(self, dropout: bool = True) -> nn.Module:
        """The model, always with the same weights; with all its kinds of dropout, or without."""
        model_class = getattr(transformers, self.class_name)
        config = self.config(dropout)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model_class(config).parameters())
        if size > LARGEST:
            raise ValueError(f"{size / 1e6:.0f} M parameters after shrinking")
        torch.manual_seed(0)
        model: nn.Module = model_class(config)
        for module in model.modules():
            if isinstance(module, nn.Dropout) and not dropout:
                module.p = 0.0
        return model

    def inputs(self, seed: int = 1) -> dict[str, Tensor]:
        """The inputs that `forward` needs for a loss, at batch 2 and, for text, 10 tokens."""
        random = torch.Generator().manual_seed(seed)
        model_class = getattr(transformers, self.class_name)
        config = self.config()
        tokens = torch.randint(3, 90, (2, 10), generator=random)
        tokens[:, 5] = END
        made: dict[str, Tensor] = {"input_ids": tokens, "labels": tokens}
        if self.task in ("sequence", "image"):
            made["labels"] = torch.tensor([0, 1])
        if self.task == "sequence":
            made["attention_mask"] = torch.ones_like(tokens)
        if self.task in ("seq2seq", "speech"):
            made["decoder_input_ids"] = tokens
        if self.task == "speech":
            made[model_class.main_input_name] = self._sound(model_class.main_input_name, random)
        made["bbox"] = torch.randint(1, 50, (2, 10, 4), generator=random).sort(-1).values
        if self.task == "image" or "with pixels" in ATTEMPTS[self.attempt]:
            made["pixel_values"] = _pixels(config, random)
        taken = inspect.signature(model_class.forward).parameters
        allowed = {*taken, "labels"} if "kwargs" in taken else {*taken}
        return {name: value for name, value in made.items() if name in allowed}

    def _sound(self, name: str, random: torch.Generator) -> Tensor:
        if name == "input_ids":
            raise ValueError("it takes sound at marked places of a text, and no such text is made")
        if name == "input_values":
            return torch.randn(2, 3200, generator=random)
        features = torch.randn(2, 16, 32, generator=random)
        return features.mT.contiguous() if "time first" in ATTEMPTS[self.attempt] else features


def find_recipe(task: str, class_name: str) -> Recipe:
    """The first attempt that builds and trains a step; otherwise raises the error of the first
    attempt."""
    first: Exception | None = None
    tried: set[str] = set()
    for attempt, changes in enumerate(ATTEMPTS):
        recipe = Recipe(task, class_name, attempt)
        try:
            values = f"{recipe.config()} {changes.keys() & {*OF_INPUTS}}"
            if values in tried:
                continue
            tried.add(values)
            loss = recipe.build().train()(**recipe.inputs())["loss"]
            loss.backward()
            if not loss.isfinite():
                raise ValueError(f"the loss is {loss.item()}")
            return recipe
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def _pixels(config: PreTrainedConfig, random: torch.Generator) -> Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 64
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(vision, "num_channels", 3)
    return torch.randn(2, channels, height, width, generator=random)
