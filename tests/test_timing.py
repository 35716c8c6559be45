"""What is measured at start-up, on real (small) models and on the clock."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from specdec.config import KvSettings
from specdec.heads.drafter import NullDrafter
from specdec.heads.drafting import HeadsDrafter
from specdec.model.kv import KvPool
from specdec.model.runner import ModelRunner, StepOutput
from specdec.model.segment_rows import SegmentRows
from specdec.timing import ROWS, measure_drafts, measure_steps
from tests.heads.making import HIDDEN, small_sequential
from tests.tiny_models import tiny_model


@pytest.mark.parametrize("limit", [None, 5, 40])
def test_steps_are_timed_as_far_as_the_model_goes(limit: int | None) -> None:
    runner = ModelRunner(tiny_model("llama"), KvSettings(pages=8), limit)
    costs = measure_steps(runner)
    points = costs.rows.points()
    longest = runner.max_length if limit is None else limit
    assert list(points) == [rows for rows in ROWS if rows < longest][: len(points)]
    assert all(0 < seconds < 1 for seconds in points.values())
    assert costs.prefill_row > 0
    assert costs.per_key > 0


def test_a_slow_step_is_seen_and_ends_the_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner(tiny_model("llama"), KvSettings(pages=8))
    forward = runner.forward

    def slow(segments: Sequence[SegmentRows], pool: KvPool) -> StepOutput:
        time.sleep(0.02 * sum(segment.width for segment in segments))
        return forward(segments, pool)

    monkeypatch.setattr(runner, "forward", slow)
    started = time.perf_counter()
    costs = measure_steps(runner)
    assert time.perf_counter() - started < 30
    points = costs.rows.points()
    assert max(points) < ROWS[-1]
    assert points[4] == pytest.approx(0.08, rel=0.5)
    assert costs.prefill_row == pytest.approx(0.02, rel=0.5)
    assert costs.seconds(64) == pytest.approx(1.28, rel=0.5)


def test_drafts_are_timed_where_there_are_heads() -> None:
    runner = ModelRunner(tiny_model("llama"), KvSettings(pages=8))
    assert measure_drafts(runner, NullDrafter(), 8) is None
    runner.hidden_size = HIDDEN
    curve = measure_drafts(runner, HeadsDrafter(small_sequential()), 8)
    assert curve is not None
    assert 0 < curve.seconds(1) <= curve.seconds(16) < 1
