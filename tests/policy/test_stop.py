from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import RequestError
from specdec.params import SamplingParams
from specdec.policy.stop import StopChecker, StopVerdict

#: A small byte-level vocabulary: whole and broken characters, an empty (special) token.
PIECES = [
    b"", b"a", b"b", b"ab", b"ba\n", b"\n", "é".encode(), b"\xc3", b"\xa9", b"a\xc3", b"\xa9b",
    b"\xf0", b"\x9f", b"\x98\x80", b"\xf0\x9f", b"\x80", b" a", "€b".encode(),
]  # fmt: skip


def detokenize(tokens: list[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


def settled(tokens: list[int]) -> str:
    """The text without a last character that may yet become another."""
    return detokenize(tokens).rstrip("\ufffd")


def run(
    checker: StopChecker, prompt: list[int], answer: list[int]
) -> tuple[int, StopVerdict | None]:
    tokens = list(prompt)
    for count, token in enumerate(answer, 1):
        verdict = checker.check(tokens, token)
        tokens.append(token)
        if verdict is not None:
            return count, verdict
    return len(answer), None


pieces = st.integers(0, len(PIECES) - 1)
stops = st.lists(
    st.sampled_from(["a", "ab", "ba\n", "bab", "é", "aéb", "\n", "€", "b€b", "😀a"]),
    min_size=1,
    max_size=3,
).map(tuple)


@settings(max_examples=400)
@given(st.lists(pieces, max_size=3), st.lists(pieces, max_size=25), stops)
def test_stop_strings_end_at_the_token_that_completes_one(
    prompt: list[int], answer: list[int], stop: tuple[str, ...]
) -> None:
    checker = StopChecker(SamplingParams(stop=stop), (), 1000, len(prompt), detokenize)
    count, verdict = run(checker, prompt, answer)
    # What a reader of the whole text sees, token by token.
    first = next(
        (k for k in range(1, len(answer) + 1) if any(s in settled(answer[:k]) for s in stop)), None
    )
    assert (verdict is not None) == (first is not None)
    if verdict is not None:
        assert count == first


@settings(max_examples=400)
@given(st.lists(pieces, max_size=25), stops, st.integers(1, 25))
def test_stop_strings_complete_before_min_tokens_do_not_count(
    answer: list[int], stop: tuple[str, ...], least: int
) -> None:
    params = SamplingParams(stop=stop, min_tokens=least)
    count, verdict = run(StopChecker(params, (), 1000, 1, detokenize), [1], answer)

    def completes(k: int) -> bool:
        """Whether a match ends in the text that token ``k`` brings."""
        text, before = settled(answer[:k]), len(settled(answer[: k - 1]))
        return any(text.find(s, max(0, before - len(s) + 1)) >= 0 for s in stop)

    first = next((k for k in range(least + 1, len(answer) + 1) if completes(k)), None)
    assert (verdict is not None) == (first is not None)
    if verdict is not None:
        assert count == first
        assert verdict.reason == "stop"
        assert verdict.matched in stop
        assert not verdict.hide_token
        assert str(verdict.matched) in settled(answer[:count])


@given(st.lists(pieces, max_size=20), stops, st.integers(0, 20))
def test_a_request_that_resumes_elsewhere_stops_at_the_same_token(
    answer: list[int], stop: tuple[str, ...], done: int
) -> None:
    params = SamplingParams(stop=stop)
    count, verdict = run(StopChecker(params, (), 1000, 1, detokenize), [1], answer)
    done = min(done, count - 1) if count else 0
    resumed = StopChecker(params, (), 1000, 1, detokenize)
    again, same = run(resumed, [1, *answer[:done]], answer[done:])
    assert (done + again, same) == (count, verdict)


def test_the_cost_of_a_token_does_not_grow() -> None:
    longest = 0

    def watch(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return detokenize(tokens)

    for answer in ([1] * 3000, [0] * 3000, [15] * 3000, [6, 7, 8] * 1000):
        checker = StopChecker(
            SamplingParams(stop=("zz" * 50,), max_tokens=9999), (), 9999, 1, watch
        )
        assert run(checker, [1], answer) == (3000, None)
    assert longest <= 9


def test_a_space_is_not_lost_where_decoding_strips_the_first() -> None:
    words = [" the", " end", " of"]

    def strips(tokens: list[int]) -> str:
        return "".join(words[t] for t in tokens).removeprefix(" ")

    checker = StopChecker(SamplingParams(stop=("the end of",)), (), 100, 1, strips)
    assert run(checker, [1], [2, 2, 2, 0, 1, 2, 2]) == (6, StopVerdict("stop", "the end of"))


def test_end_tokens_come_first_and_are_hidden() -> None:
    params = SamplingParams(stop=("a",), stop_token_ids=frozenset({2}), max_tokens=1)
    checker = StopChecker(params, (1,), 100, 1, detokenize)
    assert checker.check([3], 1) == StopVerdict("stop", 1, hide_token=True)
    assert checker.check([3], 2) == StopVerdict("stop", 2, hide_token=True)
    assert checker.check([3], 3) == StopVerdict("stop", "a")
    assert checker.check([3], 5) == StopVerdict("length")


def test_ignored_end_tokens_do_not_end() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=frozenset({2}))
    checker = StopChecker(params, (1, 2), 100, 1)
    assert checker.check([3], 1) is None
    assert checker.check([3], 2) == StopVerdict("stop", 2, hide_token=True)


@pytest.mark.parametrize(("max_tokens", "max_length", "last"), [(3, 100, 3), (50, 9, 4), (4, 9, 4)])
def test_length(max_tokens: int, max_length: int, last: int) -> None:
    prompt = [1] * 5
    checker = StopChecker(SamplingParams(max_tokens=max_tokens), (), max_length, 5)
    assert checker.remaining(5) == last
    assert run(checker, prompt, [2] * 60) == (last, StopVerdict("length"))


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(RequestError, match="tokenizer") as refused:
        StopChecker(SamplingParams(stop=("a",)), (), 10, 1)
    assert refused.value.param == "stop"
