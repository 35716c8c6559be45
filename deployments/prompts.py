"""From the prompts of a request to tokens."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from deployments.errors import from_request_error, invalid
from deployments.messages import WorkerInfo
from deployments.tools.transcript import Turn
from specdec.chat import SystemPrompts, encode_prompt
from specdec.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptEncoder:
    """Texts and conversations as the model reads them.

    Args:
        tokenizer: of the model.
        info: of the model.
        most: tokens that a prompt may have; None leaves it to the model.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, info: WorkerInfo, most: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._system_prompts = SystemPrompts(tokenizer)
        self._info = info
        self._most = most

    async def encode(
        self,
        prompt: str | list[Turn],
        long: bool,
        param: str,
        tools: list[Turn] | None = None,
    ) -> tuple[tuple[int, ...], int]:
        """Tokens, and how many of them are of a chat's system prompt.

        Args:
            prompt: a text, or the turns of a conversation.
            long: whether it takes so long that it is done beside the event loop.
            param: of the request, for errors.
            tools: that the conversation may call.

        Raises:
            ApiError: 400, it is empty, too long, or not what the template takes.
        """

        def encode() -> tuple[list[int], int]:
            tokens = encode_prompt(self._tokenizer, prompt, tools)
            if isinstance(prompt, str) or len(tokens) >= self._info.max_model_length:
                return tokens, 0  # the latter will be refused
            return tokens, self._system_prompts.length(prompt, tokens)

        try:
            tokens, shared = await asyncio.to_thread(encode) if long else encode()
        except RequestError as error:
            raise from_request_error(error) from error
        if not tokens:
            raise invalid(param, f"'{param}' is empty.")
        return self._bounded(tuple(tokens), param), shared

    def _bounded(self, tokens: tuple[int, ...], param: str) -> tuple[int, ...]:
        most = self._most
        if most is not None and len(tokens) > most:
            raise invalid(
                param,
                f"'{param}' has {len(tokens)} tokens; this server takes {most}.",
                "context_length_exceeded",
            )
        return tokens

    def known(self, tokens: list[int]) -> tuple[int, ...]:
        """Token ids of a prompt, all of which the model knows.

        Raises:
            ApiError: 400, it does not know one, or they are too many.
        """
        known = range(self._info.vocab_size)
        outside = next((token for token in tokens if token not in known), None)
        if outside is not None:
            raise invalid(
                "prompt",
                f"'prompt' holds token {outside!r:.40}, outside the vocabulary of {len(known)}.",
            )
        return self._bounded(tuple(tokens), "prompt")
