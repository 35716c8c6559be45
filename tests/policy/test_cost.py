"""What steps are expected to cost, against costs that the test makes up.

What these catch: one stall taken for a trend, a curve that falls or swings, a point that was
disturbed while it was timed.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.policy.cost import CostCurve

#: Six rows for the price of one, then 2.5 ms each: a CPU without matrix units.
AVX2 = ((1, 6, 64), (0.016, 0.018, 0.163))


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


def test_far_beyond_the_last_point_it_does_not_swing() -> None:
    flat = CostCurve((1, 2, 4, 8, 16, 32, 64), (0.01, 0.01, 0.01, 0.0101, 0.0102, 0.0104, 0.0108))
    truth, rng = 0.0172, random.Random(0)
    seen = []
    for _ in range(600):
        flat.learn(512, truth * (1 + rng.uniform(-0.03, 0.03)))
        seen.append(flat.seconds(512) / truth)
    assert all(0.85 < ratio < 1.15 for ratio in seen[-300:])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 80), st.floats(1e-4, 1.0)), max_size=60))
def test_more_rows_never_cost_less(seen: list[tuple[int, float]]) -> None:
    curve = CostCurve((1, 2, 4, 8, 16, 32), (0.016, 0.016, 0.017, 0.02, 0.04, 0.08))
    for rows, seconds in seen:
        curve.learn(rows, seconds)
    times = [curve.seconds(rows) for rows in range(1, 64)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(times))
    assert times[0] > 0


def test_a_curve_goes_on_in_a_straight_line() -> None:
    curve = CostCurve((1, 4, 8), (1.0, 2.0, 6.0))
    assert [curve.seconds(rows) for rows in (1, 2, 4, 6, 8, 10)] == pytest.approx(
        [1.0, 4 / 3, 2.0, 4.0, 6.0, 8.0]
    )
    assert CostCurve((1,), (2.0,)).seconds(9) == 2.0
    assert CostCurve((1, 2, 3), (1.0, 9.0, 3.0)).seconds(2) == 3.0  # 9 was disturbed
    for sizes, seconds in (
        ((), ()),
        ((1, 1), (1.0, 1.0)),
        ((0, 1), (1.0, 1.0)),
        ((1,), ()),
        ((1,), (0.0,)),
    ):
        with pytest.raises(ValueError, match="size"):
            CostCurve(sizes, seconds)
