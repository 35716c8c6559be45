"""From a conversation or a text to prompt tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.errors import RequestError


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Mapping[str, Any]]
) -> list[int]:
    """Tokens of a text, or of messages under the model's chat template.

    Raises:
        RequestError: the model has no chat template, or its template refuses the messages.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if tokenizer.chat_template is None:
        raise RequestError("this model has no chat template; use a text prompt", param="messages")
    try:
        rendered = tokenizer.apply_chat_template(
            [dict(message) for message in prompt], add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # jinja templates raise errors of many kinds on purpose
        raise RequestError(
            f"the chat template refuses these messages: {error}", param="messages"
        ) from error
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
