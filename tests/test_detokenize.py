"""Incremental text against one-shot decoding, over tokenizers of all common kinds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specdec.detokenize import REPLACEMENT, IncrementalDetokenizer, special_ids
from specdec.stop_text import StopCutter

SAMPLES = [
    "Hello world,  this is  a test.\n\n\tindented",
    "naïve café — “quotes” …",
    "日本語のテキスト、中文字符。",
    "👩‍👩‍👧‍👦 family, 🇩🇪 flag, 👍🏽 thumbs, e\u0301 combining, ﷽",
    "  leading and trailing  ",
    "don't can't they're . , ! ?",
    "कुछ हिन्दी, ไทย, עברית, العربية",
    "real replacement \ufffd character\ufffd\ufffd",
    "\u2028line\u0085sep\x00nul",
]
WORDS = ["hello", "world", "the", "a", "test", "##ing", "##s", ".", ",", "don", "'", "t", "你"]


def wrap(backend: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def byte_level() -> PreTrainedTokenizerBase:
    """Every byte is a token, so that characters break everywhere; a few merges on top."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    merges = []
    for word in ("Ġt", "he", "Ġthe", "ll", "æĹ", "æĹ¥", "ðŁ", "ðŁĳ", "âĢ"):
        left, right = word[:-1], word[-1]
        if left in vocabulary and right in vocabulary:
            vocabulary[word] = len(vocabulary)
            merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return wrap(backend, eos_token="<eos>")


def byte_fallback() -> PreTrainedTokenizerBase:
    """As Llama 2: words with a space mark, bytes for all else, a space dropped at the start."""
    names = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    names += ["▁", "▁the", "▁a", "he", "llo", "l", "o", ".", ",", "日", REPLACEMENT, "▁▁"]
    names += [chr(letter) for letter in range(ord("a"), ord("z") + 1) if chr(letter) not in "lo"]
    vocabulary = {name: index for index, name in enumerate(names)}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return wrap(backend, eos_token="</s>", unk_token="<unk>")


def metaspace() -> PreTrainedTokenizerBase:
    names = ["<unk>", "▁", "▁hello", "▁world", "▁a", "b", "c", ".", "▁▁", "é", "日"]
    vocabulary = [(name, -float(index)) for index, name in enumerate(names)]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    return wrap(backend, bos_token="<s>")


def wordpiece() -> PreTrainedTokenizerBase:
    vocabulary = {name: index for index, name in enumerate(["[UNK]", *WORDS])}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    return wrap(backend, sep_token="[SEP]", unk_token="[UNK]")


def word_suffix() -> PreTrainedTokenizerBase:
    names = ["a", "b", "c", "a</w>", "b</w>", "c</w>", ".</w>"]
    backend = Tokenizer(
        models.BPE(
            vocab={name: index for index, name in enumerate(names)},
            merges=[],
            end_of_word_suffix="</w>",
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder()
    return wrap(backend)


KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    build.__name__: lru_cache(build)
    for build in (byte_level, byte_fallback, metaspace, wordpiece, word_suffix)
}
kinds = pytest.mark.parametrize("kind", KINDS)


def one_shot(tokenizer: PreTrainedTokenizerBase, tokens: list[int], skip: bool = True) -> str:
    return str(
        tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    )


def ids_of(tokenizer: PreTrainedTokenizerBase, *names: str) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[name] for name in names]


def in_parts(tokens: list[int], sizes: Iterator[int]) -> Iterator[list[int]]:
    start = 0
    while start < len(tokens):
        size = next(sizes)
        yield tokens[start : start + size]
        start += size


