"""What the model must know of a plan's segments: rows, positions and who sees whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from specdec.policy.plan import StepPlan
from specdec.policy.tree import DraftTree

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SegmentRows:
    """What the model must know of one segment.

    Attributes:
        pages: pages of the sequence, covering all of the segment's positions.
        start: slot position of the first row: tokens before it have their KV in the pages.
        tokens: per row its token.
        tree: the draft tree of a verify segment; None for a prefill chunk.
        wants_logits: whether a prefill chunk's last row needs logits (a tree's rows all do).
        every_row: whether all rows of a prefill chunk do.
    """

    pages: Sequence[int]
    start: int
    tokens: tuple[int, ...]
    tree: DraftTree | None
    wants_logits: bool
    every_row: bool = False

    @property
    def width(self) -> int:
        """Rows of the segment."""
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Slots that its rows may attend to."""
        return self.start + len(self.tokens)

    @property
    def logit_count(self) -> int:
        """Rows that need logits: all of a tree; all, the last or none of a prefill chunk."""
        if self.tree is not None or self.every_row:
            return self.width
        return int(self.wants_logits)

    def positions(self) -> Ints:
        """Per row its true position ``[width]``: tree nodes of one depth share theirs."""
        if self.tree is None:
            return np.arange(self.start, self.length)
        return self.start + np.asarray(self.tree.depths, dtype=np.int64)

    def visible(self) -> Bools:
        """Which rows of the segment each row attends to, ``[width, width]``."""
        if self.tree is None:
            return np.tri(self.width, dtype=np.bool_)
        return ancestors(self.tree.parents)


@lru_cache(maxsize=256)
def ancestors(parents: tuple[int, ...]) -> Bools:
    """Per node (row) itself and its ancestors (columns), ``[N, N]``, read-only."""
    seen = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    seen.flags.writeable = False
    return seen


@dataclass(frozen=True)
class PackedRows:
    """Where the segments of a step lie among its ``T`` packed rows.

    Attributes:
        offsets: ``[segments + 1]`` first row of each segment, and T.
        logit_rows: ``[R]`` rows that need logits.
        spans: per segment the half-open range of its rows in the logits.
    """

    offsets: Ints
    logit_rows: Ints
    spans: tuple[tuple[int, int], ...]

    @staticmethod
    def of(segments: Sequence[SegmentRows]) -> PackedRows:
        """Segments stand one after the other; those of a segment that need logits are its last."""
        offsets = np.concatenate(([0], np.cumsum([s.width for s in segments])))
        counts = [s.logit_count for s in segments]
        ends = np.cumsum(counts).tolist()
        rows = [np.arange(end - n, end) for end, n in zip(offsets[1:], counts, strict=True)]
        return PackedRows(
            offsets,
            np.concatenate(rows).astype(np.int64),
            tuple((end - n, end) for end, n in zip(ends, counts, strict=True)),
        )


def segment_rows(plan: StepPlan) -> list[SegmentRows]:
    """The segments of a plan as the model sees them."""
    rows = []
    for segment in plan.segments:
        lease = segment.sequence.lease
        if lease is None:
            raise ValueError(f"{segment.sequence.request_id} is scheduled without pages")
        rows.append(
            SegmentRows(
                lease.pages,
                segment.start,
                segment.tokens,
                segment.tree,
                segment.wants_logits,
                segment.every_row,
            )
        )
    return rows
