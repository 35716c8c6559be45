"""Trees in a step: what is cut, what is committed, where its KV goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.params import SamplingParams
from specdec.policy.sequence import Status
from specdec.policy.verdict import Verdict
from tests.policy.scheduling import CONFIG, fork, make, plain, scheduler, shape, started, step


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
    # what was kept has its KV in place, for a next turn; what was walked behind it is dropped
    assert (result.moves.source_slots, result.moves.target_slots) == ([8], [7])
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
