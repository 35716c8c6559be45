"""Text of all choices of a request, as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deployments.client import TokenStream, WorkerClient
from deployments.errors import internal, unavailable
from deployments.fan_in import fan_in
from deployments.messages import GenerateRequest
from deployments.responses import CompletionTokensDetails, FinishReason, Usage
from specdec.detokenize import IncrementalDetokenizer
from specdec.outputs import RequestOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ChoicePlan:
    """One choice to generate.

    Attributes:
        request: for the worker.
        continues: whether the text continues the prompt's own, as completions do.
    """

    request: GenerateRequest
    continues: bool


@dataclass(frozen=True)
class Piece:
    """What came for one choice.

    Attributes:
        index: of the choice.
        text: new text, perhaps none.
        finish_reason: set on the last piece of a choice.
    """

    index: int
    text: str
    finish_reason: FinishReason | None


class Generation:
    """The choices of one request under way in the workers.

    ``start`` it, iterate over ``pieces``, and ``close`` it in any case.
    """

    def __init__(
        self,
        plans: Sequence[ChoicePlan],
        client: WorkerClient,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._plans = plans
        self._client = client
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._streams: list[TokenStream] = []
        self._completion_tokens = 0
        self._accepted = 0
        self._drafted = 0

    async def start(self) -> None:
        """Send all choices and wait until the engines have them.

        Raises:
            ApiError: a worker refused one.
        """
        self._streams = [self._client.start(plan.request) for plan in self._plans]
        results = await asyncio.gather(
            *(stream.accepted() for stream in self._streams), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

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
    def usage(self) -> Usage:
        """Tokens up to now; a prompt counts once, however many choices it has."""
        prompts = {
            id(plan.request.prompt_tokens): plan.request.prompt_tokens for plan in self._plans
        }
        prompt_tokens = sum(map(len, prompts.values()))
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=self._accepted,
                rejected_prediction_tokens=self._drafted - self._accepted,
            ),
        )

    async def _choice(self, index: int) -> AsyncGenerator[Piece]:
        request = self._plans[index].request
        detokenizer = IncrementalDetokenizer(
            self._tokenizer,
            request.params.stop,
            context=request.prompt_tokens if self._plans[index].continues else (),
        )
        stream = self._streams[index]
        async with aclosing(stream.outputs()) as outputs:
            async for output in outputs:
                self._count(output)
                text = detokenizer.add(self._shown(output, request))
                reason = _finish_reason(output, request)
                if reason is not None:
                    text += detokenizer.finish()
                if detokenizer.matched_stop is not None:
                    reason = "stop"
                if text or reason is not None:
                    yield Piece(index, text, reason)
                if reason is not None:
                    break
        stream.close()

    def _shown(self, output: RequestOutput, request: GenerateRequest) -> tuple[int, ...]:
        """The new tokens less the one that is an end and no text."""
        tokens = output.new_tokens
        ends = request.params.stop_token_ids | (
            frozenset() if request.params.ignore_eos else self._eos_token_ids
        )
        hide = output.finish_reason == "stop" and tokens and tokens[-1] in ends
        return tokens[:-1] if hide else tokens

    def _count(self, output: RequestOutput) -> None:
        self._completion_tokens += len(output.new_tokens)
        if output.stats is not None:
            self._accepted += output.stats.accepted
            self._drafted += output.stats.drafted


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
