from __future__ import annotations

import threading

import pytest

from prefix_cache.breaker import BreakerState, CircuitBreaker


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> CircuitBreaker:
    breaker = CircuitBreaker(threshold=3, backoff_s=1, backoff_cap_s=5, clock=clock)
    for _ in range(3):
        assert breaker.allow()
        breaker.failure()
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_failures_must_come_in_a_row() -> None:
    breaker = CircuitBreaker(threshold=3, clock=Clock())
    for _ in range(5):
        breaker.failure()
        breaker.failure()
        breaker.success()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.transitions == {}


def test_while_open_nothing_is_let_through_and_late_answers_change_nothing() -> None:
    clock = Clock()
    breaker = opened(clock)
    breaker.success()
    breaker.failure()
    clock.now += 0.999
    assert not breaker.allow()
    assert breaker.state is BreakerState.OPEN


def test_one_probe_and_its_success_closes() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 1
    assert [breaker.allow() for _ in range(3)] == [True, False, False]
    states = [breaker.state]
    breaker.success()
    assert [*states, breaker.state] == [BreakerState.HALF_OPEN, BreakerState.CLOSED]
    assert all(breaker.allow() for _ in range(3))
    assert breaker.transitions == {
        BreakerState.OPEN: 1,
        BreakerState.HALF_OPEN: 1,
        BreakerState.CLOSED: 1,
    }


def test_the_back_off_doubles_up_to_its_cap_and_starts_again_after_a_success() -> None:
    clock = Clock()
    breaker = opened(clock)
    for backoff in (1, 2, 4, 5, 5):
        clock.now += backoff - 0.001
        assert not breaker.allow()
        clock.now += 0.001
        assert breaker.allow()
        breaker.failure()
    clock.now += 5
    assert breaker.allow()
    breaker.success()
    for _ in range(3):
        breaker.failure()
    clock.now += 1
    assert breaker.allow()


def test_a_probe_that_never_reports_is_given_up() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 1
    assert breaker.allow()
    clock.now += 0.999
    assert not breaker.allow()
    clock.now += 0.001
    assert breaker.allow()


def test_of_many_threads_one_probes() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 1
    allowed: list[bool] = []
    barrier = threading.Barrier(8)

    def ask() -> None:
        barrier.wait(10)
        allowed.append(breaker.allow())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(allowed) == [False] * 7 + [True]


@pytest.mark.parametrize(
    "bad", [{"threshold": 0}, {"backoff_s": 0}, {"backoff_s": 9, "backoff_cap_s": 8}]
)
def test_nonsense_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="threshold"):
        CircuitBreaker(**bad)  # type: ignore[arg-type]
