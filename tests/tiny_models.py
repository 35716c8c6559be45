"""Tiny seeded models of every family that the engine must serve, or must refuse.

They are made from configs, so that no download is needed. Their weights are scaled up
until greedy output varies and the gap between the two best logits is not a near-tie.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCABULARY = 128

#: Sliding window, in tokens, of the families that have one.
WINDOW = 16

#: Served: rows through pages and trees equal the model's own forward.
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt2",
    "gpt_neox",
    "opt",
)

#: Refused: these do not route attention through transformers' AttentionInterface.
REFUSED = ("bloom", "falcon", "gpt_neo")

_COMMON: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

#: The keys that most families share: four query heads over two KV heads, three layers.
_ROTARY: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}

#: Gemma's: window on some layers, softcap. Untied, since their embeddings outweigh the
#: layers, so that a tied head would only repeat the last token.
_MIXED_LAYERS: dict[str, object] = {
    "tie_word_embeddings": False,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "final_logit_softcapping": 6.0,
}

_OWN: dict[str, dict[str, object]] = {
    "llama": _ROTARY,
    "qwen2": _ROTARY,
    "qwen3": _ROTARY | {"head_dim": 24},
    "mistral": _ROTARY | {"sliding_window": WINDOW},
    "gemma2": _ROTARY | _MIXED_LAYERS | {"attn_logit_softcapping": 4.0},
    "gemma3_text": _ROTARY | _MIXED_LAYERS,
    "phi3": _ROTARY,
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "gpt_neox": {k: v for k, v in _ROTARY.items() if k != "num_key_value_heads"},
    "opt": {
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    },
    "gpt_oss": _ROTARY
    | {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gpt_neo": {
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": WINDOW,
        "max_position_embeddings": 512,
    },
}

#: Factor on every matrix, and on every embedding table, after the usual initialisation.
_MATRIX_SCALE = 10.0
_TABLE_SCALE = 5.0


def tiny_config(family: str, **changes: object) -> PretrainedConfig:
    """The config of a tiny model; ``changes`` override its keys."""
    config: PretrainedConfig = AutoConfig.for_model(family, **(_COMMON | _OWN[family] | changes))
    return config


def tiny_model(family: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A float32 model in evaluation mode whose weights depend on ``seed`` alone.

    Args:
        family: a name of :data:`FAMILIES` or :data:`REFUSED`, or ``gpt_oss`` (attention sinks).
        seed: of the weights; the global generator is left as it was.
        changes: config keys to override.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            tiny_config(family, **changes), dtype=torch.float32
        )
        tables = {id(t.weight) for t in model.modules() if isinstance(t, torch.nn.Embedding)}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(_TABLE_SCALE if id(parameter) in tables else _MATRIX_SCALE)
                else:
                    # Biases and norms start at constants, which would hide mistakes in them.
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval()
    return model


def save_tiny(family: str, folder: Path, seed: int = 0, **changes: object) -> Path:
    """Write :func:`tiny_model` to ``folder`` as safetensors, without a tokenizer."""
    tiny_model(family, seed, **changes).save_pretrained(folder)
    return folder
