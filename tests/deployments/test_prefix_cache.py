"""Shared prompts through the real server: who finds whose, and what the client is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from bench.server import Server
from deployments.scope import cache_scope
from specdec.config import KvSettings

PAGE = KvSettings().page_size


def ask(server: Server, messages: Any, key: str = "none", **extra: object) -> tuple[str, int, int]:
    """The answer, its prompt's length, and how much of that was found."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60) as sdk:
        answer = sdk.chat.completions.create(
            model=server.model,
            messages=messages,
            temperature=0,
            max_tokens=6,
            extra_body=dict(extra),
        )
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    return answer.choices[0].message.content or "", usage.prompt_tokens, cached


def chat(name: str) -> list[dict[str, str]]:
    """A conversation that no other test has: a system prompt of some 400 tokens, a question."""
    rules = " ".join(f"Rule {i}: never speak of {name}." for i in range(40))
    return [
        {"role": "system", "content": f"You are a helpful assistant. {rules}"},
        {"role": "user", "content": f"What do {name} eat, where do they live, and since when?"},
    ]


@pytest.fixture
def streaming(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as sdk:
        yield sdk


@pytest.mark.slow
def test_a_repeated_prompt_is_found_and_told(server: Server) -> None:
    text, length, cached = ask(server, chat("foxes"))
    assert cached < 2 * PAGE  # the template's opening at most
    again = ask(server, chat("foxes"))
    assert again == (text, length, (length - 1) // PAGE * PAGE)


@pytest.mark.slow
def test_tenants_share_the_system_prompt_alone(server: Server) -> None:
    messages = chat("owls")
    text, length, _ = ask(server, messages, "key-a")
    own = ask(server, messages, "key-a")[2]
    other = ask(server, messages, "key-b")
    assert own == (length - 1) // PAGE * PAGE
    assert other[0] == text
    # whatever the question is, another tenant finds no more than with a question of its own
    question = {"role": "user", "content": "Hello"}
    assert other[2] == ask(server, [messages[0], question], "key-c")[2] < own
    assert other[2] > 300


@pytest.mark.slow
def test_a_salt_keeps_requests_apart(server: Server) -> None:
    messages = chat("eels")
    _, length, _ = ask(server, messages, cache_salt="one")
    whole = (length - 1) // PAGE * PAGE
    assert ask(server, messages, cache_salt="two")[2] == 0  # not even the system prompt
    assert ask(server, messages, cache_salt="one")[2] == whole
    assert ask(server, messages)[2] < whole


@pytest.mark.slow
def test_a_stream_tells_it_too_and_choices_count_once(
    server: Server, streaming: openai.OpenAI
) -> None:
    messages: Any = chat("bees")
    _, length, _ = ask(server, messages)
    stream = streaming.chat.completions.create(
        model=server.model,
        messages=messages,
        max_tokens=4,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = [chunk.usage for chunk in stream][-1]
    assert usage is not None
    assert usage.prompt_tokens == length
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == (length - 1) // PAGE * PAGE


def test_scopes_differ_in_all_that_they_depend_on() -> None:
    tenants = [b"", b"\1" * 32, b"\2" * 32]
    salts = [None, "a", "b", "\ud800"]
    scopes = [cache_scope(tenant, salt) for tenant in tenants for salt in salts]
    assert len({scope.salt for scope in scopes}) == len(scopes)
    assert cache_scope(b"", None, 7).salt == b""
