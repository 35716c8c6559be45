"""A block as stored bytes, and back again only if every byte of it is what was asked for.

Little-endian throughout::

    0   magic "KVBL"                  4
    4   schema                        2
    6   compression, 0 none 1 zstd    1
    7   check, 1 MAC 2 XXH3           1
    8   key                          32
    40  identity                     32
    72  bytes of the payload          8
    80  bytes of it as stored         8
    88  token ids, count of them      4
    92  bytes of an element           4
    96  token ids, 4 bytes each, then zeros to a multiple of 16
    ..  the payload as stored
    -32 over all bytes before it: 128 bits of XXH3 and 16 zeros, or BLAKE2b keyed with the secret

The check covers the key, so a sound block under another key is refused too. Without a secret it
finds accidents alone, as any checksum that everybody can make. Nothing is unpickled
or otherwise run, and nothing is allocated by a length that the stored bytes name.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import xxhash

from prefix_cache.errors import BlockRejected, Rejection, StoreConfigError
from prefix_cache.keys import KEY_BYTES, SCHEMA, pack_tokens
from prefix_cache.packing import UnpackError, pack, unpack

Compression = Literal["none", "zstd"]

_MAGIC = b"KVBL"
_HEADER = struct.Struct("<4sHBB32s32sQQII")
_CHECK_BYTES = 32
_COMPRESSION_CODES: dict[Compression, int] = {"none": 0, "zstd": 1}
_MAC, _XXH3 = 1, 2


@dataclass(frozen=True)
class BlockInfo:
    """What a stored block says of itself, unverified.

    Attributes:
        identity: digest.
        tokens: token ids.
        stored_bytes: all of it.
        sealed: whether it has a MAC.
    """

    identity: bytes
    tokens: tuple[int, ...]
    stored_bytes: int
    sealed: bool


def describe(data: bytes) -> BlockInfo:
    """Read a block's header, for people; nothing is checked but its form.

    Raises:
        BlockRejected: it is no block of this schema.
    """
    if len(data) < _HEADER.size:
        raise BlockRejected(Rejection.TRUNCATED)
    magic, schema, _, check, _, identity, _, _, count, _ = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise BlockRejected(Rejection.MAGIC)
    if schema != SCHEMA:
        raise BlockRejected(Rejection.SCHEMA)
    ids = data[_HEADER.size : _HEADER.size + 4 * count]
    if len(ids) < 4 * count:
        raise BlockRejected(Rejection.TRUNCATED)
    return BlockInfo(identity, struct.unpack(f"<{count}I", ids), len(data), check == _MAC)


@dataclass(frozen=True)
class BlockCodec:
    """Writes and verifies the blocks of one identity.

    Attributes:
        identity: digest of the identity, 32 bytes.
        payload_bytes: bytes of every payload.
        element_bytes: bytes of a number in it; compression wants like bytes side by side.
        compression: how new blocks are stored. Both kinds can be read, whichever is set.
        secret: where set, blocks carry a MAC that nobody can make without it, and only blocks
            with a right MAC are accepted.
    """

    identity: bytes
    payload_bytes: int
    element_bytes: int = 4
    compression: Compression = "none"
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if len(self.identity) != KEY_BYTES:
            raise ValueError(f"identity must have {KEY_BYTES} bytes, not {len(self.identity)}")
        if self.element_bytes < 1 or self.payload_bytes < 1:
            raise ValueError("payload_bytes and element_bytes must be at least 1")
        if self.payload_bytes % self.element_bytes:
            raise ValueError("payload_bytes must be a multiple of element_bytes")

    def encode(self, key: bytes, tokens: Sequence[int], payload: bytes | memoryview) -> bytes:
        """The block as stored bytes; raises as ``parts`` does."""
        return b"".join(self.parts(key, tokens, payload))

    def parts(
        self, key: bytes, tokens: Sequence[int], payload: bytes | memoryview
    ) -> tuple[bytes | memoryview, ...]:
        """The block as stored bytes, in parts that follow one another; the payload is not copied
        where it is not compressed.

        Raises:
            ValueError: key, tokens or payload are not of this codec's sizes.
        """
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        stored: bytes | memoryview = memoryview(payload).cast("B")
        if len(stored) != self.payload_bytes:
            raise ValueError(f"a payload has {self.payload_bytes} bytes, not {len(stored)}")
        if self.compression == "zstd":
            stored = pack(stored, self.element_bytes)
        header = _HEADER.pack(
            _MAGIC,
            SCHEMA,
            _COMPRESSION_CODES[self.compression],
            _MAC if self.secret else _XXH3,
            key,
            self.identity,
            self.payload_bytes,
            len(stored),
            len(tokens),
            self.element_bytes,
        )
        ids = _padded(pack_tokens(tokens))
        return header, ids, stored, self._check(header, ids, stored)

    def decode(self, data: bytes, key: bytes, tokens: Sequence[int]) -> memoryview:
        """The payload, if ``data`` is this very block.

        Args:
            data: what the store holds under ``key``; may be anything.
            key: the block's key.
            tokens: the block's token ids.

        Returns:
            ``payload_bytes`` bytes, without a copy where they are stored uncompressed.

        Raises:
            BlockRejected: they are not; ``reason`` names the first check that failed.
        """
        if len(data) < _HEADER.size + _CHECK_BYTES:
            raise BlockRejected(Rejection.TRUNCATED)
        (magic, schema, compression, check, its_key, identity, size, stored, count, element) = (
            _HEADER.unpack_from(data)
        )
        ids = _padded(pack_tokens(tokens))
        for holds, reason in (
            (magic == _MAGIC, Rejection.MAGIC),
            (schema == SCHEMA, Rejection.SCHEMA),
            (identity == self.identity, Rejection.IDENTITY),
            (its_key == key, Rejection.KEY),
            (count == len(tokens), Rejection.TOKENS),
            (check == (_MAC if self.secret else _XXH3), Rejection.MAC),
            (len(data) == _HEADER.size + len(ids) + stored + _CHECK_BYTES, Rejection.TRUNCATED),
            (data[_HEADER.size : _HEADER.size + len(ids)] == ids, Rejection.TOKENS),
        ):
            if not holds:
                raise BlockRejected(reason)
        view = memoryview(data)
        if not hmac.compare_digest(self._check(view[:-_CHECK_BYTES]), data[-_CHECK_BYTES:]):
            raise BlockRejected(Rejection.MAC if self.secret else Rejection.CHECKSUM)
        payload = view[_HEADER.size + len(ids) : -_CHECK_BYTES]
        return self._expand(payload, compression, size, element)

    def _expand(self, stored: memoryview, compression: int, size: int, element: int) -> memoryview:
        """Undo the compression; the check has passed, but without a secret anybody can make it."""
        if size != self.payload_bytes or element != self.element_bytes:
            raise BlockRejected(Rejection.SCHEMA)
        if compression == _COMPRESSION_CODES["none"]:
            if len(stored) != size:
                raise BlockRejected(Rejection.COMPRESSION)
            return stored
        if compression != _COMPRESSION_CODES["zstd"]:
            raise BlockRejected(Rejection.COMPRESSION)
        try:
            return memoryview(unpack(stored, size, element))
        except (UnpackError, StoreConfigError) as error:
            raise BlockRejected(Rejection.COMPRESSION) from error

    def _check(self, *parts: bytes | memoryview) -> bytes:
        """Over all parts, one after the other."""
        secret = self.secret
        if len(secret) > hashlib.blake2b.MAX_KEY_SIZE:
            secret = hashlib.sha512(secret).digest()
        check = (
            hashlib.blake2b(key=secret, digest_size=_CHECK_BYTES, person=b"prefix_cache")
            if secret
            else xxhash.xxh3_128()
        )
        for part in parts:
            check.update(part)
        return check.digest().ljust(_CHECK_BYTES, b"\0")


def _padded(tokens: bytes) -> bytes:
    """Zeros to a multiple of 16, so that the payload starts where any number may."""
    return tokens + bytes(-len(tokens) % 16)
