"""The budget against costs and chances that the test makes up, and a search of all choices.

What these catch: candidates that cost more time than they save, drafting that makes a loaded
engine slower, estimates that are believed against what was seen, a long prompt that holds up
running streams.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.policy.budget import Source, StepSeen, UnlimitedBudget
from specdec.policy.cost import CostCurve, StepCost
from specdec.policy.measured import MARGIN, PROBE_EVERY, PROBE_STEPS, MeasuredBudget
from specdec.policy.tree import DraftTree

Points = tuple[tuple[int, ...], tuple[float, ...]]

#: Six rows for the price of one, then 2.5 ms each: a CPU without matrix units.
AVX2 = ((1, 6, 64), (0.016, 0.018, 0.163))
#: All rows for the price of one.
FREE = ((1, 64), (0.02, 0.0201))
KEYS = 100


def new_budget(points: Points = AVX2, stall: float = 2.0) -> MeasuredBudget:
    draft = CostCurve((1, 16), (0.002, 0.008))
    return MeasuredBudget(StepCost(CostCurve(*points), 0.002, 0.0), draft, stall)


class World:
    """An engine with ``sequences`` streams, whose candidates are accepted with true chances.

    Every step takes what ``budget`` expects of it; a sequence's candidates stand one below the
    other.
    """

    def __init__(self, budget: MeasuredBudget, sequences: int, seed: int = 0) -> None:
        self.budget, self.sequences = budget, sequences
        self.rng = random.Random(seed)
        self.tokens = self.seconds = 0.0
        self.drafts = 0
        self.chosen = 0

    def run(
        self, steps: int, values: list[float], truth: list[float], lookup: list[float] | None = None
    ) -> float:
        """Tokens per second over ``steps``; ``lookup`` offers candidates besides."""
        budget, n = self.budget, self.sequences
        self.tokens = self.seconds = 0.0
        for _ in range(steps):
            pays = budget.worth_drafting(n, KEYS * n)
            self.drafts += pays
            draft = budget.draft.seconds(n) if pays and budget.draft else 0.0
            budget.drafted(Source.HEADS if pays else Source.LOOKUP, n, draft)
            known = sorted((values if pays else []) + (lookup or []), reverse=True)
            chance = dict(zip(values, truth, strict=True)) | {v: v for v in lookup or []}
            tree = DraftTree(
                (0,) * (len(known) + 1),
                tuple(range(-1, len(known))),
                tuple(range(len(known) + 1)),
                (1.0, *known),
            )
            estimates = list(budget.estimates(tree, True))[1:]
            offered = sorted(estimates * n, reverse=True)
            count = self.chosen = budget.candidates(offered, n, KEYS * n, 500)
            committed = 0
            for place in range(n):
                size = count // n + (place < count % n)
                walked, reached = [0], 1.0
                for node in range(1, size + 1):
                    share = chance[known[node - 1]] / reached if reached else 0.0
                    if self.rng.random() >= share:
                        break
                    walked.append(node)
                    reached = chance[known[node - 1]]
                budget.learn_verdict(tree.prefix(size + 1), walked, True)
                committed += len(walked)
            rows = n + count
            seconds = budget.step.seconds(rows, KEYS * rows)
            budget.learn(StepSeen(rows, n, KEYS * rows, 0, 0, committed, seconds))
            self.tokens += committed
            self.seconds += seconds + draft
        return self.tokens / self.seconds


GOOD = [0.6, 0.4, 0.25, 0.15]


falling = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8).map(
    lambda chances: sorted(chances, reverse=True)
)


@settings(max_examples=1000, deadline=None)
@given(falling, st.integers(1, 4), st.sampled_from([AVX2, FREE]))
def test_the_first_choice_has_about_the_highest_rate(
    chances: list[float], sequences: int, points: Points
) -> None:
    budget = new_budget(points)
    budget.drafted(Source.HEADS, sequences, 0.0)
    offered = sorted(chances * sequences, reverse=True)
    draft = budget.draft.seconds(sequences) if budget.draft else 0.0

    def rate(count: int) -> float:
        cost = budget.step.rows.seconds(sequences + count) + draft
        return (sequences + sum(offered[:count])) / cost

    chosen = budget.candidates(offered, sequences, 0, 500)
    best = max(range(len(offered) + 1), key=rate)
    assert chosen <= best
    # what the margin may cost: a share of what the rows left out would have taken
    assert rate(chosen) >= rate(best) * (1 - MARGIN)


def test_free_rows_are_filled_and_dear_ones_must_pay() -> None:
    for points, chances, count in (
        (FREE, [0.5, 0.2, 0.1, 0.05], 4),
        (AVX2, [0.6, 0.4, 0.3, 0.2, 0.15, 0.12, 0.1, 0.1], 5),
        (AVX2, [0.95] * 12, 12),
        (AVX2, [], 0),
    ):
        budget = new_budget(points)
        budget.drafted(Source.HEADS, 1, 0.0)
        assert budget.candidates(chances, 1, KEYS, 500) == count
        assert budget.candidates(chances, 1, KEYS, 2) == min(count, 2)


def test_drafts_where_it_pays() -> None:
    world = World(new_budget(AVX2), 1)
    assert world.run(500, GOOD, GOOD) > 1.5 * 62.5
    assert world.chosen >= 3


def test_a_loaded_engine_does_not_draft() -> None:
    for sequences in (12, 32, 64):
        budget = new_budget(AVX2)
        world = World(budget, sequences)
        plain = sequences / budget.step.seconds(sequences, KEYS * sequences)
        assert world.run(PROBE_EVERY, GOOD, GOOD) > 0.98 * plain
    free = World(new_budget(FREE), 12)
    free.run(50, GOOD, GOOD)
    assert free.drafts == 50


def test_what_looks_slower_is_tried_again_now_and_then() -> None:
    world = World(new_budget(AVX2), 32)
    world.run(2 * PROBE_EVERY, GOOD, GOOD)  # more often while little is known
    world.drafts = 0
    world.run(3 * PROBE_EVERY, GOOD, GOOD)
    assert PROBE_STEPS * 2 <= world.drafts <= PROBE_STEPS * 4


@pytest.mark.parametrize("sequences", [1, 4])
def test_heads_that_fail_are_left_out_and_come_back(sequences: int) -> None:
    budget = new_budget(AVX2)
    world = World(budget, sequences)
    plain = sequences / budget.step.seconds(sequences, KEYS * sequences)
    good = world.run(1000, GOOD, GOOD)
    assert good > 1.02 * plain
    world.run(400, GOOD, [value * 0.05 for value in GOOD])
    assert world.run(1500, GOOD, [value * 0.05 for value in GOOD]) > 0.97 * plain
    world.run(4 * PROBE_EVERY, GOOD, GOOD)
    assert world.run(1000, GOOD, GOOD) > 0.93 * good


def test_heads_are_left_out_where_lookup_alone_is_faster() -> None:
    budget = new_budget(AVX2)
    world = World(budget, 1)
    lookup = [0.9, 0.85, 0.8, 0.7, 0.65]
    world.run(10 * PROBE_EVERY, [0.03], [0.03], lookup)
    world.drafts = 0
    world.run(1000, [0.03], [0.03], lookup)
    assert world.drafts < 200


def test_rounds_of_lookup_alone_say_nothing_of_the_heads() -> None:
    budget = new_budget(AVX2)
    world = World(budget, 1)
    for _ in range(300):
        world.run(1, GOOD, GOOD)
        budget.drafted(Source.NEITHER, 0, 0.0)  # lookup was sure
        assert budget.candidates([0.95] * 10, 1, KEYS, 500) == 10
        budget.learn(StepSeen(11, 1, KEYS * 11, 0, 0, 10, budget.step.seconds(11, KEYS * 11)))
    assert world.drafts > 250  # but for trying without


def test_prefill_is_bounded_where_streams_run() -> None:
    budget = new_budget(AVX2)
    assert budget.prefill_rows(0, 0, 0, 256) == 256
    assert 15 <= budget.prefill_rows(1, 0, 0, 256) <= 16  # two steps of 16 ms, 2 ms a row
    assert 160 <= budget.prefill_rows(64, 0, 0, 256) <= 163
    budget.step.per_key = 1e-6
    assert 7 <= budget.prefill_rows(1, 0, 2000, 256) <= 8  # rows deep in a prompt cost more
    dear = MeasuredBudget(StepCost(CostCurve((1,), (0.001,)), 1.0, 0.0), None, 0.1)
    assert dear.prefill_rows(1, 10, 0, 256) == 1
    assert UnlimitedBudget().prefill_rows(1, 10, 0, 256) == 256


@pytest.mark.parametrize("factor", [0.5, 0.77, 1.5, 3.0])
def test_prefill_is_bounded_right_on_a_machine_that_was_timed_wrong(factor: float) -> None:
    """Only mixed steps are seen: neither part may be blamed for the other's surprise for ever."""
    budget = new_budget(AVX2)
    truth = StepCost(CostCurve(AVX2[0], [s * factor for s in AVX2[1]]), 0.002 * factor, 0.0)
    for _ in range(3000):
        rows = budget.prefill_rows(8, 8 * KEYS, 0, 512)
        seconds = truth.seconds(8, 8 * KEYS) + truth.prefill(rows, 0)
        budget.learn(StepSeen(8, 8, 8 * KEYS, rows, 0, 8, seconds))
    right = int(2 * truth.seconds(8, 8 * KEYS) / truth.prefill(1, 0))
    assert budget.prefill_rows(8, 8 * KEYS, 0, 512) == pytest.approx(right, rel=0.35)


