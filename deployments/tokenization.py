"""``/tokenize`` and ``/detokenize``, in the shapes of vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, Field

from deployments.errors import ApiError, from_request_error, invalid
from deployments.schema import Body, Message, validated, with_plain_messages
from deployments.security.guard import Caller
from deployments.tools.schema import Tool
from deployments.tools.transcript import Transcript
from specdec.chat import encode_prompt
from specdec.detokenize import text_decoder
from specdec.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ResultT = TypeVar("ResultT")


class TokenizeRequest(Body):
    """Body of ``POST /tokenize``: a text, or a conversation.

    Attributes:
        model: the served one, if named.
        prompt: a text.
        messages: a conversation, in place of a text.
        tools: that the conversation offers.
        add_special_tokens: to a text, as ``/v1/completions`` has it; a conversation gets what its
            template writes.
        return_token_strs: also return each token as the vocabulary spells it.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(BaseModel):
    """Answer of ``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Body):
    """Body of ``POST /detokenize``.

    Attributes:
        model: the served one, if named.
        tokens: to decode, special ones included.
    """

    model: str | None = None
    tokens: list[int]


class DetokenizeAnswer(BaseModel):
    """Answer of ``POST /detokenize``."""

    prompt: str


class TokenizationApi:
    """Text to tokens and back, beside the event loop."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        transcript: Transcript,
        max_model_length: int,
        vocab_size: int,
        model_name: str,
    ) -> None:
        self._tokenizer = tokenizer
        self._transcript = transcript
        self._max_model_length = max_model_length
        self._vocab_size = vocab_size
        self._model_name = model_name

    async def tokenize(self, data: dict[str, Any], caller: Caller) -> TokenizeAnswer:
        """Tokens of a text or of a conversation, as a completion or a chat would have them.

        Raises:
            ApiError: any answer other than 200.
        """
        request = validated(TokenizeRequest, with_plain_messages(data))
        self._check_model(request.model, caller)
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt", "Give one of 'prompt' and 'messages'.")
        if request.prompt is not None and request.tools is not None:
            raise invalid("tools", "'tools' go with 'messages'.")
        tokens = await self._aside(lambda: self._encode(request))
        strings = None
        if request.return_token_strs:
            strings = list(self._tokenizer.convert_ids_to_tokens(tokens))
        return TokenizeAnswer(
            count=len(tokens),
            max_model_len=self._max_model_length,
            tokens=tokens,
            token_strs=strings,
        )

    async def detokenize(self, data: dict[str, Any], caller: Caller) -> DetokenizeAnswer:
        """The text of tokens.

        Raises:
            ApiError: any answer other than 200.
        """
        request = validated(DetokenizeRequest, data)
        self._check_model(request.model, caller)
        outside = next((t for t in request.tokens if not 0 <= t < self._vocab_size), None)
        if outside is not None:
            raise invalid(
                "tokens",
                f"'tokens' holds {outside!r:.40}, outside the vocabulary of {self._vocab_size}.",
            )
        decode = text_decoder(self._tokenizer)
        return DetokenizeAnswer(prompt=await self._aside(lambda: decode(request.tokens)))

    def _encode(self, request: TokenizeRequest) -> list[int]:
        if request.messages is not None:
            messages, tools = self._transcript.render(request.messages, request.tools or [])
            return encode_prompt(self._tokenizer, messages, tools)
        special = request.add_special_tokens is not False
        return list(self._tokenizer(request.prompt, add_special_tokens=special)["input_ids"])

    async def _aside(self, work: Callable[[], ResultT]) -> ResultT:
        try:
            return await asyncio.to_thread(work)
        except RequestError as error:
            raise from_request_error(error) from error

    def _check_model(self, model: str | None, caller: Caller) -> None:
        caller.check_model(self._model_name)
        if model is not None and model != self._model_name:
            raise ApiError(
                404,
                f"The model {model!r:.200} is not served here.",
                param="model",
                code="model_not_found",
            )
