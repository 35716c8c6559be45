"""From a conversation or a text to prompt tokens."""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.errors import RequestError

#: Stands for a user's turn that is not yet known; hardly a text begins with it.
_ANY_TURN = "\x00"


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Tokens of a text, or of messages under the model's chat template.

    Templates come with models and are not trusted: transformers runs them in jinja's immutable
    sandbox.

    Args:
        tokenizer: of the model.
        prompt: text or messages.
        tools: functions that a chat offers, for a template that knows them.

    Raises:
        RequestError: the model has no chat template, or its template refuses the messages.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if tokenizer.chat_template is None:
        raise RequestError("this model has no chat template; use a text prompt", param="messages")
    try:
        rendered = tokenizer.apply_chat_template(
            [dict(message) for message in prompt],
            tools=None if tools is None else [dict(tool) for tool in tools],
            add_generation_prompt=True,
            tokenize=False,
        )
    except Exception as error:  # jinja templates raise errors of many kinds on purpose
        raise RequestError(
            f"the chat template refuses these messages: {error}", param="messages"
        ) from error
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


class SystemPrompts:
    """Tells how much of a chat's prompt comes before what its user said. Thread-safe.

    Args:
        tokenizer: of the model.
        kept: tokens of system prompts that are remembered.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kept: int = 2**18) -> None:
        self._tokenizer = tokenizer
        self._kept = kept
        self._lock = threading.Lock()
        self._openings: OrderedDict[bytes, array[int]] = OrderedDict()
        self._tokens = 0

    def length(self, messages: Sequence[Mapping[str, Any]], tokens: Sequence[int]) -> int:
        """How many of ``tokens`` depend on the system messages alone.

        Args:
            messages: of the chat.
            tokens: their encoding by :func:`encode_prompt`.
        """
        leading = list(takewhile(lambda message: message["role"] == "system", messages))
        opening = self._opening(leading)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(opening, tokens, strict=False))
        return sum(1 for _ in same)

    def _opening(self, system: list[Mapping[str, Any]]) -> array[int]:
        """Tokens of a chat with these system messages, as far as any user's turn begins so."""
        text = json.dumps([dict(message) for message in system])
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            found = self._openings.get(key)
            if found is not None:
                self._openings.move_to_end(key)
                return found
        turn = {"role": "user", "content": _ANY_TURN}
        try:
            opening = array("q", encode_prompt(self._tokenizer, [*system, turn]))
        except RequestError:  # a template that asks for more than one turn
            opening = array("q")
        with self._lock:
            if key not in self._openings:
                self._openings[key] = opening
                self._tokens += len(opening) + 1
            while self._tokens > self._kept:
                _, oldest = self._openings.popitem(last=False)
                self._tokens -= len(oldest) + 1
        return opening
