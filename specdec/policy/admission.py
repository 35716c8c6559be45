"""Which requests can be served at all. Holds no torch."""

from __future__ import annotations

from specdec.errors import ContextLengthError, RequestError
from specdec.policy.sequence import Sequence


def check_request(sequence: Sequence, max_model_length: int, slots: int) -> None:
    """Refuse a sequence that can never emit a token.

    Prompt and ``max_tokens`` may exceed the pool, as the request may stop earlier; if it does
    not, it ends with ``length`` when the pool is full.

    Args:
        sequence: not yet queued.
        max_model_length: most committed tokens.
        slots: tokens in the KV pool.

    Raises:
        ContextLengthError: prompt and first root fit the model or the pool in no case.
        RequestError: no prompt, or nothing is left to emit.
        ValueError: the stop checker knows another model length.
    """
    length, longest = len(sequence.tokens), sequence.stop_checker.max_length
    if longest > max_model_length:
        raise ValueError(f"a stop checker for {longest} tokens; the limit is {max_model_length}")
    if not 1 <= sequence.prompt_length <= length:
        raise RequestError("the prompt has no tokens", "prompt")
    if length >= longest:
        raise ContextLengthError(
            f"{length} tokens leave no room for an answer in a context of {longest}", "prompt"
        )
    if max(length, sequence.prompt_length + 1) > slots:
        raise ContextLengthError(
            f"{length} tokens and an answer do not fit the KV pool of {slots} tokens", "prompt"
        )
    if sequence.remaining < 1:
        raise RequestError("all of max_tokens are emitted already", "max_tokens")
