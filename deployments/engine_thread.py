"""One thread that owns the engine, and the way in and out of it for asyncio."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from deployments.messages import Accepted, Event, Fault, GenerateRequest
from specdec.errors import ContextLengthError, QueueFullError, RequestError
from specdec.outputs import RequestOutput

if TYPE_CHECKING:
    from specdec.engine import Engine

log = logging.getLogger("ray.serve")
ResultT = TypeVar("ResultT")

_DEAD = "the engine stopped on an internal error; the request may be sent again"


class EngineDownError(RuntimeError):
    """The engine has failed, hangs, or is closed."""


@dataclass(frozen=True)
class _Listener:
    """Where the events of a request go. Only its loop's thread touches the queue."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Event]


class EngineThread:
    """Runs ``engine.step()`` while there is work, and sleeps otherwise.

    Commands reach the engine between two steps, through an inbox. All outputs of a step reach
    an event loop in one wake-up. A step that raises ends the thread: every open request gets
    a Fault, later ones are turned away, and ``check`` raises from then on.
    """

    def __init__(
        self,
        engine: Engine,
        stall_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._listeners: dict[str, _Listener] = {}  # touched by the engine thread only
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._down: str | None = None
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        """The events of a request. Leaving the iteration early aborts it in the engine.

        Outputs that pile up while the caller is busy are joined to one.
        """
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())
        if not self._post(lambda: self._add(request, listener)):
            yield Fault("unavailable", _DEAD)
            return
        ended = False
        try:
            while not ended:
                event = _joined(await listener.queue.get(), listener.queue)
                ended = isinstance(event, Fault) or (
                    isinstance(event, RequestOutput) and event.finished
                )
                yield event
        finally:
            if not ended:
                self._post(lambda: self._abort(request.request_id, listener))

    async def call(self, function: Callable[[Engine, int], ResultT]) -> ResultT:
        """Run ``function(engine, open requests)`` between two steps.

        Raises:
            EngineDownError: there is no engine any more.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ResultT] = loop.create_future()

        def settle(result: ResultT | None, error: Exception | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            try:
                result = function(self._engine, len(self._listeners))
            except Exception as error:  # noqa: BLE001  # handed to the caller
                _tell(loop, settle, None, error)
            else:
                _tell(loop, settle, result, None)

        if not self._post(run):
            raise EngineDownError(self._down or "closed")
        return await future

    def check(self) -> None:
        """Make sure that the engine lives and moves.

        Raises:
            EngineDownError: it does not.
        """
        if self._down is not None:
            raise EngineDownError(self._down)
        began = self._step_began
        if began is not None and self._clock() - began > self._stall_timeout_s:
            raise EngineDownError(f"a step has been running for {self._clock() - began:.0f} s")

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread after the step under way; open requests get a Fault."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def _post(self, command: Callable[[], None]) -> bool:
        """Hand a command to the engine thread; False where there is none."""
        with self._wake:
            if self._closing or self._down is not None:
                return False
            self._inbox.append(command)
            self._wake.notify()
            return True

    def _run(self) -> None:
        try:
            while (commands := self._next_commands()) is not None:
                for command in commands:
                    command()
                if self._engine.has_work:
                    self._step_began = self._clock()
                    outputs = self._engine.step()
                    self._step_began = None
                    self._deliver(outputs)
        except Exception as error:  # whatever it is, waiting callers must hear of it
            log.exception("the engine failed")
            self._end(f"the engine failed: {type(error).__name__}: {error}")
        else:
            self._end("the engine is closed")

    def _next_commands(self) -> list[Callable[[], None]] | None:
        """Commands that came in; sleeps while there are none and the engine has no work.

        Returns None when the thread is to end.
        """
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._closing or self._engine.has_work)
            if self._closing:
                return None
            commands = list(self._inbox)
            self._inbox.clear()
            return commands

    def _add(self, request: GenerateRequest, listener: _Listener) -> None:
        event: Event = Accepted()
        try:
            if self._down is not None:
                raise EngineDownError(self._down)
            self._engine.add_request(
                request.request_id, list(request.prompt_tokens), request.params
            )
            self._listeners[request.request_id] = listener
        except ContextLengthError as error:
            event = Fault("too_long", str(error), error.param)
        except RequestError as error:
            event = Fault("invalid", str(error), error.param)
        except QueueFullError as error:
            event = Fault("busy", str(error))
        except EngineDownError:
            event = Fault("unavailable", _DEAD)
        except Exception:  # one request that nobody thought of must not end all others
            log.exception("the engine cannot take request %s", request.request_id)
            event = Fault("internal", "the engine cannot take this request")
        _tell(listener.loop, listener.queue.put_nowait, event)

    def _abort(self, request_id: str, listener: _Listener) -> None:
        # a caller whose request was refused, its id being in use, must not end the other's
        if self._listeners.get(request_id) is listener:
            del self._listeners[request_id]
            self._engine.abort(request_id)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        mail: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[Event], Event]]] = {}
        for output in outputs:
            listener = self._listeners.get(output.request_id)
            if listener is None:
                continue  # aborted
            if output.finished:
                del self._listeners[output.request_id]
            mail.setdefault(listener.loop, []).append((listener.queue, output))
        for loop, letters in mail.items():
            _tell(loop, _put_all, letters)

    def _end(self, reason: str) -> None:
        with self._wake:
            self._down = reason
            abandoned = list(self._inbox)
            self._inbox.clear()
        for command in abandoned:  # adds among them still get a listener, aborts lose theirs
            command()
        for listener in self._listeners.values():
            _tell(listener.loop, listener.queue.put_nowait, Fault("unavailable", _DEAD))
        self._listeners.clear()


def _put_all(letters: list[tuple[asyncio.Queue[Event], Event]]) -> None:
    for queue, event in letters:
        queue.put_nowait(event)


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> None:
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:  # the loop is closed: nobody listens any more
        log.debug("an event came after its loop had closed")


def _joined(event: Event, queue: asyncio.Queue[Event]) -> Event:
    """``event`` and the outputs already in the queue behind it, as one output."""
    while isinstance(event, RequestOutput) and not event.finished and not queue.empty():
        following = queue.get_nowait()
        if isinstance(following, RequestOutput):
            event = replace(following, new_tokens=event.new_tokens + following.new_tokens)
        else:
            event = following
    return event