@kinds
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_tokens_equal_one_shot(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    skip = data.draw(st.booleans())
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    parts = [
        detokenizer.add(part)
        for part in in_parts(tokens, iter(lambda: data.draw(st.integers(1, 4)), 0))
    ]
    assert "".join(parts) + detokenizer.finish() == one_shot(tokenizer, tokens, skip)


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_texts_come_back_whole(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    parts = [detokenizer.add([token]) for token in tokens]
    assert "".join(parts) + detokenizer.finish() == one_shot(tokenizer, tokens) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in part for part in parts), "a character was split"


@kinds
def test_text_does_not_depend_on_how_tokens_are_grouped(kind: str) -> None:
    tokenizer = KINDS[kind]()
    rng = random.Random(7)
    tokens = [rng.randrange(len(tokenizer)) for _ in range(400)]
    texts = set()
    for size in (1, 2, 3, 7, 400):
        detokenizer = IncrementalDetokenizer(tokenizer, stop=["the", ". ,", "ab"])
        parts = [detokenizer.add(part) for part in in_parts(tokens, iter(lambda: size, 0))]  # noqa: B023
        texts.add("".join(parts) + detokenizer.finish())
    assert len(texts) == 1


def test_text_is_not_held_longer_than_needed() -> None:
    tokenizer = KINDS["byte_level"]()
    tokens = tokenizer("a日b", add_special_tokens=False)["input_ids"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown = [detokenizer.add([token]) for token in tokens]
    assert [part for part in shown if part] == ["a", "日", "b"]


@pytest.mark.parametrize(("kind", "token"), [("byte_level", "ÿ"), ("byte_fallback", "<0xFF>")])
def test_cost_of_invalid_bytes_stays_bounded(kind: str, token: str) -> None:
    """The window that is decoded for each token must not grow with the length of the output."""
    tokenizer = KINDS[kind]()
    tokens = ids_of(tokenizer, token) * 2000
    detokenizer = IncrementalDetokenizer(tokenizer)
    longest = 0
    decode = detokenizer._text._decode

    def watched(window: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(window))
        return decode(window)

    detokenizer._text._decode = watched
    text = detokenizer.add(tokens)
    assert longest <= 64
    detokenizer._text._decode = decode
    assert text + detokenizer.finish() == one_shot(tokenizer, tokens)


@pytest.mark.parametrize(
    ("prompt", "answer"), [("▁the", "▁a"), ("▁the", "<0xE6>"), ("<0xE6>", "<0x97>"), ("▁", "▁")]
)
def test_continuation_of_a_prompt_keeps_its_space(prompt: str, answer: str) -> None:
    tokenizer = KINDS["byte_fallback"]()
    before, after = ids_of(tokenizer, prompt, answer)
    detokenizer = IncrementalDetokenizer(tokenizer, context=[before])
    text = detokenizer.add([after]) + detokenizer.finish()
    if prompt.startswith("<"):
        assert text == one_shot(tokenizer, [after])
    else:
        assert one_shot(tokenizer, [before]) + text == one_shot(tokenizer, [before, after])


def test_special_tokens_are_left_out() -> None:
    tokenizer = KINDS["byte_level"]()
    assert special_ids(tokenizer) == {tokenizer.eos_token_id}
    tokens = tokenizer("hi<tool>ho<eos>", add_special_tokens=False)["input_ids"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.add(tokens) + detokenizer.finish() == "hi<tool>ho"


@settings(max_examples=500, deadline=None)
@given(
    text=st.text(alphabet="ab\n", max_size=30),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4),
    sizes=st.lists(st.integers(1, 5), min_size=1),
)
def test_stop_strings_are_cut_and_never_leak(text: str, stops: list[str], sizes: list[int]) -> None:
    cutter = StopCutter(stops)
    shown, taken = "", 0
    expected: str | None = None
    while taken < len(text):
        size = sizes[taken % len(sizes)]
        shown += cutter.add(text[taken : taken + size])
        taken += size
        places = [place for stop in stops if (place := text[:taken].find(stop)) >= 0]
        if places and expected is None:
            expected = text[: min(places)]
        assert text.startswith(shown)
        if expected is not None:
            assert shown == expected
            assert cutter.matched in stops
        elif stops:
            longest = max(map(len, stops)) - 1
            assert len(shown) >= min(taken, len(text)) - longest
            assert not any(stop in shown for stop in stops)
    assert shown + cutter.finish() == (text if expected is None else expected)


def test_stop_string_across_tokens() -> None:
    tokenizer = KINDS["byte_level"]()
    tokens = tokenizer("one 日本 two", add_special_tokens=False)["input_ids"]
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["本 t"])
    parts = [detokenizer.add([token]) for token in tokens]
    assert "".join(parts) + detokenizer.finish() == "one 日"
    assert detokenizer.matched_stop == "本 t"
