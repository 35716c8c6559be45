"""A tokenizer of single letters, in which any text can be written, JSON as well."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

#: Tokens: the 256 letters of byte-level vocabularies, some pairs, and the end.
PAIRS = ("ab", "ba", "aa", "bc", "ca", "12")
END = 256 + len(PAIRS)
VOCABULARY = END + 1


def letter_tokenizer(pairs: Sequence[str] = PAIRS) -> PreTrainedTokenizerFast:
    """Byte-level, with a few merges; the end is the last token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate((*letters, *pairs))}
    merges = [(pair[0], pair[1]) for pair in pairs]
    inner = Tokenizer(models.BPE(vocabulary, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
