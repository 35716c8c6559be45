from __future__ import annotations

import contextlib
import hashlib
import random
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import prefix_cache
from prefix_cache.codec import BlockCodec, Compression
from prefix_cache.errors import BlockRejected, Rejection

SIZE = 512
TOKENS = [3, 1, 4, 1, 5]
KEY, OTHER_KEY = b"k" * 32, b"o" * 32
PLAIN = BlockCodec(b"i" * 32, SIZE, 4)
PACKED = replace(PLAIN, compression="zstd")
SECRET = replace(PLAIN, secret=b"s" * 16)
CODECS = {
    "plain": PLAIN,
    "packed": PACKED,
    "secret": SECRET,
    "long": replace(SECRET, secret=b"s" * 99),
}
HEADER = struct.Struct("<4sHBB32s32sQQII")


def payload(seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(SIZE)


def reason(
    codec: BlockCodec, data: bytes, key: bytes = KEY, tokens: list[int] = TOKENS
) -> Rejection:
    with pytest.raises(BlockRejected) as caught:
        codec.decode(data, key, tokens)
    return caught.value.reason


def checksum(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data) + bytes(16)


def resealed(data: bytes) -> bytes:
    """With a right checksum, which anybody can make where there is no secret."""
    return data[:-32] + checksum(data[:-32])


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_what_was_encoded_is_decoded(codec: BlockCodec) -> None:
    for seed, tokens in enumerate(([], [0], TOKENS, list(range(16)), [2**32 - 1] * 3)):
        data = codec.encode(KEY, tokens, payload(seed))
        assert codec.decode(data, KEY, tokens) == payload(seed)


def test_stored_bytes_are_laid_out_as_the_module_says() -> None:
    data = PLAIN.encode(KEY, TOKENS, payload())
    header = HEADER.pack(b"KVBL", 2, 0, 2, KEY, b"i" * 32, SIZE, SIZE, 5, 4)
    body = header + struct.pack("<5I", *TOKENS) + bytes(12) + payload()
    assert data == body + checksum(body)
    mac = hashlib.blake2b(key=b"s" * 16, digest_size=32, person=b"prefix_cache")
    body = body[:7] + b"\1" + body[8:]
    mac.update(body)
    assert SECRET.encode(KEY, TOKENS, payload()) == body + mac.digest()


def test_an_uncompressed_payload_is_not_copied_and_numbers_in_it_are_aligned() -> None:
    data = PLAIN.encode(KEY, TOKENS, payload())
    decoded = PLAIN.decode(data, KEY, TOKENS)
    assert decoded.obj is data
    assert data.index(payload()) % 16 == 0


def test_compression_finds_what_repeats_in_a_number() -> None:
    # numbers of one exponent: a quarter of the bytes is always the same
    numbers = b"".join(random.Random(n).randbytes(3) + b"\x3f" for n in range(SIZE // 4))
    assert len(PACKED.encode(KEY, TOKENS, numbers)) < 0.85 * len(PLAIN.encode(KEY, TOKENS, numbers))


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_every_flipped_bit_is_noticed(codec: BlockCodec) -> None:
    data = codec.encode(KEY, TOKENS, payload())
    for bit in range(0, len(data) * 8, 3):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        reason(codec, bytes(flipped))


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_every_truncation_and_extension_is_noticed(codec: BlockCodec) -> None:
    data = codec.encode(KEY, TOKENS, payload())
    for length in range(len(data)):
        assert reason(codec, data[:length]) is Rejection.TRUNCATED
    assert reason(codec, data + b"\0") is Rejection.TRUNCATED
    assert reason(codec, data * 2) is Rejection.TRUNCATED


def test_each_mismatch_has_its_reason() -> None:
    data = PLAIN.encode(KEY, TOKENS, payload())
    assert reason(PLAIN, b"") is Rejection.TRUNCATED
    assert reason(PLAIN, b"JUNK" + data[4:]) is Rejection.MAGIC
    assert reason(PLAIN, data[:4] + b"\1" + data[5:]) is Rejection.SCHEMA
    assert reason(replace(PLAIN, identity=b"j" * 32), data) is Rejection.IDENTITY
    assert reason(PLAIN, data, key=OTHER_KEY) is Rejection.KEY
    assert reason(PLAIN, data, tokens=[3, 1, 4, 1, 6]) is Rejection.TOKENS
    assert reason(PLAIN, data, tokens=[3, 1, 4, 1]) is Rejection.TOKENS
    assert reason(PLAIN, data[:200] + b"?" + data[201:]) is Rejection.CHECKSUM
    assert reason(replace(PLAIN, payload_bytes=SIZE * 2), data) is Rejection.SCHEMA
    assert reason(replace(PLAIN, element_bytes=2), data) is Rejection.SCHEMA


def test_a_sound_block_moved_to_another_key_is_refused() -> None:
    for codec in CODECS.values():
        data = codec.encode(KEY, TOKENS, payload())
        moved = data[:8] + OTHER_KEY + data[40:]
        assert reason(codec, moved, OTHER_KEY) in (Rejection.CHECKSUM, Rejection.MAC)


def test_with_a_secret_only_its_holders_are_believed() -> None:
    own = SECRET.encode(KEY, TOKENS, payload())
    forged = PLAIN.encode(KEY, TOKENS, payload())
    marked = forged[:7] + b"\1" + forged[8:]
    assert reason(SECRET, forged) is Rejection.MAC
    assert reason(SECRET, resealed(marked)) is Rejection.MAC
    assert reason(replace(SECRET, secret=b"t" * 16), own) is Rejection.MAC
    assert reason(PLAIN, own) is Rejection.MAC


def sealed(
    stored: bytes, compression: int, stored_size: int | None = None, size: int = SIZE
) -> bytes:
    header = HEADER.pack(
        *(b"KVBL", 2, compression, 2, KEY, b"i" * 32),
        *(size, len(stored) if stored_size is None else stored_size, 5, 4),
    )
    return resealed(header + struct.pack("<5I", *TOKENS) + bytes(12) + stored + bytes(32))


def test_compressed_bytes_that_lie_are_refused() -> None:
    frame = zstandard.ZstdCompressor().compress
    assert reason(PLAIN, sealed(frame(bytes(SIZE - 1)), 1)) is Rejection.COMPRESSION
    assert reason(PLAIN, sealed(frame(bytes(SIZE + 1)), 1)) is Rejection.COMPRESSION
    assert reason(PLAIN, sealed(frame(bytes(SIZE))[:-3], 1)) is Rejection.COMPRESSION
    assert reason(PLAIN, sealed(b"no frame", 1)) is Rejection.COMPRESSION
    assert reason(PLAIN, sealed(payload(), 7)) is Rejection.COMPRESSION
    assert reason(PLAIN, sealed(payload()[1:], 0)) is Rejection.COMPRESSION
    assert reason(PLAIN, sealed(payload(), 0, stored_size=2**63)) is Rejection.TRUNCATED
    assert reason(PLAIN, sealed(payload(), 0, size=2**63)) is Rejection.SCHEMA


def test_a_bomb_takes_no_memory() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(200_000_000))
    wide = zstandard.ZstdCompressionParameters(window_log=27, strategy=1)
    wide_bomb = zstandard.ZstdCompressor(compression_params=wide).compress(bytes(200_000_000))
    tracemalloc.start()
    try:
        for data in (bomb, wide_bomb):
            assert reason(PLAIN, sealed(data, 1)) is Rejection.COMPRESSION
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@settings(deadline=None, max_examples=300)
@given(data=st.binary(max_size=700), name=st.sampled_from(sorted(CODECS)))
def test_random_bytes_are_rejected(data: bytes, name: str) -> None:
    reason(CODECS[name], data)


@settings(deadline=None, max_examples=300)
@given(
    stored=st.binary(max_size=700),
    compression=st.integers(0, 2),
    size=st.integers(0, 2**64 - 1) | st.just(SIZE),
    stored_size=st.integers(0, 2**64 - 1) | st.none(),
    magic=st.booleans(),
)
def test_a_forger_gets_rejections_or_a_payload_of_the_right_size(
    stored: bytes, compression: int, size: int, stored_size: int | None, magic: bool
) -> None:
    if magic:
        stored = b"\x28\xb5\x2f\xfd" + stored
    try:
        decoded = PLAIN.decode(sealed(stored, compression, stored_size, size), KEY, TOKENS)
    except BlockRejected:
        return
    assert len(decoded) == SIZE


@settings(deadline=None, max_examples=300)
@given(data=st.data(), name=st.sampled_from(sorted(CODECS)))
def test_damaged_blocks_are_rejected_or_whole(data: st.DataObject, name: str) -> None:
    codec = CODECS[name]
    block = bytearray(codec.encode(KEY, TOKENS, payload()))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(block)))
        end = data.draw(st.integers(start, min(len(block), start + 40)))
        block[start:end] = data.draw(st.binary(max_size=40))
    with contextlib.suppress(BlockRejected):
        assert codec.decode(bytes(block), KEY, TOKENS) == payload()


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_either_kind_of_compression_is_read_whichever_is_set(compression: Compression) -> None:
    data = replace(PLAIN, compression=compression).encode(KEY, TOKENS, payload())
    for codec in (PLAIN, PACKED):
        assert codec.decode(data, KEY, TOKENS) == payload()


@pytest.mark.parametrize(
    "call",
    [
        lambda: PLAIN.encode(b"short", TOKENS, payload()),
        lambda: PLAIN.encode(KEY, TOKENS, payload()[1:]),
        lambda: PLAIN.encode(KEY, [-1], payload()),
        lambda: BlockCodec(b"short", SIZE),
        lambda: BlockCodec(b"i" * 32, SIZE + 1, 4),
        lambda: BlockCodec(b"i" * 32, 0),
    ],
)
def test_what_does_not_fit_is_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=r"bytes|token"):
        call()


def test_a_secret_is_not_shown() -> None:
    assert "ssss" not in repr(SECRET)


def test_nothing_in_the_package_unpickles_or_evaluates() -> None:
    sources = list(Path(prefix_cache.__file__).parent.rglob("*.py"))
    assert len(sources) > 15
    for source in sources:
        text = source.read_text()
        for word in ("pickle", "marshal", "shelve", "eval(", "exec("):
            assert word not in text.replace("unpickled", "").replace("Never pickle", ""), source
