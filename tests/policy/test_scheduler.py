from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import count

import pytest

from specdec.errors import ConfigError, ContextLengthError, QueueFullError, RequestError
from specdec.params import SamplingParams
from specdec.policy.pages import PageAllocator
from specdec.policy.plan import CommitResult, SchedulerConfig, StepPlan
from specdec.policy.scheduler import Scheduler
from specdec.policy.sequence import Sequence, Status
from specdec.policy.stop import StopChecker
from specdec.policy.tree import DraftTree
from specdec.policy.verdict import Verdict

CONFIG = SchedulerConfig(
    token_budget=32,
    max_sequences=4,
    max_waiting=3,
    max_tree_nodes=8,
    prefill_chunk=16,
    max_model_length=100,
)
EOS = 99


def make(
    name: str,
    prompt: int = 4,
    params: SamplingParams | None = None,
    config: SchedulerConfig = CONFIG,
) -> Sequence:
    params = params or SamplingParams(max_tokens=50)
    checker = StopChecker(params, (EOS,), config.max_model_length, prompt)
    return Sequence(name, list(range(prompt)), prompt, params, checker)


def scheduler(pages: int = 20, size: int = 4, config: SchedulerConfig = CONFIG) -> Scheduler:
    ticks = count()
    return Scheduler(config, PageAllocator(pages, size), lambda: float(next(ticks)))


def plain(plan: StepPlan, token: int = 50) -> list[Verdict | None]:
    """Verdicts of a target that emits ``token``, agreeing with no candidate."""
    return [Verdict((0,), (token,)) if s.wants_logits else None for s in plan.segments]


def step(served: Scheduler, verdicts: Items[Verdict | None] | None = None) -> CommitResult:
    plan = served.schedule()
    result = served.commit(plan, plain(plan) if verdicts is None else verdicts)
    served.check_integrity()
    return result


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(s.sequence.request_id, s.start, len(s.tokens), s.wants_logits) for s in plan.segments]


def fork(root: int) -> DraftTree:
    """Root; 61 and 62 below it; 71 below 62; 81 below 71."""
    tokens, values = (root, 61, 62, 71, 81), (1.0, 0.9, 0.8, 0.7, 0.6)
    return DraftTree(tokens, (-1, 0, 0, 2, 3), (0, 1, 1, 2, 3), values)


def started(served: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        served.add(sequence)
    while any(not s.decoding for s in sequences):
        assert all(s.status is not Status.FINISHED for s in sequences)
        step(served)


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


def test_an_accepted_branch_moves_to_its_positions() -> None:
    served, sequence = scheduler(), make("a", 6)
    started(served, sequence)
    sequence.draft = fork(50)
    plan = served.schedule()
    (segment,) = plan.segments
    assert (segment.start, segment.tokens, plan.rows) == (6, (50, 61, 62, 71, 81), 5)
    assert sequence.lease is not None
    pages = list(sequence.lease.pages)
    assert len(pages) == 3
    result = served.commit(plan, [Verdict((0, 2, 3), (62, 71, 5))])
    # Nodes 2 and 3, at slot positions 8 and 9, hold the KV of positions 7 and 8.
    slot = [page * 4 + offset for page in pages for offset in range(4)]
    assert result.moves.source_slots == [slot[8], slot[9]]
    assert result.moves.target_slots == [slot[7], slot[8]]
    (entry,) = result.committed
    assert (entry.tokens, entry.row, entry.logits_row) == ((62, 71, 5), 3, 3)
    assert sequence.emitted == [50, 62, 71, 5]
    assert sequence.computed == 9
    stats = sequence.stats
    assert (stats.rounds, stats.drafted, stats.accepted) == (1, 4, 2)
    assert stats.accepted_by_depth == [1, 1, 0]
    assert stats.walked_by_depth == [1, 1, 1]
    assert sequence.draft is None
    served.check_integrity()


def test_a_stop_inside_an_accepted_run_ends_it_there() -> None:
    params = SamplingParams(max_tokens=50, stop_token_ids=frozenset({71}))
    served, sequence = scheduler(), make("a", 6, params)
    started(served, sequence)
    sequence.draft = fork(50)
    result = step(served, [Verdict((0, 2, 3, 4), (62, 71, 81, 5))])
    assert result.committed[0].tokens == (62, 71)
    assert sequence.emitted == [50, 62, 71]
    assert (sequence.status, sequence.finish_reason) == (Status.FINISHED, "stop")
    assert result.finished == (sequence,)
    assert len(result.moves) == 0
    assert sequence.stats.accepted == 1
    assert served.allocator.free_pages == 20
    assert not served.has_work


@pytest.mark.parametrize("limit", ["request", "model"])
@pytest.mark.parametrize(("remaining", "nodes"), [(1, 1), (2, 3), (3, 4), (4, 5), (9, 5)])
def test_a_draft_is_no_deeper_than_what_may_be_emitted(
    limit: str, remaining: int, nodes: int
) -> None:
    served = scheduler(pages=40)
    if limit == "request":
        sequence = make("a", 6, SamplingParams(max_tokens=remaining + 1))
    else:
        sequence = make("a", 99 - remaining)
    started(served, sequence)
    sequence.draft = fork(50)
    assert sequence.remaining == remaining
    assert served.draft_depth(sequence) == remaining - 1
    assert len(served.schedule().segments[0].tokens) == nodes


def test_the_pool_limits_the_draft_and_ends_the_request() -> None:
    served = scheduler(pages=2)
    sequence = make("a", 5)
    started(served, sequence)
    sequence.draft = fork(50)
    assert served.draft_depth(sequence) == 2
    plan = served.schedule()
    assert plan.segments[0].tokens == (50, 61, 62)
    served.commit(plan, [Verdict((0, 2), (62, 50))])
    result = step(served)
    # 8 slots hold 8 tokens; the ninth is emitted but could be no root.
    assert len(sequence) == 9
    assert sequence.finish_reason == "length"
    assert result.finished == (sequence,)
    assert served.allocator.free_pages == 2


def test_without_speculation_the_root_goes_alone() -> None:
    served = scheduler()
    sequence = make("a", 6, SamplingParams(speculation=False))
    started(served, sequence)
    sequence.draft = fork(50)
    assert served.draft_depth(sequence) == 0
    assert len(served.schedule().segments[0].tokens) == 1


def test_a_tree_is_cut_to_max_tree_nodes() -> None:
    served = scheduler(config=replace(CONFIG, max_tree_nodes=3))
    sequence = make("a", 6)
    started(served, sequence)
    sequence.draft = fork(50)
    assert served.schedule().segments[0].tokens == (50, 61, 62)


def test_a_draft_from_another_root_is_refused() -> None:
    served, sequence = scheduler(), make("a", 6)
    started(served, sequence)
    sequence.draft = fork(51)
    with pytest.raises(ValueError, match="grows from another token"):
        served.schedule()


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


def test_trees_are_cut_before_anyone_is_preempted() -> None:
    served = scheduler(pages=5)
    old, young = make("a", 7), make("b", 6)
    started(served, old, young)
    assert served.allocator.free_pages == 1
    old.draft, young.draft = fork(50), fork(50)
    plan = served.schedule()
    # The last page goes to the older tree; the younger has two slots left in its own pages.
    assert shape(plan) == [("a", 7, 5, True), ("b", 6, 2, True)]
    assert young.stats.preemptions == 0
    served.commit(plan, plain(plan))
    assert served.allocator.free_pages == 0
    assert old.lease is not None
    assert len(old.lease.pages) == 3


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
