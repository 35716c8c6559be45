"""Clients that come back: to another gateway, after a kill of everything, with a key."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.server import Server, processes_of, running_server
from bench.small_model import make_small_model
from bench.valkey import Valkey
from prefix_cache.checkpoints.cells import open_cells
from prefix_cache.checkpoints.codec import CheckpointCodec
from prefix_cache.checkpoints.record import State
from prefix_cache.checkpoints.store import SwappingStore
from prefix_cache.store import StoreOptions

pytestmark = pytest.mark.slow

WAIT_S = 240.0
PATH = "/v1/completions"
MODEL = "small"


@dataclass
class Seen:
    """Events of a stream: ids and chunks, and whether it came to its end."""

    ids: list[str] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    def text(self, first: int = 0, choice: int = 0) -> str:
        return "".join(
            one["text"]
            for chunk in self.chunks[first:]
            for one in chunk["choices"]
            if one["index"] == choice
        )

    @property
    def usage(self) -> Any:
        return self.chunks[-1]["usage"]


def read(answer: httpx.Response, most: int | None = None) -> Seen:
    assert answer.status_code == 200, answer.read()
    seen, name = Seen(), ""
    for line in answer.iter_lines():
        if line.startswith("id: "):
            name = line.removeprefix("id: ")
        elif line == "data: [DONE]":
            seen.done = True
        elif line:
            seen.ids.append(name)
            seen.chunks.append(json.loads(line.removeprefix("data: ")))
            if len(seen.chunks) == most:
                break
    return seen


def body(**changes: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": [20, 31, 45, 200],
        "temperature": 0.8,
        "seed": 7,
        "max_tokens": 120,
        "stream": True,
        "stream_options": {"include_usage": True},
        **changes,
    }


def ask(
    http: httpx.Client,
    request: dict[str, Any],
    most: int | None = None,
    headers: dict[str, str] | None = None,
) -> Seen:
    with http.stream("POST", PATH, json=request, headers=headers) as answer:
        return read(answer, most)


def resume(http: httpx.Client, last: str, **headers: str) -> Seen:
    with http.stream("POST", PATH, headers={"Last-Event-ID": last, **headers}) as answer:
        return read(answer)


def changes(folder: Path, url: str) -> dict[str, dict[str, Any]]:
    return {
        "engine": {
            "model": str(folder),
            "dtype": "float32",
            "threads": 1,
            "kv": {"memory_gib": 0.1},
        },
        "gateway": {"debug": True},
        "recovery": {"store": {"url": url, "lease_s": 4}, "every_rounds": 2, "every_tokens": 8},
    }


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    server = Valkey(tmp_path_factory.mktemp("valkey"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_model(tmp_path_factory.mktemp("model") / MODEL)


@pytest.fixture(scope="module")
def orphan(folder: Path, valkey: Valkey) -> Seen:
    """The beginning of a stream whose server was killed, every process of it at once."""
    with (
        running_server(changes(folder, valkey.url), MODEL) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as http,
        http.stream("POST", PATH, json=body(ignore_eos=True)) as answer,
    ):
        seen = read(answer, 12)
        for pid in processes_of(server.log.parent):
            os.kill(pid, signal.SIGKILL)
    return seen


@pytest.fixture(scope="module")
def server(folder: Path, valkey: Valkey, orphan: Seen) -> Iterator[Server]:
    with running_server(changes(folder, valkey.url), MODEL) as found:
        yield found


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        yield client


def checkpoints(valkey: Valkey) -> dict[str, State]:
    cells = open_cells(valkey.url, StoreOptions("ckpt", 600, 2**20))
    store = SwappingStore(cells, CheckpointCodec(2**20), 600)
    found = {one.request_id: one.state for one in store.list(1000, 10)}
    store.close()
    return found


def wait_until_idle(http: httpx.Client) -> None:
    end = time.monotonic() + WAIT_S
    while True:
        report = http.get("/debug/integrity").json()
        assert report["problem"] is None
        if not report["has_work"] and not report["open_requests"]:
            assert report["pages_in_use"] == 0
            return
        assert time.monotonic() < end
        time.sleep(0.1)


def test_after_a_kill_of_everything_the_rest_comes_exactly(
    http: httpx.Client, orphan: Seen
) -> None:
    rest = resume(http, orphan.ids[-1])
    whole = ask(http, body(ignore_eos=True))
    assert rest.done
    assert orphan.text() + rest.text() == whole.text()
    assert rest.usage["completion_tokens"] == whole.usage["completion_tokens"] == 120
    assert rest.usage["prompt_tokens"] == whole.usage["prompt_tokens"]


@pytest.mark.parametrize(
    "more", [{}, {"stop": ["w1 w", "7 w4"], "n": 3, "max_tokens": 60}], ids=["one", "stops"]
)
def test_from_every_event_the_rest_is_exact(http: httpx.Client, more: dict[str, Any]) -> None:
    whole = ask(http, body(**more))
    assert len(set(whole.ids)) == len(whole.ids)
    choices = range(more.get("n", 1))
    for index, name in enumerate(whole.ids):
        rest = resume(http, name)
        assert rest.done
        for choice in choices:
            assert rest.text(choice=choice) == whole.text(index + 1, choice), name
        if index + 1 < len(whole.ids):
            assert rest.usage == whole.usage
        else:
            assert rest.chunks == []


def test_a_client_that_left_gets_the_rest(http: httpx.Client, valkey: Valkey) -> None:
    request = body(ignore_eos=True, max_tokens=1500)
    whole = ask(http, request)
    begun = ask(http, request, most=9)
    wait_until_idle(http)  # a disconnect ends the work
    rest = resume(http, begun.ids[-1])
    assert begun.text() + rest.text() == whole.text()
    assert set(checkpoints(valkey).values()) == {State.FINISHED}


def test_a_killed_gateway_costs_no_client_its_answer(server: Server, http: httpx.Client) -> None:
    whole = ask(http, body(ignore_eos=True, max_tokens=600))
    (gateway,) = [
        pid
        for pid, command in processes_of(server.log.parent).items()
        if command.startswith("ray::ServeReplica:specdec:Gateway")
        or "SERVE_REPLICA::specdec#Gateway" in command
    ]
    with http.stream("POST", PATH, json=body(ignore_eos=True, max_tokens=600)) as answer:
        begun = read(answer, 10)
        os.kill(gateway, signal.SIGKILL)
    end = time.monotonic() + WAIT_S
    while True:
        try:
            with httpx.Client(base_url=server.url, timeout=WAIT_S) as again:
                rest = resume(again, begun.ids[-1])
            break
        except (AssertionError, httpx.HTTPError):
            assert time.monotonic() < end
            time.sleep(0.3)
    assert rest.done
    assert begun.text() + rest.text() == whole.text()
    assert rest.usage["completion_tokens"] == 600
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as again:
        wait_until_idle(again)  # what the dead gateway had asked for has ended as well


def test_only_whoever_asked_gets_the_rest(http: httpx.Client) -> None:
    mine = {"Authorization": "Bearer mine"}
    whole = ask(http, body(), headers=mine)
    for headers in ({}, {"Authorization": "Bearer other"}):
        answer = http.post(PATH, headers={"Last-Event-ID": whole.ids[3], **headers})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "answer_not_found"
    assert resume(http, whole.ids[3], **mine).text() == whole.text(4)


@pytest.mark.parametrize("name", ["x", "chatcmpl-1:0", f"chatcmpl-{'0' * 32}:1-zz", "9" * 500])
def test_ids_that_are_none(http: httpx.Client, name: str) -> None:
    answer = http.post(PATH, headers={"Last-Event-ID": name})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")
    unknown = http.post(PATH, headers={"Last-Event-ID": f"cmpl-{'0' * 32}:1-00000000"})
    assert unknown.status_code == 404


def test_a_key_gives_one_generation(http: httpx.Client) -> None:
    random = body(stream=False, stream_options=None, max_tokens=40)
    del random["seed"]
    headers = {"Idempotency-Key": "a key", "Authorization": "Bearer mine"}
    first = http.post(PATH, json=random, headers=headers)
    again = http.post(PATH, json=random, headers=headers)
    assert first.json() == again.json()
    other = http.post(PATH, json=random | {"max_tokens": 41}, headers=headers)
    assert other.status_code == 422
    assert other.json()["error"]["code"] == "idempotency_key_reused"
    others = http.post(PATH, json=random, headers=headers | {"Authorization": "Bearer other"})
    assert others.json()["id"] != first.json()["id"]
    bad = http.post(PATH, json=random, headers=headers | {"Idempotency-Key": "x" * 256})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "Idempotency-Key")


def test_a_key_in_use_is_a_conflict_until_its_answer_is_there(http: httpx.Client) -> None:
    request = body(ignore_eos=True, max_tokens=800)
    headers = {"Idempotency-Key": "streamed"}
    with http.stream("POST", PATH, json=request, headers=headers) as answer:
        lines = answer.iter_lines()
        next(lines)
        busy = http.post(PATH, json=request, headers=headers)
        assert busy.status_code == 409
        assert busy.json()["error"]["code"] == "idempotency_in_progress"
        assert busy.headers["retry-after"] == "1"
        rest = list(lines)
    assert rest[-2] == "data: [DONE]"
    again = ask(http, request, headers={"Idempotency-Key": "streamed"})
    assert again.done
    assert again.usage["completion_tokens"] == 800
    texts = [json.loads(line[6:]) for line in rest if line.startswith("data: {")]
    joined = "".join(c["text"] for one in texts for c in one["choices"])
    assert again.text() == joined


def test_a_refused_request_leaves_its_key_free(http: httpx.Client) -> None:
    headers = {"Idempotency-Key": "too much"}
    wrong = body(stream=False, stream_options=None, temperature=9)
    assert http.post(PATH, json=wrong, headers=headers).status_code == 400
    right = wrong | {"temperature": 0, "max_tokens": 3}
    assert http.post(PATH, json=right, headers=headers).status_code == 200


def test_without_the_store_requests_go_on(http: httpx.Client, valkey: Valkey) -> None:
    expected = ask(http, body())
    valkey.stop()
    try:
        assert ask(http, body()).text() == expected.text()
        keyed = ask(http, body(), headers={"Idempotency-Key": "no store"})
        assert keyed.text() == expected.text()
        lost = http.post(PATH, headers={"Last-Event-ID": expected.ids[2]})
        assert lost.status_code == 503
    finally:
        valkey.start()
    wait_until_idle(http)
