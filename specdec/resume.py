"""Requests that begin with tokens which an earlier attempt has emitted. Holds no torch."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.errors import RequestError
from specdec.outputs import FinishReason
from specdec.policy.stop import StopChecker


def replay(
    checker: StopChecker,
    prompt: Sequence[int],
    prior: Sequence[int],
    vocabulary: int,
    pool_limit: int,
) -> FinishReason | None:
    """Check emitted tokens as they were checked when they were committed.

    Args:
        checker: new; knows all tokens afterwards.
        prompt: of the request.
        prior: emitted after it.
        vocabulary: tokens that the model knows.
        pool_limit: committed tokens at which the pool ends a request.

    Returns:
        Why the request has ended with its last token, if it has.

    Raises:
        RequestError: a token lies outside the vocabulary, or behind the end: these tokens are not
            what such a request emits.
    """
    tokens = list(prompt)
    for count, token in enumerate(prior, 1):
        if not 0 <= token < vocabulary:
            raise RequestError(
                f"prior token {token} lies outside the vocabulary of {vocabulary}", "prior_tokens"
            )
        verdict = checker.check(tokens, token)
        tokens.append(token)
        reason: FinishReason | None = None if verdict is None else verdict.reason
        if reason is None and len(tokens) >= pool_limit:
            reason = "length"
        if reason is not None:
            if count < len(prior):
                raise RequestError(
                    f"the request had ended with prior token {count} of {len(prior)}",
                    "prior_tokens",
                )
            return reason
    return None
