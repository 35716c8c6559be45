"""What a gateway keeps of an answer in its checkpoints, so that any other can go on with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from deployments.formats import AnswerHead, ChatFormat, Format, TextFormat
from deployments.generation import ChoicePlan
from deployments.idempotency import Idempotency
from deployments.messages import GenerateRequest
from deployments.schema import SamplingFields, StreamOptions
from deployments.tools.format import ToolFormat
from deployments.tools.parser import CallFormat
from specdec.params import CacheScope, SamplingParams


class AnswerRecord(BaseModel):
    """Of a whole answer; each of its choices' checkpoints holds it.

    Attributes:
        head: what its bodies begin with.
        kind: of its bodies.
        stream: whether it comes in events.
        include_usage: see StreamOptions.
        continuous_usage: likewise.
        choices: how many it has.
        per_prompt: of them, how many each prompt has.
        continues: whether text continues the prompt's own.
        tenant: digest of the credentials it was asked for with, in hex.
        several_calls: whether it may hold several calls of functions; None without functions.
        weights: that its tokens are of; see ``AppConfig.weights``.
        body: digest of what was asked, in hex; set where it came with an Idempotency-Key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    head: AnswerHead
    kind: Literal["chat", "text"]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    choices: int
    per_prompt: int
    continues: bool
    tenant: str
    weights: str
    several_calls: bool | None = None
    body: str = ""

    def request_id(self, index: int) -> str:
        """Of a choice."""
        return f"{self.head.id}-{index}"


class RequestRecord(BaseModel):
    """Of one choice: how its tokens are computed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    params: SamplingParams
    shared_tokens: int
    salt: str

    @classmethod
    def of(cls, request: GenerateRequest) -> RequestRecord:
        """What is kept of a request, its tokens left out."""
        scope = request.scope
        return cls(params=request.params, shared_tokens=scope.shared_tokens, salt=scope.salt.hex())

    @property
    def scope(self) -> CacheScope:
        """With whom its KV is shared."""
        return CacheScope(self.shared_tokens, bytes.fromhex(self.salt))


@dataclass(frozen=True)
class Answer:
    """An answer with all its choices."""

    record: AnswerRecord
    plans: tuple[ChoicePlan, ...]


def record_of(
    request: SamplingFields,
    head: AnswerHead,
    kind: Literal["chat", "text"],
    prompts: int,
    tenant: bytes,
    once: Idempotency | None,
    weights: str,
    several_calls: bool | None = None,
) -> AnswerRecord:
    """Of a new answer."""
    options, n = request.stream_options or StreamOptions(), request.n or 1
    return AnswerRecord(
        head=head,
        kind=kind,
        stream=bool(request.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        choices=n * prompts,
        per_prompt=n,
        continues=kind == "text",
        tenant=tenant.hex(),
        weights=weights,
        several_calls=several_calls,
        body="" if once is None else once.body,
    )


def format_of(record: AnswerRecord, calls: CallFormat) -> Format:
    """What builds its bodies; ``calls`` is how the model writes calls of functions."""
    if record.kind == "text":
        return TextFormat(record.head, record.include_usage)
    chat, several = ChatFormat(record.head, record.include_usage), record.several_calls
    return chat if several is None else ToolFormat(chat, lambda: calls.make(several))


def read_answer(data: bytes) -> AnswerRecord:
    """From a checkpoint.

    Raises:
        ValueError: it is none, or of another version of this program.
    """
    try:
        return AnswerRecord.model_validate_json(data)
    except ValidationError as error:
        raise ValueError("the checkpoint's answer cannot be read") from error


def read_request(data: bytes) -> RequestRecord:
    """From a checkpoint; raises as ``read_answer``."""
    try:
        return RequestRecord.model_validate_json(data)
    except ValidationError as error:
        raise ValueError("the checkpoint's request cannot be read") from error
