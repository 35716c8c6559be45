"""Checkpoints as bytes: what is not sound is not believed."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest

from prefix_cache.checkpoints.codec import HEADER_BYTES, CheckpointCodec
from prefix_cache.checkpoints.memory import MemoryCells
from prefix_cache.checkpoints.record import FIRST_FENCE, Checkpoint, Header, State
from prefix_cache.checkpoints.store import Save, SwappingStore
from prefix_cache.errors import CheckpointRejected, CheckpointTooLarge, Rejection
from prefix_cache.store import StoreOptions

SECRET = b"0123456789abcdef"
ONE = Checkpoint(
    "r", (1, 2), (3, 4, 5), b"{}", b"answer", b"{}", draft=(5, 6), draft_parents=(-1, 0)
)
HEADER = Header(State.UNFINISHED, 65536, 123456789, b"o" * 16, b"n" * 8)


def encode(codec: CheckpointCodec, one: Checkpoint = ONE, header: Header = HEADER) -> bytes:
    return codec.encode_header(one.request_id, header) + codec.encode_body(one)


@pytest.mark.parametrize("secret", [b"", SECRET, b"x" * 100])
def test_a_round_trip(secret: bytes) -> None:
    codec = CheckpointCodec(4096, secret)
    assert codec.decode("r", encode(codec)) == (HEADER, ONE)


def test_growing_arrays_are_stored_like_tuples() -> None:
    codec = CheckpointCodec(4096)
    grown = replace(ONE, emitted=array("I", ONE.emitted))
    assert codec.encode_body(grown) == codec.encode_body(ONE)


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_no_changed_bit_is_believed(secret: bytes) -> None:
    codec = CheckpointCodec(4096, secret)
    whole = encode(codec)
    for place in range(len(whole)):
        for bit in (0, 7):
            broken = bytearray(whole)
            broken[place] ^= 1 << bit
            with pytest.raises(CheckpointRejected):
                codec.decode("r", bytes(broken))
    for length in range(len(whole)):
        with pytest.raises(CheckpointRejected):
            codec.decode("r", whole[:length])
    with pytest.raises(CheckpointRejected):
        codec.decode("r", whole + b"x")


def test_any_bytes_are_rejected_without_harm() -> None:
    codec, rng = CheckpointCodec(4096), random.Random(0)
    for _ in range(2000):
        data = b"CKPT" + rng.randbytes(rng.randrange(300))
        with pytest.raises(CheckpointRejected):
            codec.decode("r", data)


def test_another_requests_checkpoint_is_rejected() -> None:
    codec = CheckpointCodec(4096)
    with pytest.raises(CheckpointRejected) as caught:
        codec.decode("s", encode(codec))
    assert caught.value.reason is Rejection.CHECKSUM
    swapped = encode(codec)[:HEADER_BYTES] + codec.encode_body(replace(ONE, request_id="s"))
    with pytest.raises(CheckpointRejected):
        codec.decode("r", swapped)


def test_secrets_keep_forgers_out() -> None:
    for forger in (CheckpointCodec(4096), CheckpointCodec(4096, b"another secret!!")):
        with pytest.raises(CheckpointRejected) as caught:
            CheckpointCodec(4096, SECRET).decode("r", encode(forger))
        assert caught.value.reason is Rejection.MAC
    with pytest.raises(CheckpointRejected):
        CheckpointCodec(4096).decode("r", encode(CheckpointCodec(4096, SECRET)))


def test_what_cannot_be_stored_is_refused() -> None:
    codec = CheckpointCodec(1024)
    with pytest.raises(CheckpointTooLarge):
        codec.encode_body(replace(ONE, emitted=(1,) * 300))
    for bad in (
        replace(ONE, prompt=(-1,)),
        replace(ONE, prompt=(2**32,)),
        replace(ONE, owner="x" * 300),
        replace(ONE, draft_parents=()),
    ):
        with pytest.raises(ValueError, match=r"wanted|number|owner"):
            codec.encode_body(bad)


def test_a_forged_or_broken_entry_is_written_over() -> None:
    cells = MemoryCells(StoreOptions("ckpt", 60, 2**20))
    store = SwappingStore(cells, CheckpointCodec(4096, SECRET), 60)
    forged = encode(CheckpointCodec(4096), header=replace(HEADER, fence=2**60))
    for junk in (forged, b"x", b"x" * 500):
        cells.put_many([(b"r", junk)], 1)
        assert store.get("r", 1) is None
        assert store.claim("r", "b", 1, 1) is None
        assert store.list(10, 1) == []
        assert store.save([Save(ONE, 1)], 1) == [True]
        found = store.get("r", 1)
        assert found is not None
        assert found.checkpoint == ONE
    cells.put_many([("é\n".encode(), b"of somebody else")], 1)
    assert [one.fence for one in store.list(10, 1)] == [FIRST_FENCE]
