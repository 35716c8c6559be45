from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.valkey import Valkey
from tests.prefix_cache.servers import Proxy, self_signed

#: The kinds of store that share one contract.
KINDS = ("memory", "lmdb", "redis", "rediss")


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    server = Valkey(tmp_path_factory.mktemp("valkey"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def tls_url(valkey: Valkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same server behind TLS, which the binary itself was built without."""
    pem = self_signed(tmp_path_factory.mktemp("tls"))
    proxy = Proxy(valkey.port, pem=pem)
    yield f"rediss://127.0.0.1:{proxy.port}?ca={pem}"
    proxy.stop()


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[Valkey]:
    """A server to be ill-treated."""
    server = Valkey(tmp_path)
    yield server
    server.stop()


def url_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """The URL of an empty store of that kind; the namespace is the caller's to choose."""
    match kind:
        case "memory":
            return "memory://"
        case "lmdb":
            return f"lmdb://{folder}/blocks"
        case "redis":
            valkey: Valkey = request.getfixturevalue("valkey")
            return valkey.url
        case _:
            url: str = request.getfixturevalue("tls_url")
            return url


@pytest.fixture(params=KINDS)
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request.param, request, tmp_path)


@pytest.fixture(params=("lmdb", "redis"))
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of stores that several processes may share."""
    return url_of(request.param, request, tmp_path)
