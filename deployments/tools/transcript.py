"""Messages and functions as a model's chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deployments.errors import ApiError, invalid
from deployments.schema import Message
from deployments.tools.schema import PastCall, Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: A function that no prompt has by chance.
_PROBE = {
    "type": "function",
    "function": {
        "name": "probe_8f1d2c",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}

_PROMPT = """\
You may call functions. Their JSON signatures stand between <tools> and </tools>:
<tools>
{signatures}
</tools>
To call one, answer with a JSON object between <tool_call> and </tool_call>:
<tool_call>
{{"name": <function name>, "arguments": <arguments as a JSON object>}}
</tool_call>"""

Turn = dict[str, Any]


class Transcript:
    """Writes conversations down for one model.

    A chat template that knows functions gets them as they are. For others they are described in
    the system prompt, calls are written as the ``hermes`` parser reads them, and results become a
    user's turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, own_prompt: bool) -> None:
        """Args:
        tokenizer: with the model's chat template.
        own_prompt: describe functions where the template cannot; else refuse them.
        """
        self.knows_tools = template_knows_tools(tokenizer)
        self._own_prompt = own_prompt

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[Turn], list[Turn] | None]:
        """Turns and functions for the chat template.

        Raises:
            ApiError: 400, messages do not fit their roles, or the model knows no functions.
        """
        check_roles(messages)
        functions = [tool.model_dump(exclude_none=True) for tool in tools]
        for function in functions:
            function["function"].pop("strict", None)
        involved = bool(functions) or any(m.role == "tool" or m.tool_calls for m in messages)
        turns = [self._turn(message, index) for index, message in enumerate(messages)]
        if not involved or self.knows_tools:
            return turns, functions or None
        if not self._own_prompt:
            raise invalid(
                "tools" if functions else "messages",
                "The chat template of this model knows no functions.",
                "unsupported_parameter",
            )
        return _in_words(turns, functions), None

    def _turn(self, message: Message, index: int) -> Turn:
        turn: Turn = {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.content,
        }
        if message.name is not None:
            turn["name"] = message.name
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            turn["tool_calls"] = [
                _past_call(call, f"messages[{index}].tool_calls[{number}]")
                for number, call in enumerate(message.tool_calls)
            ]
        return turn


def template_knows_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether functions show in what the chat template writes. Tried out, not guessed."""
    if tokenizer.chat_template is None:
        return False
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}],
            tools=[_PROBE],
            add_generation_prompt=True,
            tokenize=False,
        )
    except Exception:  # jinja templates raise errors of many kinds  # noqa: BLE001
        return False
    return _PROBE["function"]["name"] in str(text)  # type: ignore[index]


def check_roles(messages: Sequence[Message]) -> None:
    """Each message has the fields of its role.

    Raises:
        ApiError: 400 that names one that has not.
    """
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role == "tool" and message.tool_call_id is None:
            raise _missing(f"{where}.tool_call_id")
        if message.role != "tool" and message.tool_call_id is not None:
            raise invalid(f"{where}.tool_call_id", "Only messages of role 'tool' have one.")
        if message.role != "assistant" and message.tool_calls:
            raise invalid(f"{where}.tool_calls", "Only messages of role 'assistant' have them.")


def _missing(param: str) -> ApiError:
    return invalid(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")


def _past_call(call: PastCall, where: str) -> Turn:
    """A call with its arguments as an object: templates write them down as they see fit."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(f"{where}.function.arguments", "'arguments' must hold a JSON object.")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _in_words(turns: list[Turn], functions: list[Turn]) -> list[Turn]:
    written: list[Turn] = []
    for turn in turns:
        if "tool_calls" in turn:
            calls = [call["function"] for call in turn["tool_calls"]]
            texts = [f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls]
            parts = [turn["content"], *texts] if turn["content"] else texts
            written.append({"role": "assistant", "content": "\n".join(parts)})
        elif turn["role"] == "tool":
            if written and written[-1].get("results"):
                written[-1]["content"] += "\n" + turn["content"]
            else:
                written.append({"role": "user", "content": turn["content"], "results": True})
        else:
            written.append(turn)
    for turn in written:
        turn.pop("results", None)
    if functions:
        prompt = _PROMPT.format(signatures="\n".join(map(_json, functions)))
        if written[0]["role"] == "system":
            written[0] = {**written[0], "content": f"{written[0]['content']}\n\n{prompt}"}
        else:
            written.insert(0, {"role": "system", "content": prompt})
    return written


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
