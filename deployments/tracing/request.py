"""The gateway's side of a request's trace."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, Status, StatusCode, Tracer

from deployments.responses import Usage
from deployments.tracing.settings import TraceSettings
from specdec.outputs import RequestStats
from specdec.params import SamplingParams
from specdec.tracing import names
from specdec.tracing.carrier import Carrier, kept, pack

#: Where the OpenTelemetry context of a request holds its RequestTrace.
_KEY = otel_context.create_key("specdec-request")


class RequestTrace:
    """The span of one HTTP request, and what is told of it while it is answered.

    Args:
        tracer: makes the spans below it.
        span: started, to be ended by :meth:`end`.
        context: holds the span, and the client's baggage.
        settings: the section ``traces``.
    """

    def __init__(
        self, tracer: Tracer, span: Span, context: Context, settings: TraceSettings
    ) -> None:
        self._tracer = tracer
        self._span = span
        self.context = otel_context.set_value(_KEY, self, context)
        self._settings = settings
        self._began = time.monotonic()
        self._usage: Callable[[], Usage] | None = None
        self._choices = 0
        self._ended_choices = 0
        self._longest_s = 0.0
        self._routed: list[tuple[int, int]] = []
        self._reasons: dict[int, str] = {}
        self._texts: dict[int, list[str]] = {}
        self._first_chunk_s: float | None = None
        self._failure: str | None = None

    def carrier(self) -> Carrier:
        """What goes to the worker with a choice."""
        return pack(self.context)

    def requested(
        self, response_id: str, model: str, params: SamplingParams, choices: int, stream: bool
    ) -> None:
        """The request is understood."""
        self._choices = choices
        if not self._span.is_recording():
            return
        self._span.set_attributes(
            {
                names.RESPONSE_ID: response_id,
                names.RESPONSE_MODEL: model,
                names.REQUEST_MODEL: model,
                names.REQUEST_MAX_TOKENS: params.max_tokens,
                names.REQUEST_TEMPERATURE: float(params.temperature),
                names.REQUEST_TOP_P: float(params.top_p),
                names.REQUEST_TOP_K: params.top_k,
                # an attribute is a signed number, and a seed of 64 bits may be larger
                names.REQUEST_SEED: params.seed if params.seed < 2**63 else str(params.seed),
                names.REQUEST_PRESENCE_PENALTY: float(params.presence_penalty),
                names.REQUEST_FREQUENCY_PENALTY: float(params.frequency_penalty),
                names.REQUEST_CHOICES: choices,
                names.REQUEST_STREAM: stream,
                names.SPECULATION: params.speculation,
                names.ACCEPTANCE_RULE: params.acceptance,
            }
        )

    def asked(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """What the prompt says; noted only with ``capture_text``."""
        if self._settings.capture_text and self._span.is_recording():
            text = [_message(str(m["role"]), str(m["content"])) for m in messages]
            self._span.set_attribute(names.INPUT_MESSAGES, json.dumps(text))

    def watch(self, usage: Callable[[], Usage]) -> None:
        """Whom to ask for the tokens at the end."""
        self._usage = usage

    def routed(self, began_ns: int) -> None:
        """Workers have taken the choices that were sent at that time."""
        self._routed.append((began_ns, time.time_ns()))

    def recovered(self, attempt: int, tokens: int) -> None:
        """A choice goes on elsewhere, after a worker died that had emitted so many tokens."""
        attributes = {names.ATTEMPT: attempt, names.COMPLETION_TOKENS: tokens}
        self._span.add_event(names.EVENT_RECOVERED, attributes)

    def piece(self, index: int, text: str, reason: str | None) -> None:
        """What came for a choice."""
        if text and self._first_chunk_s is None:
            self._first_chunk_s = time.monotonic() - self._began
        if reason is not None:
            self._reasons[index] = reason
        if self._settings.capture_text:
            self._texts.setdefault(index, []).append(text)

    def finished(self, stats: RequestStats) -> None:
        """A worker has told the end of a choice."""
        self._ended_choices += 1
        self._longest_s = max(self._longest_s, stats.total_s)

    def failed(self, kind: str) -> None:
        """The answer ends with an error, whatever the status was."""
        self._failure = kind

    def end(self, status: int | None, completed: bool) -> None:
        """End the span, and decide on its trace.

        Args:
            status: of HTTP; None if the client left before there was one.
            completed: whether the answer was sent to its end.
        """
        span = self._span
        if status is not None and status >= 500 and self._failure is None:
            self._failure = str(status)
        seconds = time.monotonic() - self._began
        why = self._why_kept(seconds, completed)
        if why is None:
            return
        failure = self._failure
        outcome = "failed" if failure else "completed" if completed else "disconnected"
        span.set_attributes({names.KEPT: why, names.OUTCOME: outcome})
        if status is not None:
            span.set_attribute(names.HTTP_STATUS, status)
            if status >= 400 and failure is None:  # the client's fault is no error of the server
                span.set_attribute(names.ERROR_TYPE, str(status))
        if failure is not None:
            span.set_attribute(names.ERROR_TYPE, failure)
            span.set_status(Status(StatusCode.ERROR))
        self._add_answer(span)
        inside = kept(self.context)
        for began, ended in self._routed:
            below = self._tracer.start_span(names.SPAN_ROUTE, inside, start_time=began)
            below.end(ended)
        span.end()

    def _why_kept(self, seconds: float, completed: bool) -> str | None:
        """As the workers decide, who must not keep spans below one that is let go.

        Where the end of a choice was not heard, its worker ended it a little later than this
        side did, and may find it slow: half the time is enough then.
        """
        sampled = self._span.get_span_context().trace_flags.sampled
        heard = completed and self._ended_choices >= self._choices
        longest = max(seconds, self._longest_s) * (1 if heard else 2)
        return self._settings.rules.why_kept(sampled, self._failure is not None, longest)

    def _add_answer(self, span: Span) -> None:
        if self._first_chunk_s is not None:
            span.set_attribute(names.RESPONSE_FIRST_CHUNK_S, self._first_chunk_s)
        if self._reasons:
            reasons = [reason for _, reason in sorted(self._reasons.items())]
            span.set_attribute(names.RESPONSE_FINISH_REASONS, reasons)
        if self._usage is not None:
            usage = self._usage()
            span.set_attributes(
                {
                    names.INPUT_TOKENS: usage.prompt_tokens,
                    names.OUTPUT_TOKENS: usage.completion_tokens,
                    names.CACHE_READ_TOKENS: usage.prompt_tokens_details.cached_tokens,
                }
            )
        if self._texts:
            said = [
                _message("assistant", "".join(parts), self._reasons.get(index))
                for index, parts in sorted(self._texts.items())
            ]
            span.set_attribute(names.OUTPUT_MESSAGES, json.dumps(said))


def current_trace() -> RequestTrace:
    """That of the request which is being answered; one that tells nobody where it has none."""
    found = otel_context.get_value(_KEY)
    if isinstance(found, RequestTrace):
        return found
    return RequestTrace(NoOpTracer(), trace.INVALID_SPAN, Context(), TraceSettings())


def _message(role: str, text: str, finish_reason: str | None = None) -> dict[str, object]:
    """As ``gen_ai.input.messages`` and ``gen_ai.output.messages`` have it."""
    message: dict[str, object] = {"role": role, "parts": [{"type": "text", "content": text}]}
    return message if finish_reason is None else {**message, "finish_reason": finish_reason}
