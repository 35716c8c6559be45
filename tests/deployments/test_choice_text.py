"""Text and its tokens' places: the same in whatever portions tokens come.

What these catch: a log-probability told before its text or its character is whole, behind a cut,
twice or never; offsets
that miss a held-back character; cutter and engine that disagree on ``min_tokens``.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.letters import END, VOCABULARY, letter_tokenizer
from deployments.choice_text import ChoiceText, place_prompt
from deployments.logprobs import PlacedLogprobs, logprobs_form
from specdec.detokenize import text_decoder, token_bytes
from specdec.outputs import TokenLogprobs
from specdec.params import SamplingParams
from specdec.policy.stop import StopChecker

TOKENIZER = letter_tokenizer()
DECODE = text_decoder(TOKENIZER)
#: Letters, pairs of them, and the bytes of an emoji and of an umlaut.
TOKENS = st.sampled_from(TOKENIZER("abcab ba12 aabc é😀", add_special_tokens=False)["input_ids"])
STOPS = st.lists(
    st.sampled_from(["a", "ab", "bca", "aab1", "é", "é😀", "😀", "b 1", "2"]), max_size=3
).map(tuple)
#: Runs in which characters of several tokens become whole, and special tokens stand between.
RUNS = st.lists(
    st.one_of(
        TOKENS.map(lambda token: [token]),
        st.sampled_from(["é", "😀", "é😀", "ab", "1"]).map(
            lambda text: list(TOKENIZER(text, add_special_tokens=False)["input_ids"])
        ),
        st.just([END]),
    ),
    max_size=8,
).map(lambda runs: [token for run in runs for token in run])


def entries(tokens: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -0.5 - place, ()) for place, token in enumerate(tokens)]


def told(
    tokens: list[int], params: SamplingParams, portions: list[int]
) -> tuple[list[str], list[tuple[PlacedLogprobs, ...]]]:
    """Texts and entries of a choice whose tokens come in these portions."""
    choice = ChoiceText(TOKENIZER, params, offset=7)
    texts, placed = [], []
    for size in [*portions, len(tokens)]:
        part, tokens = tokens[:size], tokens[size:]
        text, found = choice.add(part, [TokenLogprobs(t, -1.0, ()) for t in part])
        texts.append(text)
        placed.append(found)
        if choice.stopped:
            break
    text, found = choice.finish()
    return [*texts, text], [*placed, found]


@settings(max_examples=300)
@given(
    RUNS,
    STOPS,
    st.integers(0, 6),
    st.booleans(),
    st.lists(st.integers(0, 4), max_size=10),
)
def test_portions_make_no_difference(
    tokens: list[int], stops: tuple[str, ...], least: int, include: bool, portions: list[int]
) -> None:
    params = SamplingParams(stop=stops, min_tokens=least, include_stop=include, logprobs=0)
    texts, placed = told(tokens, params, portions)
    whole_texts, whole_placed = told(tokens, params, [])
    text = "".join(texts)
    found = [entry for part in placed for entry in part]
    assert text == "".join(whole_texts)
    assert found == [entry for part in whole_placed for entry in part]
    # without log-probabilities the text is the same
    plain = ChoiceText(TOKENIZER, params)
    assert text == plain.add(tokens)[0] + plain.finish()[0]
    assert [entry.token for entry in found] == tokens[: len(found)]
    shown = 0
    for part, some in zip(texts, placed, strict=True):
        shown += len(part)
        assert all(entry.offset <= 7 + shown for entry in some)
    if not stops:
        assert len(found) == len(tokens)


@settings(max_examples=300)
@given(st.lists(TOKENS, max_size=20), STOPS, st.integers(0, 6))
def test_text_is_cut_where_the_engine_stops(
    tokens: list[int], stops: tuple[str, ...], least: int
) -> None:
    params = SamplingParams(stop=stops, min_tokens=least)
    checker = StopChecker(params, (), 1000, 1, DECODE)
    known = [0]
    stopped = False
    for token in tokens:
        verdict = checker.check(known, token)
        known.append(token)
        stopped = verdict is not None and verdict.reason == "stop"
        if stopped:
            break
    choice = ChoiceText(TOKENIZER, params)
    text = choice.add(known[1:])[0] + choice.finish()[0]
    assert choice.stopped == stopped
    if not stopped:
        assert text == DECODE(known[1:])


def test_a_prompts_tokens_have_their_places() -> None:
    prompt = TOKENIZER("ab é!")["input_ids"]
    placed = place_prompt(TOKENIZER, prompt, entries(prompt[1:]))
    assert placed[0].logprob is None
    assert [entry.token for entry in placed] == prompt
    assert [entry.offset for entry in placed] == [0, 2, 3, 3, 4]


def test_a_stop_string_may_begin_within_what_was_no_character_yet() -> None:
    """Its first tokens have no text when they come, alone or with the rest."""
    emoji = TOKENIZER("😀")["input_ids"]
    for before in ([], [65, END]):
        tokens = [66, *before, *emoji]
        expected = [66, 65] if before else [66]
        for portions in ([], [1] * len(tokens)):
            _, placed = told(tokens, SamplingParams(stop=("😀",), logprobs=0), portions)
            assert [entry.token for part in placed for entry in part] == expected


def test_bytes_of_tokens() -> None:
    raw = token_bytes(TOKENIZER)
    text = "ab 12\n é😀"
    assert b"".join(map(raw, TOKENIZER(text)["input_ids"])) == text.encode()
    assert raw(END) == b"<end>"
    assert len({raw(token) for token in range(256)}) == 256
    assert len({raw(token) for token in range(VOCABULARY)}) == VOCABULARY


def test_forms() -> None:
    emoji = TOKENIZER("😀")["input_ids"]
    placed = [
        PlacedLogprobs(65, 0, None, ()),
        PlacedLogprobs(emoji[0], 1, -float("inf"), ((emoji[1], -0.5), (66, -1.0))),
    ]
    text = logprobs_form(TOKENIZER, chat=False)(placed).model_dump()
    assert text["token_logprobs"] == [None, -9999.0]
    assert text["tokens"][1] == "bytes:\\xf0"
    assert text["top_logprobs"][0] is None
    assert set(text["top_logprobs"][1].values()) == {-0.5, -1.0, -9999.0}
    assert text["text_offset"] == [0, 1]
    chat = logprobs_form(TOKENIZER, chat=True)(placed[1:]).model_dump()
    assert chat["refusal"] is None
    (entry,) = chat["content"]
    assert entry["bytes"] == [0xF0]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.0]


def test_logprobs_need_one_entry_per_token() -> None:
    with pytest.raises(ValueError, match="zip"):
        ChoiceText(TOKENIZER, SamplingParams()).add([65, 66], entries([65]))
