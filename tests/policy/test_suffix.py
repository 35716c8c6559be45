"""Prompt lookup against a search of the whole sequence, and rates against counting.

What these catch: an n-gram entered too late or not moved to its latest place, a continuation
off by one, a period continued from the wrong token, an estimate that never adapts.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.policy.suffix import MAX_MATCH, MEMORY, PRIOR_RATES, MatchRates, SuffixIndex


def search(tokens: list[int], limit: int) -> tuple[int, list[int]]:
    """The same by comparing every earlier place, nearest first, for every length."""
    for length in range(min(MAX_MATCH, len(tokens)), 0, -1):
        suffix = tokens[len(tokens) - length :]
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == suffix:
                whole = list(tokens)
                for place in range(end, end + limit):
                    whole.append(whole[place])
                return length, whole[len(tokens) :]
    return 0, []


@given(
    st.lists(st.integers(0, 2), max_size=60) | st.lists(st.integers(0, 9), max_size=120),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_equals_a_search_however_the_tokens_come(
    tokens: list[int], limit: int, rng: random.Random
) -> None:
    index = SuffixIndex()
    while len(index) < len(tokens):
        upto = len(index) + rng.randint(1, 7)
        index.extend(tokens[len(index) : upto])
        assert index.continuation(limit) == search(tokens[:upto], limit)


@given(st.integers(1, 12), st.integers(2, 5))
def test_a_period_goes_on(period: int, times: int) -> None:
    index = SuffixIndex()
    index.extend(list(range(period)) * times)
    length, tokens = index.continuation(30)
    assert length == min(MAX_MATCH, period * (times - 1))
    assert tokens == (list(range(period)) * 30)[:30]


def test_nothing_matches() -> None:
    index = SuffixIndex()
    assert index.continuation(5) == (0, [])
    index.extend([1, 2, 3])
    assert index.continuation(5) == (0, [])
    index.extend([1])
    assert index.continuation(5) == (1, [2, 3, 1, 2, 3])
    assert index.continuation(0) == (0, [])


def test_memory_is_bounded_by_the_length() -> None:
    rng = random.Random(1)
    for vocabulary in (1, 3, 50, 10_000):
        index = SuffixIndex()
        index.extend([rng.randrange(vocabulary) for _ in range(3000)])
        assert len(index._ends) <= MAX_MATCH * len(index)


def test_values_are_products_of_the_rates() -> None:
    rates = MatchRates()
    expected = [0.68, 0.68 * 0.73, 0.68 * 0.73 * 0.8]
    assert rates.values(4, 3) == pytest.approx(expected)
    assert rates.values(8, 2) == pytest.approx([0.9, 0.81])
    assert rates.values(0, 0) == []


def test_rates_learn_up_to_the_first_wrong_token() -> None:
    rates = MatchRates()
    rates.learn(2, [5, 6, 7, 8], [5, 6, 9, 8, 1])
    hit = [(20 * PRIOR_RATES[i] + 1) / 21 for i in (1, 2)]
    miss = 20 * PRIOR_RATES[3] / 21
    assert [rates.rate(n) for n in (2, 3, 4)] == pytest.approx([*hit, miss])
    untouched = [n for n in range(1, MAX_MATCH + 1) if n not in (2, 3, 4)]
    assert all(rates.rate(n) == PRIOR_RATES[n - 1] for n in untouched)
    rates.learn(2, [5, 6, 7, 8], [5])  # what was never reached says nothing
    assert rates.rate(3) == pytest.approx(hit[1])
    rates.learn(0, [], [1, 2])
    assert rates.rate(1) == PRIOR_RATES[0]


def test_rates_follow_a_change() -> None:
    rates = MatchRates()
    for wanted in (0.9, 0.2, 0.7):
        rng = random.Random(7)
        for _ in range(6 * MEMORY):
            rates.learn(MAX_MATCH + 3, [1], [1 if rng.random() < wanted else 2])
        assert rates.rate(MAX_MATCH) == pytest.approx(wanted, abs=0.1)
        assert 0 < rates.rate(MAX_MATCH) < 1
