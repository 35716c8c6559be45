"""The log of requests: a line of JSON for each, written when it has ended.

ASCII only and without line breaks, so nothing that a client sends can end a line or start one.
Headers are never written, so no key is. Prompts and answers are written only where the settings
say so.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

from deployments.metrics.request import RequestRecord
from deployments.metrics.settings import LogSettings

log = logging.getLogger("ray.serve")

#: Most characters of a path and of a model's name; both are whatever a client sent.
_NAME_CHARACTERS = 200


class RequestLog:
    """Writes. A line that cannot be written costs no request.

    Args:
        settings: see there.
        path: of the file.
    """

    def __init__(self, settings: LogSettings, path: Path) -> None:
        self.path = path
        self.keeps_text = settings.text
        self._characters = settings.text_characters
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = RotatingFileHandler(
            path, maxBytes=settings.max_bytes, backupCount=settings.backups, encoding="ascii"
        )

    def write(self, record: RequestRecord) -> None:
        """Append the line of a request that has ended."""
        line = json.dumps(self.fields(record), ensure_ascii=True, separators=(",", ":"))
        self._handler.handle(logging.LogRecord("requests", logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        """Let go of the file."""
        self._handler.close()

    def fields(self, record: RequestRecord) -> dict[str, object]:
        """What is written of a request; docs/observability.md explains each."""
        error = record.error
        fields: dict[str, object] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "trace_id": record.trace_id,
            "request_id": record.request_id,
            "method": record.method,
            "endpoint": record.path[:_NAME_CHARACTERS],
            "status": record.status,
            "outcome": record.outcome,
            "error": None if error is None else error.code,
            "total_s": round(record.seconds, 6),
        }
        generation, request = record.generation, record.request
        if generation is None or request is None:
            return fields
        usage, ended = generation.usage, generation.ended
        rounds = sum(stats.rounds for stats in ended)
        drafted = sum(stats.drafted for stats in ended)
        accepted = sum(stats.accepted for stats in ended)
        first = record.first_token_s
        fields |= {
            "model": str(request.model)[:_NAME_CHARACTERS],
            "stream": bool(request.stream),
            "choices": generation.choices,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "rounds": rounds,
            "drafted_nodes": drafted,
            "accepted_tokens": accepted,
            "acceptance": round(accepted / drafted, 4) if drafted else None,
            "tokens_per_round": round(accepted / rounds + 1, 4) if rounds else None,
            "preemptions": sum(stats.preemptions for stats in ended),
            "queue_s": round(max(stats.queue_s for stats in ended), 6) if ended else None,
            "first_token_s": None if first is None else round(first, 6),
        }
        if self.keeps_text:
            fields["prompt"] = json.dumps(record.prompt, ensure_ascii=False)[: self._characters]
            fields["output"] = [
                "".join(parts)[: self._characters] for parts in generation.texts or []
            ]
        return fields


def open_request_log(settings: LogSettings, replica: str | None) -> RequestLog | None:
    """The log of this replica; None where there is to be none, or it cannot be written."""
    if not settings.requests:
        return None
    folder = settings.folder or serve_log_folder()
    if folder is None:
        return None
    try:
        return RequestLog(settings, folder.expanduser() / f"requests_{replica or 'gateway'}.jsonl")
    except OSError as error:
        log.error("logs.folder: no log of requests: %s", error)
        return None


def serve_log_folder() -> Path | None:
    """Where Ray Serve writes the logs of this replica; None outside of one."""
    pending = list(log.handlers)
    while pending:
        handler = pending.pop()
        if isinstance(handler, logging.FileHandler):
            return Path(handler.baseFilename).parent
        target = getattr(handler, "target", None)  # Serve buffers in a MemoryHandler
        if isinstance(target, logging.Handler):
            pending.append(target)
    return None
