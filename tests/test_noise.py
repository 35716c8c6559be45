"""Noise against Random123's published vectors, and against the uniform distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from specdec import noise
from specdec.params import MAX_SEED

#: Chance that a test of a right generator fails, were its seeds drawn anew.
FALSE_ALARM = 1e-4


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    def arrays(numbers: tuple[int, ...]) -> list[NDArray[np.uint64]]:
        return [np.array([number], dtype=np.uint64) for number in numbers]

    result = noise.philox4x32(arrays(counter), arrays(key))
    assert tuple(int(word[0]) for word in result) == words


def test_uniform_is_the_first_53_bits_of_the_block() -> None:
    # Counter (5, 0, 3, 0), key (7, 0), made with plain integers.
    c, k = [5, 0, 3, 0], [7, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b % 2**32, a >> 32 ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    assert noise.uniform(7, 5, 3) == ((c[0] << 32 | c[1]) >> 11) / 2**53


numbers = st.integers(0, MAX_SEED)


@settings(deadline=None, derandomize=True)
@given(numbers, numbers, st.integers(0, 2**32 - 1))
def test_numbers_lie_in_the_half_open_unit_interval(seed: int, position: int, lane: int) -> None:
    assert 0 <= noise.uniform(seed, position, lane) < 1


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(numbers, numbers, st.integers(0, 2**32 - 1)), min_size=1, max_size=20))
def test_a_number_does_not_depend_on_its_neighbours(keys: list[tuple[int, int, int]]) -> None:
    seeds, positions, lanes = zip(*keys, strict=True)
    together = noise.uniforms(
        np.array(seeds, dtype=np.uint64),
        np.array(positions, dtype=np.uint64),
        np.array(lanes, dtype=np.uint64),
    )
    assert together.tolist() == [noise.uniform(*key) for key in keys]


def test_arguments_broadcast() -> None:
    table = noise.uniforms(np.arange(3)[:, None], 9, np.arange(4))
    assert table.shape == (3, 4)
    assert table[2, 3] == noise.uniform(2, 9, 3)


@pytest.mark.parametrize("axis", ["seed", "position", "lane"])
def test_numbers_are_uniform_and_uncorrelated_along_each_axis(axis: str) -> None:
    """Chi-square over 256 bins, and over 16 x 16 bins of successive pairs; n = 100,000."""
    count = 100_000
    keys = {"seed": 11, "position": 22, "lane": 33}
    run = np.arange(count, dtype=np.uint64)
    drawn = noise.uniforms(*(run if name == axis else key for name, key in keys.items()))
    bins = np.bincount((drawn * 256).astype(int), minlength=256)
    assert stats.chisquare(bins).pvalue > FALSE_ALARM
    pairs = (drawn[:-1:2] * 16).astype(int) * 16 + (drawn[1::2] * 16).astype(int)
    assert stats.chisquare(np.bincount(pairs, minlength=256)).pvalue > FALSE_ALARM
    low_bits = (drawn * 2**53).astype(np.uint64) % np.uint64(256)
    assert stats.chisquare(np.bincount(low_bits.astype(int), minlength=256)).pvalue > FALSE_ALARM
