"""One request as the scheduler sees it. Holds no torch."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from specdec.outputs import FinishReason, TokenLogprobs
from specdec.params import SamplingParams
from specdec.policy.constraint import Constraint
from specdec.policy.pages import PageLease
from specdec.policy.stop import StopChecker
from specdec.policy.tree import DraftTree


class BlockKeys(Protocol):
    """The keys under which a sequence's KV can be shared; a block is one page of tokens."""

    def keys(self, tokens: Items[int], count: int) -> Items[bytes]:
        """Keys of the first ``count`` blocks of ``tokens``.

        Args:
            tokens: the sequence's, never others than those of earlier calls and more behind.
            count: of blocks, all of them full.
        """


@dataclass(frozen=True)
class FoundBlocks:
    """Consecutive blocks of a sequence that were found outside the pool.

    Attributes:
        first: index of the first one.
        payloads: their KV, one each.
    """

    first: int = 0
    payloads: tuple[bytes | memoryview, ...] = ()

    def after(self, blocks: int) -> tuple[bytes | memoryview, ...]:
        """Payloads that follow the first ``blocks`` blocks without a gap."""
        return self.payloads[blocks - self.first :] if blocks >= self.first else ()


class Status(Enum):
    """Where a sequence stands. Only a running one holds pages; one that is loading waits for
    blocks from outside the pool, and then takes its place behind all that wait.
    """

    LOADING = "loading"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class SequenceStats:
    """How a sequence goes. Times are seconds of the scheduler's clock.

    Tokens emitted equal ``accepted + rounds`` plus one for each prefill completed: where a
    stop cuts an accepted run, the last token kept counts as the bonus token of its round.

    Attributes:
        rounds: trees verified; the chunk that ends a prefill is none.
        drafted: candidate nodes verified, roots not counted.
        accepted: candidate nodes kept.
        accepted_by_depth: of them by depth, from depth 1 on.
        walked_by_depth: rounds that offered a candidate of that depth, from depth 1 on.
        preemptions: times its pages were taken away.
        cached: prompt tokens whose KV was found when it first started.
        loaded: of them, those that came from outside the pool.
        prefill_chunks: chunks computed, those after a preemption included.
        arrival: when it was added.
        enqueued: when it took its place in the queue: on arrival, or once its blocks were there.
        first_scheduled: when it first got rows.
        first_token: when its first token was committed.
        finished: when it ended.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    walked_by_depth: list[int] = field(default_factory=list)
    preemptions: int = 0
    cached: int = 0
    loaded: int = 0
    prefill_chunks: int = 0
    arrival: float = 0.0
    enqueued: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None

    def count_round(self, tree: DraftTree, accepted: int) -> None:
        """Enter one verified tree of which ``accepted`` nodes were kept."""
        self.rounds += 1
        self.drafted += len(tree) - 1
        self.accepted += accepted
        depth = max(tree.depths)
        missing = depth - len(self.walked_by_depth)
        if missing > 0:
            self.walked_by_depth.extend([0] * missing)
            self.accepted_by_depth.extend([0] * missing)
        for i in range(depth):
            self.walked_by_depth[i] += 1
        for i in range(accepted):
            self.accepted_by_depth[i] += 1


@dataclass(eq=False)
class Sequence:
    """A request, its tokens and its place in the pool. Compared by identity.

    Attributes:
        request_id: unique among unfinished requests.
        tokens: committed tokens, prompt and emitted; ``n`` of them. A request that resumes
            elsewhere starts with the tokens it has already emitted.
        prompt_length: how many of them are the prompt.
        params: what was asked for.
        stop_checker: says when it ends.
        block_keys: of its KV, or None if that is shared with nobody.
        constraint: on its tokens, or None if any may come.
        prompt_logprobs: of the prompt's tokens but the first, as far as they are computed; None
            where they are not wanted, or were told.
        computed: committed tokens whose KV is in the pages.
        decoding: whether its prefill is complete; then ``computed == n - 1``.
        lease: its pages while it runs.
        found: blocks from outside the pool, for when it starts.
        draft: the next round's tree, its root the last committed token; set by the engine
            after a commit, taken by the next one. None means a root alone.
        status: see Status.
        finish_reason: set when finished.
        error: what went wrong where the reason is ``error``.
        stats: how it goes.
    """

    request_id: str
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    stop_checker: StopChecker
    block_keys: BlockKeys | None = None
    constraint: Constraint | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    computed: int = 0
    decoding: bool = False
    lease: PageLease | None = None
    found: FoundBlocks = FoundBlocks()
    draft: DraftTree | None = None
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: SequenceStats = field(default_factory=SequenceStats)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def emitted(self) -> list[int]:
        """The tokens emitted so far (a copy)."""
        return self.tokens[self.prompt_length :]

    def wants_every_row(self, start: int) -> bool:
        """Whether the logits of a prefill chunk that begins there are wanted row by row."""
        return self.prompt_logprobs is not None and start < self.prompt_length - 1

    @property
    def remaining(self) -> int:
        """Tokens that may yet be emitted, by ``max_tokens`` and the model's length."""
        return self.stop_checker.remaining(len(self.tokens))
