"""Mixed traffic as users make it: chats that share a prompt, streams, mistakes, leavers."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from bench.server import Server

_TIMEOUT_S = 300.0
_SYSTEM = "You are a guide. " + " ".join(f"Rule {i}: be brief and kind." for i in range(12))


@dataclass
class Tally:
    """What the answers told, added up.

    Attributes:
        answers: whole answers of one choice.
        prompt: tokens of their prompts …
        cached: … and those found.
        completion: tokens of the answers …
        accepted: … and those that had been drafted.
        drafted: candidates verified.
        aborted: requests left in their middle.
        errors: answers other than 200, by code.
    """

    answers: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    accepted: int = 0
    drafted: int = 0
    aborted: int = 0
    errors: int = 0

    def add(self, usage: dict[str, Any]) -> None:
        """Enter the usage of an answer."""
        self.answers += 1
        self.prompt += usage["prompt_tokens"]
        self.cached += usage["prompt_tokens_details"]["cached_tokens"]
        self.completion += usage["completion_tokens"]
        details = usage["completion_tokens_details"]
        self.accepted += details["accepted_prediction_tokens"]
        self.drafted += details["accepted_prediction_tokens"]
        self.drafted += details["rejected_prediction_tokens"]


class Traffic:
    """Clients that ask until stopped; then :attr:`tally` holds what they were told.

    Args:
        server: to ask.
        clients: at once.
        mistakes: also send requests that fail, and leave some answers.
        seed: of what is asked.
        question: with ``{}`` for a number.
    """

    def __init__(
        self,
        server: Server,
        clients: int = 3,
        mistakes: bool = True,
        seed: int = 0,
        question: str = "Count from {} on, in digits.",
    ) -> None:
        self._question = question
        self.tally = Tally()
        self._server = server
        self._mistakes = mistakes
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._http = httpx.Client(
            base_url=server.url, timeout=_TIMEOUT_S, limits=httpx.Limits(max_connections=None)
        )
        self._threads = ThreadPoolExecutor(clients)
        self._running: list[Future[None]] = [
            self._threads.submit(self._client, random.Random(1000 * seed + number))
            for number in range(clients)
        ]

    def stop(self) -> Tally:
        """Wait for the answers under way.

        Raises:
            AssertionError: an answer was not as it should be.
        """
        self._stopped.set()
        try:
            for client in self._running:
                client.result()
        finally:
            self._threads.shutdown()
            self._http.close()
        return self.tally

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _client(self, rng: random.Random) -> None:
        actions: list[Callable[[random.Random], None]] = [self._chat, self._stream, self._chat]
        if self._mistakes:
            actions += [self._leave, self._mistake]
        for action in itertools.cycle(actions):
            if self._stopped.is_set():
                return
            action(rng)

    def _body(self, rng: random.Random, **changes: object) -> dict[str, Any]:
        return {
            "model": self._server.model,
            "messages": [
                {"role": "system", "content": _SYSTEM},
                {"role": "user", "content": self._question.format(rng.randrange(90))},
            ],
            "temperature": rng.choice((0, 0, 0.7)),
            "seed": rng.randrange(1000),
            "max_tokens": rng.randrange(8, 48),
            **changes,
        }

    def _chat(self, rng: random.Random) -> None:
        answer = self._http.post("/v1/chat/completions", json=self._body(rng))
        assert answer.status_code == 200, answer.text
        with self._lock:
            self.tally.add(answer.json()["usage"])

    def _stream(self, rng: random.Random) -> None:
        body = self._body(rng, stream=True, stream_options={"include_usage": True})
        usage = None
        with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    usage = event.get("usage") or usage
        assert usage is not None
        with self._lock:
            self.tally.add(usage)

    def _leave(self, rng: random.Random) -> None:
        """Go after the first words of a long answer."""
        body = self._body(rng, stream=True, max_tokens=600, ignore_eos=True)
        with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            lines = (line for line in answer.iter_lines() if line)
            for _ in range(rng.randrange(2, 6)):
                next(lines)
        with self._lock:
            self.tally.aborted += 1

    def _mistake(self, rng: random.Random) -> None:
        wrong: dict[str, Any] = rng.choice(
            (
                {"model": f"model-{rng.random()}"},
                {"temperature": "hot"},
                {"max_tokens": -1},
                {f"parameter_{rng.randrange(1000)}": 1},
                {"messages": []},
            )
        )
        answer = self._http.post("/v1/chat/completions", json=self._body(rng, **wrong))
        assert answer.status_code in (400, 404), answer.text
        with self._lock:
            self.tally.errors += 1


def flood(server: Server, requests: int, tokens: int) -> list[int]:
    """So many requests at once; the statuses of their answers."""
    limits = httpx.Limits(max_connections=None)
    with (
        httpx.Client(base_url=server.url, timeout=_TIMEOUT_S, limits=limits) as http,
        ThreadPoolExecutor(requests) as threads,
    ):
        body = {
            "model": server.model,
            "messages": [{"role": "user", "content": "Tell a long story."}],
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        asked = [
            threads.submit(http.post, "/v1/chat/completions", json=body) for _ in range(requests)
        ]
        return [future.result().status_code for future in asked]


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float) -> float:
    """Seconds until it holds.

    Raises:
        AssertionError: it did not in time; says what was waited for.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.5)
    return time.monotonic() - began
