"""Server-sent events. https://html.spec.whatwg.org/multipage/server-sent-events.html"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"


def event(data: BaseModel | Mapping[str, Any], event_id: str | None = None) -> bytes:
    """One event. ASCII only: clients differ on which characters end a line.

    Args:
        data: its content.
        event_id: what a client that comes back names it by.
    """
    if isinstance(data, BaseModel):
        text = data.model_dump_json(exclude_unset=True, ensure_ascii=True)
    else:
        text = json.dumps(data, separators=(",", ":"))
    name = "" if event_id is None else f"id: {event_id}\n"
    return f"{name}data: {text}\n\n".encode("ascii")


class EventStream(StreamingResponse):
    """An answer in events. Whatever becomes of it, ``on_close`` is awaited at the end.

    A generator's own ``finally`` would not do: it does not run where the client has left
    before the first event was asked for.
    """

    def __init__(
        self, events: AsyncIterator[bytes], on_close: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._on_close()
