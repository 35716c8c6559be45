"""A grammar that leaves nothing to write but calls of given functions."""

from __future__ import annotations

import json
from collections.abc import Sequence

from deployments.tools.hermes import CLOSE, OPEN
from deployments.tools.schema import Tool

#: As models write JSON: with endless spaces allowed, one might never end.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def call_grammar(tools: Sequence[Tool], several: bool) -> str:
    """In Lark's notation as llguidance reads it, JSON Schemas embedded.

    What it allows is what ``HermesParser`` reads, with arguments that fit the function's schema.

    Args:
        tools: one of which is called.
        several: whether more calls may follow the first.
    """
    rules = [
        f"start: call{' (NEWLINE call)*' if several else ''}",
        f"call: {_literal(OPEN)} NEWLINE object NEWLINE {_literal(CLOSE)}",
        "object: " + " | ".join(f"object_{number}" for number in range(len(tools))),
        r"NEWLINE: /\n/",
    ]
    rules += [f"object_{number}: %json {_schema(tool)}" for number, tool in enumerate(tools)]
    return "\n".join(rules) + "\n"


def _schema(tool: Tool) -> str:
    """Of the object that calls a function."""
    parameters = tool.function.parameters
    arguments = {"type": "object", "properties": {}} if parameters is None else parameters
    return json.dumps(
        {
            "x-guidance": _LAYOUT,
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
    )


def _literal(text: str) -> str:
    return json.dumps(text)
