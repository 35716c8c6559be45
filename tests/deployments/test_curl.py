"""curl against the real server: bytes on the wire, and what no SDK would send."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench.server import Server

pytestmark = pytest.mark.slow

JSON = ("-H", "Content-Type: application/json")


def curl(*arguments: str) -> str:
    done = subprocess.run(
        ["curl", "--silent", "--max-time", "120", *arguments], capture_output=True, check=True
    )
    return done.stdout.decode()


def body(server: Server, **changes: object) -> str:
    return json.dumps(
        {
            "model": server.model,
            "messages": [{"role": "user", "content": "Say hello."}],
            "max_tokens": 12,
            "temperature": 0,
            **changes,
        }
    )


@pytest.mark.parametrize("headers", [JSON, ()], ids=["json", "form"])
def test_answer(server: Server, headers: tuple[str, ...]) -> None:
    """Also to who leaves the header out: curl then says that it is a form."""
    url = f"{server.url}/v1/chat/completions"
    answer = json.loads(curl(url, *headers, "-d", body(server)))
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["choices"][0]["message"]["content"]


def test_events(server: Server) -> None:
    sent = body(server, stream=True)
    text = curl("-N", "-i", f"{server.url}/v1/chat/completions", *JSON, "-d", sent)
    head, _, events = text.replace("\r\n", "\n").partition("\n\n")
    assert "content-type: text/event-stream" in head.lower()
    frames = events.split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    for frame in frames:
        assert frame.startswith("data: ")
        assert "\n" not in frame
        chunk = json.loads(frame.removeprefix("data: "))
        assert chunk["object"] == "chat.completion.chunk"
        assert "usage" not in chunk


def test_body_of_five_megabytes(server: Server, tmp_path: Path) -> None:
    big = tmp_path / "body.json"
    content = "word " * 1_000_000
    big.write_text(body(server, messages=[{"role": "user", "content": content}]))
    for extra in ([], ["-H", "Transfer-Encoding: chunked"], ["-H", "Expect:"]):
        text = curl(
            "-w",
            "\n%{http_code}",
            f"{server.url}/v1/chat/completions",
            "-H",
            "Content-Type: application/json",
            *extra,
            "--data-binary",
            f"@{big}",
        )
        answer, _, status = text.rpartition("\n")
        assert status == "413", (extra, text[-300:])
        assert json.loads(answer)["error"]["code"] == "request_too_large"
    assert "ok" in curl(f"{server.url}/health")


@pytest.mark.own_server
def test_start_up_tells_its_time_and_address(server: Server) -> None:
    lines = [
        line for line in server.log.read_text().splitlines() if line.startswith("specdec ready")
    ]
    assert len(lines) == 1
    assert lines[0].endswith(f" s: {server.url}/v1")
