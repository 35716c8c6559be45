"""Clients that were not written for this server: LangChain and LiteLLM, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import os
import warnings
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices
with warnings.catch_warnings():  # what they warn of at import is theirs
    warnings.simplefilter("ignore")
    import litellm
    from langchain_openai import ChatOpenAI
    from litellm.exceptions import BadRequestError

from bench.server import Server
from tests.deployments.test_tools import HISTORY, TOOLS

pytestmark = [
    pytest.mark.slow,
    # of their own code, and sockets that they leave to the garbage collector
    pytest.mark.filterwarnings("ignore"),
]

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def chain(server: Server, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=server.model,
        base_url=f"{server.url}/v1",
        api_key="none",
        temperature=0,
        max_retries=0,
        timeout=120,
        **settings,
    )


def test_langchain(server: Server) -> None:
    model = chain(server, max_tokens=40)
    answer = model.invoke(QUESTION)
    assert "Paris" in answer.content
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    chunks = list(model.stream(QUESTION))
    assert "".join(str(chunk.content) for chunk in chunks) == answer.content
    assert asyncio.run(model.ainvoke(QUESTION)).content == answer.content
    cut = chain(server, max_tokens=40, stop=[" is"]).invoke(QUESTION)
    assert " is" not in cut.content
    assert answer.content.startswith(str(cut.content))


def test_langchain_calls_functions(server: Server) -> None:
    model = chain(server, max_tokens=60).bind_tools(TOOLS)
    answer = model.invoke(HISTORY)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Rome"})
    whole: Any = None
    for chunk in model.stream(HISTORY):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Rome"})
    assert not whole.content


def lite(server: Server, **changes: Any) -> Any:
    return litellm.completion(
        model=f"openai/{server.model}",
        api_base=f"{server.url}/v1",
        api_key="none",
        temperature=0,
        max_retries=0,
        timeout=120,
        **changes,
    )


def test_litellm(server: Server) -> None:
    answer = lite(server, messages=QUESTION, max_tokens=40)
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(lite(server, messages=QUESTION, max_tokens=40, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content
    with pytest.raises(BadRequestError):
        lite(server, messages=QUESTION, max_tokens=-1)


def test_litellm_calls_functions(server: Server) -> None:
    changes: dict[str, Any] = {"messages": HISTORY, "tools": TOOLS, "max_tokens": 60}
    answer = lite(server, **changes)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert answer.choices[0].finish_reason == "tool_calls"
    chunks = list(lite(server, **changes, stream=True))
    whole: Any = litellm.stream_chunk_builder(chunks, messages=HISTORY)
    (call,) = whole.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
