"""Log-probabilities as OpenAI's API tells them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from specdec.detokenize import token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: What OpenAI tells of a token that has no chance; JSON has no infinity.
_NO_CHANCE = -9999.0


@dataclass(frozen=True)
class PlacedLogprobs:
    """A token of an answer.

    Attributes:
        token: its id.
        offset: of its text in the answer's, in characters.
        logprob: None for a prompt's first token.
        top: the likeliest tokens there.
    """

    token: int
    offset: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class TopLogprob(BaseModel):
    """A token that could have come, or the one that came."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    """A token of a chat's answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Those of a chat's answer, or of a chunk of it."""

    content: list[ContentLogprob]
    refusal: None


class TextLogprobs(BaseModel):
    """Those of a completion, or of a chunk of it: four lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


#: From tokens to the part of an answer's body.
LogprobsForm = Callable[[Sequence[PlacedLogprobs]], BaseModel]


def logprobs_form(tokenizer: PreTrainedTokenizerBase, chat: bool) -> LogprobsForm:
    """The form of a chat's, or of a completion's log-probabilities."""
    raw = token_bytes(tokenizer)

    def top(token: int, logprob: float) -> TopLogprob:
        data = raw(token)
        return TopLogprob(token=_shown(data), logprob=max(logprob, _NO_CHANCE), bytes=list(data))

    def of_chat(entries: Sequence[PlacedLogprobs]) -> ChatLogprobs:
        content = [
            ContentLogprob(
                **top(
                    entry.token, _NO_CHANCE if entry.logprob is None else entry.logprob
                ).model_dump(),
                top_logprobs=[top(*pair) for pair in entry.top],
            )
            for entry in entries
        ]
        return ChatLogprobs(content=content, refusal=None)

    def of_text(entries: Sequence[PlacedLogprobs]) -> TextLogprobs:
        tops: list[dict[str, float] | None] = []
        for entry in entries:
            if entry.logprob is None:
                tops.append(None)
                continue
            # the token itself is always among them
            pairs = dict((*entry.top, (entry.token, entry.logprob)))
            tops.append({_shown(raw(t)): max(value, _NO_CHANCE) for t, value in pairs.items()})
        return TextLogprobs(
            tokens=[_shown(raw(entry.token)) for entry in entries],
            token_logprobs=[
                None if entry.logprob is None else max(entry.logprob, _NO_CHANCE)
                for entry in entries
            ],
            top_logprobs=tops,
            text_offset=[entry.offset for entry in entries],
        )

    return of_chat if chat else of_text


def attach(
    body: BaseModel, place: int, entries: Sequence[PlacedLogprobs], form: LogprobsForm
) -> None:
    """Put log-probabilities into the choice at that place of an answer, or of a chunk of it."""
    choices: list[Any] = getattr(body, "choices", [])
    choices[place].logprobs = form(entries)


def _shown(data: bytes) -> str:
    r"""A token's text; bytes that are none by themselves as ``bytes:\xf0\x9f``."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
