"""The `openai` SDK against the real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from bench.server import Server

pytestmark = pytest.mark.slow

QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0
    ) as sdk:
        yield sdk


def test_models(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).id == server.model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-unknown")
    assert caught.value.code == "model_not_found"


def test_chat(client: openai.OpenAI, server: Server) -> None:
    answer = client.chat.completions.create(
        model=server.model, messages=QUESTION, temperature=0, max_completion_tokens=40
    )
    choice = answer.choices[0]
    assert choice.message.content is not None
    assert "Paris" in choice.message.content
    assert "<|im_end|>" not in choice.message.content
    assert choice.finish_reason == "stop"
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert 0 <= details.accepted_prediction_tokens < usage.completion_tokens
    assert (details.rejected_prediction_tokens or 0) >= 0


def test_streamed_chat_equals_plain(client: openai.OpenAI, server: Server) -> None:
    arguments: dict[str, Any] = {
        "model": server.model,
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 40,
    }
    plain = client.chat.completions.create(**arguments)
    chunks = list(
        client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(text) == plain.choices[0].message.content
    assert sum(map(bool, text)) > 2, "not streamed"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "stop"
    assert not any(reasons[:-1])
    assert chunks[-1].choices == []
    told, expected = chunks[-1].usage, plain.usage
    assert told is not None
    assert expected is not None
    # how many candidates were verified depends on the load of the moment
    assert told.completion_tokens == expected.completion_tokens
    assert told.prompt_tokens == expected.prompt_tokens
    assert told.completion_tokens_details is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_in_every_chunk(client: openai.OpenAI, server: Server) -> None:
    """As load generators ask of vLLM."""
    chunks = list(
        client.chat.completions.create(
            model=server.model,
            messages=QUESTION,
            temperature=0,
            max_tokens=12,
            stream=True,
            extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert 0 < counts[-2] <= counts[-1] <= 12


def test_length(client: openai.OpenAI, server: Server) -> None:
    answer = client.chat.completions.create(
        model=server.model, messages=QUESTION, temperature=0, max_tokens=3
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stop", [" is", [" is", "Paris"], "tal of Fr", "capital of France is P"])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_never_leak(
    client: openai.OpenAI, server: Server, stop: str | list[str], stream: bool
) -> None:
    arguments: dict[str, Any] = {
        "model": server.model,
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 40,
    }
    whole = client.chat.completions.create(**arguments).choices[0].message.content
    stops = [stop] if isinstance(stop, str) else stop
    expected = whole[: min(whole.find(s) for s in stops if s in whole)]
    if stream:
        chunks = list(client.chat.completions.create(**arguments, stop=stop, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = client.chat.completions.create(**arguments, stop=stop).choices[0]
        text, reason = choice.message.content, choice.finish_reason
    assert text == expected
    assert reason == "stop"


def test_seed_repeats_and_its_lack_does_not(client: openai.OpenAI, server: Server) -> None:
    def texts(**arguments: Any) -> list[str]:
        answer = client.completions.create(
            model=server.model, prompt="Once upon a time", max_tokens=12, **arguments
        )
        return [choice.text for choice in answer.choices]

    assert texts(seed=5) == texts(seed=5)
    assert len({*texts(seed=5), *texts(seed=6), *texts(), *texts(seed=-1)}) > 2
    several = texts(seed=5, n=3)
    assert several[0] == texts(seed=5)[0]
    assert len(set(several)) > 1


def test_completions(client: openai.OpenAI, server: Server) -> None:
    prompts = ["The capital of France is", "Two plus two is"]
    answer = client.completions.create(
        model=server.model, prompt=prompts, temperature=0, max_tokens=4
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith(" Paris")
    singles = [
        client.completions.create(
            model=server.model, prompt=prompt, temperature=0, max_tokens=4
        ).usage
        for prompt in prompts
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(u.prompt_tokens for u in singles if u is not None)


def test_completion_of_token_ids(client: openai.OpenAI, server: Server) -> None:
    from transformers import AutoTokenizer

    from specdec.model.resolve import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(server.model))
    prompt = "The capital of France is"
    tokens = tokenizer(prompt)["input_ids"]
    texts = [
        client.completions.create(
            model=server.model, prompt=form, temperature=0, max_tokens=5
        ).choices[0]
        for form in (prompt, tokens, [tokens])
    ]
    assert len({choice.text for choice in texts}) == 1


def test_default_length_of_completions_is_openais(client: openai.OpenAI, server: Server) -> None:
    answer = client.completions.create(model=server.model, prompt="One, two,", temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 16


def test_streamed_choices_and_completions(client: openai.OpenAI, server: Server) -> None:
    arguments: dict[str, Any] = {
        "model": server.model,
        "prompt": "Once upon a time",
        "max_tokens": 10,
        "seed": 3,
        "n": 2,
    }
    plain = client.completions.create(**arguments)
    texts, reasons = ["", ""], [None, None]
    for chunk in client.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in plain.choices]
    assert reasons == [choice.finish_reason for choice in plain.choices]


def test_history_goes_back_as_the_sdk_dumps_it(client: openai.OpenAI, server: Server) -> None:
    first = client.chat.completions.create(
        model=server.model, messages=QUESTION, temperature=0, max_tokens=40
    )
    follow_up: Any = [
        {"role": "system", "content": "Answer briefly."},
        *QUESTION,
        first.choices[0].message.model_dump(),
        {
            "role": "user",
            "content": [{"type": "text", "text": "And of "}, {"type": "text", "text": "Italy?"}],
        },
    ]
    answer = client.chat.completions.create(
        model=server.model, messages=follow_up, temperature=0, max_tokens=40
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert first.usage is not None
    assert answer.usage.prompt_tokens > first.usage.total_tokens


@pytest.mark.parametrize(
    "speculation", [{"enabled": False}, {"acceptance": "rejection"}, {"acceptance": "typical"}]
)
def test_speculation_is_chosen_per_request(
    client: openai.OpenAI, server: Server, speculation: dict[str, Any]
) -> None:
    answer = client.chat.completions.create(
        model=server.model,
        messages=QUESTION,
        temperature=0,
        max_tokens=40,
        extra_body={"speculation": speculation, "top_k": 40, "min_p": 0.05},
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    if not speculation.get("enabled", True):
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_every_sampling_field_is_taken(client: openai.OpenAI, server: Server) -> None:
    answer = client.chat.completions.create(
        model=server.model,
        messages=QUESTION,
        max_tokens=8,
        temperature=0.8,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"2": -100},
        seed=1,
        user="somebody",
        metadata={"run": "1"},
        store=False,
        extra_body={"repetition_penalty": 1.1, "ignore_eos": True, "top_k": -1},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.system_fingerprint


def test_logit_bias_decides(client: openai.OpenAI, server: Server) -> None:
    answer = client.completions.create(
        model=server.model, prompt="a", max_tokens=3, temperature=0, logit_bias={"100": 100}
    )
    assert answer.choices[0].text == 3 * answer.choices[0].text[: len(answer.choices[0].text) // 3]


def test_async_streams_side_by_side(server: Server) -> None:
    async def ask(sdk: openai.AsyncOpenAI, question: str) -> str:
        stream = await sdk.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=30,
            stream=True,
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0
        ) as sdk:
            countries = ("France", "Japan", "France")
            return await asyncio.gather(
                *(ask(sdk, f"What is the capital of {country}?") for country in countries)
            )

    answers = asyncio.run(run())
    for answer, city in zip(answers, ("Paris", "Tokyo", "Paris"), strict=True):
        assert city in answer
