"""What a step costs: measured at start-up, corrected while running. Holds no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

#: Share of a surprise that goes to all sizes alike: the machine as a whole became slower.
_COMMON = 0.02
#: Share that goes to the sizes next to the one seen.
_LOCAL = 0.1
#: A surprise counts as at most this multiple of what was expected: one stall is no trend.
_MOST = 0.5


class CostCurve:
    """Seconds by size, never falling with it, on straight lines between measured points.

    Args:
        sizes: rising, the first at least 1.
        seconds: measured at these sizes.
        per_key: seconds for each key that a row attends to.

    Raises:
        ValueError: there is no point, or sizes and seconds do not match or rise.
    """

    def __init__(
        self, sizes: Sequence[int], seconds: Sequence[float], per_key: float = 0.0
    ) -> None:
        if not sizes or len(sizes) != len(seconds):
            raise ValueError(f"{len(sizes)} sizes for {len(seconds)} measurements")
        if list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(f"sizes {list(sizes)} do not rise from 1 or more")
        self._sizes = list(sizes)
        self._seconds = list(seconds)
        self.per_key = max(0.0, per_key)
        for i in range(1, len(self._seconds)):
            self._seconds[i] = max(self._seconds[i], self._seconds[i - 1])

    def seconds(self, size: int, keys: float = 0.0) -> float:
        """Expected time; beyond the last point the last line goes on.

        Args:
            size: rows, or whatever the curve is over.
            keys: over all rows, the keys that they attend to.
        """
        low, share = self._place(size)
        at = self._seconds
        if low + 1 == len(at):
            return at[low] + keys * self.per_key
        return at[low] + share * (at[low + 1] - at[low]) + keys * self.per_key

    def learn(self, size: int, seconds: float, keys: float = 0.0) -> None:
        """Move towards what was seen.

        Args:
            size: as above.
            seconds: measured; what is not above 0 is passed over.
            keys: as above.
        """
        expected = self.seconds(size, keys)
        if not seconds > 0 or not expected > 0:
            return
        surprise = max(-_MOST, min(_MOST, seconds / expected - 1))
        self._seconds = [value * (1 + _COMMON * surprise) for value in self._seconds]
        self.per_key *= 1 + _COMMON * surprise
        low, share = self._place(size)
        high = min(low + 1, len(self._seconds) - 1)
        share = min(share, 1.0)
        self._seconds[low] *= 1 + _LOCAL * (1 - share) * surprise
        self._seconds[high] *= 1 + _LOCAL * share * surprise
        self._keep_rising(low, high)

    def points(self) -> dict[int, float]:
        """Seconds by size, at the points."""
        return dict(zip(self._sizes, self._seconds, strict=True))

    def _place(self, size: int) -> tuple[int, float]:
        """The point below ``size``, and how far on the line to the next one."""
        sizes = self._sizes
        low = max(0, min(bisect_right(sizes, size) - 1, len(sizes) - 2))
        if len(sizes) == 1 or size <= sizes[0]:
            return 0, 0.0
        return low, (size - sizes[low]) / (sizes[low + 1] - sizes[low])

    def _keep_rising(self, low: int, high: int) -> None:
        at = self._seconds
        at[high] = max(at[high], at[low])
        for i in range(low - 1, -1, -1):
            at[i] = min(at[i], at[i + 1])
        for i in range(high + 1, len(at)):
            at[i] = max(at[i], at[i - 1])
