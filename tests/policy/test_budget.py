"""The budget against costs and chances that the test makes up, and a search of all choices.

What these catch: candidates that cost more time than they save, drafting that makes a loaded
engine slower, estimates that are believed against what was seen, one stall taken for a trend,
a long prompt that holds up running streams.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.policy.budget import PROBE_ROUNDS, MeasuredBudget, UnlimitedBudget
from specdec.policy.calibration import Calibration
from specdec.policy.cost import CostCurve
from specdec.policy.tree import DraftTree

#: Six rows for the price of one, then 2.5 ms each: a CPU without matrix units.
AVX2 = ((1, 6, 64), (0.016, 0.018, 0.163))
#: All rows for the price of one.
FREE = ((1, 64), (0.02, 0.0201))


def new_budget(points: tuple[tuple[int, ...], tuple[float, ...]] = AVX2) -> MeasuredBudget:
    draft = CostCurve((1, 16), (0.002, 0.008))
    return MeasuredBudget(CostCurve(*points), draft, prefill_row=0.002, stall=2.0)


def rounds(
    budget: MeasuredBudget, sequences: int, chances: list[float], count: int = 30
) -> tuple[int, bool]:
    """Candidates chosen and whether the heads drafted, after ``count`` rounds alike."""
    chosen, drafts = 0, False
    for _ in range(count):
        drafts = budget.worth_drafting(sequences, 100 * sequences)
        budget.drafted(sequences if drafts else 0, 0.002)
        offered = sorted(chances * sequences, reverse=True) if drafts else []
        chosen = budget.candidates(offered, sequences, 100 * sequences, 500)
    return chosen, drafts


falling = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8).map(
    lambda chances: sorted(chances, reverse=True)
)


@settings(max_examples=100, deadline=None)
@given(falling, st.integers(1, 4), st.sampled_from([AVX2, FREE]))
def test_the_choice_has_the_highest_rate(
    chances: list[float], sequences: int, points: tuple[tuple[int, ...], tuple[float, ...]]
) -> None:
    budget = new_budget(points)
    chosen, drafts = rounds(budget, sequences, chances)
    if not drafts:
        return
    offered = sorted(chances * sequences, reverse=True)
    draft = budget.draft.seconds(sequences) if budget.draft else 0.0

    def rate(count: int) -> float:
        cost = budget.step.seconds(sequences + count) + draft
        return (sequences + sum(offered[:count])) / cost

    best = max(map(rate, range(len(offered) + 1)))
    assert rate(chosen) == pytest.approx(best, rel=1e-6)


def test_free_rows_are_filled_and_dear_ones_must_pay() -> None:
    assert rounds(new_budget(FREE), 1, [0.5, 0.2, 0.1, 0.05]) == (4, True)
    chosen, drafts = rounds(new_budget(AVX2), 1, [0.6, 0.4, 0.3, 0.2, 0.15, 0.12, 0.1, 0.1])
    assert (chosen, drafts) == (5, True)
    chosen, _ = rounds(new_budget(AVX2), 1, [0.95] * 12)
    assert chosen == 12


def test_a_loaded_engine_does_not_draft() -> None:
    for sequences in (12, 32, 64):
        assert rounds(new_budget(AVX2), sequences, [0.5, 0.3, 0.2]) == (0, False)
    assert rounds(new_budget(FREE), 12, [0.5, 0.3, 0.2])[1]


def test_what_does_not_pay_is_tried_again_now_and_then() -> None:
    budget = new_budget(AVX2)
    tries = [rounds(budget, 32, [0.5], 1)[1] for _ in range(3 * PROBE_ROUNDS)]
    assert 2 <= sum(tries) <= 3


def test_drafting_ends_where_nothing_is_accepted() -> None:
    budget = new_budget(AVX2)
    tree = DraftTree((1, 2), (-1, 0), (0, 1), (1.0, 0.6))
    drafted = 0
    for _ in range(300):
        pays = budget.worth_drafting(1, 100)
        budget.drafted(int(pays), 0.002)
        values = budget.estimates(tree, True)[1:] if pays else []
        if budget.candidates(values, 1, 100, 500):
            budget.learn_verdict(tree, (0,), greedy=True)
        drafted += pays
    assert drafted < 250
    assert not budget.worth_drafting(1, 100)


def test_rounds_of_lookup_alone_say_nothing_of_the_heads() -> None:
    budget = new_budget(AVX2)
    for _ in range(50):
        rounds(budget, 1, [0.6, 0.4, 0.3], 1)
        assert budget.worth_drafting(1, 100)
        budget.drafted(0, 0.0)  # lookup was sure
        assert budget.candidates([0.95] * 10, 1, 100, 500) == 10
    assert rounds(budget, 1, [0.6, 0.4, 0.3], 1)[1]
    assert budget.least(1) == pytest.approx(0.3)


def test_prefill_is_bounded_where_streams_run() -> None:
    budget = new_budget(AVX2)
    assert budget.prefill_rows(0, 0, 0, 256) == 256
    assert budget.prefill_rows(1, 100, 0, 256) == 16  # two steps of 16 ms, 2 ms a row
    assert budget.prefill_rows(64, 6400, 0, 256) == 163
    budget.step.per_key = 1e-6
    assert budget.prefill_rows(1, 0, 2000, 256) == 8  # rows deep in a prompt cost more
    tight = MeasuredBudget(CostCurve((1,), (0.001,)), None, 1.0, 0.1)
    assert tight.prefill_rows(1, 10, 0, 256) == 1
    assert UnlimitedBudget().prefill_rows(1, 10, 0, 256) == 256


def test_costs_follow_the_machine() -> None:
    curve = CostCurve(*AVX2)
    for _ in range(200):
        for rows in (1, 6, 16):
            curve.learn(rows, 2 * CostCurve(*AVX2).seconds(rows))
    for rows in (1, 6, 16, 40):
        assert curve.seconds(rows) == pytest.approx(2 * CostCurve(*AVX2).seconds(rows), rel=0.15)
    curve = CostCurve(*AVX2)
    before = curve.seconds(6)
    curve.learn(6, 10.0)
    assert before < curve.seconds(6) < 1.1 * before
    for bad in (0.0, -1.0, float("nan")):
        curve.learn(6, bad)
    times = [curve.seconds(rows) for rows in range(1, 100)]
    assert times == sorted(times)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 80), st.floats(1e-4, 1.0)), max_size=60))
def test_more_rows_never_cost_less(seen: list[tuple[int, float]]) -> None:
    curve = CostCurve((1, 2, 4, 8, 16, 32), (0.016, 0.016, 0.017, 0.02, 0.04, 0.08), 1e-6)
    for rows, seconds in seen:
        curve.learn(rows, seconds, rows * 100)
    times = [curve.seconds(rows) for rows in range(1, 64)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(times))
    assert times[0] > 0


def test_a_curve_goes_on_in_a_straight_line() -> None:
    curve = CostCurve((1, 4, 8), (1.0, 2.0, 6.0))
    assert [curve.seconds(rows) for rows in (1, 2, 4, 6, 8, 10)] == pytest.approx(
        [1.0, 4 / 3, 2.0, 4.0, 6.0, 8.0]
    )
    assert CostCurve((1,), (2.0,)).seconds(9) == 2.0
    for sizes, seconds in (((), ()), ((1, 1), (1.0, 1.0)), ((0, 1), (1.0, 1.0)), ((1,), ())):
        with pytest.raises(ValueError, match="size"):
            CostCurve(sizes, seconds)


def test_chances_are_those_seen() -> None:
    truth = {0.1: 0.02, 0.5: 0.4, 0.9: 0.99}
    calibration = Calibration()
    assert calibration.chance(0.5) == pytest.approx(0.5, abs=0.01)
    rng = random.Random(0)
    for _ in range(3000):
        estimate = rng.choice(list(truth))
        calibration.learn([estimate], [rng.random() < truth[estimate]])
    for estimate, share in truth.items():
        # 1000 draws: 4 standard deviations are 0.06
        assert calibration.chance(estimate) == pytest.approx(share, abs=0.08)
    fine = calibration.chances([i / 200 for i in range(201)])
    assert fine == sorted(fine)
    assert all(0 <= chance <= 1 for chance in fine)


def test_greedy_and_sampled_requests_are_calibrated_apart() -> None:
    budget = new_budget()
    tree = DraftTree((1, 2), (-1, 0), (0, 1), (1.0, 0.525))  # the middle of a range
    for _ in range(500):
        budget.learn_verdict(tree, (0, 1), greedy=True)
    assert budget.estimates(tree, True)[1] > 0.9
    assert budget.estimates(tree, False)[1] == pytest.approx(0.525)
    assert budget.estimates(tree, True)[0] == 1.0
    assert set(budget.describe()) >= {"step_ms", "draft_ms", "chances_greedy", "skipped_drafts"}
