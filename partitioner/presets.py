"""Published configurations by name, known without a network.

Each entry is a transformers model class and the fields of its configuration that differ from
that configuration's defaults; sizes are those of the papers and of the checkpoints of that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """A class of transformers with the configuration fields of a published model."""

    model_class: str
    config_class: str
    fields: Mapping[str, Any] = field(default_factory=dict)


def _gpt2(layers: int, width: int, heads: int) -> Preset:
    fields = {"n_layer": layers, "n_embd": width, "n_head": heads}
    return Preset("GPT2LMHeadModel", "GPT2Config", fields)


def _encoder(family: str, layers: int, width: int, heads: int, **fields: Any) -> Preset:
    head = "ForMaskedLM"
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    return Preset(family + head, family + "Config", sizes | fields)


def _t5(layers: int, width: int, heads: int, hidden: int, key: int = 64) -> Preset:
    fields = {
        "num_layers": layers,
        "num_decoder_layers": layers,
        "d_model": width,
        "num_heads": heads,
        "d_ff": hidden,
        "d_kv": key,
        "decoder_start_token_id": 0,
    }
    return Preset("T5ForConditionalGeneration", "T5Config", fields)


def _vit(layers: int, width: int, heads: int) -> Preset:
    fields = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "num_labels": 1000,
    }
    return Preset("ViTForImageClassification", "ViTConfig", fields)


def _llama(
    layers: int, width: int, heads: int, key_value_heads: int, hidden: int, vocabulary: int = 32000
) -> Preset:
    fields = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "intermediate_size": hidden,
        "vocab_size": vocabulary,
    }
    return Preset("LlamaForCausalLM", "LlamaConfig", fields)


_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}

PRESETS: Mapping[str, Preset] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "bert-base-uncased": _encoder("Bert", 12, 768, 12),
    "bert-large-uncased": _encoder("Bert", 24, 1024, 16),
    "roberta-base": _encoder("Roberta", 12, 768, 12, **_ROBERTA),
    "roberta-large": _encoder("Roberta", 24, 1024, 16, **_ROBERTA),
    "t5-small": _t5(6, 512, 8, 2048),
    "t5-base": _t5(12, 768, 12, 3072),
    "t5-large": _t5(24, 1024, 16, 4096),
    "t5-3b": _t5(24, 1024, 32, 16384, 128),
    "t5-11b": _t5(24, 1024, 128, 65536, 128),
    "vit-base": _vit(12, 768, 12),
    "vit-large": _vit(24, 1024, 16),
    "llama-1b": _llama(22, 2048, 32, 4, 5632),
    "llama-7b": _llama(32, 4096, 32, 32, 11008),
    "llama-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama-13b": _llama(40, 5120, 40, 40, 13824),
    "llama-70b": _llama(80, 8192, 64, 8, 28672, 128256),
}
