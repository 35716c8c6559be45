"""What is not the block that was saved is a miss, with its reason."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from prefix_cache.codec import BlockCodec
from prefix_cache.errors import Rejection
from tests.prefix_cache.caches import (
    BLOCK,
    IDENTITY,
    SIZE,
    Prompt,
    TestStore,
    cache_on,
    stored,
)

CODEC = BlockCodec(IDENTITY.digest(), SIZE)
SECRET = replace(CODEC, secret=b"s" * 32)
SOON = 10.0


#: How a stored block may go bad, and why it is refused then.
DAMAGE: dict[str, tuple[Rejection, Callable[[bytes, bytes], bytes]]] = {
    "flipped": (Rejection.CHECKSUM, lambda data, _: data[:150] + b"\xff" + data[151:]),
    "truncated": (Rejection.TRUNCATED, lambda data, _: data[:-1]),
    "emptied": (Rejection.TRUNCATED, lambda data, _: b""),
    "swapped": (Rejection.KEY, lambda _, other: other),
    "replayed": (Rejection.TOKENS, lambda data, other: data[:8] + other[8:40] + data[40:]),
    "replayed with tokens": (
        Rejection.CHECKSUM,
        lambda data, other: data[:8] + other[8:40] + data[40:96] + other[96:112] + data[112:],
    ),
    "junk": (Rejection.MAGIC, lambda data, _: b"x" * len(data)),
    "older schema": (Rejection.SCHEMA, lambda data, _: data[:4] + b"\1\0" + data[6:]),
}


@pytest.mark.parametrize("codec", [CODEC, SECRET], ids=["checksum", "mac"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_bad_block_is_a_counted_miss_and_is_written_anew(damage: str, codec: BlockCodec) -> None:
    expected, spoil = DAMAGE[damage]
    if codec is SECRET and expected is Rejection.CHECKSUM:
        expected = Rejection.MAC
    store, prompt, other = TestStore(), Prompt(1), Prompt(2)
    with cache_on(store, codec=codec) as cache:
        stored(cache, prompt)
        stored(cache, other)
        good, foreign = store.get_many([prompt.keys[2], other.keys[2]], SOON)
        assert good is not None
        assert foreign is not None
        # to the key of `other` for what is replayed there, else to its own
        victim = other if damage.startswith("replayed") else prompt
        store.put_many([(victim.keys[2], spoil(good, foreign))], SOON)
        assert cache.load(victim.keys, victim.tokens) == victim.payloads[:2]
        stats = cache.stats()
        assert stats.rejected == {expected: 1}
        assert (stats.hits, stats.misses) == (2, 3)
        assert stats.errors == {}
        stored(cache, victim)
        assert cache.load(victim.keys, victim.tokens) == victim.payloads


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (replace(CODEC, identity=replace(IDENTITY, weights=b"v").digest()), Rejection.IDENTITY),
        (replace(CODEC, identity=replace(IDENTITY, dtype="int8").digest()), Rejection.IDENTITY),
        (replace(CODEC, identity=replace(IDENTITY, schema=1).digest()), Rejection.IDENTITY),
        (SECRET, Rejection.MAC),
        (replace(CODEC, payload_bytes=SIZE // 2), Rejection.SCHEMA),
    ],
)
def test_blocks_of_another_cache_are_not_believed(codec: BlockCodec, expected: Rejection) -> None:
    # Other models have other keys, so this takes a writer that lies about them.
    store, prompt = TestStore(), Prompt(1)
    with cache_on(store) as writing, cache_on(store, codec=codec) as reading:
        stored(writing, prompt)
        assert reading.load(prompt.keys, prompt.tokens) == []
        assert reading.stats().rejected == {expected: 1}


def test_the_same_key_with_other_tokens_is_a_miss() -> None:
    prompt = Prompt(1)
    with cache_on(TestStore()) as cache:
        stored(cache, prompt)
        assert cache.load(prompt.keys[:1], [[0] * BLOCK]) == []
        assert cache.stats().rejected == {Rejection.TOKENS: 1}


def test_rejections_are_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    prompts = [Prompt(i) for i in range(50)]
    with cache_on(TestStore()) as cache:
        for prompt in prompts:
            stored(cache, prompt)
        with caplog.at_level(logging.WARNING, "prefix_cache"):
            for prompt in prompts:
                cache.load(prompt.keys[:1], [[0] * BLOCK])
                # not asked for again before it is written anew
                assert cache.load(prompt.keys, prompt.tokens) == []
        assert cache.stats().rejected == {Rejection.TOKENS: 50}
    assert len([r for r in caplog.records if "rejected: tokens" in r.getMessage()]) == 1
