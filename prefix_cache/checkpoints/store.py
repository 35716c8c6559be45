"""Checkpoints with leases and fences, over any store whose entries can be swapped.

Every change reads the entry's header, decides, and swaps the entry if the header is still the
same; else it begins again. So the rules stand here once, for all stores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from prefix_cache.checkpoints.cells import Cells, Swap
from prefix_cache.checkpoints.codec import (
    HEADER_BYTES,
    CheckpointCodec,
    check_id,
    is_id,
    owner_digest,
)
from prefix_cache.checkpoints.record import (
    FENCES_PER_CLAIM,
    FIRST_FENCE,
    Checkpoint,
    Header,
    Listed,
    State,
)
from prefix_cache.errors import CheckpointRejected, FencedError, LeaseHeldError
from prefix_cache.stores.deadline import Deadline


@dataclass(frozen=True)
class Save:
    """A checkpoint to write.

    Attributes:
        checkpoint: with owner and fence.
        lease_s: for how long its owner is taken to live from now on; 0 lets go of it.
    """

    checkpoint: Checkpoint
    lease_s: float


@dataclass(frozen=True)
class Found:
    """A checkpoint as it lies in the store.

    Attributes:
        checkpoint: with the fence of the present owner.
        lease_left_s: for how long that owner is taken to live; 0 if it is not.
    """

    checkpoint: Checkpoint
    lease_left_s: float


class CheckpointStore(Protocol):
    """Checkpoints by request, shared by processes. Thread-safe.

    Every call takes at most ``deadline_s`` seconds and, but for ``close``, raises StoreError where
    the store cannot do it.
    """

    def create(
        self, checkpoint: Checkpoint, lease_s: float, deadline_s: float
    ) -> Checkpoint | None:
        """Write the first checkpoint of a request, if it has none.

        Returns:
            The checkpoint with its fence, above that of any that was removed; None where there is
            one already.
        """

    def save(self, saves: Sequence[Save], deadline_s: float) -> list[bool]:
        """Write checkpoints, each only over those of the same or a lower fence.

        Returns:
            Of each whether it was written. If not, a newer owner has the request, or it was
            removed.
        """

    def claim(
        self,
        request_id: str,
        owner: str,
        lease_s: float,
        deadline_s: float,
        supersede: int | None = None,
    ) -> Checkpoint | None:
        """Become the owner of an unfinished request: whatever had it is fenced off from now on.

        Args:
            request_id: of the request.
            owner: the new one.
            lease_s: for how long it is taken to live.
            deadline_s: of the call.
            supersede: the fence of an owner that is to lose the request even if it lives. Of
                several callers with the same one, one wins.

        Returns:
            The checkpoint with the caller's new fence, or None if there is none to claim. One
            that is finished is returned as it is: nobody needs to own it.

        Raises:
            LeaseHeldError: another owner lives.
        """

    def renew(self, request_id: str, fence: int, lease_s: float, deadline_s: float) -> None:
        """Let the owner of that fence be taken to live for longer; 0 lets go of the lease.

        Raises:
            FencedError: it is not the owner any more.
        """

    def remove(self, request_ids: Sequence[str], fence: int, deadline_s: float) -> None:
        """Delete checkpoints of that or a lower fence; what comes late of their owners is refused
        for as long as a checkpoint lives.
        """

    def get(self, request_id: str, deadline_s: float) -> Found | None:
        """The checkpoint of a request, if there is a sound one."""

    def list(self, most: int, deadline_s: float) -> list[Listed]:
        """Checkpoints in no order; all, if there are no more than ``most`` entries."""

    def close(self) -> None:
        """Let go of files and connections."""


class SwappingStore:
    """The one implementation of :class:`CheckpointStore`.

    Args:
        cells: closed with this.
        codec: of the checkpoints.
        ttl_s: seconds from the last write after which a checkpoint is gone.
        clock: seconds since 1970. Machines that share a store should agree to within a lease: a
            clock that is ahead takes a live owner for dead, who is fenced off then.
    """

    def __init__(
        self,
        cells: Cells,
        codec: CheckpointCodec,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cells = cells
        self._codec = codec
        self._ttl_s = ttl_s
        self._clock = clock

    def create(
        self, checkpoint: Checkpoint, lease_s: float, deadline_s: float
    ) -> Checkpoint | None:
        """See CheckpointStore."""
        deadline, name = Deadline(deadline_s), checkpoint.request_id
        while True:
            ((raw, header),) = self._heads([name], deadline)
            if header is not None and header.state is not State.REMOVED:
                return None
            fence = FIRST_FENCE if header is None else _next_claim(header.fence)
            created = replace(checkpoint, fence=fence)
            head = self._new_header(Save(created, lease_s))
            swap = self._swap(name, raw, head, self._codec.encode_body(created))
            if self._cells.swap_many([swap], deadline.left())[0]:
                return created

    def save(self, saves: Sequence[Save], deadline_s: float) -> list[bool]:
        """See CheckpointStore.

        Raises:
            CheckpointTooLarge: one is; none is written.
        """
        deadline = Deadline(deadline_s)
        ids = [save.checkpoint.request_id for save in saves]
        if len(set(ids)) < len(ids):
            raise ValueError("two checkpoints of one request in one call")
        bodies = [self._codec.encode_body(save.checkpoint) for save in saves]
        written = [False] * len(saves)
        pending = list(range(len(saves)))
        while pending:
            heads = self._heads([ids[i] for i in pending], deadline)
            swaps: dict[int, Swap] = {}
            for i, (raw, header) in zip(pending, heads, strict=True):
                if _may_save(header, saves[i]):
                    head = self._new_header(saves[i])
                    swaps[i] = self._swap(ids[i], raw, head, bodies[i])
            done = self._cells.swap_many(list(swaps.values()), deadline.left()) if swaps else []
            pending = []
            for i, swapped in zip(swaps, done, strict=True):
                written[i] = swapped
                if not swapped:
                    pending.append(i)
        return written

    def claim(
        self,
        request_id: str,
        owner: str,
        lease_s: float,
        deadline_s: float,
        supersede: int | None = None,
    ) -> Checkpoint | None:
        """See CheckpointStore."""
        deadline = Deadline(deadline_s)
        while True:
            (value,) = self._cells.get_many([check_id(request_id)], deadline.left())
            found = self._decoded(request_id, value)
            if value is None or found is None:
                return None
            header, checkpoint = found
            if header.state is State.FINISHED:
                return replace(checkpoint, fence=header.fence)
            left_s = self._left_s(header)
            if left_s > 0 and header.fence != supersede and header.owner != owner_digest(owner):
                raise LeaseHeldError(left_s, header.fence)
            fence = _next_claim(header.fence)
            claimed = self._header(State.UNFINISHED, fence, lease_s, owner_digest(owner))
            swap = self._swap(request_id, value[:HEADER_BYTES], claimed, None)
            if self._cells.swap_many([swap], deadline.left())[0]:
                return replace(checkpoint, owner=owner, fence=fence)

    def renew(self, request_id: str, fence: int, lease_s: float, deadline_s: float) -> None:
        """See CheckpointStore."""
        deadline = Deadline(deadline_s)
        while True:
            ((raw, header),) = self._heads([request_id], deadline)
            if header is None or header.fence != fence or header.state is State.REMOVED:
                raise FencedError(f"fence {fence} does not own {request_id}")
            renewed = self._header(header.state, fence, lease_s, header.owner)
            swap = self._swap(request_id, raw, renewed, None)
            if self._cells.swap_many([swap], deadline.left())[0]:
                return

    def remove(self, request_ids: Sequence[str], fence: int, deadline_s: float) -> None:
        """See CheckpointStore."""
        deadline = Deadline(deadline_s)
        pending = list(request_ids)
        while pending:
            swaps: dict[str, Swap] = {}
            heads = self._heads(pending, deadline)
            for request_id, (raw, header) in zip(pending, heads, strict=True):
                if header is None or header.fence <= fence:
                    tombstone = self._header(State.REMOVED, fence, 0, bytes(16))
                    swaps[request_id] = self._swap(request_id, raw, tombstone, b"")
            done = self._cells.swap_many(list(swaps.values()), deadline.left()) if swaps else []
            pending = [one for one, swapped in zip(swaps, done, strict=True) if not swapped]

    def get(self, request_id: str, deadline_s: float) -> Found | None:
        """See CheckpointStore."""
        (value,) = self._cells.get_many([check_id(request_id)], deadline_s)
        found = self._decoded(request_id, value)
        if found is None:
            return None
        header, checkpoint = found
        return Found(replace(checkpoint, fence=header.fence), self._left_s(header))

    def list(self, most: int, deadline_s: float) -> list[Listed]:
        """See CheckpointStore."""
        deadline = Deadline(deadline_s)
        keys = self._cells.list_keys(most, deadline.left())
        ids = [key.decode() for key in keys if is_id(key)]
        return [
            Listed(name, header.state, header.fence, self._left_s(header) > 0, header.owner)
            for name, (_, header) in zip(ids, self._heads(ids, deadline), strict=True)
            if header is not None and header.state is not State.REMOVED
        ]

    def close(self) -> None:
        """See CheckpointStore."""
        self._cells.close()

    def _heads(
        self, ids: Sequence[str], deadline: Deadline
    ) -> Sequence[tuple[bytes, Header | None]]:
        """What each entry begins with, and what that says if it is sound."""
        keys = [check_id(name) for name in ids]
        heads = self._cells.heads(keys, HEADER_BYTES, deadline.left()) if keys else []
        return [
            (raw, self._decoded_header(name, raw)) for name, raw in zip(ids, heads, strict=True)
        ]

    def _decoded_header(self, request_id: str, raw: bytes) -> Header | None:
        try:
            return self._codec.decode_header(request_id, raw)
        except CheckpointRejected:
            return None

    def _decoded(self, request_id: str, value: bytes | None) -> tuple[Header, Checkpoint] | None:
        try:
            return None if value is None else self._codec.decode(request_id, value)
        except CheckpointRejected:
            return None

    def _new_header(self, save: Save) -> Header:
        checkpoint = save.checkpoint
        return self._header(
            checkpoint.state, checkpoint.fence, save.lease_s, owner_digest(checkpoint.owner)
        )

    def _header(self, state: State, fence: int, lease_s: float, owner: bytes) -> Header:
        until = 0 if lease_s <= 0 or state is not State.UNFINISHED else self._clock() + lease_s
        return Header(state, fence, round(until * 1000), owner, os.urandom(8))

    def _swap(self, request_id: str, expected: bytes, header: Header, body: bytes | None) -> Swap:
        head = self._codec.encode_header(request_id, header)
        return Swap(check_id(request_id), expected, head, body, self._ttl_s)

    def _left_s(self, header: Header) -> float:
        return max(0.0, header.lease_until_ms / 1000 - self._clock())


def _may_save(header: Header | None, save: Save) -> bool:
    if header is None:
        return True
    return header.state is not State.REMOVED and header.fence <= save.checkpoint.fence


def _next_claim(fence: int) -> int:
    return (fence // FENCES_PER_CLAIM + 1) * FENCES_PER_CLAIM
