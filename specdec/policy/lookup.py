"""Prompt lookup for all sequences of an engine. Holds no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.policy.sequence import Sequence
from specdec.policy.suffix import MatchRates, SuffixIndex

#: Tokens entered in one call: some 10 ms of work, in which all other sequences wait.
TOKENS_PER_CALL = 2048


@dataclass(frozen=True)
class Continuation:
    """Candidates one below the other, from depth 1 down.

    Attributes:
        tokens: per candidate its token.
        values: per candidate the estimated probability that the walk reaches it, falling.
    """

    tokens: list[int]
    values: list[float]


@dataclass
class _Known:
    """What is kept of one sequence: its n-grams, and what was last proposed for it."""

    index: SuffixIndex = field(default_factory=SuffixIndex)
    match: int = 0
    proposed: list[int] = field(default_factory=list)


class PromptLookup:
    """Proposes what followed before, and learns from what then came.

    An index is made when a sequence is first asked for, and kept over preemptions, which leave
    the tokens as they are, until :meth:`forget`.
    """

    def __init__(self) -> None:
        self._rates = MatchRates()
        self._known: dict[str, _Known] = {}

    def __len__(self) -> int:
        """Sequences that something is kept of."""
        return len(self._known)

    def propose(self, sequence: Sequence, limit: int) -> Continuation:
        """Candidates for the tokens that follow; none without a match.

        What was committed since the last call is first compared with that call's proposal.

        Args:
            sequence: its tokens only ever grow.
            limit: most candidates.
        """
        known = self._known.setdefault(sequence.request_id, _Known())
        done = len(known.index)
        fresh = sequence.tokens[done : done + TOKENS_PER_CALL]
        self._rates.learn(known.match, known.proposed, fresh)
        known.index.extend(fresh)
        if done + len(fresh) < len(sequence.tokens):  # a long prompt is not yet entered
            known.match, known.proposed = 0, []
            return Continuation([], [])
        known.match, known.proposed = known.index.continuation(limit)
        return Continuation(known.proposed, self._rates.values(known.match, len(known.proposed)))

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a finished sequence."""
        self._known.pop(sequence.request_id, None)
