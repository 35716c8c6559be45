"""Choices that begin with tokens which are known already, or with text that was sent already."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from deployments.errors import ApiError, conflict
from deployments.event_ids import Cursor
from deployments.messages import GenerateRequest
from deployments.progress import Progress
from specdec.outputs import RequestOutput


class Resumption:
    """Follows the tokens of a choice and tells those whose text the client has from the others.

    Args:
        sent: what the client has.
    """

    def __init__(self, sent: Cursor) -> None:
        self._sent = sent
        self._now = Cursor(opened=sent.opened)

    @property
    def behind(self) -> bool:
        """Whether all up to now, an end included, has been sent before."""
        return self._sent.ended or self._now.tokens < self._sent.tokens

    def split(
        self, shown: tuple[int, ...], tokens: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Divide the next tokens at the place up to which text was sent.

        Args:
            shown: those of ``tokens`` that are text; an end at their end is left out.
            tokens: all of them.

        Raises:
            ApiError: they are not those whose text was sent.
        """
        left = max(0, self._sent.tokens - self._now.tokens)
        at_sent = self._now.after(tokens[:left])
        if left and at_sent.tokens == self._sent.tokens and at_sent.check != self._sent.check:
            raise _differs()
        self._now = at_sent.after(tokens[left:])
        return shown[:left], shown[left:]

    def cursor(self, ended: bool) -> Cursor:
        """What has been sent once the text up to now has.

        Raises:
            ApiError: it ends before the place up to which text was sent.
        """
        if ended and self._now.tokens < self._sent.tokens:
            raise _differs()
        return replace(self._now, opened=True, ended=ended)


async def before(
    request: GenerateRequest, progress: Progress, outputs: AsyncGenerator[RequestOutput]
) -> AsyncGenerator[RequestOutput]:
    """What is known of a choice as its first output, then those to come."""
    drafted, accepted = progress.drafted, progress.accepted
    if request.prior_tokens and progress.finish_reason is None:
        yield RequestOutput(
            request.request_id,
            request.prior_tokens,
            cached_tokens=progress.cached_tokens or 0,
            drafted=drafted,
            accepted=accepted,
        )
    async with aclosing(outputs):
        async for output in outputs:
            if request.prior_tokens and progress.finish_reason is None:
                output = _plus(output, progress)
            yield output


class FinishedStream:
    """Stands for a worker's stream where all is known."""

    def __init__(self, request: GenerateRequest, progress: Progress) -> None:
        self._request = request
        self._progress = progress

    async def accepted(self) -> None:
        """Nobody needs to accept it."""

    async def outputs(self) -> AsyncGenerator[RequestOutput]:
        """The whole choice at once."""
        yield RequestOutput(
            self._request.request_id,
            self._request.prior_tokens,
            self._progress.finish_reason,
            cached_tokens=self._progress.cached_tokens or 0,
            drafted=self._progress.drafted,
            accepted=self._progress.accepted,
        )

    def close(self) -> None:
        """Nothing runs."""


def _differs() -> ApiError:
    return conflict(
        "The answer cannot be continued: computed again, it begins otherwise.", "answer_differs"
    )


def _plus(output: RequestOutput, progress: Progress) -> RequestOutput:
    """Counts of earlier owners added, and the prompt's as it was found first."""
    drafted = output.drafted + progress.drafted
    accepted = output.accepted + progress.accepted
    cached = output.cached_tokens if progress.cached_tokens is None else progress.cached_tokens
    stats = output.stats and replace(output.stats, drafted=drafted, accepted=accepted)
    return replace(output, drafted=drafted, accepted=accepted, cached_tokens=cached, stats=stats)
