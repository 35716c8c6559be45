"""Text of all choices of a request, as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deployments.choice_text import ChoiceText, place_prompt
from deployments.client import WorkerClient
from deployments.errors import internal, unavailable
from deployments.event_ids import Cursor
from deployments.failover import TokenStream
from deployments.fan_in import fan_in
from deployments.logprobs import PlacedLogprobs
from deployments.messages import GenerateRequest
from deployments.progress import Progress
from deployments.responses import (
    CompletionTokensDetails,
    FinishReason,
    PromptTokensDetails,
    Usage,
)
from deployments.resumed import FinishedStream, Resumption, before
from deployments.tracing.request import current_trace
from specdec.outputs import RequestOutput, RequestStats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ChoicePlan:
    """One choice to generate, or to go on with.

    Attributes:
        request: for the worker; its prior tokens are known already.
        continues: whether the text continues the prompt's own, as completions do.
        sent: what the client has of it.
        progress: of earlier owners; a choice that has finished needs no worker.
        echo: the prompt's text, to be given before what follows it; None gives it not.
        prompt_only: give nothing but the prompt, for its log-probabilities.
    """

    request: GenerateRequest
    continues: bool
    sent: Cursor = field(default_factory=Cursor)
    progress: Progress = field(default_factory=Progress)
    echo: str | None = None
    prompt_only: bool = False


@dataclass(frozen=True)
class Piece:
    """What came for one choice.

    Attributes:
        index: of the choice.
        text: new text, perhaps none.
        finish_reason: set on the last piece of a choice.
        cursor: how much of the choice has been sent with it.
        sent: whether the client has it already, from an earlier connection.
        logprobs: of the tokens that the text ends with, where they were asked for.
    """

    index: int
    text: str
    finish_reason: FinishReason | None
    cursor: Cursor = field(default_factory=Cursor)
    sent: bool = False
    logprobs: tuple[PlacedLogprobs, ...] = ()


class Generation:
    """The choices of one request under way in the workers.

    ``start`` it, iterate over ``pieces``, and ``close`` it in any case.

    Attributes:
        trace: of the request.
        first_token_at: when the first token came, on the monotonic clock.
        ended: how those choices went that have come to their end.
        texts: set to a list per choice, it collects their texts.
    """

    def __init__(
        self,
        plans: Sequence[ChoicePlan],
        client: WorkerClient,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.trace = current_trace()
        self._plans = plans
        self._client = client
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._streams: list[TokenStream | FinishedStream] = []
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}
        self._drafted: dict[str, int] = {}
        self._accepted: dict[str, int] = {}
        self.first_token_at: float | None = None
        self.ended: list[RequestStats] = []
        self.texts: list[list[str]] | None = None

    async def start(self) -> None:
        """Send all choices and wait until the engines have them.

        Raises:
            ApiError: a worker refused one.
        """
        began_ns = time.time_ns()
        self._streams = [
            FinishedStream(plan.request, plan.progress)
            if plan.progress.finish_reason
            else self._client.start(plan.request)
            for plan in self._plans
        ]
        results = await asyncio.gather(
            *(stream.accepted() for stream in self._streams), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        self.trace.routed(began_ns)

    def pieces(self) -> AsyncGenerator[Piece]:
        """The text of all choices in the order of its coming.

        Raises:
            ApiError: a worker gave up.
        """
        return fan_in([self._choice(index) for index in range(len(self._plans))])

    async def close(self) -> None:
        """End what still runs."""
        for stream in self._streams:
            stream.close()

    @property
    def resumable(self) -> bool:
        """Whether there are checkpoints from which another gateway could go on."""
        return all(plan.request.ticket is not None for plan in self._plans)

    @property
    def choices(self) -> int:
        """How many were asked for."""
        return len(self._plans)

    @property
    def usage(self) -> Usage:
        """Tokens up to now; a prompt counts once, however many choices it has."""
        prompts = {
            id(plan.request.prompt_tokens): plan.request.prompt_tokens for plan in self._plans
        }
        prompt_tokens = sum(map(len, prompts.values()))
        accepted = sum(self._accepted.values())
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=sum(self._drafted.values()) - accepted,
            ),
        )

    async def _choice(self, index: int) -> AsyncGenerator[Piece]:
        stream, plan = self._streams[index], self._plans[index]
        request, echo = plan.request, plan.echo  # the latter until it is given
        told = ChoiceText(
            self._tokenizer,
            request.params,
            request.prompt_tokens if plan.continues else (),
            len(echo or ""),
        )
        if echo is not None and request.params.prompt_logprobs is None and not plan.prompt_only:
            yield Piece(index, echo, None)
            echo = None
        resumption = Resumption(plan.sent)
        async with aclosing(before(request, plan.progress, stream.outputs())) as outputs:
            async for output in outputs:
                if not plan.prompt_only:
                    self._count(output, request)
                reason = _finish_reason(output, request)
                if echo is not None and (output.new_tokens or reason is not None):
                    yield self._echo(index, echo, output)
                    echo = None
                    if plan.prompt_only:
                        break
                known, new = resumption.split(self._shown(output, request), output.new_tokens)
                sent = told.add(known)[0]
                text, logprobs = told.add(new, output.logprobs[: len(new)])
                if reason is not None:
                    rest, last = told.finish()
                    text, logprobs = text + rest, logprobs + last
                if told.stopped:
                    reason = "stop"
                    # how many came in one portion must not show
                    self._completion_tokens -= told.unread
                if self.texts is not None:
                    self.texts[index].append(sent + text)
                cursor = resumption.cursor(reason is not None)
                if sent:
                    yield Piece(index, sent, None, cursor, sent=True)
                if text or logprobs or reason is not None:
                    self.trace.piece(index, text, reason)
                    yield Piece(index, text, reason, cursor, resumption.behind, logprobs)
                if reason is not None:
                    break
        stream.close()

    def _echo(self, index: int, echo: str, output: RequestOutput) -> Piece:
        """The prompt, with its log-probabilities where the engine tells them."""
        plan = self._plans[index]
        placed: tuple[PlacedLogprobs, ...] = ()
        if plan.request.params.prompt_logprobs is not None:
            prompt = plan.request.prompt_tokens
            placed = place_prompt(self._tokenizer, prompt, output.prompt_logprobs)
        return Piece(index, echo, "length" if plan.prompt_only else None, logprobs=placed)

    def _shown(self, output: RequestOutput, request: GenerateRequest) -> tuple[int, ...]:
        """The new tokens less the one that is an end and no text."""
        tokens = output.new_tokens
        ends = request.params.stop_token_ids | (
            frozenset() if request.params.ignore_eos else self._eos_token_ids
        )
        if request.params.include_stop:  # special tokens are no text in any case
            return tokens
        hide = output.finish_reason == "stop" and tokens and tokens[-1] in ends
        return tokens[:-1] if hide else tokens

    def _count(self, output: RequestOutput, request: GenerateRequest) -> None:
        self._completion_tokens += len(output.new_tokens)
        if self.first_token_at is None and output.new_tokens:
            self.first_token_at = time.monotonic()
        # of a prompt's choices, the later ones find what the first has computed
        prompt = id(request.prompt_tokens)
        self._cached[prompt] = min(
            output.cached_tokens, self._cached.get(prompt, output.cached_tokens)
        )
        self._drafted[request.request_id] = output.drafted
        self._accepted[request.request_id] = output.accepted
        if output.stats is not None:
            self.trace.finished(output.stats)
            self.ended.append(output.stats)


def _finish_reason(output: RequestOutput, request: GenerateRequest) -> FinishReason | None:
    """The reason that a client is told.

    Raises:
        ApiError: the choice did not come to a proper end.
    """
    if output.finish_reason == "error":
        raise internal(request.request_id)
    if output.finish_reason == "abort":
        raise unavailable("the worker gave the request up; it may be sent again", 1)
    return output.finish_reason
