"""What a chat's ``tools`` and ``tool_choice`` come to."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.errors import invalid
from deployments.schema import ChatRequest, SamplingFields
from deployments.tools.forced import call_grammar
from deployments.tools.schema import NamedTool, Tool
from specdec.params import GrammarSpec


@dataclass(frozen=True)
class ToolPlan:
    """Functions that are offered to the model.

    Attributes:
        tools: them.
        several: whether an answer may have more than one call.
        forced: functions one of which must be called; empty leaves it to the model.
    """

    tools: tuple[Tool, ...]
    several: bool
    forced: tuple[Tool, ...] = ()


def plan_tools(request: ChatRequest, most: int) -> ToolPlan | None:
    """The plan of a request; None where no function is offered.

    Args:
        request: of a chat.
        most: functions that a request may offer.

    Raises:
        ApiError: 400 that names the field.
    """
    tools, choice = tuple(request.tools or ()), request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "'tool_choice' needs 'tools'.")
        return None
    if len(tools) > most:
        raise invalid("tools", f"'tools' may hold at most {most} functions, not {len(tools)}.")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", "'tools' has two functions of the same name.")
    forced: tuple[Tool, ...] = ()
    if isinstance(choice, NamedTool):
        forced = tuple(tool for tool in tools if tool.function.name == choice.function.name)
        if not forced:
            raise invalid("tool_choice", "'tool_choice' names a function that 'tools' has not.")
    elif choice == "required":
        forced = tools
    if choice == "none":
        return None
    return ToolPlan(tools, request.parallel_tool_calls is not False, forced)


def forced_call(fields: SamplingFields, most: int) -> GrammarSpec | None:
    """The grammar of a request that must be answered by a call; None where it need not.

    Args:
        fields: of the request.
        most: functions that a request may offer.

    Raises:
        ApiError: 400 that names the field.
    """
    plan = plan_tools(fields, most) if isinstance(fields, ChatRequest) else None
    if plan is None or not plan.forced:
        return None
    return GrammarSpec("lark", call_grammar(plan.forced, plan.several), "tools")
