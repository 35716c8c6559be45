"""Which rows run next, on whose pages. Holds no torch.

One invariant carries everything: computed tokens chase known tokens plus draft. A running
sequence that has computed less than its committed tokens gets prefill chunks, be it new or
resuming after a preemption; one whose last committed token alone is left gets its draft tree
verified. Requests are served in the order of arrival: ``running`` followed by ``waiting`` is
always in that order, only the last of ``running`` is preempted, and the first never is. A
sequence is admitted only while rows are left in the step, so that never more run than the
token budget has rows. Hence every running decode has its root in every step, whatever prefill
there is, and the oldest request has rows in every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items

from specdec.errors import QueueFullError, RequestError
from specdec.outputs import FinishReason
from specdec.policy.admission import check_request
from specdec.policy.budget import Budget, UnlimitedBudget
from specdec.policy.outcome import add_moves, check_verdict, take_tokens
from specdec.policy.pages import PageAllocator
from specdec.policy.plan import (
    CommitResult,
    Committed,
    KvMove,
    PublishedBlock,
    SchedulerConfig,
    Segment,
    StepPlan,
)
from specdec.policy.roster import Roster
from specdec.policy.rows import choose_trees, usable_draft
from specdec.policy.sequence import FoundBlocks, Sequence, Status
from specdec.policy.verdict import Verdict

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """Runs requests from ``add`` to their end; every end frees their pages.

    One step is ``plan = schedule()``, a forward, ``commit(plan, verdicts)``, the moves of its
    result, and new drafts on the sequences that go on. ``abort`` may come at any time between.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: PageAllocator,
        clock: Callable[[], float] = time.monotonic,
        budget: Budget | None = None,
    ) -> None:
        self.config = config
        self.allocator = allocator
        self._budget: Budget = budget or UnlimitedBudget()
        self._clock = clock
        self._slots = allocator.num_pages * allocator.page_size
        self._roster = Roster(allocator)

    @property
    def running(self) -> Items[Sequence]:
        """Sequences that hold pages, oldest first."""
        return tuple(self._roster.running)

    @property
    def waiting(self) -> Items[Sequence]:
        """Sequences that hold none, next first."""
        return tuple(self._roster.waiting)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return len(self._roster) > 0

    @property
    def loading(self) -> int:
        """Sequences that wait for their blocks."""
        return len(self._roster.loading)

    @property
    def pool_limit(self) -> int:
        """Committed tokens at which a sequence ends, as no root beyond would find a slot."""
        return self._slots + 1

    def add(self, sequence: Sequence, loading: bool = False) -> None:
        """Queue a sequence.

        Args:
            sequence: new.
            loading: it takes its place in the queue only when ``loaded`` is called.

        Raises:
            ContextLengthError: it can never emit a token within model length and pool.
            QueueFullError: ``max_waiting`` sequences wait.
            RequestError: no prompt, no token left to emit, or an id already in use.
        """
        if self._roster.find(sequence.request_id) is not None:
            raise RequestError(f"request id {sequence.request_id!r} is in use", "request_id")
        check_request(sequence, self.config.max_model_length, self._slots)
        waiting = len(self._roster.waiting) + len(self._roster.loading)
        if waiting >= self.config.max_waiting:
            raise QueueFullError(f"{waiting} requests wait already; retry later")
        self._roster.enqueue(sequence, self._clock(), loading)

    def loaded(self, sequence: Sequence, found: FoundBlocks) -> None:
        """Enter what came of loading; nothing happens if the sequence has ended meanwhile."""
        if sequence.status is Status.LOADING:
            self._roster.finish_loading(sequence, found, self._clock())

    def blocks_wanted(self, sequence: Sequence) -> tuple[int, Items[bytes]]:
        """Of a new sequence, the blocks worth loading: the index of the first one that is in no
        page, and the keys from there on.
        """
        return self._roster.blocks_wanted(sequence)

    def find(self, request_id: str) -> Sequence | None:
        """The unfinished sequence of that id."""
        return self._roster.find(request_id)

    def abort(self, request_id: str) -> bool:
        """End an unfinished request; False if there is none of that id."""
        sequence = self._roster.find(request_id)
        if sequence is None:
            return False
        self._roster.finish(sequence, "abort", self._clock())
        return True

    def draft_depth(self, sequence: Sequence) -> int:
        """The greatest depth at which a node could yet be committed; deeper ones are cut."""
        room = min(sequence.remaining, self._slots + 1 - len(sequence.tokens))
        return max(0, room - 1) if sequence.params.speculation else 0

    def schedule(self) -> StepPlan:
        """The next step; empty only if there is no work (or others hold the whole pool).

        Raises:
            ValueError: a draft's root is not its sequence's last committed token.
        """
        running = self.running
        decodes = [s for s in running if s.decoding and self._roster.hold_root(s)]
        rows = self.config.token_budget - len(decodes)
        prefills = [s for s in running if not s.decoding and s.status is Status.RUNNING]
        wanted = sum(map(self._chunk, prefills))
        prefills += self._admit(rows - wanted)
        wanted = sum(map(self._chunk, prefills))

        reserved = min(wanted, max(rows // 2, 1), rows)
        chosen = choose_trees(
            [usable_draft(s, self.draft_depth(s), self.config.max_tree_nodes) for s in decodes],
            decodes,
            rows - reserved,
            self._budget,
            self._roster.hold_scratch,
        )
        segments = [
            Segment(s, len(s.tokens) - 1, tree.tokens, tree, True, expected=expected)
            for s, (tree, expected) in zip(decodes, chosen, strict=True)
        ]
        trees = [tree for tree, _ in chosen]
        rows -= sum(map(len, trees)) - len(trees)
        left = rows
        if prefills and rows > 0:
            keys = sum(len(s) * len(t) for s, t in zip(decodes, trees, strict=True))
            left = self._budget.prefill_rows(
                sum(map(len, trees)), keys, prefills[0].computed, min(rows, wanted)
            )
        for sequence in prefills:
            length = min(self._chunk(sequence), left)
            if length == 0:
                break
            rows, left = rows - length, left - length
            start, end = sequence.computed, sequence.computed + length
            ends = end == len(sequence.tokens)
            chunk = tuple(sequence.tokens[start:end])
            every_row = sequence.wants_every_row(start)
            segments.append(Segment(sequence, start, chunk, None, ends, every_row))
        now = self._clock()
        for segment in segments:
            if segment.sequence.stats.first_scheduled is None:
                segment.sequence.stats.first_scheduled = now
        loads, reused = tuple(self._roster.loads), tuple(self._roster.reused)
        preempted = tuple(self._roster.preempted)
        self._roster.loads, self._roster.reused, self._roster.preempted = [], [], []
        rows = self.config.token_budget - rows
        return StepPlan(tuple(segments), rows, loads, reused, preempted)

    def commit(self, plan: StepPlan, verdicts: Items[Verdict | None]) -> CommitResult:
        """Enter what the forward of ``plan`` gave.

        Args:
            verdicts: per segment its verdict; None for those that want no logits. Of a
                sequence aborted since ``schedule`` it is ignored.

        Raises:
            ValueError: a verdict is missing or is no walk through its segment's tree.
        """
        moves = KvMove([], [])
        committed: list[Committed] = []
        finished: list[Sequence] = []
        published: list[PublishedBlock] = []
        row = logits_row = 0
        now = self._clock()
        for segment, verdict in zip(plan.segments, verdicts, strict=True):
            sequence = segment.sequence
            if sequence.status is not Status.RUNNING:
                pass
            elif verdict is not None and verdict.error is not None:
                sequence.error = verdict.error
                self._roster.finish(sequence, "error", now)
                finished.append(sequence)
            elif not segment.wants_logits:
                sequence.computed += len(segment.tokens)
                sequence.stats.prefill_chunks += 1
                published += self._roster.publish(sequence)
            elif verdict is None:
                raise ValueError(f"no verdict for {sequence.request_id}")
            else:
                check_verdict(segment, verdict)
                taken, reason = self._advance(segment, verdict, now)
                node = verdict.nodes[taken - 1] if segment.tree else len(segment.tokens) - 1
                committed.append(
                    Committed(
                        sequence,
                        verdict.tokens[:taken],
                        row + node,
                        logits_row + (node if segment.tree else segment.logit_rows - 1),
                    )
                )
                # also of one that ends: a chat's next turn begins with its tokens
                add_moves(moves, segment, verdict.nodes[:taken])
                published += self._roster.publish(sequence)
                if reason is not None:
                    self._roster.finish(sequence, reason, now)
                    finished.append(sequence)
                else:
                    self._roster.drop_scratch(sequence)
            row += len(segment.tokens)
            logits_row += segment.logit_rows
        withdrawn, self._roster.withdrawn = tuple(self._roster.withdrawn), []
        return CommitResult(moves, tuple(committed), tuple(finished), tuple(published), withdrawn)

    def check_integrity(self) -> None:
        """Prove that pages, queues and states agree.

        Raises:
            IntegrityError: says what does not.
        """
        self._roster.check_integrity()

    def _chunk(self, sequence: Sequence) -> int:
        """Rows wanted by a prefill."""
        return min(len(sequence.tokens) - sequence.computed, self.config.prefill_chunk)

    def _admit(self, rows: int) -> list[Sequence]:
        """Start waiting sequences while ``rows`` are left for their prefill."""
        admitted: list[Sequence] = []
        roster = self._roster
        while rows > 0 and roster.waiting and len(roster.running) < self.config.max_sequences:
            if len(roster.loads) >= self.config.max_loads:
                break
            sequence = roster.admit()
            if sequence is None:
                break
            admitted.append(sequence)
            rows -= self._chunk(sequence)
        return admitted

    def _advance(
        self, segment: Segment, verdict: Verdict, now: float
    ) -> tuple[int, FinishReason | None]:
        """Commit a walk; returns how many of its tokens were kept, and why it ends, if so."""
        sequence, stats = segment.sequence, segment.sequence.stats
        taken, reason = take_tokens(sequence, verdict.tokens, self.pool_limit)
        if segment.tree is not None:
            stats.count_round(segment.tree, taken - 1)
        else:
            stats.prefill_chunks += 1
        if stats.first_token is None:
            stats.first_token = now
        sequence.computed = len(sequence.tokens) - 1
        sequence.decoding = True
        sequence.draft = None
        return taken, reason
