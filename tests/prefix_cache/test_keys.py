from __future__ import annotations

import hashlib
import struct
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_cache.keys import Identity, KeyChain, block_keys

IDENTITY = Identity(
    weights=b"w" * 32,
    tokenizer=b"t" * 32,
    dtype="float32",
    layers=30,
    kv_heads=3,
    head_dim=64,
    block_size=4,
)


def sized(*parts: bytes) -> bytes:
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def test_keys_are_what_the_module_says() -> None:
    numbers = [struct.pack("<Q", number) for number in (30, 3, 64, 4, 2)]
    identity = hashlib.sha256(
        sized(b"prefix_cache identity", b"w" * 32, b"t" * 32, b"float32", *numbers)
    ).digest()
    assert IDENTITY.digest() == identity

    first = hashlib.sha256(
        sized(b"prefix_cache block", identity, b"", struct.pack("<4I", 5, 6, 7, 8))
    ).digest()
    second = hashlib.sha256(
        sized(b"prefix_cache block", first, b"tenant", struct.pack("<4I", 9, 10, 11, 12))
    ).digest()
    tokens = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert block_keys(IDENTITY, tokens, shared_length=4, salt=b"tenant") == [first, second]


def test_a_known_key_stays_what_it_is() -> None:
    # Another number here throws away every cache there is. If that is meant, raise SCHEMA.
    known = "11b98b27570e18ea6c413c278c4caa55640be9fe054fa0a795f328aaba039727"
    assert block_keys(IDENTITY, [1, 2, 3, 4])[0].hex() == known


def test_tenants_share_the_whole_blocks_of_the_system_prompt_and_nothing_else() -> None:
    tokens = list(range(40))
    for shared in range(len(tokens) + 5):
        one = block_keys(IDENTITY, tokens, shared, b"tenant 1")
        two = block_keys(IDENTITY, tokens, shared, b"tenant 2")
        common = [a == b for a, b in zip(one, two, strict=True)]
        whole = min(shared // 4, 10)
        assert common == [True] * whole + [False] * (10 - whole)


def test_without_a_salt_the_shared_length_makes_no_difference() -> None:
    tokens = list(range(40))
    assert block_keys(IDENTITY, tokens, 0) == block_keys(IDENTITY, tokens, 17)


def test_a_salt_is_part_of_the_key() -> None:
    keys = {salt: block_keys(IDENTITY, [1, 2, 3, 4], 0, salt)[0] for salt in (b"", b"a", b"b")}
    assert len(set(keys.values())) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": b"v" * 32},
        {"tokenizer": b"u" * 32},
        {"dtype": "bfloat16"},
        {"layers": 31},
        {"kv_heads": 4},
        {"head_dim": 32},
        {"schema": 1},
        {"layers": 3, "kv_heads": 30},
    ],
)
def test_each_part_of_the_identity_changes_every_key(changed: dict[str, int]) -> None:
    other = replace(IDENTITY, **changed)  # type: ignore[arg-type]
    tokens = list(range(12))
    assert not set(block_keys(IDENTITY, tokens)) & set(block_keys(other, tokens))


def test_moving_a_boundary_changes_the_key() -> None:
    # "weights" + "tokenizer" and salt + tokens spell the same bytes in another split
    assert (
        replace(IDENTITY, weights=b"wt", tokenizer=b"x").digest()
        != replace(IDENTITY, weights=b"w", tokenizer=b"tx").digest()
    )
    one = replace(IDENTITY, block_size=1)
    salted = block_keys(one, [7], 0, salt=struct.pack("<I", 7))
    assert salted != block_keys(one, [7], 0)
    assert block_keys(one, [1, 2])[-1] != block_keys(replace(one, block_size=2), [1, 2])[-1]


def test_order_of_blocks_and_of_tokens_matters() -> None:
    assert (
        block_keys(IDENTITY, [1, 2, 3, 4, 5, 6, 7, 8])[-1]
        != (block_keys(IDENTITY, [5, 6, 7, 8, 1, 2, 3, 4])[-1])
    )
    assert block_keys(IDENTITY, [1, 2, 3, 4]) != block_keys(IDENTITY, [2, 1, 3, 4])


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    shared=st.integers(0, 60),
)
def test_a_chain_grown_in_steps_equals_one_made_at_once(
    tokens: list[int], cuts: list[int], shared: int
) -> None:
    chain = KeyChain(IDENTITY, shared, b"salt")
    grown: list[bytes] = []
    for cut in [*sorted(cuts), len(tokens)]:
        grown += chain.grow(tokens[:cut])
    assert grown == list(chain.keys) == block_keys(IDENTITY, tokens, shared, b"salt")


@given(st.lists(st.lists(st.integers(0, 1), min_size=8, max_size=8), min_size=2, max_size=8))
def test_keys_are_equal_where_prefixes_are(prompts: list[list[int]]) -> None:
    seen: dict[bytes, tuple[int, ...]] = {}
    for prompt in prompts:
        for index, key in enumerate(block_keys(IDENTITY, prompt)):
            prefix = tuple(prompt[: (index + 1) * 4])
            assert seen.setdefault(key, prefix) == prefix


@pytest.mark.parametrize("bad", [[-1, 2, 3, 4], [2**32, 2, 3, 4], [1.5, 2, 3, 4]])
def test_what_is_no_token_id_is_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="not token ids"):
        block_keys(IDENTITY, bad)


@pytest.mark.parametrize("bad", [{"block_size": 0}, {"weights": b""}, {"dtype": ""}])
def test_an_identity_without_content_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|not be empty"):
        replace(IDENTITY, **bad)  # type: ignore[arg-type]


def test_a_long_prompt_takes_milliseconds() -> None:
    identity, tokens = replace(IDENTITY, block_size=16), list(range(4000))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        block_keys(identity, tokens)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.02  # about 1 ms; the machine may be busy
