"""Counting and publishing: nothing lost between threads, no fault of a sink reaches anybody."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from deployments.metrics import table
from deployments.metrics.definition import OTHER
from deployments.metrics.publisher import Publisher
from deployments.metrics.recorder import Batch, Recorder
from deployments.metrics.table import METRICS


class Collected:
    """A sink that adds batches up, and may fail."""

    def __init__(self, failing: bool = False) -> None:
        self.batches: list[Batch] = []
        self.closed = False
        self._failing = failing

    def publish(self, batch: Batch) -> None:
        self.batches.append(batch)
        if self._failing:
            raise OSError("nobody there")

    def close(self) -> None:
        self.closed = True

    def total(self, *key: object) -> float:
        return sum(
            amount
            for batch in self.batches
            for (metric, labels), amount in batch.sums.items()
            if (metric, *labels) == key
        )


def test_nothing_is_lost_between_threads() -> None:
    recorder, sink = Recorder(), Collected()
    publisher = Publisher(recorder, [sink], 0.002)

    def count(_: int) -> None:
        for _ in range(2000):  # in all fewer than are kept where the publisher gets no turn
            recorder.add(table.ROUNDS)
            recorder.observe(table.STEP_TIME, 0.5)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(count, range(4)))
    publisher.close()
    assert sink.total(table.ROUNDS) == 8_000
    assert len(sink.batches) > 1
    seen = [v for batch in sink.batches for v in batch.observations.get((table.STEP_TIME, ()), [])]
    assert len(seen) == 8_000


def test_a_sink_that_fails_harms_no_other_and_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder, bad, good = Recorder(), Collected(failing=True), Collected()
    published = threading.Event()

    def prepare() -> None:
        if len(good.batches) > 5:
            published.set()

    with caplog.at_level("ERROR", logger="ray.serve"):
        publisher = Publisher(recorder, [bad, good], 0.002, prepare)
        recorder.add(table.ROUNDS, 3)
        assert published.wait(20)
        publisher.close()
        publisher.close()
    assert good.total(table.ROUNDS) == 3
    assert bad.closed
    assert good.closed
    assert sum("Collected (1) failed" in record.message for record in caplog.records) == 1


def test_an_observer_without_a_publisher_takes_bounded_memory() -> None:
    recorder = Recorder()
    for _ in range(30_000):
        recorder.observe(table.STEP_TIME, 0.1)
    ((_, values),) = recorder.drain().observations.items()
    assert len(values) == 10_000


def test_a_recorder_that_is_off_counts_nothing() -> None:
    recorder = Recorder(enabled=False)
    recorder.add(table.ROUNDS)
    recorder.set(table.UP, 1)
    recorder.observe(table.STEP_TIME, 1)
    assert recorder.drain() == Batch()


def test_mistakes_of_callers_are_errors() -> None:
    recorder = Recorder()
    with pytest.raises(ValueError, match="only grows"):
        recorder.add(table.ROUNDS, -1)
    with pytest.raises(ValueError, match="zip"):
        recorder.add(table.ENDED)
    with pytest.raises(ValueError, match="zip"):
        recorder.add(table.ROUNDS, 1, "stop")


def test_gauges_are_told_while_they_are_set() -> None:
    recorder = Recorder()
    recorder.set(table.UP, 0)
    recorder.set(table.UP, 1)
    assert recorder.drain().levels == {(table.UP, ()): 1}
    assert recorder.drain().levels == {}


def test_random_labels_make_no_series() -> None:
    """5,000 values for each label of each metric, ids, names and line breaks among them."""
    rng = random.Random(1)
    recorder = Recorder()
    series: Counter[str] = Counter()
    for _ in range(5000):
        for metric in METRICS:
            labels = [f"{rng.random()}\n{label.name}" for label in metric.labels]
            if metric.kind == "counter":
                recorder.add(metric, 1, *labels)
            elif metric.kind == "gauge":
                recorder.set(metric, 1, *labels)
            elif len(labels):
                recorder.observe(metric, 1, *labels)
    batch = recorder.drain()
    for metric, values in [*batch.sums, *batch.levels, *batch.observations]:
        series[metric.name] += 1
        assert set(values) <= {OTHER}
    assert set(series.values()) == {1}
