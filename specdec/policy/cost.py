"""What a step costs: measured at start-up, corrected while running. Holds no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

#: Share of a surprise that goes to all sizes alike: the machine as a whole became slower.
COMMON = 0.02
#: Share that goes to the sizes next to the one seen.
LOCAL = 0.1
#: A surprise counts as at most this multiple of what was expected: one stall is no trend.
_MOST = 0.5
#: Steps with prefill after one without, in which that one still says what the rows cost.
_APART = 20


def surprise(seconds: float, expected: float) -> float:
    """By what share of the expected time a measured one differs, bounded; 0 if it is no time."""
    if not seconds > 0 or not expected > 0:
        return 0.0
    return max(-_MOST, min(_MOST, seconds / expected - 1))


class CostCurve:
    """Seconds by size, never falling with it, on straight lines between measured points.

    A point that took longer than a larger one was disturbed and counts as that one.

    Args:
        sizes: rising, the first at least 1.
        seconds: measured at these sizes, above 0.

    Raises:
        ValueError: there is no point, or sizes and seconds do not match, rise or exceed 0.
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        if not sizes or len(sizes) != len(seconds):
            raise ValueError(f"{len(sizes)} sizes for {len(seconds)} measurements")
        if list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(f"sizes {list(sizes)} do not rise from 1 or more")
        if not all(value > 0 for value in seconds):
            raise ValueError(f"sizes took no time: {list(seconds)}")
        self._sizes = list(sizes)
        self._seconds = list(accumulate(reversed(seconds), min))[::-1]

    def seconds(self, size: int) -> float:
        """Expected time; beyond the last point the last line goes on."""
        low, share = self._place(size)
        at = self._seconds
        return at[low] if low + 1 == len(at) else at[low] + share * (at[low + 1] - at[low])

    def learn(self, size: int, seconds: float) -> None:
        """Move towards a measured time; what is not above 0 is passed over."""
        self.adjust(size, surprise(seconds, self.seconds(size)))

    def adjust(self, size: int, by: float) -> None:
        """Move as far as is due where ``size`` took ``1 + by`` times as long as expected."""
        self.scale(1 + COMMON * by)
        low, share = self._place(size)
        high = min(low + 1, len(self._seconds) - 1)
        # beyond the last point a change of it counts several times
        local = LOCAL * by / max(1.0, share)
        share = min(share, 1.0)
        self._seconds[low] *= 1 + (1 - share) * local
        self._seconds[high] *= 1 + share * local
        self._keep_rising(low, high)

    def scale(self, factor: float) -> None:
        """All sizes take ``factor`` times as long."""
        self._seconds = [value * factor for value in self._seconds]

    def points(self) -> dict[int, float]:
        """Seconds by size, at the points."""
        return dict(zip(self._sizes, self._seconds, strict=True))

    def _place(self, size: int) -> tuple[int, float]:
        """The point below ``size``, and how far on the line to the next one."""
        sizes = self._sizes
        if len(sizes) == 1 or size <= sizes[0]:
            return 0, 0.0
        low = min(bisect_right(sizes, size) - 1, len(sizes) - 2)
        return low, (size - sizes[low]) / (sizes[low + 1] - sizes[low])

    def _keep_rising(self, low: int, high: int) -> None:
        at = self._seconds
        at[high] = max(at[high], at[low])
        for i in range(low - 1, -1, -1):
            at[i] = min(at[i], at[i + 1])
        for i in range(high + 1, len(at)):
            at[i] = max(at[i], at[i - 1])


class StepCost:
    """Seconds of a step: rows with logits, rows of prefill, and the keys that they attend to.

    Args:
        rows: by rows with logits.
        prefill_row: seconds that a row of prefill adds.
        per_key: seconds for each key that a row attends to.
    """

    def __init__(self, rows: CostCurve, prefill_row: float, per_key: float) -> None:
        self.rows = rows
        # What is 0 could never be corrected. A step takes at least as long as these rows.
        self._least_row = rows.seconds(1) / 1024
        self.prefill_row = max(prefill_row, self._least_row)
        self.per_key = max(per_key, self._least_row * 1e-4)
        self._since_pure = _APART

    def seconds(self, rows: int, keys: float = 0.0) -> float:
        """Of a step without prefill; ``keys`` are summed over its rows."""
        return self.rows.seconds(rows) + keys * self.per_key

    def prefill(self, rows: int, keys: float) -> float:
        """What prefill adds to a step."""
        return rows * self.prefill_row + keys * self.per_key

    def learn(self, rows: int, keys: int, prefill: int, prefill_keys: int, seconds: float) -> None:
        """Correct the parts by how far a step differs from what was expected of it.

        A step without prefill shows what rows cost, and one with prefill soon after it what
        prefill costs. After many steps with prefill in a row, both are corrected alike.

        Args:
            rows: with logits.
            keys: that these attend to.
            prefill: rows of prefill.
            prefill_keys: that these attend to.
            seconds: measured.
        """
        if not prefill:
            by = surprise(seconds, self.seconds(rows, keys))
            self.rows.adjust(rows, by)
            self.prefill_row = max(self.prefill_row * (1 + COMMON * by), self._least_row)
            self._since_pure = 0
        else:
            usual = self.seconds(rows, keys) if rows else 0.0
            by = surprise(seconds, usual + self.prefill(prefill, prefill_keys))
            self._since_pure += 1
            # what cannot be told apart is corrected alike
            if self._since_pure >= _APART:
                self.rows.scale(1 + LOCAL * by)
            self.prefill_row = max(self.prefill_row * (1 + LOCAL * by), self._least_row)
        self.per_key = max(self.per_key * (1 + COMMON * by), self._least_row * 1e-4)
