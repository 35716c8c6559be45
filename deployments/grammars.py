"""What a request wants its output to be: JSON, an expression, a choice or a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from deployments.errors import invalid
from specdec.params import GrammarSpec

if TYPE_CHECKING:
    from deployments.schema import SamplingFields

_ANY_OBJECT = {"type": "object"}


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class JsonSchema(_Part):
    """A named schema, as OpenAI's API has it.

    Attributes:
        name: has no effect.
        description: has no effect.
        json_schema: absent, any object will do.
        strict: has no effect: outputs always keep to the schema.
    """

    name: str = Field(max_length=256)
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Part):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Part):
    """vLLM's ``structured_outputs``; exactly one of these.

    Attributes:
        json_: a schema, or its text.
        regex: Rust's syntax; the whole output matches.
        choice: the output is one of these.
        grammar: context-free, in Lark's notation as llguidance reads it.
        json_object: any object.
    """

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def grammar_of(fields: SamplingFields) -> GrammarSpec | None:
    """The grammar that a request asks for; None if it asks for none.

    Raises:
        ApiError: 400, it asks for several, or for one that says nothing.
    """
    specs = list(_specs(fields))
    if len(specs) > 1:
        raise invalid(
            specs[1].param,
            f"'{specs[0].param}' and '{specs[1].param}' exclude each other: the output can only "
            "be one of them.",
        )
    return specs[0] if specs else None


def _specs(fields: SamplingFields) -> Iterator[GrammarSpec]:
    wanted = fields.response_format
    if wanted is not None and wanted.type == "json_object":
        yield _of_schema(_ANY_OBJECT, "response_format")
    elif wanted is not None and wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise invalid(
                "response_format.json_schema",
                "Missing required parameter: 'response_format.json_schema'.",
                "missing_required_parameter",
            )
        schema = wanted.json_schema.json_schema
        yield _of_schema(
            _ANY_OBJECT if schema is None else schema, "response_format.json_schema.schema"
        )
    structured = fields.structured_outputs
    if structured is not None:
        found = list(_structured(structured))
        if not found:
            raise invalid("structured_outputs", "'structured_outputs' asks for nothing.")
        yield from found
    yield from _parts(
        fields.guided_json,
        fields.guided_regex,
        fields.guided_choice,
        fields.guided_grammar,
        "guided_",
    )


def _structured(wanted: StructuredOutputs) -> Iterator[GrammarSpec]:
    if wanted.json_object:
        yield _of_schema(_ANY_OBJECT, "structured_outputs.json_object")
    yield from _parts(
        wanted.json_, wanted.regex, wanted.choice, wanted.grammar, "structured_outputs."
    )


def _parts(
    schema: dict[str, Any] | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    prefix: str,
) -> Iterator[GrammarSpec]:
    if schema is not None:
        yield _of_schema(schema, f"{prefix}json")
    if regex is not None:
        yield GrammarSpec("regex", regex, f"{prefix}regex")
    if choice is not None:
        if not choice or not all(choice):
            raise invalid(
                f"{prefix}choice", f"'{prefix}choice' must hold strings that are not empty."
            )
        # an alternative of strings: JSON's escapes are Lark's
        yield GrammarSpec(
            "lark", "start: " + " | ".join(map(json.dumps, choice)), f"{prefix}choice"
        )
    if grammar is not None:
        yield GrammarSpec("lark", grammar, f"{prefix}grammar")


def _of_schema(schema: dict[str, Any] | str, param: str) -> GrammarSpec:
    return GrammarSpec(
        "json_schema", schema if isinstance(schema, str) else json.dumps(schema), param
    )
