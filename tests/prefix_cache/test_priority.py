from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefix_cache.priority import SOON, give_way
from tests.prefix_cache.caches import TestStore, cache_on

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_thread_gives_way_and_those_that_it_starts_and_no_other() -> None:
    own = niceness()
    with ThreadPoolExecutor(1, initializer=give_way) as below:
        assert below.submit(niceness).result(20) == min(19, own + SOON)
        with below.submit(ThreadPoolExecutor, 1).result(20) as within:
            started = below.submit(lambda: within.submit(niceness).result(20))
            assert started.result(20) == min(19, own + SOON)
    assert niceness() == own


def test_blocks_are_written_by_a_thread_that_gives_way() -> None:
    own = niceness()
    with cache_on(TestStore()):
        (writer,) = (t for t in threading.enumerate() if t.name == "prefix-cache-writer")
        assert writer.native_id is not None
        for _ in range(2000):
            if os.getpriority(os.PRIO_PROCESS, writer.native_id) == min(19, own + SOON):
                break
            threading.Event().wait(0.01)
        else:
            pytest.fail("the writer has the priority of the rest")
    assert niceness() == own
