"""Counter-based noise: every draw is a pure function of (seed, position, lane).

No generator state exists, so nothing can be lost in a crash, shared by mistake between
requests or consumed in another order by another batch. The numbers are made with integers
on the host and are therefore the same whatever device the model runs on.

Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

#: The token drawn at a position: plain draws, bonus tokens and draws from a residual.
DRAW_LANE = 0
#: Acceptance test of the i-th sibling at a position: ``ACCEPT_LANE + i``.
ACCEPT_LANE = 1
#: Draft draw of the i-th sibling at a position: ``DRAFT_LANE + i``.
DRAFT_LANE = 1 << 16

Words: TypeAlias = NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
#: 64 random bits give the 53 bits of a float64's mantissa.
_SPARE_BITS = np.uint64(11)
_UNIT = 2.0**-53


def philox4x32(counter: Sequence[Words], key: Sequence[Words]) -> tuple[Words, ...]:
    """Ten rounds of Philox4x32.

    Args:
        counter: four arrays ``[n]`` of 32-bit words, each held in a uint64.
        key: two such arrays.

    Returns:
        Four arrays ``[n]`` of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low, high = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (high >> _HALF) ^ c1 ^ k0,
            high & _MASK,
            (low >> _HALF) ^ c3 ^ k1,
            low & _MASK,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniforms(seeds: ArrayLike, positions: ArrayLike, lanes: ArrayLike = 0) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits each.

    Args:
        seeds: 64-bit unsigned integers, of any shape that broadcasts with the others.
        positions: index of the token in its sequence that the number decides about.
        lanes: 32-bit number that tells several draws at one position apart.

    Returns:
        float64 of the broadcast shape.
    """
    seed, position, lane = np.broadcast_arrays(
        np.asarray(seeds, dtype=np.uint64),
        np.asarray(positions, dtype=np.uint64),
        np.asarray(lanes, dtype=np.uint64),
    )
    words = philox4x32(
        (position & _MASK, position >> _HALF, lane & _MASK, np.zeros_like(lane)),
        (seed & _MASK, seed >> _HALF),
    )
    bits = ((words[0] << _HALF) | words[1]) >> _SPARE_BITS
    return bits.astype(np.float64) * _UNIT


def uniform(seed: int, position: int, lane: int = 0) -> float:
    """One number of :func:`uniforms`."""
    return float(uniforms(seed, position, lane))
