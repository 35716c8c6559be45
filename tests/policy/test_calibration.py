"""Estimated against observed chances: they follow what is seen, and forget what no longer is."""

from __future__ import annotations

import random

import pytest

from specdec.policy.calibration import Calibration


def test_chances_are_those_seen() -> None:
    truth = {0.1: 0.02, 0.5: 0.4, 0.9: 0.99}
    calibration = Calibration()
    assert calibration.chances([0.5]) == pytest.approx([0.5], abs=0.01)
    rng = random.Random(0)
    for _ in range(3000):
        estimate = rng.choice(list(truth))
        calibration.learn([estimate], [rng.random() < truth[estimate]])
        calibration.age()
    for estimate, share in truth.items():
        # some 300 draws count: 3 standard deviations are 0.08
        assert calibration.chances([estimate]) == pytest.approx([share], abs=0.1)
    fine = calibration.chances([i / 200 for i in range(201)])
    assert fine == sorted(fine)
    assert all(0 <= chance <= 1 for chance in fine)
    for _ in range(10_000):  # nothing is seen any more
        calibration.age()
    assert calibration.chances([0.1]) == pytest.approx([0.1], abs=0.02)
