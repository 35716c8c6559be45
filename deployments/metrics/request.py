"""What is known of an HTTP request while it is answered, for its figures and its line in the log.

The routes' code notes what it learns with one call; it needs to know no more of figures and logs.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from deployments.errors import ApiError
from deployments.responses import Usage
from deployments.schema import ChatRequest, CompletionRequest, SamplingFields
from specdec.outputs import RequestStats

#: Of the request that this task answers; set by RequestWatch.
_current: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


class GenerationView(Protocol):
    """What is read of a :class:`deployments.generation.Generation`."""

    first_token_at: float | None
    ended: list[RequestStats]
    texts: list[list[str]] | None

    @property
    def usage(self) -> Usage:
        """Tokens up to now."""

    @property
    def choices(self) -> int:
        """How many were asked for."""


@dataclass
class RequestRecord:
    """One request.

    Attributes:
        method: of HTTP.
        path: as sent.
        trace_id: 32 hexadecimal digits, or None.
        keep_text: whether prompt and answer may be kept for the log.
        began: on the monotonic clock.
        seconds: until it ended.
        status: of the answer; None if none was sent.
        error: told to the client, if any.
        request_id: as in the answer's body.
        request: its body, checked.
        generation: of its choices.
    """

    method: str
    path: str
    trace_id: str | None
    keep_text: bool = False
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    status: int | None = None
    error: ApiError | None = None
    request_id: str | None = None
    request: SamplingFields | None = None
    generation: GenerationView | None = None

    @property
    def outcome(self) -> str:
        """How it ended, as the label ``outcome`` tells it."""
        status = self.status if self.error is None else self.error.status
        if status is not None and status >= 500:
            return "server_error"
        if status == 429:
            return "rejected"
        if status is not None and status >= 400:
            return "client_error"
        generation = self.generation
        left = generation is not None and len(generation.ended) < generation.choices
        return "aborted" if left or status is None else "ok"

    @property
    def first_token_s(self) -> float | None:
        """Seconds to the first token."""
        at = None if self.generation is None else self.generation.first_token_at
        return None if at is None else at - self.began

    @property
    def prompt(self) -> object:
        """What was to be continued or answered."""
        if isinstance(self.request, ChatRequest):
            return [message.model_dump(exclude_unset=True) for message in self.request.messages]
        return self.request.prompt if isinstance(self.request, CompletionRequest) else None


def set_record(record: RequestRecord) -> None:
    """Make it the one that the functions below note on, in this task and those that it starts."""
    _current.set(record)


def note_error(error: ApiError) -> None:
    """An error is told to the client."""
    record = _current.get()
    if record is not None:
        record.error = error


def note_generation(request_id: str, request: SamplingFields, generation: GenerationView) -> None:
    """The request is sound and goes to the workers."""
    record = _current.get()
    if record is not None:
        record.request_id, record.request, record.generation = request_id, request, generation
        if record.keep_text:
            generation.texts = [[] for _ in range(generation.choices)]
