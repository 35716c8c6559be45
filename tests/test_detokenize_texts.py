"""Incremental text of any text and of any tokens, by the default model's own tokenizer and by one
that falls back to bytes."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from deployments.tokenizer import load_tokenizer
from specdec.config import DEFAULT_MODEL
from specdec.detokenize import REPLACEMENT, IncrementalDetokenizer
from specdec.model.resolve import resolve_model

#: Pieces that break in the middle: joined emoji, flags, marks that combine, scripts of two to
#: four bytes, spaces of all kinds.
PIECES = [
    "👩‍👩‍👧‍👦",
    "🇩🇪🇫🇷",
    "👍🏽",
    "e\u0301",
    "n\u0303o\u0308",
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞",
    "日本語",
    "漢字仮名",
    "한국어",
    "हिन्दी",
    "עִבְרִית",
    "ﷺ",
    "𝔘𝔫𝔦",
    "\U0010ffff",
    "  ",
    "\n\n",
    "\t",
    "\u00a0",
    "\u3000",
    "\u200b",
    " a",
    "b ",
    "don't",
    "1,000.50",
    "<tool_call>",
    "▁x",
    "Ġy",
]
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=12).map("".join)


@lru_cache
def default_model() -> PreTrainedTokenizerBase:
    """Byte-level BPE."""
    return load_tokenizer(resolve_model(DEFAULT_MODEL, Path("~/.cache/specdec")))


@lru_cache
def byte_fallback() -> PreTrainedTokenizerBase:
    """As sentencepiece makes them: trained pieces, a space mark, and bytes for all else."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog, again and again; 日本 日本"] * 20, trainer
    )
    data = json.loads(backend.to_str())
    vocabulary = data["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    backend = Tokenizer.from_str(json.dumps(data))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "default_model": default_model,
    "byte_fallback": byte_fallback,
}
kinds = pytest.mark.parametrize("kind", KINDS)


def increments(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.add([token]) for token in tokens), detokenizer.finish()]


def one_shot(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(
        tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


@kinds
@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_any_text_comes_back(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    parts = increments(tokenizer, tokens)
    assert "".join(parts) == one_shot(tokenizer, tokens)
    if "".join(parts) == text and REPLACEMENT not in text:  # a vocabulary may lack some bytes
        assert not any(REPLACEMENT in part for part in parts)
    for part in parts:
        part.encode()  # no half of a surrogate pair


@kinds
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_equal_one_shot(kind: str, data: st.DataObject) -> None:
    """Bytes of characters in any order, which no tokenizer would write."""
    tokenizer = KINDS[kind]()
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=48))
    shown = ""
    whole = one_shot(tokenizer, tokens)
    for part in increments(tokenizer, tokens):
        shown += part
        assert whole.startswith(shown), "what was shown has changed"
    assert shown == whole


@kinds
def test_marks_stay_with_their_letters(kind: str) -> None:
    """The letter may come before its marks, but never a mark without, nor another in between."""
    tokenizer = KINDS[kind]()
    text = "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞ e\u0301 n\u0303"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    joined = "".join(increments(tokenizer, tokens))
    assert unicodedata.normalize("NFC", joined) == unicodedata.normalize("NFC", text)
