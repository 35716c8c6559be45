"""How often candidates of an estimated chance are really accepted. Holds no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: Ranges of the estimate, equally wide.
_BINS = 20
#: Candidates' worth of trust in the estimate itself.
_PRIOR = 10.0
#: Weight of what was seen one step earlier, in every range: one that is no longer seen goes back
#: to the estimate in time.
_KEPT = 0.999
#: Steps after which the chances are worked out anew.
_REFIT = 16


class Calibration:
    """Turns estimated into observed chances, by ranges of the estimate.

    The result never falls as the estimate rises, so an order by estimate stays one.
    """

    def __init__(self) -> None:
        self._seen = [0.0] * _BINS
        self._accepted = [0.0] * _BINS
        self._chances: list[float] | None = None
        self._steps = 0

    def chances(self, estimates: Sequence[float]) -> list[float]:
        """Observed chances, 0 to 1, of candidates with such estimates."""
        if self._chances is None:
            self._chances = self._fit()
        table = self._chances
        return [_between(table, max(0.0, min(1.0, value))) for value in estimates]

    def learn(self, estimates: Iterable[float], accepted: Iterable[bool]) -> None:
        """Enter verified candidates."""
        for estimate, yes in zip(estimates, accepted, strict=True):
            index = min(_BINS - 1, int(max(0.0, estimate) * _BINS))
            self._seen[index] += 1
            self._accepted[index] += yes

    def age(self) -> None:
        """A step has passed."""
        self._steps += 1
        if self._steps < _REFIT:
            return
        kept = _KEPT**self._steps
        self._seen = [value * kept for value in self._seen]
        self._accepted = [value * kept for value in self._accepted]
        self._chances, self._steps = None, 0

    def table(self) -> list[float]:
        """Observed chances at the middle of each range, the lowest first."""
        return self.chances([(index + 0.5) / _BINS for index in range(_BINS)])

    def _fit(self) -> list[float]:
        """Rising by pooling neighbours that fall (isotonic regression), weighted by what was
        seen: a range without candidates gives way to one with many.
        """
        pools: list[tuple[float, float, int]] = []  # chance, weight, ranges
        for index, (seen, hits) in enumerate(zip(self._seen, self._accepted, strict=True)):
            weight = seen + _PRIOR
            chance, width = (hits + _PRIOR * (index + 0.5) / _BINS) / weight, 1
            while pools and pools[-1][0] >= chance:
                above, mass, ranges = pools.pop()
                chance = (chance * weight + above * mass) / (weight + mass)
                weight, width = weight + mass, width + ranges
            pools.append((chance, weight, width))
        return [chance for chance, _, width in pools for _ in range(width)]


def _between(table: Sequence[float], estimate: float) -> float:
    """On straight lines between the middles of ranges; from 0 to the first, and flat at the end."""
    place = estimate * _BINS - 0.5
    if place <= 0:
        return table[0] * estimate * 2 * _BINS
    low = int(place)
    if low + 1 >= _BINS:
        return table[-1]
    return table[low] + (place - low) * (table[low + 1] - table[low])
