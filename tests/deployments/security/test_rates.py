"""Limits of a caller, by a clock that the test moves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.security.rates import (
    WINDOW_S,
    Account,
    Accounts,
    Lease,
    OverLimit,
    Rates,
    SlidingWindow,
)


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@settings(max_examples=200, deadline=None)
@given(
    limit=st.integers(1, 12),
    steps=st.lists(st.tuples(st.floats(0, 40), st.integers(0, 14), st.booleans()), max_size=60),
)
def test_no_sixty_seconds_hold_more_than_the_limit(
    limit: int, steps: list[tuple[float, int, bool]]
) -> None:
    """Against all windows counted by hand; and what is refused would have been too much."""
    clock = Clock()
    window = SlidingWindow(limit, clock)
    taken: list[tuple[float, int]] = []
    for pause, cost, patient in steps:
        clock.seconds += pause
        wait = window.wait_s(cost)
        used = sum(c for when, c in taken if when + WINDOW_S > clock.seconds)
        assert (wait == 0) == (used + cost <= limit)
        assert window.standing().remaining == limit - used
        assert (wait is None) == (cost > limit)
        if patient and wait:
            clock.seconds += wait + 1e-6
            assert window.wait_s(cost) == 0, "Retry-After was too short"
            used = sum(c for when, c in taken if when + WINDOW_S > clock.seconds)
            wait = 0.0
        if wait == 0:
            window.take(cost)
            taken.append((clock.seconds, cost))
    for end, _ in taken:
        assert sum(c for when, c in taken if when <= end < when + WINDOW_S) <= limit


def test_a_request_that_used_less_gives_the_rest_back() -> None:
    clock = Clock()
    account = Account(Rates(tokens_per_minute=100), clock)
    lease = account.enter()
    lease.reserve(80)
    assert account.standings()["tokens"].remaining == 20
    other = account.enter()
    with pytest.raises(OverLimit) as caught:
        other.reserve(30)
    assert caught.value.retry_s == WINDOW_S
    lease.spent(15)
    lease.release()
    lease.release()
    assert account.standings()["tokens"].remaining == 85
    other.reserve(30)
    other.release()  # it failed: nothing was used
    assert account.standings()["tokens"].remaining == 85
    clock.seconds += WINDOW_S
    assert account.standings()["tokens"].remaining == 100
    assert account.idle


def test_a_correction_after_the_window_changes_nothing() -> None:
    clock = Clock()
    account = Account(Rates(tokens_per_minute=100), clock)
    lease = account.enter()
    lease.reserve(90)
    clock.seconds += WINDOW_S + 1
    lease.spent(5)
    lease.release()
    assert account.standings()["tokens"].remaining == 100
    account.enter().reserve(100)


def test_what_can_never_pass_has_no_time_to_come_again() -> None:
    lease = Account(Rates(tokens_per_minute=10), Clock()).enter()
    with pytest.raises(OverLimit) as caught:
        lease.reserve(11)
    assert caught.value.retry_s is None


def test_requests_at_once() -> None:
    account = Account(Rates(concurrent_requests=2), Clock())
    first, _ = account.enter(), account.enter()
    with pytest.raises(OverLimit, match="2 requests at once"):
        account.enter()
    first.release()
    first.release()
    account.enter()
    with pytest.raises(OverLimit):
        account.enter()


def test_a_refused_request_counts_for_nothing() -> None:
    clock = Clock()
    account = Account(Rates(requests_per_minute=1), clock)
    account.enter().release()
    for _ in range(5):
        with pytest.raises(OverLimit):
            account.enter()
    clock.seconds += WINDOW_S
    account.enter()


def test_accounts_are_apart_and_idle_ones_are_dropped() -> None:
    clock = Clock()
    accounts = Accounts(clock, kept=8)
    rates = Rates(requests_per_minute=1, concurrent_requests=1)
    lease = accounts.of("ann", rates).enter()
    accounts.of("bob", rates).enter().release()
    clock.seconds += WINDOW_S
    for number in range(1000):
        accounts.of(f"caller {number}", rates)
        assert len(accounts._accounts) <= 9
    with pytest.raises(OverLimit):
        accounts.of("ann", rates).enter()
    lease.release()
    assert accounts.of("ann", Rates(requests_per_minute=2)).standings()["requests"].limit == 2


def test_many_callers_in_any_order() -> None:
    """Leases that are released in any order leave nothing open."""
    clock, rng = Clock(), random.Random(3)
    account = Account(Rates(concurrent_requests=50, tokens_per_minute=10_000), clock)
    leases: list[Lease] = []
    for _ in range(2000):
        clock.seconds += rng.random()
        if leases and rng.random() < 0.5:
            lease = leases.pop(rng.randrange(len(leases)))
            lease.spent(rng.randint(0, 50))
            lease.release()
            continue
        try:
            lease = account.enter()
        except OverLimit:
            assert account.open == 50
            continue
        try:
            lease.reserve(rng.randint(1, 400))
        except OverLimit:
            lease.release()
        else:
            leases.append(lease)
    for lease in leases:
        lease.release()
    clock.seconds += WINDOW_S
    assert account.idle
