"""Fields of a request that have to do with functions, as OpenAI defines them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class ToolBody(BaseModel):
    """Base: no conversion between types, unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class Function(ToolBody):
    """A function that the model may call.

    Attributes:
        name: of letters, digits, ``_`` and ``-``.
        description: for the model.
        parameters: JSON Schema of the arguments; None is none.
        strict: accepted; arguments are made to fit the schema only where a call is forced.
    """

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ToolBody):
    """The only kind of tool there is."""

    type: Literal["function"]
    function: Function


class NamedFunction(ToolBody):
    """Names a function."""

    name: str


class NamedTool(ToolBody):
    """A ``tool_choice`` that asks for one function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class PastFunction(ToolBody):
    """What an earlier turn called.

    Attributes:
        name: of the function.
        arguments: a JSON object in a string.
    """

    name: str = Field(min_length=1)
    arguments: str


class PastCall(ToolBody):
    """A call of an earlier turn, as an answer of this API has it."""

    id: str
    type: Literal["function"]
    function: PastFunction
    index: int | None = None
