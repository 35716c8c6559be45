"""Finds the calls in a model's text while it comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from deployments.tools.hermes import HermesParser
from deployments.tools.parsed import Parsed


class ToolParser(Protocol):
    """Reads the text of one choice.

    However the text is split, what comes out of all calls together is the same.
    """

    @property
    def calls(self) -> int:
        """Calls found up to now."""

    def add(self, text: str) -> Parsed:
        """Take text; returns what is certain now."""

    def finish(self, cut: bool) -> Parsed:
        """The rest, when no text follows.

        Args:
            cut: whether the text ends because it got too long. The beginning of a call is then
                left out; else it is text, as the model meant nothing more by it.
        """


@dataclass(frozen=True)
class CallFormat:
    """How a family of models writes its calls.

    Attributes:
        make: a parser for one choice; takes whether there may be more than one call.
    """

    make: Callable[[bool], ToolParser]


#: By the name that ``gateway.tools.parser`` has.
FORMATS: Mapping[str, CallFormat] = MappingProxyType({"hermes": CallFormat(HermesParser)})
