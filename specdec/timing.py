"""How long steps and drafts take on the machine at hand, measured at start-up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from specdec.config import EngineSettings
from specdec.drafting import default_max_nodes
from specdec.heads.drafter import Drafter
from specdec.model.kv import KvPool
from specdec.model.runner import ModelRunner
from specdec.model.segment_rows import SegmentRows
from specdec.policy.cost import CostCurve, StepCost
from specdec.policy.measured import MeasuredBudget
from specdec.policy.tree import DraftTree

#: Rows of the steps that are timed.
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
#: Sequences of the drafts that are timed.
SEQUENCES = (1, 4, 16)
#: Context of the step that shows what a key costs.
_CONTEXT = 768
_CHUNK = 32
#: Seconds after which no further size is timed, two apart: curves go on in a straight line.
_PATIENCE = 3.0
#: The best of this many counts, fewer where that takes longer than a second.
_REPEATS = 3


def measure_steps(runner: ModelRunner) -> StepCost:
    """Time forwards of several sizes, on a pool of their own.

    Takes some seconds, on a model whose step takes longer than that some steps. Sizes that a
    model's length does not allow are not timed.
    """
    timer = _Timer(runner)
    largest = max(1, runner.max_length - 1)
    sizes = [rows for rows in ROWS if rows <= largest]
    timer.seconds(1, 0, True)  # first calls are slow
    times = list(_until(_PATIENCE, sizes, lambda rows: timer.seconds(rows, 0, True)))
    curve = CostCurve(sizes[: len(times)], times)
    context, rows = min(_CONTEXT, largest - 4), min(4, sizes[-1])
    per_key = 0.0
    if context > 0:
        per_key = (timer.seconds(rows, context, True) - curve.seconds(rows)) / (rows * context)
    chunk = min(_CHUNK, largest)
    prefill_row = (timer.seconds(chunk, 0, False) - curve.seconds(1)) / chunk
    return StepCost(curve, prefill_row, per_key)


def measure_drafts(runner: ModelRunner, drafter: Drafter, max_nodes: int) -> CostCurve | None:
    """Time drafts for several sequences at once; None if the drafter never drafts."""
    if drafter.max_depth == 0:
        return None
    generator = torch.Generator().manual_seed(0)

    def seconds(sequences: int) -> float:
        hidden = torch.randn(sequences, runner.hidden_size, generator=generator)
        hidden = hidden.to(runner.device)
        contexts = [[place % runner.vocab_size for place in range(8)]] * sequences
        sizes = [max_nodes] * sequences
        return _best(lambda: drafter.draft(hidden, contexts, sizes), runner)

    seconds(1)
    times = list(_until(_PATIENCE, SEQUENCES, seconds))
    return CostCurve(SEQUENCES[: len(times)], times)


def measured_budget(
    runner: ModelRunner, drafter: Drafter, settings: EngineSettings
) -> MeasuredBudget:
    """A budget that knows this model on this machine; takes some seconds."""
    drafts = measure_drafts(
        runner, drafter, settings.speculation.max_nodes or default_max_nodes(runner)
    )
    return MeasuredBudget(measure_steps(runner), drafts, settings.batch.prefill_stall)


class _Timer:
    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        size = runner.pool.page_size
        positions = max(_CONTEXT, 0) + max(ROWS)
        self._pages = range(-(-min(positions, runner.max_length) // size))
        self._pool = KvPool(runner.shape.layout, len(self._pages), size, runner.device)

    def seconds(self, rows: int, start: int, tree: bool) -> float:
        """Of a step of one chain of ``rows`` after ``start`` tokens; a prefill chunk comes with
        a row of another sequence that has logits.
        """
        tokens = tuple(place % self._runner.vocab_size for place in range(rows))
        chain = DraftTree(tokens, tuple(range(-1, rows - 1)), tuple(range(rows)), (1.0,) * rows)
        segment = SegmentRows(self._pages, start, tokens, chain if tree else None, False)
        first = SegmentRows(self._pages, 0, tokens[:1], None, True)
        segments = [segment] if tree else [segment, first]
        return _best(lambda: self._runner.forward(segments, self._pool), self._runner)


def _until(
    patience: float, sizes: Sequence[int], seconds: Callable[[int], float]
) -> Iterator[float]:
    """Times of sizes, as far as patience goes; at least of two, for a slope."""
    end = time.perf_counter() + patience
    for count, size in enumerate(sizes, 1):
        yield seconds(size)
        if count >= 2 and time.perf_counter() > end:
            return


def _best(call: Callable[[], object], runner: ModelRunner) -> float:
    best, spent = float("inf"), 0.0
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
        took = time.perf_counter() - started
        best, spent = min(best, took), spent + took
        if spent > 1.0:
            break
    return best
