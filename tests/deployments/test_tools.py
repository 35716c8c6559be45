"""Calls of functions by the default model, which knows them from its prompt alone.

An earlier turn shows the format, so that even a small model keeps to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from bench.server import Server

pytestmark = pytest.mark.slow

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def called(city: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    call = {"id": f"call_{city}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


HISTORY: list[Any] = [
    {"role": "user", "content": "What is the weather in Paris?"},
    called("Paris"),
    {"role": "tool", "tool_call_id": "call_Paris", "content": '{"sky": "clear"}'},
    {"role": "assistant", "content": "The sky in Paris is clear."},
    {"role": "user", "content": "What is the weather in Berlin?"},
    called("Berlin"),
    {"role": "tool", "tool_call_id": "call_Berlin", "content": '{"sky": "clear"}'},
    {"role": "assistant", "content": "The sky in Berlin is clear."},
    {"role": "user", "content": "What is the weather in Rome?"},
]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0
    ) as sdk:
        yield sdk


def ask(server: Server, **changes: Any) -> dict[str, Any]:
    return {
        "model": server.model,
        "messages": HISTORY,
        "tools": TOOLS,
        "temperature": 0,
        "max_tokens": 60,
        **changes,
    }


@pytest.mark.parametrize("changes", [{}, {"tool_choice": "auto"}, {"parallel_tool_calls": False}])
def test_a_call_whole_and_streamed(
    client: openai.OpenAI, server: Server, changes: dict[str, Any]
) -> None:
    whole = client.chat.completions.create(**ask(server, **changes)).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls or []
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"}

    chunks = list(client.chat.completions.create(**ask(server, **changes, stream=True)))
    deltas = [c.choices[0].delta for c in chunks]
    assert not any(delta.content for delta in deltas), "a mark leaked"
    calls = [entry for delta in deltas for entry in delta.tool_calls or []]
    assert calls[0].id
    assert calls[0].function is not None
    assert calls[0].function.name == "get_weather"
    assert {entry.index for entry in calls} == {0}
    assert [entry.id for entry in calls[1:]] == [None] * len(calls[1:])
    arguments = "".join(entry.function.arguments or "" for entry in calls if entry.function)
    assert arguments == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_sdk_puts_a_streamed_call_together(client: openai.OpenAI, server: Server) -> None:
    with client.chat.completions.stream(**ask(server)) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in events
    (call,) = final.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Rome"}


def test_no_call_where_none_is_wanted(client: openai.OpenAI, server: Server) -> None:
    """With ``none`` the text is the model's own, marks and all, as there is nothing to call."""
    answer = client.chat.completions.create(**ask(server, tool_choice="none"))
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


def test_text_beside_functions_is_text(client: openai.OpenAI, server: Server) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    changes = {"messages": question, "max_tokens": 30}
    whole = client.chat.completions.create(**ask(server, **changes)).choices[0]
    chunks = client.chat.completions.create(**ask(server, **changes, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.message.content
    assert whole.finish_reason in ("stop", "length")


def test_an_answer_cut_within_a_call(client: openai.OpenAI, server: Server) -> None:
    for length in (2, 5, 9):
        answer = client.chat.completions.create(**ask(server, max_tokens=length)).choices[0]
        assert answer.finish_reason == "length"
        assert "<" not in (answer.message.content or "")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_forced_call_fits_its_schema(client: openai.OpenAI, server: Server, choice: Any) -> None:
    """Of a model that would say hello."""
    days = {"type": "integer", "minimum": 1, "maximum": 9}
    parameters = {
        "type": "object",
        "properties": {"days": days},
        "required": ["days"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    changes = {
        "messages": [{"role": "user", "content": "Hello!"}],
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    answer = client.chat.completions.create(**ask(server, **changes)).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls or []
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"days"}
    assert 1 <= arguments["days"] <= 9


def test_a_forced_call_and_another_grammar_exclude_each_other(
    client: openai.OpenAI, server: Server
) -> None:
    changes: dict[str, Any] = {
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
    }
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ask(server, **changes))
    assert caught.value.param == "tool_choice"
