"""A small model made from a config: a server of it starts in seconds."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512
#: Factors on all matrices, and on the embeddings, after the usual initialisation: greedy text then
#: varies, and its two best tokens are no near-tie.
_MATRIX_SCALE, _TABLE_SCALE = 10.0, 5.0


def make_small_model(
    folder: Path,
    seed: int = 0,
    max_length: int = 4096,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """Write a model to ``folder``, with ``tokenizer`` or one of words.

    The weights depend on ``seed`` and on the size of the vocabulary alone.
    """
    tokenizer = tokenizer or word_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(_TABLE_SCALE if "embed" in name else _MATRIX_SCALE)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def word_tokenizer() -> PreTrainedTokenizerFast:
    """``VOCABULARY`` words: w0, w1 and so on, and a question mark for all others."""
    words = {f"w{i}": i for i in range(VOCABULARY - 1)} | {"?": VOCABULARY - 1}
    inner = Tokenizer(WordLevel(words, unk_token="?"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")
