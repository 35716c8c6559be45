"""Who hears of what the engine does with its requests: the interface, and nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from deployments.messages import GenerateRequest
from specdec.outputs import RequestOutput
from specdec.policy.tree import DraftTree


class Recorder(Protocol):
    """Hears of requests; called by the engine's thread between two steps, and never waits."""

    def begin(self, request: GenerateRequest) -> None:
        """The engine has a request."""

    def progressed(
        self, output: RequestOutput, draft_of: Callable[[str], DraftTree | None]
    ) -> None:
        """It has got further, or ended."""

    def left(self, attempt_id: str) -> None:
        """Its caller has left, and it ends in the engine."""


class NoRecorder:
    """Where there is no checkpoint store."""

    def begin(self, request: GenerateRequest) -> None:
        """Forget it."""

    def progressed(
        self, output: RequestOutput, draft_of: Callable[[str], DraftTree | None]
    ) -> None:
        """Forget it."""

    def left(self, attempt_id: str) -> None:
        """Forget it."""
