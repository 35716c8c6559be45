"""Connections of redis-py that keep one deadline over a whole call.

redis-py knows a timeout for each wait on its socket, so a server that dribbles can hold a caller
for ever. Here each wait gets what is left of the call's own time, connecting included. What is
not bounded is the resolution of the host's name.
"""

from __future__ import annotations

import socket
import threading
import time

from redis.backoff import NoBackoff
from redis.connection import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

_READ_BYTES = 2**18


class Timer(threading.local):
    """When the call that this thread makes must have returned."""

    _at = 0.0

    def start(self, seconds: float) -> None:
        """Begin a call that may take ``seconds``."""
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, above 0.

        Raises:
            TimeoutError: none is; redis-py takes it for its own.
        """
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError("the call's deadline has passed")
        return left


class _TimedSocket:
    """As much of a socket as redis-py uses. A timeout other than 0 (do not wait) is the timer's."""

    def __init__(self, inner: socket.socket, timer: Timer) -> None:
        self._inner = inner
        self._timer = timer
        self._waits = True

    def settimeout(self, seconds: float | None) -> None:
        self._waits = seconds != 0

    def recv(self, size: int) -> bytes:
        self._inner.settimeout(self._timer.left() if self._waits else 0)
        return self._inner.recv(size)

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._inner.settimeout(self._timer.left())
            view = view[self._inner.send(view) :]

    def shutdown(self, how: int) -> None:
        self._inner.shutdown(how)

    def close(self) -> None:
        self._inner.close()

    def getsockname(self) -> object:
        return self._inner.getsockname()

    def getpeername(self) -> object:
        return self._inner.getpeername()


class _Timed(AbstractConnection):
    """Set before a kind of connection: timeouts come from ``timer``, not from settings."""

    def __init__(self, *, timer: Timer, **settings: object) -> None:
        self._timer = timer
        super().__init__(**settings)  # type: ignore[arg-type]  # passed on as they came

    @property
    def socket_timeout(self) -> float:
        return self._timer.left()

    @socket_timeout.setter
    def socket_timeout(self, value: object) -> None:
        """Not settable."""

    @property
    def socket_connect_timeout(self) -> float:
        return self._timer.left()

    @socket_connect_timeout.setter
    def socket_connect_timeout(self, value: object) -> None:
        """Not settable."""

    def _connect(self) -> _TimedSocket:
        return _TimedSocket(super()._connect(), self._timer)  # type: ignore[safe-super, no-untyped-call]


class _Tcp(_Timed, Connection):
    pass


class _Tls(_Timed, SSLConnection):
    pass


class _Unix(_Timed, UnixDomainSocketConnection):
    pass


def make_pool(where: dict[str, str | int | None], timer: Timer, connections: int) -> ConnectionPool:
    """A pool of such connections, which never tries a call twice.

    Args:
        where: arguments of redis-py's connection class: host and port or path, db, credentials,
            and with ``ssl_ca_certs`` also those of TLS.
        timer: started before each call.
        connections: most of them open at once; a call beyond fails.
    """
    kind: type[_Timed] = _Unix if "path" in where else _Tls if "ssl_ca_certs" in where else _Tcp
    return ConnectionPool(
        connection_class=kind,
        max_connections=connections,
        timer=timer,
        retry=Retry(NoBackoff(), 0),
        socket_read_size=_READ_BYTES,
        # a handshake of as few round trips as may be
        protocol=2,
        driver_info=None,
        maint_notifications_config=MaintNotificationsConfig(enabled=False),
        **where,  # type: ignore[arg-type]  # of the connection class
    )
