"""One thread that owns the engine, and the way in and out of it for asyncio."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from deployments.health import ErrorStorm
from deployments.messages import Accepted, Alive, Event, Fault, GenerateRequest
from deployments.recorder import NoRecorder, Recorder
from specdec.errors import ContextLengthError, QueueFullError, RequestError
from specdec.outputs import RequestOutput
from specdec.policy.tree import DraftTree
from specdec.tracing.carrier import context_for

if TYPE_CHECKING:
    from opentelemetry.context import Context

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

    Attributes:
        recorder: hears of requests from the next one on.
    """

    def __init__(
        self,
        engine: Engine,
        stall_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        heartbeat_s: float = 3.0,
        storm: ErrorStorm | None = None,
        after_step: Callable[[Engine, list[RequestOutput], float], None] | None = None,
    ) -> None:
        self.recorder: Recorder = NoRecorder()
        self._heartbeat_s = heartbeat_s
        self._storm = storm
        self._engine = engine
        self._after_step = after_step
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

    @property
    def engine(self) -> Engine:
        """The engine, which only this thread may step."""
        return self._engine

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        """The events of a request. Leaving the iteration early aborts it in the engine.

        Outputs that pile up while the caller is busy are joined to one.
        """
        fault = await self._compile(request)
        if fault is not None:
            yield fault
            return
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())
        context = context_for(request.trace)
        if not self._post(lambda: self._add(request, listener, context)):
            yield Fault("unavailable", _DEAD)
            return
        ended = False
        try:
            while not ended:
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        event = await listener.queue.get()
                except TimeoutError:
                    if self._problem() is None:  # else silence says what there is to say
                        yield Alive()
                    continue
                event = _joined(event, listener.queue)
                ended = isinstance(event, Fault) or (
                    isinstance(event, RequestOutput) and event.finished
                )
                yield event
        finally:
            if not ended:
                self._post(lambda: self._abort(request.attempt_id, listener))

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

    def lose(self, attempt_id: str) -> None:
        """End an attempt that another owner has taken over; returns at once."""
        self._post(lambda: self._take_away(attempt_id))

    def post(self, function: Callable[[Engine], None]) -> bool:
        """Have ``function(engine)`` run between two steps, some time; False if it will not.

        It must not raise: that would end the engine.
        """
        return self._post(lambda: function(self._engine))

    def check(self) -> None:
        """Make sure that the engine lives and moves.

        Raises:
            EngineDownError: it does not.
        """
        problem = self._problem()
        if problem is not None:
            raise EngineDownError(problem)
        failed = 0 if self._storm is None else self._storm.failed()
        if failed:
            raise EngineDownError(f"{failed} requests in a short time had non-finite numbers")

    def _problem(self) -> str | None:
        if self._down is not None:
            return self._down
        began = self._step_began
        if began is not None and self._clock() - began > self._stall_timeout_s:
            return f"a step has been running for {self._clock() - began:.0f} s"
        return None

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread after the step under way; open requests get a Fault."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)

    async def _compile(self, request: GenerateRequest) -> Fault | None:
        """Compile a request's grammar, beside the engine's thread, so that no step waits for it.

        Returns:
            What is wrong with it, if anything is.
        """
        grammar = request.params.grammar
        if grammar is None:
            return None
        try:
            await asyncio.to_thread(self._engine.grammars.compile, grammar)
        except RequestError as error:
            return Fault("invalid", str(error), error.param)
        return None

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
                    self._step_began = began = self._clock()
                    outputs = self._engine.step()
                    seconds, self._step_began = self._clock() - began, None
                    self._deliver(outputs)
                    if self._after_step is not None:
                        self._after_step(self._engine, outputs, seconds)
        except Exception as error:  # whatever it is, waiting callers must hear of it
            log.exception("the engine failed")
            self._end(f"the engine failed: {type(error).__name__}: {error}")
        else:
            self._end("the engine is closed", clean=True)

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

    def _add(self, request: GenerateRequest, listener: _Listener, context: Context | None) -> None:
        event: Event = Accepted()
        try:
            if self._down is not None:
                raise EngineDownError(self._down)
            self._engine.add_request(
                request.attempt_id,
                request.prompt_tokens,
                request.params,
                request.scope,
                request.prior_tokens,
                context,
            )
            self._listeners[request.attempt_id] = listener
            self.recorder.begin(request)
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
            self.recorder.left(request_id)

    def _take_away(self, request_id: str) -> None:
        listener = self._listeners.pop(request_id, None)
        if listener is not None:
            self._engine.abort(request_id)
            fault = Fault("superseded", "another connection goes on with this answer")
            _tell(listener.loop, listener.queue.put_nowait, fault)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        mail: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[Event], Event]]] = {}
        for output in outputs:
            listener = self._listeners.get(output.request_id)
            if listener is None:
                continue  # aborted
            if output.finish_reason is not None:
                del self._listeners[output.request_id]
                if self._storm is not None:
                    self._storm.count(output.finish_reason)
            self.recorder.progressed(output, self._draft_of)
            mail.setdefault(listener.loop, []).append((listener.queue, output))
        for loop, letters in mail.items():
            _tell(loop, _put_all, letters)

    def _draft_of(self, attempt_id: str) -> DraftTree | None:
        sequence = self._engine.scheduler.find(attempt_id)
        return None if sequence is None else sequence.draft

    def _end(self, reason: str, clean: bool = False) -> None:
        with self._wake:
            self._down = reason
            abandoned = list(self._inbox)
            self._inbox.clear()
        for command in abandoned:  # adds among them still get a listener, aborts lose theirs
            command()
        for attempt_id, listener in self._listeners.items():
            fault = Fault("handover", "the worker stops") if clean else Fault("lost", _DEAD)
            _tell(listener.loop, listener.queue.put_nowait, fault)
            self.recorder.left(attempt_id)
        self._listeners.clear()
        self._engine.close(5.0 if clean else 0.0)  # what a broken engine computed is not kept


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
        if not isinstance(following, RequestOutput):
            return following
        event = event.followed_by(following)
    return event
