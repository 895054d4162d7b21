"""A configuration of transformers -> a small one: values by the names of its fields.

Nested configurations are shrunk too, and each kind of layer of the published model stays. Fields
depend on each other in ways that only the modelling code knows (heads times their size, latent
attention, windows in an image), so there are several sets of values, to be tried in order.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 99
END = 2  # the token that ends a text: some classify at its place
_KEPT = object()  # in an attempt: the field keeps its default

_WIDTH = ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "embedding_size")
_WIDTH += ("d_embed", "projection_dim", "moe_intermediate_size", "word_embed_proj_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "depth")
_LAYERS += ("decoder_layers", "num_decoder_layers", "num_encoder_layers", "num_global_layers")
_LAYERS += ("speech_encoder_layers", "num_self_attends_per_block")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_experts")
_HEADS += ("encoder_attention_heads", "decoder_attention_heads", "num_local_experts")
_HEADS += ("n_routed_experts", "moe_num_experts", "zero_expert_num")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "hidden_dim")
_INNER += ("decoder_ffn_dim", "ffn_hidden_size", "expert_ffn_hidden_size")
_INNER += ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_DROPOUT = ("dropout", "pdrop", "drop_path", "drop_prob")

SMALL: dict[str, Any] = {
    **dict.fromkeys(_WIDTH, 32),
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_INNER, 64),
    **dict.fromkeys(("vocab_size", "entity_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "encoder_hash_byte_group_vocab": VOCABULARY,
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "global_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "embedding_rank", "d_latents"), 16),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups"), 1),
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads"), 4),
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    "num_key_value_heads": 2,
    "index_topk": 4,
    "num_latents": 8,
    "rotary_dim": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "num_kv_shared_layers": 0,
    "max_source_positions": 16,
    "max_target_positions": 64,
    "num_mel_bins": 16,
    "image_size": 32,
    "patch_size": 8,
    "window_size": 2,
    "num_labels": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": END,
    "decoder_start_token_id": 1,
    "n_shared_experts": 1,
    "coordinate_size": 6,
    "shape_size": 4,
    "width_coefficient": 1.0,
    "depth_coefficient": 1.0,
    "rope_theta": 1e4,
    "clip_qkv": 8,
    "input_feat_per_channel": 16,
    "feature_projection_input_dim": 16,
    "input_dim": 16,
    "conv_channels": 32,
    "apply_spec_augment": False,  # draws from numpy
    "default_language": "en_XX",
    "axial_pos_embds": False,
    "use_cache": False,
}

# What else to try, in this order, when a model does not build or does not train with SMALL.
OF_INPUTS = ("with pixels", "time first")
_WINDOWS = {"image_size": 64, "patch_size": _KEPT}
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": _KEPT},
    {"head_dim": _KEPT, "num_key_value_heads": 4},
    {"dropout": _KEPT},
    {"num_heads": 8},
    {"hidden_size": 48},
    {"layer kinds": "twice"},
    {"layer kinds": _KEPT},
    {"layer kinds": _KEPT, "num_key_value_heads": 4},
    *({name: True} for name in OF_INPUTS),
    {"image_size": 64},
    _WINDOWS,
    _WINDOWS | {"lists": "depths"},
    _WINDOWS | {"lists": "depths", "hidden_dim": 1280},  # the width of EfficientNet's head
    {"image_size": _KEPT, "patch_size": _KEPT, "window_size": _KEPT, "lists": "depths"},
)

# Fields that the default configuration of a class leaves out although its model needs them.
MISSING: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
            for kind in ("full_attention", "sliding_attention")
        }
    },
}


def shrunk(config: PreTrainedConfig, rules: Mapping[str, Any]) -> PreTrainedConfig:
    """A configuration of the same class, with small values for the fields in `rules`."""
    fields = {field.name for field in dataclasses.fields(config)}
    values = {name: value for name, value in _small_values(config, rules).items() if name in fields}
    try:
        made = type(config)(**values)
    except Exception:
        made = type(config)()
        for name, value in values.items():
            with contextlib.suppress(Exception):
                setattr(made, name, value)
    for name in ("decoder_start_token_id", "rope_theta"):  # read by T5, DBRX; no fields of theirs
        if not hasattr(made, name):
            setattr(made, name, rules[name])
    return made


def _small_values(config: PreTrainedConfig, rules: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in vars(config).items():
        rule = rules.get(name, _KEPT)
        if isinstance(value, PreTrainedConfig):
            values[name] = shrunk(value, rules)
        elif type(value) in (int, float) and any(part in name for part in _DROPOUT):
            values[name] = rules["dropout"] if rules["dropout"] is not _KEPT else value
        elif isinstance(value, list | tuple):
            short = _small_list(name, value, rule, only_depths="lists" in rules)
            if short is not None:
                values[name] = short
        elif rule is not _KEPT and not isinstance(value, list | tuple | dict):
            values[name] = rule
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            values[name] = value if value < VOCABULARY else 90 + value % 9
    if rules.get("layer kinds") is not _KEPT:
        values |= _one_of_each_kind(config, 2 if "layer kinds" in rules else 1)
    return values | MISSING.get(config.model_type, {})


def _small_list(name: str, value: Any, rule: Any, only_depths: bool) -> list[int] | None:
    """Depths, widths and heads by level, with the same length and proportions."""
    if not value or not all(isinstance(entry, int) and entry > 0 for entry in value):
        return None
    if any(part in name for part in ("depth", "blocks", "repeats")):
        return [min(entry, 3) for entry in value]
    if only_depths and name != "image_size":
        return None
    if "heads" in name:
        return [min(4, 2**level) for level in range(len(value))]
    if max(value) >= 64 and rule is _KEPT:
        parts = 1
        while min(value) // parts > 8 and all(entry % (2 * parts) == 0 for entry in value):
            parts *= 2
        return [entry // parts for entry in value]
    return [rule] * len(value) if isinstance(rule, int) else None


def _one_of_each_kind(config: PreTrainedConfig, repeats: int) -> dict[str, Any]:
    """The smallest number of layers that has every kind of the default, at least two."""
    layers = getattr(config, "num_hidden_layers", None)
    kinds = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == layers and isinstance(value[0], str)
    }
    if not kinds:
        return {}
    rows = list(zip(*kinds.values(), strict=True))
    chosen = sorted({rows.index(row) for row in rows})
    if len(chosen) == 1 and repeats == 1:
        chosen *= 2
    chosen *= repeats
    made: dict[str, Any] = {name: [value[i] for i in chosen] for name, value in kinds.items()}
    return made | {"num_hidden_layers": len(chosen)}
