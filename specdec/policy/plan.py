"""What goes from the scheduler to the model and back. Holds no torch.

``Scheduler.schedule`` fills a ``StepPlan``, the model runs its rows, verification gives one
``Verdict`` (or None) per segment, and ``Scheduler.commit`` answers with a ``CommitResult``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from specdec.errors import ConfigError
from specdec.policy.sequence import Sequence
from specdec.policy.tree import DraftTree


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step and of the queue.

    Attributes:
        token_budget: most rows in a step, and so most sequences running at once.
        max_sequences: most sequences running at once.
        max_waiting: waiting sequences from which on new ones are refused.
        max_tree_nodes: most nodes of a tree, its root included.
        prefill_chunk: most prefill rows of one sequence in a step.
        max_model_length: most committed tokens of a sequence.
        max_loads: blocks to be loaded in a step from which on no more sequences start.

    Raises:
        ConfigError: a limit is below 1.
    """

    token_budget: int
    max_sequences: int
    max_waiting: int
    max_tree_nodes: int
    prefill_chunk: int
    max_model_length: int
    max_loads: int = 256

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value < 1:
                raise ConfigError(f"{entry.name} must be at least 1, not {value}")


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one sequence in a step: a prefill chunk or a draft tree.

    KV of row ``i`` is written to the slot of position ``start + i`` of the sequence's lease,
    which covers it; for a tree that is a scratch slot, and the true position of node ``i`` is
    ``start + tree.depths[i]``.

    Attributes:
        sequence: whose rows; its KV is in the pages for all positions before ``start``.
        start: slot position of the first row; ``n - 1`` for a tree.
        tokens: per row its token.
        tree: the tree to verify (``tokens`` are its tokens), or None for a prefill chunk.
        wants_logits: whether a token is drawn: always for a tree (from every row), for a
            prefill chunk only if it holds the last committed token (from its last row).
        every_row: whether a prefill chunk's rows need logits, drawn from or not.
        expected: of a tree's candidates, how many may be expected to be accepted.
    """

    sequence: Sequence
    start: int
    tokens: tuple[int, ...]
    tree: DraftTree | None
    wants_logits: bool
    every_row: bool = False
    expected: float = 0.0

    @property
    def logit_rows(self) -> int:
        """Rows that need logits, the last ones of the segment."""
        if self.tree is not None or self.every_row:
            return len(self.tokens)
        return int(self.wants_logits)


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """KV of one block to be written to a page.

    Attributes:
        page: its page.
        payload: what was stored.
    """

    page: int
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True)
class PublishedBlock:
    """A block that sequences can share from now on.

    Attributes:
        key: its name.
        tokens: that it holds the KV of.
        page: where it lies, at least until the next step is scheduled.
    """

    key: bytes
    tokens: tuple[int, ...]
    page: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: packed segments, trees first.

    Attributes:
        loads: to be carried out before the forward.
        reused: blocks that sequences which start now have found in the pool.
        segments: at most one per sequence.
        rows: sum of their lengths, at most the token budget.
        preempted: those whose pages were taken away for it, one entry each time.
    """

    segments: tuple[Segment, ...]
    rows: int
    loads: tuple[BlockLoad, ...] = ()
    reused: tuple[PublishedBlock, ...] = ()
    preempted: tuple[Sequence, ...] = ()


@dataclass(frozen=True, slots=True)
class KvMove:
    """KV to move between slots, in all layers, before the next forward.

    No target is the source of a later pair, so both moving pair by pair in this order and
    reading all sources before writing any target are right.

    Attributes:
        source_slots: where accepted nodes were written.
        target_slots: their committed slots, same length.
    """

    source_slots: list[int]
    target_slots: list[int]

    def __len__(self) -> int:
        return len(self.source_slots)


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens that one sequence gained in a step, cut at the first stop.

    Attributes:
        sequence: whose; already extended by ``tokens``.
        tokens: at least one.
        row: index, within the packed rows of the step, of the node that ``tokens[-1]`` follows.
        logits_row: the same within the rows that have logits, in segment order.
    """

    sequence: Sequence
    tokens: tuple[int, ...]
    row: int
    logits_row: int


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What became of a step.

    Attributes:
        moves: to be carried out before the next step's forward.
        committed: in segment order; sequences that finished with their last tokens included.
        finished: all that ended in this step, failed ones included; their pages are free.
        published: blocks whose KV is in place after the moves, and was nowhere before.
        withdrawn: keys of blocks that are shared no more, as requests with them failed.
    """

    moves: KvMove
    committed: tuple[Committed, ...]
    finished: tuple[Sequence, ...]
    published: tuple[PublishedBlock, ...] = ()
    withdrawn: tuple[bytes, ...] = ()

    @property
    def failed(self) -> tuple[Sequence, ...]:
        """Those of ``finished`` that ended with an error."""
        return tuple(s for s in self.finished if s.finish_reason == "error")
