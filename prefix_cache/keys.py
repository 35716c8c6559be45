"""Keys of blocks: a chain of full 256-bit hashes over everything that a block's KV depends on.

With ``L(x)`` for the 8-byte little-endian length of ``x`` followed by ``x``:

    identity = SHA-256(L("prefix_cache identity") L(weights) L(tokenizer) L(dtype)
                       L(layers) L(kv_heads) L(head_dim) L(block_size) L(schema))
    key[i]   = SHA-256(L("prefix_cache block") L(key[i-1]) L(salt[i]) L(tokens[i]))

where ``key[-1]`` is the identity, integers of the identity are 8 bytes little-endian and token
ids 4 bytes little-endian. Every part carries its length, so no two different inputs are encoded
alike.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

#: Raised when the meaning of a key or a stored block changes. Old blocks are then never found.
SCHEMA = 2

#: Bytes of a key and of an identity's digest.
KEY_BYTES = 32


@dataclass(frozen=True)
class Identity:
    """What all blocks of one model have in common: caches with equal identity may share.

    Attributes:
        weights: digest of the weights, as they are computed with.
        tokenizer: digest of the tokenizer.
        dtype: of keys and values in a payload, such as ``float32``.
        layers: layers that hold KV.
        kv_heads: KV heads of a layer.
        head_dim: numbers in a head's key.
        block_size: tokens of a block.
        schema: version of keys and stored blocks.
    """

    weights: bytes
    tokenizer: bytes
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_size", "schema"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not (self.weights and self.tokenizer and self.dtype):
            raise ValueError("weights, tokenizer and dtype must not be empty")

    def digest(self) -> bytes:
        """The identity as 32 bytes."""
        counts = (self.layers, self.kv_heads, self.head_dim, self.block_size, self.schema)
        return _hash(
            b"prefix_cache identity",
            self.weights,
            self.tokenizer,
            self.dtype.encode(),
            *(struct.pack("<Q", count) for count in counts),
        )


class KeyChain:
    """The keys of one sequence's whole blocks, grown as the sequence grows.

    A block that lies wholly within the first ``shared_length`` tokens is hashed without the
    salt, every later one with it: sequences of different salts share the blocks of a common
    system prompt and nothing else. With an empty salt they share all they have in common.
    """

    def __init__(self, identity: Identity, shared_length: int = 0, salt: bytes = b"") -> None:
        self._block_size = identity.block_size
        self._parent = identity.digest()
        self._shared_length = shared_length
        self._salt = salt
        self._keys: list[bytes] = []

    @property
    def keys(self) -> Sequence[bytes]:
        """Keys of all whole blocks so far, 32 bytes each. To be read only."""
        return self._keys

    def grow(self, tokens: Sequence[int]) -> list[bytes]:
        """Hash the blocks that have become whole since the last call.

        Args:
            tokens: the whole sequence so far. It must begin with the tokens of earlier calls;
                those already hashed are not looked at again.

        Returns:
            The new blocks' keys.

        Raises:
            ValueError: a token id is not an integer of 0 to 2**32-1.
        """
        size, start = self._block_size, len(self._keys)
        for end in range((start + 1) * size, len(tokens) + 1, size):
            salt = b"" if end <= self._shared_length else self._salt
            block = pack_tokens(tokens[end - size : end])
            self._parent = _hash(b"prefix_cache block", self._parent, salt, block)
            self._keys.append(self._parent)
        return self._keys[start:]


def block_keys(
    identity: Identity, tokens: Sequence[int], shared_length: int = 0, salt: bytes = b""
) -> list[bytes]:
    """Keys of all whole blocks of ``tokens``; see ``KeyChain``.

    Raises:
        ValueError: a token id is not an integer of 0 to 2**32-1.
    """
    return KeyChain(identity, shared_length, salt).grow(tokens)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as 4 bytes each, little-endian.

    Raises:
        ValueError: a token id is not an integer of 0 to 2**32-1.
    """
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"not token ids of 0 to 2**32-1: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _hash(*parts: bytes) -> bytes:
    pieces: list[bytes] = []
    for part in parts:
        pieces += (struct.pack("<Q", len(part)), part)
    return hashlib.sha256(b"".join(pieces)).digest()
