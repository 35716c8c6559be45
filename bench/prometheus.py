"""A real Prometheus for benchmarks and tests: Debian's, fetched once where it is not installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from bench.server import free_port

_CACHE = Path("~/.cache/specdec/prometheus").expanduser()
_START_S = 60.0


def binary(name: str) -> Path:
    """``prometheus`` or ``promtool``: of this machine, else unpacked from Debian's package.

    Raises:
        RuntimeError: it is neither here nor to be had.
    """
    found = shutil.which(name)
    if found is not None:
        return Path(found)
    path = _CACHE / "usr/bin" / name
    if not path.exists():
        _CACHE.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(_CACHE.with_suffix(".lock")):
            if not path.exists():
                _fetch()
    return path


def _fetch() -> None:
    """Unpack the package, which needs no root; it is not installed."""
    with tempfile.TemporaryDirectory(dir=_CACHE.parent) as folder:
        download = ["apt-get", "download", "-q", "prometheus"]
        try:
            if subprocess.run(download, cwd=folder, check=False).returncode != 0:
                subprocess.run(["apt-get", "update", "-q"], check=True)
                subprocess.run(download, cwd=folder, check=True)
            (package,) = Path(folder).glob("prometheus_*.deb")
            unpacked = Path(folder) / "unpacked"
            subprocess.run(["dpkg-deb", "-x", str(package), str(unpacked)], check=True)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            raise RuntimeError(
                f"no Prometheus here, and none from Debian's packages ({error}); "
                "install prometheus and promtool"
            ) from error
        unpacked.rename(_CACHE)


def check_rules(path: Path) -> str:
    """What ``promtool check rules`` says.

    Raises:
        RuntimeError: it finds something.
    """
    command = [str(binary("promtool")), "check", "rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"promtool: {done.stdout}{done.stderr}")
    return done.stdout


class Prometheus:
    """A server that scrapes one target every second. To be stopped.

    Args:
        folder: to run in.
        target: URL of what it scrapes.
        rules: as in a file of rules.
    """

    def __init__(self, folder: Path, target: str, rules: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rules.yaml").write_text(yaml.safe_dump(dict(rules), width=10_000))
        where = urllib.parse.urlsplit(target)
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [
                {
                    "job_name": "specdec",
                    "metrics_path": where.path,
                    "static_configs": [{"targets": [where.netloc]}],
                }
            ],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self._url = f"http://127.0.0.1:{free_port()}"
        self._log = (folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [
                str(binary("prometheus")),
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self._url.removeprefix('http://')}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "GOMAXPROCS": "1"},
        )
        end = time.monotonic() + _START_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > end:
                self.stop()
                log = (folder / "prometheus.log").read_text()[-4000:]
                raise RuntimeError(f"prometheus does not start:\n{log}")
            time.sleep(0.1)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series of an expression now, each with ``metric`` and ``value``.

        Raises:
            RuntimeError: it is no valid expression.
        """
        data = self._get("query", query=expression)
        if data["resultType"] == "scalar":
            return [{"metric": {}, "value": data["result"]}]
        series: list[dict[str, Any]] = data["result"]
        return series

    def range(self, expression: str, seconds: float, step: float) -> list[dict[str, Any]]:
        """Series of an expression up to now, each with ``metric`` and ``values``."""
        now = time.time()
        data = self._get("query_range", query=expression, start=now - seconds, end=now, step=step)
        series: list[dict[str, Any]] = data["result"]
        return series

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        return {s["metric"]["alertname"] for s in self.query('ALERTS{alertstate="firing"}')}

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(20)
        self._log.close()

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _get(self, path: str, **parameters: str | float) -> dict[str, Any]:
        body = urllib.parse.urlencode(parameters).encode()
        request = urllib.request.Request(f"{self._url}/api/v1/{path}", body)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                data: dict[str, Any] = json.load(answer)["data"]
                return data
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{parameters.get('query')}: {error.read().decode()}") from error
