"""The worker's side of recovery: checkpoints of what it runs, written behind the engine's steps."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from deployments.config import RecoverySettings
from deployments.messages import GenerateRequest, Ticket
from deployments.progress import Progress
from prefix_cache.checkpoints.record import Checkpoint, State
from prefix_cache.checkpoints.store import CheckpointStore, Save
from prefix_cache.errors import CheckpointTooLarge, PrefixCacheError, StoreError
from prefix_cache.priority import give_way
from prefix_cache.quiet_log import QuietLog
from specdec.outputs import RequestOutput
from specdec.policy.tree import DraftTree

log = logging.getLogger("ray.serve")

#: Checkpoints that wait to be written; beyond, new ones are dropped.
_MOST_WAITING = 4096
#: Bytes and number of checkpoints written at once.
_BATCH_BYTES, _BATCH = 2 * 2**20, 64
#: Of checkpoints that a starting worker counts.
_COUNTED = 1000
_NO_TREE = DraftTree((), (), (), ())


@dataclass(eq=False)
class _Tracked:
    """A running request. Tokens are appended by the engine's thread and never changed, so that the
    writing thread may copy a beginning of them at any time.
    """

    request: GenerateRequest
    ticket: Ticket
    tokens: array[int]
    rounds: int = 0
    recorded: int = 0
    written_at: float = 0.0
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True)
class _State:
    """What is to be written of a request: its first ``count`` tokens and the rest."""

    tracked: _Tracked
    count: int
    draft: DraftTree
    progress: Progress
    running: bool
    removed: bool = False


class Checkpointer:
    """A :class:`deployments.recorder.Recorder` with a thread that writes.

    Of each request the newest state waits, in place of the one before. Where the store fails, what
    was to be written is forgotten: the next state of a request makes good for it.

    Args:
        store: closed with this.
        settings: how often.
        owner: this worker's name.
        lost: told of attempts that another owner has taken over; called by the thread.
    """

    def __init__(
        self,
        store: CheckpointStore,
        settings: RecoverySettings,
        owner: str,
        lost: Callable[[str], None],
    ) -> None:
        assert settings.store is not None
        self._store = store
        self._settings = settings
        self._lease_s = settings.store.lease_s
        self._deadline_s = settings.store.write_deadline_ms / 1000
        self._owner = owner
        self._lost = lost
        self._log = QuietLog(log)
        self._changed = threading.Condition()
        self._tracked: dict[str, _Tracked] = {}
        self._waiting: dict[str, _State] = {}
        self._busy = self._closed = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def begin(self, request: GenerateRequest) -> None:
        """See Recorder."""
        if request.ticket is None:
            return
        prior = array("I", request.prior_tokens)
        tracked = _Tracked(request, request.ticket, prior, recorded=len(prior))
        tracked.written_at = time.monotonic()
        name, fence = request.request_id, _fence(tracked)
        with self._changed:
            older = [
                attempt_id
                for attempt_id, other in self._tracked.items()
                if other.request.request_id == name and _fence(other) < fence
            ]
            self._tracked[request.attempt_id] = tracked
        for attempt_id in older:  # of a connection that was taken for dead, or of a dead gateway
            self._lose(attempt_id)

    def progressed(
        self, output: RequestOutput, draft_of: Callable[[str], DraftTree | None]
    ) -> None:
        """See Recorder."""
        tracked = self._tracked.get(output.request_id)
        if tracked is None:
            return
        tracked.tokens.extend(output.new_tokens)
        tracked.rounds += 1
        tracked.progress = tracked.progress.after(output)
        if output.finished:
            self._end(output.request_id, removed=output.finish_reason == "error")
            return
        new = len(tracked.tokens) - tracked.recorded
        if new < self._settings.every_tokens and tracked.rounds < self._settings.every_rounds:
            return
        tracked.rounds, tracked.recorded = 0, len(tracked.tokens)
        self._put(self._state(tracked, draft_of(output.request_id), running=True))

    def left(self, attempt_id: str) -> None:
        """See Recorder. What it has got stays, for whoever asks for the rest."""
        self._end(attempt_id, removed=False)

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits to be written; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Let go of all leases, write what waits as far as the time allows, close the store."""
        for attempt_id in list(self._tracked):
            self.left(attempt_id)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        self._store.close()

    def _end(self, attempt_id: str, removed: bool) -> None:
        with self._changed:
            tracked = self._tracked.pop(attempt_id, None)
        if tracked is not None:  # else the writing thread has just lost it
            self._put(replace(self._state(tracked, None, running=False), removed=removed))

    def _state(self, tracked: _Tracked, draft: DraftTree | None, running: bool) -> _State:
        return _State(tracked, len(tracked.tokens), draft or _NO_TREE, tracked.progress, running)

    def _put(self, state: _State) -> None:
        name = state.tracked.request.attempt_id
        with self._changed:
            if name not in self._waiting and len(self._waiting) >= _MOST_WAITING:
                self.dropped += 1
                return
            self._waiting[name] = state
            self._changed.notify_all()

    def _run(self) -> None:
        give_way()
        self._count_old()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed, self._lease_s / 6)
                if self._closed and not self._waiting:
                    return
                batch = self._next_batch()
                self._busy = True
            try:
                self._write(batch)
            except Exception:  # a bug must not end all checkpoints
                log.exception("checkpoints not written")
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _next_batch(self) -> list[_State]:
        """States that wait, and those of requests whose leases want to be renewed. Whoever calls
        holds the lock.
        """
        due = time.monotonic() - self._lease_s / 3
        for name, tracked in self._tracked.items():
            if tracked.written_at < due and name not in self._waiting:
                self._waiting[name] = self._state(tracked, None, running=True)
        batch: list[_State] = []
        size = 0
        while self._waiting and len(batch) < _BATCH and size < _BATCH_BYTES:
            state = self._waiting.pop(next(iter(self._waiting)))
            batch.append(state)
            size += 4 * (len(state.tracked.request.prompt_tokens) + state.count)
        return batch

    def _write(self, batch: list[_State]) -> None:
        states: dict[str, _State] = {}
        for state in batch:  # of two attempts of a request the later one counts
            other = states.get(state.tracked.request.request_id)
            if other is None or _fence(other.tracked) < _fence(state.tracked):
                states[state.tracked.request.request_id] = state
        try:
            for state in states.values():
                if state.removed:
                    name = state.tracked.request.request_id
                    self._store.remove([name], _fence(state.tracked), self._deadline_s)
            kept = [state for state in states.values() if not state.removed]
            written = self._save(kept)
        except StoreError as error:
            self.dropped += len(batch)
            self._log.warn(error.fault, f"{len(batch)} checkpoints not written: {error}")
            return
        for state, done in zip(kept, written, strict=True):
            if not done:
                self._lose(state.tracked.request.attempt_id)

    def _save(self, states: list[_State]) -> list[bool]:
        now = time.monotonic()
        for state in states:
            state.tracked.written_at = now  # also if it fails: the next one comes in its time
        saves = [
            Save(self._checkpoint(state), self._lease_s if state.running else 0.0)
            for state in states
        ]
        try:
            return self._store.save(saves, self._deadline_s) if saves else []
        except CheckpointTooLarge as error:
            if len(states) > 1:
                return [self._save([state])[0] for state in states]
            self._log.warn("size", f"no checkpoint: {error}")
            with self._changed:
                self._tracked.pop(states[0].tracked.request.attempt_id, None)
            return [True]

    def _lose(self, attempt_id: str) -> None:
        with self._changed:
            self._waiting.pop(attempt_id, None)
            running = self._tracked.pop(attempt_id, None) is not None
        if running:
            log.warning("request %s has another owner by now", attempt_id)
            self._lost(attempt_id)

    def _checkpoint(self, state: _State) -> Checkpoint:
        request, ticket = state.tracked.request, state.tracked.ticket
        return Checkpoint(
            request_id=request.request_id,
            prompt=request.prompt_tokens,
            emitted=state.tracked.tokens[: state.count],
            request=ticket.request,
            answer=ticket.answer,
            progress=state.progress.encode(),
            finished=state.progress.finish_reason is not None,
            draft=state.draft.tokens,
            draft_parents=state.draft.parents,
            owner=self._owner,
            fence=_fence(state.tracked),
            written_at=time.time(),
        )

    def _count_old(self) -> None:
        """Say what earlier workers have left. Whoever answers its client claims it."""
        try:
            found = self._store.list(_COUNTED, self._deadline_s)
        except PrefixCacheError as error:
            log.warning("checkpoints cannot be listed: %s", error)
            return
        left = [one for one in found if one.state is State.UNFINISHED and not one.leased]
        if left:
            log.info("%d unfinished checkpoints without an owner wait to be claimed", len(left))


def _fence(tracked: _Tracked) -> int:
    return tracked.ticket.fence + tracked.request.attempt