def test_no_prefill_cost_is_stuck_at_nothing() -> None:
    budget = MeasuredBudget(StepCost(CostCurve(*AVX2), 0.0, 0.0), None, 2.0)
    for step in range(2000):
        rows = 0 if step % 40 == 0 else 100
        budget.learn(StepSeen(8, 8, 0, rows, 0, 8, 0.023 + 0.002 * rows))
    assert budget.prefill_rows(8, 0, 0, 512) < 60
    for _ in range(20000):
        budget.learn(StepSeen(8, 8, 0, 10, 0, 8, 1e-5))
    assert 1 <= budget.prefill_rows(8, 0, 0, 512) <= 512


def test_greedy_and_sampled_requests_are_calibrated_apart() -> None:
    budget = new_budget()
    tree = DraftTree((1, 2), (-1, 0), (0, 1), (1.0, 0.525))  # the middle of a range
    for _ in range(500):
        budget.learn_verdict(tree, (0, 1), greedy=True)
        budget.learn(StepSeen(2, 1, 0, 0, 0, 2, 0.016))
    assert budget.estimates(tree, True)[1] > 0.9
    assert budget.estimates(tree, False)[1] == pytest.approx(0.525)
    assert budget.estimates(tree, True)[0] == 1.0
    assert set(budget.describe()) >= {"step_ms", "draft_ms", "chances_greedy", "skipped_drafts"}
