"""What verification says of one segment. Holds no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The walk through one draft tree, or why there is none.

    Attributes:
        nodes: indices of the walked nodes, the root (0) first; each is the parent of the next.
            For the last chunk of a prefill ``(0,)``: its last row counts as the root.
        tokens: one per walked node, the token committed after it; the last is the bonus token.
        error: why the request fails; ``nodes`` and ``tokens`` are then ignored.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    error: str | None = None

    @staticmethod
    def failure(error: str) -> Verdict:
        """The request fails, for this reason."""
        return Verdict((), (), error)
