"""``redis://``, ``rediss://`` and ``unix://``: blocks in a Redis or Valkey server.

    redis://[user:password@]host[:port][/db]
    rediss://...?ca=/path/ca.pem&cert=/path/client.pem&key=/path/client.key
    unix://[user:password@]/path/to/socket?db=0

Further option: ``connections``, the most open at once. The server's ``maxmemory`` bounds what it
holds; give it an ``allkeys-lru`` policy. Only commands on single keys are sent, in pipelines, so
that a proxy in front of a cluster may route them. Needs Redis 4 or Valkey, nothing newer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self, cast
from urllib.parse import SplitResult, unquote

from prefix_cache.errors import StoreConfigError, StoreError, StoreFault
from prefix_cache.store import StoreOptions, StoreStats, Value
from prefix_cache.stores.deadline import Deadline
from prefix_cache.stores.url import count, option, query_of

try:
    import redis
except ImportError as missing:
    raise StoreConfigError(
        "redis:// needs the redis package; pip install 'specdec[serve]'"
    ) from missing

from prefix_cache.stores.redis_connection import Timer, make_pool

#: Commands sent before their replies are read, and bytes of values in them.
_CHUNK_COMMANDS = 64
_CHUNK_BYTES = 8 * 2**20
_CONNECTIONS = 64
_PORT = 6379

Command = tuple[Value | str | int, ...]
Where = dict[str, str | int | None]


class RedisStore:
    """Blocks as plain string values with a TTL."""

    def __init__(
        self, where: Where, options: StoreOptions, connections: int = _CONNECTIONS
    ) -> None:
        self._options = options
        self._password = where.get("password")
        self._name = where.get("path") or f"{where.get('host')}:{where.get('port')}"
        self._timer = Timer()
        self._pool = make_pool(where, self._timer, connections)
        self._client = redis.Redis(connection_pool=self._pool)
        self._ttl_ms = max(1, round(options.ttl_s * 1000))
        self._closed = False

    @classmethod
    def from_url(cls, parts: SplitResult, options: StoreOptions) -> Self:
        """The store of a URL; the server is not called yet.

        Raises:
            StoreConfigError: the URL is wrong. The message holds no credentials.
        """
        tls, local = parts.scheme == "rediss", parts.scheme == "unix"
        known = (
            "connections",
            *(("ca", "cert", "key") if tls else ()),
            *(("db",) if local else ()),
        )
        query = query_of(parts, known)
        where: Where = {
            "username": unquote(parts.username) if parts.username else None,
            "password": unquote(parts.password) if parts.password else None,
        }
        database = query.get("db", "0") if local else parts.path.strip("/") or "0"
        if not database.isdecimal():
            raise StoreConfigError(f"{parts.scheme}: the database is a number, not {database!r}")
        where["db"] = int(database)
        if local:
            where["path"] = unquote(parts.path)
        else:
            where |= _address(parts)
        if tls:
            where |= {
                "ssl_ca_certs": _file(query, "ca"),
                "ssl_certfile": _file(query, "cert"),
                "ssl_keyfile": _file(query, "key"),
            }
        return cls(where, options, option(query, "connections", count, _CONNECTIONS))

    def get_many(self, keys: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        """See BlockStore."""
        replies = self._run([("GET", self._options.key(key)) for key in keys], deadline_s)
        return cast("list[bytes | None]", replies)

    def has_many(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """See BlockStore."""
        replies = self._run([("EXISTS", self._options.key(key)) for key in keys], deadline_s)
        return [reply == 1 for reply in replies]

    def put_many(self, items: Sequence[tuple[bytes, Value]], deadline_s: float) -> None:
        """See BlockStore."""
        self._run(
            [("SET", self._options.key(key), value, "PX", self._ttl_ms) for key, value in items],
            deadline_s,
        )

    def touch_many(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """See BlockStore."""
        self._run([("PEXPIRE", self._options.key(key), self._ttl_ms) for key in keys], deadline_s)

    def list_keys(self, most: int, deadline_s: float) -> list[bytes]:
        """See BlockStore."""
        prefix = self._options.key(b"")
        found: dict[bytes, None] = {}  # a scan may give a key twice
        for keys in self._scan(Deadline(deadline_s)):
            found.update(dict.fromkeys(key.removeprefix(prefix) for key in keys))
            if len(found) >= most:
                break
        return list(found)[:most]

    def purge(self, deadline_s: float) -> None:
        """See BlockStore."""
        deadline = Deadline(deadline_s)
        for keys in self._scan(deadline):
            self._run([("UNLINK", key) for key in keys], deadline.left())

    def _scan(self, deadline: Deadline) -> Iterator[list[bytes]]:
        """Keys as they are stored, some at a time."""
        cursor = b"0"
        while True:
            scan: Command = ("SCAN", cursor, "MATCH", self._options.key(b"*"), "COUNT", 1000)
            (reply,) = self._run([scan], deadline.left())
            cursor, keys = cast("tuple[bytes, list[bytes]]", reply)
            yield keys
            if int(cursor) == 0:
                return

    def stats(self, deadline_s: float) -> StoreStats:
        """Keys of the whole database, and all memory that the server uses."""
        entries, memory = self._run([("DBSIZE",), ("INFO", "memory")], deadline_s)
        used = cast("dict[str, int]", memory).get("used_memory")
        return StoreStats(cast("int", entries), used)

    def close(self) -> None:
        """See BlockStore."""
        self._closed = True
        self._pool.disconnect()

    def _run(self, commands: Sequence[Command], deadline_s: float) -> list[object]:
        """Replies to ``commands``; an error among them is raised."""
        if self._closed:
            raise StoreError(StoreFault.UNAVAILABLE, "the store is closed")
        replies: list[object] = []
        self._timer.start(deadline_s)
        try:
            for chunk in _chunks(commands):
                pipeline = self._client.pipeline(transaction=False)
                for command in chunk:
                    pipeline.execute_command(*command)
                replies += pipeline.execute(raise_on_error=False)
        except (redis.RedisError, OSError, ValueError) as error:
            # ValueError: what answers does not speak the protocol
            raise self._translated(error) from error
        for reply in replies:
            if isinstance(reply, Exception):
                raise self._translated(reply) from reply
        return replies

    def _translated(self, error: Exception) -> StoreError:
        text = f"redis at {self._name}: {type(error).__name__}: {error}"
        if self._password:
            text = text.replace(str(self._password), "***")
        if isinstance(error, redis.exceptions.OutOfMemoryError):
            return StoreError(StoreFault.FULL, text)
        if isinstance(error, (redis.TimeoutError, TimeoutError)):
            return StoreError(StoreFault.TIMEOUT, text)
        return StoreError(StoreFault.UNAVAILABLE, text)


def _address(parts: SplitResult) -> Where:
    try:
        host, port = parts.hostname, parts.port or _PORT
    except ValueError as error:
        raise StoreConfigError(f"{parts.scheme}: the port is not a number") from error
    if not host:
        raise StoreConfigError(f"{parts.scheme}: a host is missing")
    return {"host": host, "port": port}


def _file(query: dict[str, str], name: str) -> str | None:
    path = query.get(name)
    if path is not None and not Path(path).is_file():
        raise StoreConfigError(f"rediss: {name}: no file {path}")
    return path


def _chunks(commands: Sequence[Command]) -> list[list[Command]]:
    chunks: list[list[Command]] = []
    size = 0
    for command in commands:
        length = sum(len(part) for part in command if isinstance(part, (bytes, memoryview)))
        full = not chunks or len(chunks[-1]) == _CHUNK_COMMANDS or size + length > _CHUNK_BYTES
        if full:
            chunks.append([])
            size = 0
        chunks[-1].append(command)
        size += length
    return chunks
