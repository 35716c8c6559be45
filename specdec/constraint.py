"""Which tokens may come next in one request: its grammar, and no end before ``min_tokens``."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.grammar import GrammarCompiler, GrammarCursor
from specdec.params import SamplingParams
from specdec.policy.constraint import Constraint


class TokenConstraint:
    """See :class:`specdec.policy.constraint.Constraint`.

    Args:
        cursor: in the request's grammar, if it has one.
        end_tokens: that end the request.
        min_tokens: before so many, none of these is allowed, unless the grammar allows nothing
            else.
        vocab_size: V.
    """

    def __init__(
        self,
        cursor: GrammarCursor | None,
        end_tokens: Collection[int],
        min_tokens: int,
        vocab_size: int,
    ) -> None:
        self._cursor = cursor
        self._min_tokens = min_tokens
        self._not_yet = np.ones(vocab_size, dtype=np.bool_)
        self._not_yet[[token for token in end_tokens if token < vocab_size]] = False

    def allowed(self, output: Sequence[int]) -> NDArray[np.bool_] | None:
        """Per token whether it may come next ``[V]``; None where all may."""
        grammar = None if self._cursor is None else self._cursor.allowed(output)
        if len(output) >= self._min_tokens:
            return grammar
        if grammar is None:
            return self._not_yet
        both = grammar & self._not_yet
        return both if both.any() else grammar

    def accepted(self, output: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of ``tokens`` the grammar lets follow."""
        return len(tokens) if self._cursor is None else self._cursor.accepted(output, tokens)

    def forced(self, output: Sequence[int]) -> list[int]:
        """Tokens of the only text that may follow."""
        return [] if self._cursor is None else self._cursor.forced(output)

    def is_complete(self, output: Sequence[int]) -> bool:
        """Whether the grammar lets nothing follow."""
        return self._cursor is not None and self._cursor.is_complete(output)


def make_constraint(
    params: SamplingParams,
    end_tokens: Collection[int],
    vocab_size: int,
    grammars: GrammarCompiler,
) -> Constraint | None:
    """What a request's parameters ask for; None where every token may always come.

    Raises:
        RequestError: its grammar cannot be used.
    """
    if not params.is_constrained:
        return None
    cursor = None if params.grammar is None else grammars.compile(params.grammar)
    return TokenConstraint(cursor, end_tokens, params.min_tokens, vocab_size)
