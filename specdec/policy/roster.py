"""Who runs and who waits, and who holds which pages. Holds no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items

from specdec.errors import IntegrityError
from specdec.outputs import FinishReason
from specdec.policy.pages import PageAllocator
from specdec.policy.plan import BlockLoad, PublishedBlock
from specdec.policy.sequence import FoundBlocks, Sequence, Status


class Roster:
    """The unfinished sequences: ``running`` followed by ``waiting`` in order of arrival.

    Attributes:
        running: they hold pages; oldest first.
        waiting: they hold none; next first.
        loading: those that wait for their blocks, in no order of importance.
        loads: KV to be written to pages of sequences that were admitted; for the next step.
        reused: blocks in the pool that these have found.
        withdrawn: keys of blocks that are shared no more.
        preempted: those that lost their pages, since the last step.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.loading: set[Sequence] = set()
        self.loads: list[BlockLoad] = []
        self.reused: list[PublishedBlock] = []
        self.withdrawn: list[bytes] = []
        self.preempted: list[Sequence] = []
        self._allocator = allocator
        self._by_id: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, request_id: str) -> Sequence | None:
        """The unfinished sequence of that id."""
        return self._by_id.get(request_id)

    def enqueue(self, sequence: Sequence, now: float, loading: bool = False) -> None:
        """Let a new sequence wait, or load first."""
        sequence.stats.arrival = now
        sequence.stats.enqueued = now
        self._by_id[sequence.request_id] = sequence
        if loading:
            sequence.status = Status.LOADING
            self.loading.add(sequence)
        else:
            sequence.status = Status.WAITING
            self.waiting.append(sequence)

    def finish_loading(self, sequence: Sequence, found: FoundBlocks, now: float) -> None:
        """Let a sequence that was loading wait."""
        self.loading.remove(sequence)
        sequence.found = found
        sequence.stats.enqueued = now
        sequence.status = Status.WAITING
        self.waiting.append(sequence)

    def admit(self) -> Sequence | None:
        """Start the next waiting sequence, or None while there are too few pages, or while another
        one computes what it begins with.

        It gets the pages of all its committed tokens at once, so that prefill never preempts;
        one page per running sequence stays free, for these to grow. Pages that hold its first
        blocks already are shared, and what they hold is not computed again.
        """
        sequence = self.waiting[0]
        allocator = self._allocator
        keys = self._keys(sequence)
        shared = allocator.find(keys)
        payloads = sequence.found.after(len(shared))
        if self._is_computed(keys[len(shared) + len(payloads) :], len(shared) + len(payloads)):
            return None
        if allocator.missing(len(sequence.tokens), shared) + len(self.running) > (
            allocator.free_pages
        ):
            return None
        self.running.append(self.waiting.popleft())
        pages = allocator.pages_for(len(sequence.tokens))
        sequence.lease = allocator.allocate(pages - len(shared), shared)
        sequence.status = Status.RUNNING
        sequence.found = FoundBlocks()
        self.loads += map(BlockLoad, sequence.lease.pages[len(shared) :], payloads)
        self.reused += [self._block(sequence, keys[i], i, page) for i, page in enumerate(shared)]
        sequence.computed = (len(shared) + len(payloads)) * allocator.page_size
        if sequence.stats.first_scheduled is None:
            sequence.stats.cached = min(sequence.computed, sequence.prompt_length)
            sequence.stats.loaded = min(len(payloads) * allocator.page_size, sequence.stats.cached)
        self.publish(sequence)
        return sequence

    def publish(self, sequence: Sequence) -> list[PublishedBlock]:
        """Let others find what a running sequence has computed, page by page.

        Returns:
            The blocks that no page had before.
        """
        lease, block_keys = sequence.lease, sequence.block_keys
        full = sequence.computed // self._allocator.page_size
        if lease is None or block_keys is None or full <= lease.published:
            return []
        keys = block_keys.keys(sequence.tokens, full)
        return [
            self._block(sequence, keys[i], i, lease.pages[i])
            for i in self._allocator.publish(lease, keys)
        ]

    def _block(self, sequence: Sequence, key: bytes, index: int, page: int) -> PublishedBlock:
        size = self._allocator.page_size
        return PublishedBlock(key, tuple(sequence.tokens[index * size : (index + 1) * size]), page)

    def hold_root(self, sequence: Sequence) -> bool:
        """Get the page for the root's slot, preempting the youngest if need be.

        False if the sequence waits, itself preempted now or before.
        """
        while sequence.lease is not None:
            missing = self._allocator.pages_for(len(sequence.tokens)) - len(sequence.lease.pages)
            if missing <= self._allocator.free_pages:
                self._allocator.grow(sequence.lease, missing)
                return True
            if len(self.running) == 1:
                return False
            self._preempt(self.running[-1])
        return False

    def hold_scratch(self, sequence: Sequence, size: int) -> int:
        """Get the pages for a tree of ``size`` nodes, preempting nobody; returns how many of
        them have slots.
        """
        if sequence.lease is None:
            return 0
        before = len(sequence.tokens) - 1
        missing = self._allocator.pages_for(before + size) - len(sequence.lease.pages)
        self._allocator.grow(sequence.lease, min(missing, self._allocator.free_pages))
        return min(size, sequence.lease.capacity - before)

    def drop_scratch(self, sequence: Sequence) -> None:
        """Give back the pages behind the next root's."""
        if sequence.lease is not None:
            keep = self._allocator.pages_for(len(sequence.tokens))
            self._allocator.shrink(sequence.lease, keep)

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End an unfinished sequence."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.LOADING:
            self.loading.remove(sequence)
        else:
            self.waiting.remove(sequence)
        del self._by_id[sequence.request_id]
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.stats.finished = now
        if reason == "error" and sequence.lease is not None:
            # what led to it may lie in its KV
            self.withdrawn += self._allocator.withdraw(sequence.lease)
        self._release(sequence)

    def check_integrity(self) -> None:
        """Prove that pages, queues and states agree.

        Raises:
            IntegrityError: says what does not.
        """
        self._allocator.check_integrity(s.lease for s in self.running if s.lease is not None)
        in_order = [*self.running, *self.waiting]
        everyone = [*in_order, *self.loading]
        faults = []
        if len(everyone) != len(self._by_id) or set(everyone) != set(self._by_id.values()):
            faults.append("queues and the register of requests differ")
        arrivals = [s.stats.enqueued for s in in_order]
        if arrivals != sorted(arrivals):
            faults.append("requests are out of the order of arrival")
        unfit = [s.request_id for s in self.running if not _may_run(s)]
        unfit += [s.request_id for s in self.waiting if not _may_wait(s, Status.WAITING)]
        unfit += [s.request_id for s in self.loading if not _may_wait(s, Status.LOADING)]
        if unfit:
            faults.append(f"in a queue where their state does not allow it: {unfit}")
        if faults:
            raise IntegrityError("; ".join(faults))

    def blocks_wanted(self, sequence: Sequence) -> tuple[int, Items[bytes]]:
        """The index of the first block that is in no page, and the keys from there on."""
        keys = self._keys(sequence)
        first = len(self._allocator.find(keys))
        return first, keys[first:]

    def _is_computed(self, missing: Items[bytes], index: int) -> bool:
        """Whether a running prefill computes the first of ``missing``, the block at ``index``.

        To wait for it takes no longer than to compute it a second time beside it.
        """
        size = self._allocator.page_size
        return bool(missing) and any(
            other.block_keys.keys(other.tokens, index + 1)[index] == missing[0]
            for other in self.running
            if not other.decoding and other.block_keys and len(other.tokens) >= (index + 1) * size
        )

    def _keys(self, sequence: Sequence) -> Items[bytes]:
        """Keys of a waiting sequence's full blocks. Its last token is never in one of them: the
        next one is drawn from a row of its own.
        """
        if sequence.block_keys is None:
            return ()
        full = (len(sequence.tokens) - 1) // self._allocator.page_size
        return sequence.block_keys.keys(sequence.tokens, full)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        sequence.status = Status.WAITING
        sequence.stats.preemptions += 1
        self.preempted.append(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """The one path by which a sequence gives up its pages."""
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None
        sequence.computed = 0
        sequence.decoding = False
        sequence.draft = None
        sequence.found = FoundBlocks()


def _may_run(sequence: Sequence) -> bool:
    known, lease = len(sequence.tokens), sequence.lease
    chased = sequence.computed == known - 1 if sequence.decoding else sequence.computed < known
    covered = lease is not None and lease.capacity >= known - sequence.decoding
    return sequence.status is Status.RUNNING and chased and covered


def _may_wait(sequence: Sequence, status: Status) -> bool:
    idle = sequence.lease is None and sequence.computed == 0 and not sequence.decoding
    return sequence.status is status and idle
