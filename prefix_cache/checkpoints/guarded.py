"""A checkpoint store behind a circuit breaker: an outage costs a few failed calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from prefix_cache.breaker import BreakerState, CircuitBreaker
from prefix_cache.checkpoints.cells import Cells, ReopeningCells, open_cells
from prefix_cache.checkpoints.codec import CheckpointCodec
from prefix_cache.checkpoints.record import Checkpoint, Listed
from prefix_cache.checkpoints.settings import CheckpointSettings
from prefix_cache.checkpoints.store import CheckpointStore, Found, Save, SwappingStore
from prefix_cache.errors import StoreError, StoreFault
from prefix_cache.quiet_log import QuietLog

_LOGGER = logging.getLogger("prefix_cache")

ResultT = TypeVar("ResultT")


class GuardedStore:
    """Passes calls on to a :class:`CheckpointStore` while its breaker lets it.

    While it does not, every call raises StoreError UNAVAILABLE at once.
    """

    def __init__(self, store: CheckpointStore, breaker: CircuitBreaker) -> None:
        self._store = store
        self._breaker = breaker
        self._log = QuietLog(_LOGGER)

    @property
    def state(self) -> BreakerState:
        """Of the breaker."""
        return self._breaker.state

    def create(
        self, checkpoint: Checkpoint, lease_s: float, deadline_s: float
    ) -> Checkpoint | None:
        """See CheckpointStore."""
        return self._guarded(lambda: self._store.create(checkpoint, lease_s, deadline_s))

    def save(self, saves: Sequence[Save], deadline_s: float) -> list[bool]:
        """See CheckpointStore."""
        return self._guarded(lambda: self._store.save(saves, deadline_s))

    def claim(
        self,
        request_id: str,
        owner: str,
        lease_s: float,
        deadline_s: float,
        supersede: int | None = None,
    ) -> Checkpoint | None:
        """See CheckpointStore."""
        return self._guarded(
            lambda: self._store.claim(request_id, owner, lease_s, deadline_s, supersede)
        )

    def renew(self, request_id: str, fence: int, lease_s: float, deadline_s: float) -> None:
        """See CheckpointStore."""
        self._guarded(lambda: self._store.renew(request_id, fence, lease_s, deadline_s))

    def remove(self, request_ids: Sequence[str], fence: int, deadline_s: float) -> None:
        """See CheckpointStore."""
        self._guarded(lambda: self._store.remove(request_ids, fence, deadline_s))

    def get(self, request_id: str, deadline_s: float) -> Found | None:
        """See CheckpointStore."""
        return self._guarded(lambda: self._store.get(request_id, deadline_s))

    def list(self, most: int, deadline_s: float) -> list[Listed]:
        """See CheckpointStore."""
        return self._guarded(lambda: self._store.list(most, deadline_s))

    def close(self) -> None:
        """See CheckpointStore."""
        self._store.close()

    def _guarded(self, call: Callable[[], ResultT]) -> ResultT:
        if not self._breaker.allow():
            raise StoreError(StoreFault.UNAVAILABLE, "left alone after failures in a row")
        try:
            result = call()
        except StoreError as error:
            if error.fault is StoreFault.FULL:
                self._breaker.success()  # it answers, and may be read
            else:
                self._breaker.failure()
            self._log.warn(error.fault, f"checkpoints: {error}")
            raise
        except Exception:  # what the store answered, such as a lease held
            self._breaker.success()
            raise
        self._breaker.success()
        return result


def open_checkpoints(settings: CheckpointSettings) -> GuardedStore:
    """The store that ``settings`` describe. One that cannot be opened now is tried again later.

    Raises:
        StoreConfigError: the settings are wrong.
    """
    codec = CheckpointCodec(settings.max_checkpoint_bytes, settings.secret_bytes())
    opener = partial(open_cells, settings.store_url(), settings.store_options())
    cells: Cells
    try:
        cells = opener()
    except StoreError as error:
        _LOGGER.warning("checkpoints: none for now: %s", error)
        cells = ReopeningCells(opener)
    return GuardedStore(SwappingStore(cells, codec, settings.ttl_s), settings.breaker())
