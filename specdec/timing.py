"""How long steps and drafts take on the machine at hand, measured at start-up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from specdec.config import EngineSettings
from specdec.drafting import default_max_nodes
from specdec.heads.drafter import Drafter
from specdec.model.kv import KvPool
from specdec.model.runner import ModelRunner
from specdec.model.segment_rows import SegmentRows
from specdec.policy.budget import MeasuredBudget
from specdec.policy.cost import CostCurve
from specdec.policy.tree import DraftTree

#: Rows of the steps that are timed.
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
#: Sequences of the drafts that are timed.
SEQUENCES = (1, 4, 16)
#: Context of the step that shows what a key costs.
_CONTEXT = 768
_CHUNK = 32
#: Seconds after which no larger size is timed; the curves go on in a straight line.
_PATIENCE = 3.0
_REPEATS = 3


@dataclass(frozen=True)
class StepCosts:
    """What was measured.

    Attributes:
        step: by rows with logits.
        prefill_row: seconds of a row without logits.
    """

    step: CostCurve
    prefill_row: float


def measure_steps(runner: ModelRunner) -> StepCosts:
    """Time forwards of several sizes, on a pool of their own.

    Some seconds at most. Rows that a model's length does not allow are not timed.
    """
    timer = _Timer(runner)
    largest = max(1, runner.max_length - 1)
    sizes = [rows for rows in ROWS if rows <= largest]
    timer.seconds(sizes[-1], 0, True, repeats=1)  # first calls are slow
    times = list(_until(_PATIENCE, sizes, lambda rows: timer.seconds(rows, 0, True)))
    step = CostCurve(sizes[: len(times)], times)
    context, rows = min(_CONTEXT, largest - 4), 4
    if context > 0 and rows in sizes:
        far = timer.seconds(rows, context, True)
        step.per_key = max(0.0, (far - step.seconds(rows)) / (rows * context))
    chunk = min(_CHUNK, largest)
    prefill = timer.seconds(chunk, 0, False)
    base = step.seconds(1)
    return StepCosts(step, max(0.0, prefill - base) / max(1, chunk - 1))


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
        return _best(lambda: drafter.draft(hidden, contexts, sizes), _REPEATS, runner)

    times = list(_until(_PATIENCE, SEQUENCES, seconds))
    return CostCurve(SEQUENCES[: len(times)], times)


def measured_budget(
    runner: ModelRunner, drafter: Drafter, settings: EngineSettings
) -> MeasuredBudget:
    """A budget that knows this model on this machine; takes some seconds."""
    steps = measure_steps(runner)
    drafts = measure_drafts(runner, drafter, default_max_nodes(runner))
    return MeasuredBudget(steps.step, drafts, steps.prefill_row, settings.batch.prefill_stall)


class _Timer:
    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        size = runner.pool.page_size
        positions = max(_CONTEXT, 0) + max(ROWS)
        self._pages = range(-(-min(positions, runner.max_length) // size))
        self._pool = KvPool(runner.shape.layout, len(self._pages), size, runner.device)

    def seconds(self, rows: int, start: int, tree: bool, repeats: int = _REPEATS) -> float:
        """Of a step of one chain of ``rows`` after ``start`` tokens."""
        tokens = tuple(place % self._runner.vocab_size for place in range(rows))
        chain = DraftTree(tokens, tuple(range(-1, rows - 1)), tuple(range(rows)), (1.0,) * rows)
        segment = SegmentRows(self._pages, start, tokens, chain if tree else None, False)
        # one row with logits, so that a chunk is a step in its own right
        first = SegmentRows(self._pages, 0, tokens[:1], None, True)
        segments = [segment] if tree else [segment, first]
        return _best(lambda: self._runner.forward(segments, self._pool), repeats, self._runner)


def _until(
    patience: float, sizes: tuple[int, ...] | list[int], seconds: Callable[[int], float]
) -> Iterator[float]:
    """Times of sizes, as far as patience goes; at least the first."""
    end = time.perf_counter() + patience
    for size in sizes:
        yield seconds(size)
        if time.perf_counter() > end:
            return


def _best(call: Callable[[], object], repeats: int, runner: ModelRunner) -> float:
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
        best = min(best, time.perf_counter() - started)
    return best
