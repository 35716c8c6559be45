"""Where requests go: to what they have in common with others, and never all to one place."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict

import pytest

from deployments.affinity import Affinity, Balance, summary_of
from prefix_cache.keys import Identity, block_keys
from specdec.params import CacheScope

IDENTITY = Identity(b"weights", b"tokenizer", "float32", 2, 1, 8, block_size=4)
SCOPE = CacheScope()
SYSTEM = list(range(20))


def affinity(factor: float = 1.5, slack: int = 4) -> Affinity[str]:
    return Affinity(Balance(factor, slack), random.Random(1))


def report(router: Affinity[str], replica: str, *texts: list[int], salt: bytes = b"") -> None:
    keys = [key for text in texts for key in block_keys(IDENTITY, text, 0, salt)]
    router.report(replica, summary_of(0, IDENTITY, keys))


def test_the_longest_prefix_wins() -> None:
    router = affinity()
    report(router, "a", SYSTEM[:8])
    report(router, "b", SYSTEM[:16])
    report(router, "c")
    keys = router.keys([*SYSTEM, 7, 7, 7], SCOPE)
    assert len(keys) == 5
    assert router.rank(keys, {"a": 0, "b": 0, "c": 0})[0] == "b"
    # blocks behind a gap are of no use
    report(router, "a", SYSTEM)
    router.report("b", summary_of(0, IDENTITY, block_keys(IDENTITY, SYSTEM)[1:]))
    assert router.rank(keys, {"a": 0, "b": 0, "c": 0})[0] == "a"


def test_a_busy_replica_is_passed_over() -> None:
    router = affinity(factor=2, slack=3)
    report(router, "a", SYSTEM)
    report(router, "b")
    keys = router.keys(SYSTEM, SCOPE)
    assert router.rank(keys, {"a": 2, "b": 0}) == ["a", "b"]
    assert router.rank(keys, {"a": 4, "b": 0}) == ["b", "a"]  # too busy
    assert router.rank(keys, {"a": 9, "b": 7}) == ["a", "b"]


def test_a_little_in_common_is_not_worth_a_queue() -> None:
    router = affinity()
    report(router, "a", SYSTEM[:4])
    report(router, "b")
    keys = router.keys([*SYSTEM, *range(100, 180)], SCOPE)
    assert router.rank(keys, {"a": 0, "b": 0})[0] == "a"
    assert router.rank(keys, {"a": 1, "b": 0})[0] == "b"


def test_without_anything_in_common_the_least_busy_is_chosen() -> None:
    router = affinity()
    report(router, "a", SYSTEM)
    report(router, "b", SYSTEM)
    keys = router.keys([99] * 12, SCOPE)
    assert router.rank(keys, {"a": 2, "b": 1})[0] == "b"
    # and of equally busy ones, each in turn
    first = Counter(router.rank(keys, {"a": 1, "b": 1})[0] for _ in range(200))
    assert min(first.values()) > 60


def test_what_was_sent_counts_before_it_is_reported() -> None:
    router = affinity()
    report(router, "a")
    report(router, "b")
    keys = router.keys(SYSTEM, SCOPE)
    router.sent(keys, "b")
    assert router.rank(keys, {"a": 0, "b": 2})[0] == "b"


def test_what_a_replica_has_given_up_is_forgotten() -> None:
    now = 0.0
    router: Affinity[str] = Affinity(Balance(), random.Random(1), lambda: now)
    report(router, "a")
    report(router, "b")
    keys = router.keys(SYSTEM, SCOPE)
    router.sent(keys, "b")
    now = 60.0  # it has reported since, and these blocks were not among its own
    report(router, "a", SYSTEM[:8])
    assert router.rank(keys, {"a": 0, "b": 0})[0] == "a"
    # a replica that comes back under its name starts with nothing
    router.keep(["b"])
    assert Counter(router.rank(keys, {"a": 0, "b": 0})[0] for _ in range(100))["b"] > 20


def test_the_same_blocks_make_the_same_summary() -> None:
    keys = block_keys(IDENTITY, SYSTEM)
    assert summary_of(0, IDENTITY, keys) == summary_of(0, IDENTITY, reversed(keys))


@pytest.mark.parametrize("tokens", [[-1] * 16, [2**32] * 16, [10**30] * 16])
def test_what_is_no_token_has_no_keys(tokens: list[int]) -> None:
    router = affinity()
    report(router, "a")
    assert router.keys(tokens, SCOPE) == []


def test_salts_are_told_apart() -> None:
    router = affinity()
    report(router, "a", SYSTEM, salt=b"one")
    report(router, "b")
    assert router.rank(router.keys(SYSTEM, CacheScope(0, b"one")), {"a": 1, "b": 0})[0] == "a"
    assert router.rank(router.keys(SYSTEM, CacheScope(0, b"two")), {"a": 1, "b": 0})[0] == "b"


@pytest.mark.parametrize("stats", [{}, {"identity": None, "keys": b""}, {"keys": 3}])
def test_replicas_that_report_nothing(stats: dict[str, object]) -> None:
    router = affinity()
    router.report("a", stats)
    assert router.keys(SYSTEM, SCOPE) == []
    assert sorted(router.rank([], {"a": 0, "b": 0})) == ["a", "b"]
    assert router.rank([], {}) == []


def test_a_skewed_load_stays_together_and_in_balance() -> None:
    """20 system prompts by Zipf's law on 2 replicas with room for 10 each; each request runs for a
    while. Against the same without affinity.
    """
    rng = random.Random(3)
    systems = [[1000 * i + t for t in range(40)] for i in range(20)]
    weights = [1 / (i + 1) for i in range(20)]

    def simulate(aware: bool) -> tuple[float, float]:
        router = affinity(factor=1.5, slack=4)
        held: dict[str, OrderedDict[int, None]] = {"a": OrderedDict(), "b": OrderedDict()}
        loads = {"a": 0, "b": 0}
        running: list[tuple[int, str]] = []
        hits, imbalance, count = 0, 0.0, 2000
        for now in range(count):
            for end, replica in [entry for entry in running if entry[0] <= now]:
                running.remove((end, replica))
                loads[replica] -= 1
            if now % 50 == 0:
                for replica in held:
                    report(router, replica, *(systems[i] for i in held[replica]))
            number = rng.choices(range(20), weights)[0]
            keys = router.keys([*systems[number], now, now, now, now], SCOPE)
            chosen = router.rank(keys if aware else [], loads)[0]
            hits += number in held[chosen]
            held[chosen][number] = None
            held[chosen].move_to_end(number)
            if len(held[chosen]) > 10:
                held[chosen].popitem(last=False)
            router.sent(keys, chosen)
            imbalance = max(imbalance, loads[chosen] - 1.5 * min(loads.values()))
            loads[chosen] += 1
            running.append((now + rng.randint(5, 25), chosen))
        return hits / count, imbalance

    ratio, imbalance = simulate(aware=True)
    blind, _ = simulate(aware=False)
    assert 0 < imbalance <= 4
    assert ratio > 0.9
    assert blind < ratio - 0.1
