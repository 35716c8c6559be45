"""A checkpoint as stored bytes, and back again only if every byte of it is sound.

Little-endian throughout. The header is rewritten alone when a lease is renewed or claimed::

    0   magic "CKPT"                                          4
    4   schema                                                2
    6   state, 0 unfinished 1 finished 2 removed              1
    7   check, 0 SHA-256 1 MAC                                1
    8   fence                                                 8
    16  end of the lease, ms since 1970                       8
    24  digest of the owner's name                           16
    40  nonce                                                 8
    48  check over the above and the request id              16

    64  fence of the owner that wrote the rest                8
    72  written at, seconds since 1970, a double              8
    80  lengths of: owner, prompt, emitted, draft,
        request, answer, progress                          4 each
    108 the owner's name, prompt, emitted, draft tokens, draft parents (4 bytes a number),
        request, answer, progress
    -32 check over all from 64 on and the request id

A check is SHA-256, or BLAKE2b keyed with the secret. Nothing is unpickled, and nothing is
allocated by a length that the stored bytes name. A MAC does not keep whoever can write to the
store from bringing back what it once held.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from prefix_cache.checkpoints.record import Checkpoint, Header, State
from prefix_cache.errors import CheckpointRejected, CheckpointTooLarge, Rejection

SCHEMA = 1
_MAGIC = b"CKPT"
_HEADER = struct.Struct("<4sHBBQQ16s8s")
_HEADER_CHECK, _BODY_CHECK = 16, 32
HEADER_BYTES = _HEADER.size + _HEADER_CHECK
_BODY = struct.Struct("<Qd7I")
_SHA256, _MAC = 0, 1
_NUMBER = "I"  # 4 bytes wherever CPython runs
_MOST_ID, _MOST_OWNER = 256, 256
_STATES = frozenset(int(state) for state in State)


@dataclass(frozen=True)
class CheckpointCodec:
    """Writes and verifies checkpoints.

    Attributes:
        max_bytes: most bytes of one.
        secret: where set, checkpoints carry a MAC, and only those with a right one are accepted.
    """

    max_bytes: int
    secret: bytes = field(default=b"", repr=False)

    def encode_header(self, request_id: str, header: Header) -> bytes:
        """``HEADER_BYTES`` bytes."""
        packed = _HEADER.pack(
            _MAGIC,
            SCHEMA,
            header.state,
            _MAC if self.secret else _SHA256,
            header.fence,
            header.lease_until_ms,
            header.owner,
            header.nonce,
        )
        return packed + self._check(request_id, packed, _HEADER_CHECK)

    def decode_header(self, request_id: str, data: bytes) -> Header:
        """The header at the start of ``data``.

        Raises:
            CheckpointRejected: it is none of this request.
        """
        if len(data) < HEADER_BYTES:
            raise CheckpointRejected(Rejection.TRUNCATED)
        magic, schema, state, check, fence, lease, owner, nonce = _HEADER.unpack_from(data)
        self._verify(request_id, data[:HEADER_BYTES], _HEADER_CHECK, (magic, schema, check))
        if state not in _STATES:
            raise CheckpointRejected(Rejection.SCHEMA)
        return Header(State(state), fence, lease, owner, nonce)

    def encode_body(self, checkpoint: Checkpoint) -> bytes:
        """All but the header.

        Raises:
            CheckpointTooLarge: header and body have more than ``max_bytes``.
            ValueError: a number or a name is none that can be stored.
        """
        owner = checkpoint.owner.encode()
        if len(owner) > _MOST_OWNER:
            raise ValueError(f"an owner's name has at most {_MOST_OWNER} bytes")
        if len(checkpoint.draft) != len(checkpoint.draft_parents):
            raise ValueError("as many parents as nodes of the draft wanted")
        parts = (
            owner,
            _pack(checkpoint.prompt),
            _pack(checkpoint.emitted),
            _pack(checkpoint.draft),
            _pack([parent + 1 for parent in checkpoint.draft_parents]),
            checkpoint.request,
            checkpoint.answer,
            checkpoint.progress,
        )
        lengths = [len(part) for part in (*parts[:4], *parts[5:])]  # one for tokens and parents
        size = HEADER_BYTES + _BODY.size + sum(map(len, parts)) + _BODY_CHECK
        if size > self.max_bytes:
            raise CheckpointTooLarge(
                f"the checkpoint of {checkpoint.request_id} has {size} bytes, "
                f"more than {self.max_bytes}"
            )
        head = _BODY.pack(checkpoint.fence, checkpoint.written_at, *lengths)
        body = b"".join((head, *parts))
        return body + self._check(checkpoint.request_id, body, _BODY_CHECK)

    def decode(self, request_id: str, data: bytes) -> tuple[Header, Checkpoint]:
        """Header and checkpoint; the checkpoint's own fence is that of whoever wrote its tokens.

        Raises:
            CheckpointRejected: ``data`` is no checkpoint of this request.
        """
        header = self.decode_header(request_id, data)
        body = data[HEADER_BYTES:]
        if header.state is State.REMOVED or len(body) < _BODY.size + _BODY_CHECK:
            raise CheckpointRejected(Rejection.TRUNCATED)
        self._verify(request_id, body, _BODY_CHECK)
        fence, written_at, owner, prompt, emitted, draft, request, answer, progress = (
            _BODY.unpack_from(body)
        )
        lengths = (owner, prompt, emitted, draft, draft, request, answer, progress)
        if _BODY.size + sum(lengths) + _BODY_CHECK != len(body):
            raise CheckpointRejected(Rejection.TRUNCATED)
        parts, start = [], _BODY.size
        for length in lengths:
            parts.append(body[start : start + length])
            start += length
        return header, Checkpoint(
            request_id,
            _unpack(parts[1]),
            _unpack(parts[2]),
            parts[5],
            parts[6],
            parts[7],
            header.state is State.FINISHED,
            _unpack(parts[3]),
            tuple(parent - 1 for parent in _unpack(parts[4])),
            parts[0].decode(errors="replace"),
            fence,
            written_at,
        )

    def _verify(
        self,
        request_id: str,
        data: bytes,
        size: int,
        form: tuple[bytes, int, int] | None = None,
    ) -> None:
        """See that ``data`` ends in its check; ``form`` is what a header says it is."""
        if form is not None:
            magic, schema, check = form
            for holds, reason in (
                (magic == _MAGIC, Rejection.MAGIC),
                (schema == SCHEMA, Rejection.SCHEMA),
                (check == (_MAC if self.secret else _SHA256), Rejection.MAC),
            ):
                if not holds:
                    raise CheckpointRejected(reason)
        if not hmac.compare_digest(self._check(request_id, data[:-size], size), data[-size:]):
            raise CheckpointRejected(Rejection.MAC if self.secret else Rejection.CHECKSUM)

    def _check(self, request_id: str, data: bytes, size: int) -> bytes:
        name = request_id.encode()
        prefix = len(name).to_bytes(4, "little") + name
        if not self.secret:
            return hashlib.sha256(prefix + data).digest()[:size]
        secret = self.secret
        if len(secret) > hashlib.blake2b.MAX_KEY_SIZE:
            secret = hashlib.sha512(secret).digest()
        mac = hashlib.blake2b(prefix, key=secret, digest_size=size, person=b"checkpoint")
        mac.update(data)
        return mac.digest()


def check_id(request_id: str) -> bytes:
    """The key of a request.

    Raises:
        ValueError: it is empty, too long, or not printable ASCII.
    """
    if not (request_id.isascii() and request_id.isprintable() and request_id):
        raise ValueError(f"a request id is printable ASCII, not {request_id!r:.80}")
    if len(request_id) > _MOST_ID:
        raise ValueError(f"a request id has at most {_MOST_ID} characters")
    return request_id.encode()


def is_id(key: bytes) -> bool:
    """Whether an entry's key can be that of a request; others may use the namespace as well."""
    return bool(key) and len(key) <= _MOST_ID and all(32 <= byte < 127 for byte in key)


def owner_digest(owner: str) -> bytes:
    """An owner's name in the header, 16 bytes."""
    return hashlib.sha256(owner.encode()).digest()[:16]


def _pack(numbers: Sequence[int]) -> bytes:
    try:
        packed = numbers if isinstance(numbers, array) else array(_NUMBER, numbers)
    except OverflowError as error:
        raise ValueError("a token id is a number of 32 bits without sign") from error
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def _unpack(data: bytes) -> tuple[int, ...]:
    if len(data) % 4:
        raise CheckpointRejected(Rejection.TOKENS)
    numbers = array(_NUMBER)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return tuple(numbers)
