"""What a Redis server may do to those who ask it."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.valkey import Valkey
from prefix_cache.errors import StoreError, StoreFault
from tests.prefix_cache.opening import SOON, fault_of, key, opened
from tests.prefix_cache.servers import Proxy


@contextmanager
def proxied(port: int, delay_s: float, piece: int = 2**16) -> Iterator[str]:
    proxy = Proxy(port, delay_s, piece)
    try:
        yield f"redis://127.0.0.1:{proxy.port}"
    finally:
        proxy.stop()


def test_a_killed_server_is_unavailable_and_its_successor_is_used(own_valkey: Valkey) -> None:
    with opened(own_valkey.url) as store:
        store.put_many([(key(1), b"1")], SOON)
        own_valkey.stop()
        for _ in range(3):
            assert fault_of(lambda: store.get_many([key(1)], 1.0), 1.0) is StoreFault.UNAVAILABLE
        own_valkey.start()
        assert store.get_many([key(1)], SOON) == [None]
        store.put_many([(key(1), b"2")], SOON)
        own_valkey.stop()
        own_valkey.start()
        assert store.get_many([key(1)], SOON) == [None], "without a call in between to notice"


def test_a_paused_server_holds_nobody_beyond_the_deadline(own_valkey: Valkey) -> None:
    with opened(own_valkey.url) as store:
        store.put_many([(key(1), b"1")], SOON)
        own_valkey.signal(signal.SIGSTOP)
        calls: list[Callable[[], object]] = [
            lambda: store.get_many([key(1)] * 100, 0.1),  # on a connection that was open
            lambda: store.get_many([key(1)], 0.1),  # on one that the kernel alone accepted
            lambda: store.has_many([key(1)], 0.1),
            lambda: store.put_many([(key(1), bytes(50_000_000))], 0.1),
            lambda: store.touch_many([key(1)], 0.1),
            lambda: store.purge(0.1),
            lambda: store.stats(0.1),
        ]
        for call in calls:
            assert fault_of(call, 0.1) is StoreFault.TIMEOUT
        own_valkey.signal(signal.SIGCONT)
        assert store.get_many([key(1)], SOON)[0] in (b"1", bytes(50_000_000))


def test_late_replies_are_waited_for_as_long_as_the_whole_call_may_take(valkey: Valkey) -> None:
    with proxied(valkey.port, 0.05) as url, opened(url) as store:
        store.put_many([(key(n), b"late") for n in range(10)], SOON)
        assert store.get_many([key(n) for n in range(10)], 1.0) == [b"late"] * 10
        assert fault_of(lambda: store.get_many([key(1)], 0.03), 0.03) is StoreFault.TIMEOUT
        # 400 commands are several pipelines, each in time for itself
        keys = [key(n) for n in range(400)]
        assert fault_of(lambda: store.get_many(keys, 0.2), 0.2) is StoreFault.TIMEOUT
        assert store.get_many([key(1)], 1.0) == [b"late"], "no reply of an earlier call"


def test_a_server_that_dribbles_meets_the_same_deadline(valkey: Valkey) -> None:
    with opened(valkey.url) as direct:
        direct.put_many([(key(1), bytes(100_000))], SOON)
    with proxied(valkey.port, 0.02, piece=500) as url, opened(url) as store:
        assert fault_of(lambda: store.get_many([key(1)], 0.3), 0.3) is StoreFault.TIMEOUT


def test_nobody_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for url in (f"redis://127.0.0.1:{port}", f"unix://{tmp_path}/nothing"):
        with opened(url) as store:
            fault = fault_of(lambda: store.get_many([key(1)], 1.0), 1.0)
            assert fault is StoreFault.UNAVAILABLE


@pytest.mark.parametrize(
    "answer", [b"$abc\r\n", b"HTTP/1.1 400 Bad\r\n\r\n", b"$99999999999\r\n", b""]
)
def test_something_else_answers(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)
                connection.recv(1000)

        thread = threading.Thread(target=serve)
        thread.start()
        with opened(f"redis://127.0.0.1:{server.getsockname()[1]}") as store:
            fault = fault_of(lambda: store.get_many([key(1)], 0.3), 0.3)
        thread.join(10)
    assert fault in (StoreFault.UNAVAILABLE, StoreFault.TIMEOUT)


def test_full_without_eviction(tmp_path: Path) -> None:
    server = Valkey(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    try:
        with opened(server.url) as store:
            items = [(key(n), bytes(500_000)) for n in range(40)]
            assert fault_of(lambda: store.put_many(items, SOON), SOON) is StoreFault.FULL
            there = store.has_many([key(n) for n in range(40)], SOON)
            assert 0 < sum(there) < 40
            assert store.get_many([key(there.index(True))], SOON) == [bytes(500_000)]
            store.touch_many([key(0)], SOON)
            store.purge(SOON)
            store.put_many(items[:3], SOON)
    finally:
        server.stop()


def test_full_with_eviction(tmp_path: Path) -> None:
    server = Valkey(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")
    try:
        with opened(server.url) as store:
            for number in range(40):
                store.put_many([(key(number), bytes(500_000))], SOON)
            there = store.has_many([key(n) for n in range(40)], SOON)
            assert there[-1]
            assert 0 < sum(there) < 20
    finally:
        server.stop()


def test_every_write_has_a_ttl(valkey: Valkey) -> None:
    with opened(valkey.url) as store:
        store.put_many([(key(1), b"1")], SOON)
        with socket.create_connection(("127.0.0.1", valkey.port)) as raw:
            raw.sendall(b"*2\r\n$4\r\nPTTL\r\n$35\r\nkv:" + key(1) + b"\r\n")
            assert 0 < int(raw.recv(100)[1:]) <= 60_000


def test_an_error_reply_is_an_error_whatever_else_was_answered(valkey: Valkey) -> None:
    with opened(valkey.url) as store:
        with socket.create_connection(("127.0.0.1", valkey.port)) as raw:
            raw.sendall(b"*3\r\n$5\r\nLPUSH\r\n$35\r\nkv:" + key(77) + b"\r\n$1\r\nx\r\n")
            assert raw.recv(100) == b":1\r\n"
        store.put_many([(key(76), b"76")], SOON)
        assert fault_of(lambda: store.get_many([key(76), key(77)], SOON), SOON) is (
            StoreFault.UNAVAILABLE
        )
        assert store.get_many([key(76)], SOON) == [b"76"]
        store.purge(SOON)


def test_passwords_open_and_are_never_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Valkey(tmp_path, "--requirepass", "hunt@er2")
    try:
        with opened(f"redis://:hunt%40er2@127.0.0.1:{server.port}/3") as store:
            store.put_many([(key(1), b"1")], SOON)
            assert store.get_many([key(1)], SOON) == [b"1"]
        for url in (f"redis://:wrong-hunter@127.0.0.1:{server.port}", server.url):
            with opened(url) as store, pytest.raises(StoreError) as caught:
                store.get_many([key(1)], SOON)
            assert caught.value.fault is StoreFault.UNAVAILABLE
            assert "hunt" not in str(caught.value) + repr(caught.value) + repr(store)
    finally:
        server.stop()
    assert "hunt" not in caplog.text


def test_a_socket_in_the_file_system(tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = Valkey(tmp_path, "--unixsocket", str(path))
    try:
        with opened(f"unix://{path}?db=2") as store:
            store.put_many([(key(1), b"1")], SOON)
            assert store.get_many([key(1)], SOON) == [b"1"]
    finally:
        server.stop()


def test_more_threads_than_connections_get_errors_or_answers(valkey: Valkey) -> None:
    outcomes: list[object] = []
    with opened(f"{valkey.url}?connections=2") as store:
        store.put_many([(key(1), bytes(1_000_000))], SOON)

        def read() -> None:
            try:
                outcomes.append(store.get_many([key(1)], SOON) == [bytes(1_000_000)])
            except StoreError as error:
                outcomes.append(error.fault)

        threads = [threading.Thread(target=read) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert set(outcomes) <= {True, StoreFault.UNAVAILABLE}
        assert True in outcomes
        assert store.get_many([key(1)], SOON) == [bytes(1_000_000)]


def test_deadlines_that_end_anywhere_leave_nothing_behind(valkey: Valkey) -> None:
    # Each call ends somewhere else: before, while or after connecting, sending, reading.
    with opened(f"{valkey.url}?connections=2") as store:
        items = [(key(n), bytes([n]) * 300_000) for n in range(4)]
        store.put_many(items, SOON)
        faults = set()
        for step in range(400):
            try:
                got = store.get_many([key(step % 4)], step * 5e-6)
                assert got == [items[step % 4][1]], "the reply to another call"
            except StoreError as error:
                faults.add(error.fault)
        assert faults == {StoreFault.TIMEOUT}
        assert store.get_many([key(n) for n in range(4)], SOON) == [v for _, v in items]
