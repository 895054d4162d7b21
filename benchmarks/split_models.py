"""The models of `tensor_parallel.py`, small enough to train 20 steps in a moment, and their data.

Each builder returns a model with its example inputs, as `asyncpipe-partition --model FILE:BUILDER`
takes them; dropout is on wherever the model has it.
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from asyncpipe.partitioner.models import builtin

VOCABULARY, TOKENS, BATCH, WIDTH, LAYERS, PIXELS = 97, 16, 2, 32, 4, 32
_LAYERS = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
_ENCODER = {"vocab_size": VOCABULARY, "intermediate_size": 4 * WIDTH, **_LAYERS}
_DECODER = {"num_key_value_heads": 2, "attention_dropout": 0.1, "use_cache": False, **_ENCODER}


def text(samples: int = 64) -> dict[str, Tensor]:
    """Random tokens, which are their own labels."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, VOCABULARY, (samples, TOKENS), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def pictures(samples: int = 64) -> dict[str, Tensor]:
    """Random pixels and one of four labels."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(samples, 3, PIXELS, PIXELS, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(4, (samples,), generator=generator)}


def with_loss(model: str, config: str, **fields: Any) -> nn.Module:
    """A model of transformers, whose loss has the dtype of its logits."""
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**fields))
    if model.endswith("ForCausalLM") or model.startswith("GPT2"):
        made.loss_function = _loss_of_next
    return made


def _with_text(model: str, config: str, **fields: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    return with_loss(model, config, **fields), text(BATCH)


def _loss_of_next(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """The loss of transformers for causal models, without its cast of the logits to float32."""
    following = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    return nn.functional.cross_entropy(logits.view(-1, vocab_size), following)


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    fields = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 4, "n_positions": 64}
    return _with_text("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, **fields)


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    """Four heads of queries share two of keys and values."""
    return _with_text("LlamaForCausalLM", "LlamaConfig", **_DECODER)


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    return _with_text("BertForMaskedLM", "BertConfig", **_ENCODER)


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    """Half of the layers in the encoder, half in the decoder."""
    fields = {"num_layers": LAYERS // 2, "num_heads": 4, "decoder_start_token_id": 0}
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 4 * WIDTH}
    model = ("T5ForConditionalGeneration", "T5Config")
    return _with_text(*model, **fields, **sizes, pad_token_id=0, use_cache=False)


def mixtral() -> tuple[nn.Module, dict[str, Tensor]]:
    """Four experts, two for each token."""
    return _with_text("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **_DECODER)


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ViTConfig(
        image_size=PIXELS,
        patch_size=8,
        num_labels=4,
        intermediate_size=4 * WIDTH,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        **_LAYERS,
    )
    return transformers.ViTForImageClassification(config), pictures(BATCH)


def resnet18() -> tuple[nn.Module, dict[str, Tensor]]:
    """A ResNet-18 of an eighth of the usual channels, for small pictures."""
    model = builtin.resnet18(planes=(8, 16, 32, 64), stem="small", num_classes=4)
    return model, pictures(BATCH)
