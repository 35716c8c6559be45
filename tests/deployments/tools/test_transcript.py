"""Functions in a model's prompt, against what transformers writes for the same messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from deployments.errors import ApiError
from deployments.schema import ChatRequest, parse_request
from deployments.tools.plan import plan_tools
from deployments.tools.transcript import Transcript
from specdec.chat import encode_prompt
from specdec.errors import RequestError

KNOWS = (
    "{% if tools %}TOOLS{% for t in tools %} {{ t | tojson }}{% endfor %}{{ '\\n' }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %} CALL {{ c.function.name }} {{ c.function.arguments.city }}"
    "{% endfor %}{{ '\\n' }}{% endfor %}"
)
KNOWS_NOT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '\\n' }}{% endfor %}"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_2", "content": "warm"},
    {"role": "user", "content": "And in Paris?"},
]


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    found = PreTrainedTokenizerFast(tokenizer_object=backend)
    found.chat_template = template
    return found


def chat(**fields: Any) -> ChatRequest:
    return parse_request(ChatRequest, {"model": "m", "messages": HISTORY, **fields})


def written(template: str, request: ChatRequest) -> str:
    model = tokenizer(template)
    turns, tools = Transcript(model, True).render(request.messages, request.tools or [])
    given: Any = tools
    return str(model.apply_chat_template(turns, tools=given, tokenize=False))


def test_a_template_that_knows_functions_gets_them_as_they_are() -> None:
    text = written(KNOWS, chat(tools=[TOOL]))
    assert text == (
        f"TOOLS {json.dumps(TOOL)}\n[user]Weather in Rome?\n"
        "[assistant] CALL weather Rome CALL weather Rome\n[tool]sunny\n[tool]warm\n"
        "[user]And in Paris?\n"
    )


def test_others_get_them_in_words() -> None:
    text = written(KNOWS_NOT, chat(tools=[TOOL]))
    system, _, rest = text.partition("[user]")
    assert system.startswith("[system]")
    assert json.dumps(TOOL) in system
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert rest == (
        f"Weather in Rome?\n[assistant]{call}\n{call}\n[user]sunny\nwarm\n[user]And in Paris?\n"
    )


def test_the_system_prompt_stays_in_front() -> None:
    request = chat(messages=[{"role": "developer", "content": "Be brief."}, *HISTORY], tools=[TOOL])
    text = written(KNOWS_NOT, request)
    assert text.startswith("[system]Be brief.\n\nYou may call functions.")
    assert text.count("[system]") == 1


def test_without_functions_nothing_changes() -> None:
    plain = [{"role": "user", "content": "hi"}]
    for template in (KNOWS, KNOWS_NOT):
        assert written(template, chat(messages=plain)) == "[user]hi\n"


def test_a_template_that_knows_none_can_be_made_to_refuse() -> None:
    transcript = Transcript(tokenizer(KNOWS_NOT), own_prompt=False)
    for request in (chat(tools=[TOOL], messages=HISTORY[:1]), chat()):
        with pytest.raises(ApiError) as caught:
            transcript.render(request.messages, request.tools or [])
        assert caught.value.status == 400
    assert transcript.render(chat(messages=HISTORY[:1]).messages, [])[1] is None


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "x", "tool_call_id": "1"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}],
                }
            ],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_messages_that_do_not_fit_their_role(messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        written(KNOWS, chat(messages=messages))
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "tool_choice",
            "invalid_value",
        ),
        ({"tools": [TOOL, TOOL]}, "tools", "invalid_value"),
        ({"tools": [TOOL] * 129}, "tools", "invalid_value"),
        ({"tools": [{"type": "web"}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "invalid_value",
        ),
        ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_type"),
    ],
)
def test_fields_at_fault(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        plan_tools(chat(**fields), 128)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


def test_what_a_choice_comes_to() -> None:
    assert plan_tools(chat(), 128) is None
    assert plan_tools(chat(tools=[], tool_choice="auto"), 128) is None
    assert plan_tools(chat(tools=[TOOL], tool_choice="none"), 128) is None
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": None}):
        plan = plan_tools(chat(tools=[TOOL], **choice), 128)
        assert plan is not None
        assert (plan.several, len(plan.tools), plan.forced) == (True, 1, ())
    named = {"type": "function", "function": {"name": "weather"}}
    for forced in ("required", named):
        plan = plan_tools(chat(tools=[TOOL], tool_choice=forced), 128)
        assert plan is not None
        assert [tool.function.name for tool in plan.forced] == ["weather"]
    one = plan_tools(chat(tools=[TOOL], parallel_tool_calls=False), 128)
    assert one is not None
    assert not one.several


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_templates_run_in_a_sandbox(template: str) -> None:
    with pytest.raises(RequestError):
        encode_prompt(tokenizer(template), [{"role": "user", "content": "hi"}])
