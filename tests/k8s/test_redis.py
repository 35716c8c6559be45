"""The Redis servers' configuration, read by a real server."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from bench.server import free_port
from bench.valkey import valkey_binary
from k8s.tools.build import ROOT
from k8s.tools.new_secrets import manifests


@contextmanager
def served(conf: Path, folder: Path) -> Iterator[Any]:
    """A server with this configuration, and the password of ``new_secrets``."""
    (folder / "data").mkdir()
    secret = manifests(False, "specdec")[0]["stringData"]
    assert isinstance(secret, dict)
    for name in ("gcs-auth.conf", "prefix-auth.conf"):
        (folder / name).write_text(secret[name])
    text = conf.read_text().replace("/etc/valkey-auth", str(folder))
    (folder / "valkey.conf").write_text(text.replace("dir /data", f"dir {folder}/data"))
    port = free_port()
    process = subprocess.Popen(
        [str(valkey_binary()), str(folder / "valkey.conf"), "--port", str(port)],
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, "the server refuses its configuration"
                assert time.monotonic() < deadline
                time.sleep(0.02)
        name = "gcs" if "gcs" in conf.name else "prefix"
        with redis.Redis(port=port, password=secret[f"{name}-auth.conf"].split()[1]) as client:
            yield client
    finally:
        process.kill()
        process.wait(20)


@pytest.mark.parametrize(
    ("conf", "policy", "durable"),
    [
        ("base/gcs-redis.conf", "noeviction", "yes"),
        ("base/prefix-redis.conf", "allkeys-lru", "no"),
        ("overlays/cpu-demo/prefix-redis.conf", "allkeys-lru", "no"),
    ],
)
def test_the_server_takes_it(conf: str, policy: str, durable: str, tmp_path: Path) -> None:
    with served(ROOT / "k8s" / conf, tmp_path) as client:
        settings = client.config_get("maxmemory*") | client.config_get("appendonly")
        assert settings["maxmemory-policy"] == policy
        assert settings["appendonly"] == durable
        assert 0 < int(settings["maxmemory"]) < memory_limit(conf)
        port = client.connection_pool.connection_kwargs["port"]
        with (
            redis.Redis(port=port) as stranger,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            stranger.ping()


def memory_limit(conf: str) -> int:
    """Of the container that runs with this configuration, in bytes."""
    if "cpu-demo" in conf:
        overlay = yaml.safe_load((ROOT / "k8s/overlays/cpu-demo/kustomization.yaml").read_text())
        (patch,) = [item["patch"] for item in overlay["patches"] if "StatefulSet" in str(item)]
        limit = yaml.safe_load(patch)[0]["value"]["limits"]["memory"]
    else:
        name = Path(conf).stem
        *_, server = yaml.safe_load_all((ROOT / f"k8s/base/{name}.yaml").read_text())
        (container,) = server["spec"]["template"]["spec"]["containers"]
        limit = container["resources"]["limits"]["memory"]
    return int(limit.removesuffix("Gi")) * 2**30
