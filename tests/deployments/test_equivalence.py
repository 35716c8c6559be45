"""Speculation on and off answer alike, through the real server: the short form of
`make equivalence`.

What this catches: anything that shows that tokens do not come one at a time: a stop string leaked
or cut short, log-probabilities of rejected nodes, a grammar's mask from the wrong node, penalties
that miss a token of an accepted run, usage that counts what was cut.
"""

from __future__ import annotations

import httpx
import pytest

from bench.equivalence import TOLERANCE, compare, first_difference
from bench.server import Server

pytestmark = pytest.mark.slow


def test_random_requests(http: httpx.Client, server: Server) -> None:
    differences, asked = compare(http, server.model, count=40, seed=1)
    assert differences == []
    assert {"stop", "n", "logprobs", "min_tokens", "echo", "response_format"} <= set(asked)


def test_differences_are_found() -> None:
    left = {"choices": [{"text": "ab", "logprobs": [{"token": "a", "logprob": -0.5}]}]}
    assert first_difference(left, left, TOLERANCE) is None
    for path, right in (
        (".choices[0].text", {"text": "aB", "logprobs": [{"token": "a", "logprob": -0.5}]}),
        (
            ".choices[0].logprobs[0].logprob",
            {"text": "ab", "logprobs": [{"token": "a", "logprob": -0.6}]},
        ),
        (".choices[0].logprobs", {"text": "ab", "logprobs": []}),
    ):
        assert first_difference(left, {"choices": [right]}, TOLERANCE) == path
