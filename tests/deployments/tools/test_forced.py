"""The grammar of forced calls, by llguidance itself, against the parser that reads them."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from deployments.tools.forced import call_grammar
from deployments.tools.schema import Tool
from tests.deployments.tools.test_hermes import call, read

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any] | None) -> Tool:
    function = {"name": name, "parameters": parameters}
    return Tool.model_validate({"type": "function", "function": function})


def allowed(text: str, several: bool) -> bool:
    """Whether the grammar lets a model write the text, and then end."""
    tools = [tool("weather", WEATHER), tool("now", None)]
    tokenizer = llguidance.LLTokenizer("byte")
    grammar = llguidance.LLMatcher.grammar_from_lark(call_grammar(tools, several))
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    fits = matcher.validate_tokens(tokens) == len(tokens)
    return bool(fits and matcher.consume_tokens(tokens) and matcher.is_accepting())


ROME = json.dumps({"city": "Rome", "days": 2})


@pytest.mark.parametrize(
    ("text", "once", "often"),
    [
        (call("weather", ROME), True, True),
        (call("now", "{}"), True, True),
        (call("weather", ROME) + "\n" + call("now", "{}"), False, True),
        (call("weather", "{}"), False, False),
        (call("weather", '{"city": 5}'), False, False),
        (call("weather", '{"city": "Rome", "days": 0}'), False, False),
        (call("other", "{}"), False, False),
        ("Well. " + call("now", "{}"), False, False),
        ("", False, False),
    ],
)
def test_what_it_allows(text: str, once: bool, often: bool) -> None:
    assert allowed(text, several=False) == once
    assert allowed(text, several=True) == often
    if often:
        content, calls, _ = read(list(text))
        assert content == ""
        assert len(calls) == text.count("<tool_call>")
