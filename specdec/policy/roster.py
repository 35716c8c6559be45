"""Who runs and who waits, and who holds which pages. Holds no torch."""

from __future__ import annotations

from collections import deque

from specdec.errors import IntegrityError
from specdec.outputs import FinishReason
from specdec.policy.pages import PageAllocator
from specdec.policy.sequence import Sequence, Status


class Roster:
    """The unfinished sequences: ``running`` followed by ``waiting`` in order of arrival.

    Attributes:
        running: they hold pages; oldest first.
        waiting: they hold none; next first.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._allocator = allocator
        self._by_id: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, request_id: str) -> Sequence | None:
        """The unfinished sequence of that id."""
        return self._by_id.get(request_id)

    def enqueue(self, sequence: Sequence) -> None:
        """Let a new sequence wait."""
        sequence.status = Status.WAITING
        self._by_id[sequence.request_id] = sequence
        self.waiting.append(sequence)

    def admit(self) -> Sequence | None:
        """Start the next waiting sequence, or None while there are too few pages.

        It gets the pages of all its committed tokens at once, so that prefill never preempts;
        one page per running sequence stays free, for these to grow.
        """
        sequence = self.waiting[0]
        pages = self._allocator.pages_for(len(sequence.tokens))
        if pages + len(self.running) > self._allocator.free_pages:
            return None
        self.running.append(self.waiting.popleft())
        sequence.lease = self._allocator.allocate(pages)
        sequence.status = Status.RUNNING
        return sequence

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
        else:
            self.waiting.remove(sequence)
        del self._by_id[sequence.request_id]
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.stats.finished = now
        self._release(sequence)

    def check_integrity(self) -> None:
        """Prove that pages, queues and states agree.

        Raises:
            IntegrityError: says what does not.
        """
        self._allocator.check_integrity(s.lease for s in self.running if s.lease is not None)
        everyone = [*self.running, *self.waiting]
        faults = []
        if len(everyone) != len(self._by_id) or set(everyone) != set(self._by_id.values()):
            faults.append("queues and the register of requests differ")
        arrivals = [s.stats.arrival for s in everyone]
        if arrivals != sorted(arrivals):
            faults.append("requests are out of the order of arrival")
        unfit = [s.request_id for s in self.running if not _may_run(s)]
        unfit += [s.request_id for s in self.waiting if not _may_wait(s)]
        if unfit:
            faults.append(f"in a queue where their state does not allow it: {unfit}")
        if faults:
            raise IntegrityError("; ".join(faults))

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        sequence.status = Status.WAITING
        sequence.stats.preemptions += 1
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """The one path by which a sequence gives up its pages."""
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None
        sequence.computed = 0
        sequence.decoding = False
        sequence.draft = None


def _may_run(sequence: Sequence) -> bool:
    known, lease = len(sequence.tokens), sequence.lease
    chased = sequence.computed == known - 1 if sequence.decoding else sequence.computed < known
    covered = lease is not None and lease.capacity >= known - sequence.decoding
    return sequence.status is Status.RUNNING and chased and covered


def _may_wait(sequence: Sequence) -> bool:
    idle = sequence.lease is None and sequence.computed == 0 and not sequence.decoding
    return sequence.status is Status.WAITING and idle
