"""Who runs when: prefill, waiting, preemption, every exit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.errors import ConfigError, ContextLengthError, QueueFullError, RequestError
from specdec.params import SamplingParams
from specdec.policy.pages import PageAllocator
from specdec.policy.scheduler import Scheduler
from specdec.policy.sequence import Status
from specdec.policy.verdict import Verdict
from tests.policy.scheduling import CONFIG, fork, make, plain, scheduler, shape, started, step


def test_prefill_goes_by_chunks_and_the_last_draws_a_token() -> None:
    served, sequence = scheduler(), make("a", 37)
    served.add(sequence)
    plans = []
    while not sequence.decoding:
        plans.append(served.schedule())
        result = served.commit(plans[-1], plain(plans[-1]))
    assert [shape(p) for p in plans] == [
        [("a", 0, 16, False)],
        [("a", 16, 16, False)],
        [("a", 32, 5, True)],
    ]
    assert plans[1].segments[0].tokens == tuple(range(16, 32))
    (entry,) = result.committed
    assert (entry.tokens, entry.row, entry.logits_row) == ((50,), 4, 0)
    assert (sequence.computed, len(sequence)) == (37, 38)
    assert sequence.stats.prefill_chunks == 3
    assert sequence.stats.rounds == 0


def test_roots_come_before_prefill_and_prefill_before_the_last_candidates() -> None:
    config = replace(CONFIG, token_budget=10)
    served = scheduler(config=config, pages=40)
    first, second = make("a"), make("b")
    started(served, first, second)
    served.add(make("c", 30))
    first.draft, second.draft = fork(50), fork(50)
    # 10 rows less 2 roots: half of the 8 left are kept for the prefill.
    assert shape(served.schedule()) == [("a", 4, 3, True), ("b", 4, 3, True), ("c", 0, 4, False)]


def test_prefill_takes_the_rows_that_trees_leave() -> None:
    served = scheduler(config=replace(CONFIG, token_budget=10), pages=40)
    started(served, make("a"))
    served.add(make("c", 30))
    assert shape(served.schedule()) == [("a", 4, 1, True), ("c", 0, 9, False)]


def test_a_waiting_request_starts_only_while_rows_are_left() -> None:
    config = replace(CONFIG, token_budget=2)
    served = scheduler(config=config, pages=40)
    started(served, make("a"), make("b"))
    served.add(make("c"))
    plan = served.schedule()
    assert shape(plan) == [("a", len(served.running[0]) - 1, 1, True), ("b", 4, 1, True)]
    assert [s.request_id for s in served.waiting] == ["c"]


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    served = scheduler(pages=5)
    old, young, newest = make("a", 7), make("b", 5), make("c", 4)
    started(served, old, young)
    served.add(newest)
    while young.status is Status.RUNNING:
        step(served)
    assert served.running == (old,)
    assert served.waiting == (young, newest)
    assert (young.lease, young.computed, young.stats.preemptions) == (None, 0, 1)
    known = list(young.tokens)
    assert served.abort("a")
    plan = served.schedule()
    # It computes prompt and emitted tokens anew, and then draws the next one.
    assert shape(plan)[0] == ("b", 0, len(known), True)
    assert plan.segments[0].tokens == tuple(known)
    rounds = young.stats.rounds
    served.commit(plan, plain(plan))
    assert young.tokens == [*known, 50]
    assert young.stats.rounds == rounds


def test_an_error_ends_one_request_alone() -> None:
    served = scheduler()
    bad, good = make("a"), make("b")
    started(served, bad, good)
    result = step(served, [Verdict.failure("logits are not finite"), Verdict((0,), (50,))])
    assert result.failed == result.finished == (bad,)
    assert (bad.finish_reason, bad.error) == ("error", "logits are not finite")
    assert bad.lease is None
    assert [c.sequence for c in result.committed] == [good]
    assert served.running == (good,)


def test_abort_in_any_state() -> None:
    served = scheduler(config=replace(CONFIG, max_sequences=1))
    running, waiting = make("a"), make("b")
    started(served, running)
    served.add(waiting)
    plan = served.schedule()
    assert served.abort("a")
    assert served.abort("b")
    assert not served.abort("a")
    assert {running.finish_reason, waiting.finish_reason} == {"abort"}
    # The forward was already under way; its verdict finds nobody.
    result = served.commit(plan, plain(plan))
    assert not result.committed
    assert not result.finished
    assert not served.has_work
    served.check_integrity()


def test_what_can_never_be_served_is_refused() -> None:
    served = scheduler(pages=2)
    for prompt in (8, 50, 100, 101):
        with pytest.raises(ContextLengthError) as refused:
            served.add(make("a", prompt))
        assert refused.value.param == "prompt"
    with pytest.raises(RequestError, match="no tokens"):
        served.add(make("a", 0))
    done = make("a", 2, SamplingParams(max_tokens=2))
    done.tokens += [5, 6]
    with pytest.raises(RequestError, match="max_tokens"):
        served.add(done)
    served.add(make("a", 7))
    with pytest.raises(RequestError, match="'a' is in use"):
        served.add(make("a", 2))
    with pytest.raises(ValueError, match="stop checker"):
        served.add(make("b", 2, config=replace(CONFIG, max_model_length=101)))


def test_the_queue_is_bounded() -> None:
    served = scheduler()
    for name in "abc":
        served.add(make(name))
    with pytest.raises(QueueFullError, match="3 requests wait"):
        served.add(make("d"))


def test_limits_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="prefill_chunk must be at least 1"):
        replace(CONFIG, prefill_chunk=0)


@pytest.mark.parametrize(
    "verdict",
    [
        None,
        Verdict((), ()),
        Verdict((0,), ()),
        Verdict((1,), (5,)),
        Verdict((0, 3), (71, 5)),
        Verdict((0, 2), (61, 5)),
        Verdict((0, 9), (61, 5)),
        Verdict((0, -1), (81, 5)),
    ],
)
def test_a_verdict_that_is_no_walk_is_refused(verdict: Verdict | None) -> None:
    served, sequence = scheduler(), make("a")
    started(served, sequence)
    sequence.draft = fork(50)
    plan = served.schedule()
    with pytest.raises(ValueError, match=r"no walk|no verdict"):
        served.commit(plan, [verdict])
    assert sequence.emitted == [50]


def test_times_are_those_of_the_clock() -> None:
    now = 0.0
    served = Scheduler(CONFIG, PageAllocator(20, 4), lambda: now)
    sequence = make("a", 20, SamplingParams(max_tokens=2))
    for now in (1.0, 2.0, 3.0, 4.0):
        if now == 1.0:
            served.add(sequence)
        else:
            step(served)
    stats = sequence.stats
    times = (stats.arrival, stats.first_scheduled, stats.first_token, stats.finished)
    assert times == (1.0, 2.0, 3.0, 4.0)
