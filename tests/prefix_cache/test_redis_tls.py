"""What may stand between a cache and its server where TLS does."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.valkey import Valkey
from prefix_cache.errors import StoreConfigError, StoreFault
from tests.prefix_cache.opening import SOON, fault_of, key, opened
from tests.prefix_cache.servers import Proxy, self_signed


@contextmanager
def behind_tls(
    port: int,
    pem: Path,
    reply_delay_s: float = 0.0,
    piece: int = 2**16,
    clients: Path | None = None,
) -> Iterator[str]:
    proxy = Proxy(port, reply_delay_s, piece, pem, clients)
    try:
        yield f"rediss://127.0.0.1:{proxy.port}"
    finally:
        proxy.stop()


def certificate(folder: Path, host: str = "127.0.0.1") -> Path:
    folder.mkdir()
    return self_signed(folder, host)


def test_the_deadline_is_kept(valkey: Valkey, tmp_path: Path) -> None:
    with opened(valkey.url) as direct:
        direct.put_many([(key(1), bytes(100_000))], SOON)
    pem = certificate(tmp_path / "a")
    with (
        behind_tls(valkey.port, pem, reply_delay_s=0.02, piece=500) as url,
        opened(f"{url}?ca={pem}") as store,
    ):
        assert store.has_many([key(1)], SOON) == [True]
        assert fault_of(lambda: store.get_many([key(1)], 0.3), 0.3) is StoreFault.TIMEOUT


def test_a_handshake_that_never_ends_meets_the_deadline(tmp_path: Path) -> None:
    pem = certificate(tmp_path / "a")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with opened(f"rediss://127.0.0.1:{port}?ca={pem}") as store:
            assert fault_of(lambda: store.get_many([key(1)], 0.2), 0.2) is StoreFault.TIMEOUT


def test_a_certificate_that_nobody_vouches_for_is_refused(valkey: Valkey, tmp_path: Path) -> None:
    served, trusted = certificate(tmp_path / "served"), certificate(tmp_path / "trusted")
    elsewhere = certificate(tmp_path / "elsewhere", "127.0.0.2")
    for pem, query in ((served, f"?ca={trusted}"), (served, ""), (elsewhere, f"?ca={elsewhere}")):
        with behind_tls(valkey.port, pem) as url, opened(url + query) as store:
            fault = fault_of(lambda: store.get_many([key(1)], 2.0), 2.0)
            assert fault is StoreFault.UNAVAILABLE


def test_a_server_may_want_to_know_its_clients(valkey: Valkey, tmp_path: Path) -> None:
    served, client = certificate(tmp_path / "served"), certificate(tmp_path / "client")
    with behind_tls(valkey.port, served, clients=client) as url:
        with opened(f"{url}?ca={served}&cert={client}&key={client}") as store:
            store.put_many([(key(2), b"2")], SOON)
            assert store.get_many([key(2)], SOON) == [b"2"]
        with opened(f"{url}?ca={served}") as store:
            fault = fault_of(lambda: store.get_many([key(2)], 2.0), 2.0)
            assert fault is StoreFault.UNAVAILABLE


@pytest.mark.parametrize("name", ["ca", "cert", "key"])
def test_a_file_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    with (
        pytest.raises(StoreConfigError, match=f"{name}: no file"),
        opened(f"rediss://host?{name}={tmp_path}/none"),
    ):
        pass
