"""Labels of the metrics: closed sets, whatever clients send."""

from __future__ import annotations

from deployments.metrics.definition import Label
from prefix_cache.breaker import BreakerState
from prefix_cache.errors import Rejection, StoreFault

#: Depths beyond the last one are told as ``other``.
DEPTHS = tuple(str(depth) for depth in range(1, 13))

ENDPOINT = Label(
    "endpoint",
    (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/version",
    ),
)
#: ``rejected`` is a 429; ``server_error`` a 5xx, or an error event in a stream; ``aborted`` a
#: client that left.
OUTCOME = Label("outcome", ("ok", "client_error", "rejected", "server_error", "aborted"))
OPERATION = Label("gen_ai.operation.name", ("chat", "text_completion"))
#: The ``code`` of the error body; ``none`` where there is no error.
ERROR_TYPE = Label(
    "error.type",
    (
        "none",
        "answer_not_found",
        "context_length_exceeded",
        "expired_api_key",
        "idempotency_key_reused",
        "internal_error",
        "invalid_api_key",
        "invalid_json",
        "invalid_type",
        "invalid_value",
        "method_not_allowed",
        "missing_required_parameter",
        "model_not_allowed",
        "model_not_found",
        "rate_limit_exceeded",
        "request_kills_workers",
        "request_timeout",
        "request_too_large",
        "server_overloaded",
        "service_unavailable",
        "unknown_parameter",
        "unknown_url",
        "unsupported_parameter",
    ),
)
#: Why a request was turned away before any work, by the code of its error.
REJECT_CODES = {
    "server_overloaded": "queue_full",
    "service_unavailable": "no_worker",
    "rate_limit_exceeded": "rate_limit",
    "request_timeout": "deadline",
    "invalid_api_key": "unauthorized",
    "expired_api_key": "unauthorized",
    "request_too_large": "too_large",
}
REJECT_REASON = Label("reason", tuple(dict.fromkeys(REJECT_CODES.values())))
RECOVERY_OUTCOME = Label("outcome", ("resumed", "handover", "failed", "poisonous"))

FINISH_REASON = Label("finish_reason", ("stop", "length", "abort", "error"))
TIER = Label("tier", ("pool", "store"))
DEPTH = Label("depth", DEPTHS)
PHASE = Label("phase", ("schedule", "load", "forward", "verify", "commit", "draft", "save"))
SEQUENCE_STATE = Label("state", ("running", "waiting", "loading"))
PAGE_STATE = Label("state", ("used", "free"))
BLOCK_RESULT = Label("result", ("hit", "miss", "unanswered", "written", "dropped"))
REJECTION = Label("reason", tuple(str(reason) for reason in Rejection))
STORE_ERROR = Label("error.type", tuple(str(fault) for fault in StoreFault))
DIRECTION = Label("direction", ("read", "write"))
BREAKER_STATE = Label("state", tuple(str(state) for state in BreakerState))
