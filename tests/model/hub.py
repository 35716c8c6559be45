"""The part of the Hugging Face hub's HTTP interface that a download uses, over one folder."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "c0ffee" + "0" * 34


@contextmanager
def serve_hub(name: str, folder: Path) -> Iterator[str]:
    """Serve ``folder`` as the repository ``name``; gives the endpoint."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, with_body: bool) -> None:
            path = urlsplit(self.path).path
            resolve = f"/{name}/resolve/{COMMIT}/"
            if path == f"/api/models/{name}/revision/main":
                files = [{"rfilename": entry["path"]} for entry in _tree(folder)]
                self._send(200, json.dumps({"id": name, "sha": COMMIT, "siblings": files}).encode())
            elif path == f"/api/models/{name}/tree/{COMMIT}":
                self._send(200, json.dumps(_tree(folder)).encode())
            elif path.startswith(resolve) and (folder / path.removeprefix(resolve)).is_file():
                self._send(200, (folder / path.removeprefix(resolve)).read_bytes(), with_body)
            else:
                self._send(404, b"{}")

        def _send(self, status: int, body: bytes, with_body: bool = True) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _tree(folder: Path) -> list[dict[str, object]]:
    return [
        {
            "type": "file",
            "path": str(path.relative_to(folder)),
            "size": path.stat().st_size,
            "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
