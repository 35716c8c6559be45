"""A tokenizer of whole words, made on the spot."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast


def word_tokenizer(size: int = 128) -> PreTrainedTokenizerFast:
    """Words ``w0`` to ``w{size - 2}`` have their numbers as ids; the last id is unknown words."""
    words = {f"w{i}": i for i in range(size - 1)} | {"?": size - 1}
    inner = Tokenizer(WordLevel(words, unk_token="?"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")
