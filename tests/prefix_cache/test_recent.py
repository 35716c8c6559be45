from __future__ import annotations

import logging

import pytest

from prefix_cache.quiet_log import QuietLog
from prefix_cache.recent import RecentKeys


def test_keys_are_forgotten_by_number_and_by_age() -> None:
    now = [0.0]
    keys = RecentKeys(3, 10, lambda: now[0])
    keys.add([b"a", b"b", b"c"])
    keys.add([b"a", b"d"])
    assert [key in keys for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    keys.discard([b"c", b"unknown"])
    assert b"c" not in keys
    now[0] = 9.9
    keys.add([b"d"])
    now[0] = 10
    assert b"a" not in keys
    assert b"d" in keys
    for number in range(100):
        keys.add([b"%d" % number])
    assert len(keys) == 3


def test_a_warning_is_said_now_and_then_with_the_number_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    log = QuietLog(logging.getLogger("test"), 30, lambda: now[0])
    for second in range(65):
        now[0] = second
        log.warn("kind", f"at {second}")
    log.warn("other", "at once")
    assert [record.getMessage() for record in caplog.records] == [
        "at 0",
        "at 30 (29 more of this kind before)",
        "at 60 (29 more of this kind before)",
        "at once",
    ]
