"""What a verdict makes of one sequence's tokens. Holds no torch."""

from __future__ import annotations

from specdec.outputs import FinishReason
from specdec.policy.plan import KvMove, Segment
from specdec.policy.sequence import Sequence
from specdec.policy.verdict import Verdict


def check_verdict(segment: Segment, verdict: Verdict) -> None:
    """Refuse a walk that is none of this segment's, before it garbles KV or text.

    Raises:
        ValueError: what does not fit.
    """
    nodes, tokens, tree = verdict.nodes, verdict.tokens, segment.tree
    fits = nodes[:1] == (0,) and len(tokens) == len(nodes)
    if fits and len(nodes) > 1:
        fits = tree is not None and all(
            0 < node < len(tree.tokens)
            and tree.parents[node] == nodes[i]
            and tree.tokens[node] == tokens[i]
            for i, node in enumerate(nodes[1:])
        )
    if not fits:
        raise ValueError(
            f"{segment.sequence.request_id}: nodes {nodes} with tokens {tokens} are no walk "
            f"through {tree or 'a prefill chunk'}"
        )


def take_tokens(
    sequence: Sequence, tokens: tuple[int, ...], pool_limit: int
) -> tuple[int, FinishReason | None]:
    """Append tokens up to the first stop.

    Args:
        pool_limit: most committed tokens for which a root still finds a slot, plus one.

    Returns:
        How many were taken (at least one), and why the sequence ends, if it does.
    """
    known = sequence.tokens
    for taken, token in enumerate(tokens, 1):
        verdict = sequence.stop_checker.check(known, token)
        known.append(token)
        if verdict is not None:
            return taken, verdict.reason
        if len(known) >= pool_limit:
            return taken, "length"
    return len(tokens), None


def add_moves(moves: KvMove, segment: Segment, nodes: tuple[int, ...]) -> None:
    """Note where the KV of the walked nodes must go: node ``i`` of the walk belongs to
    position ``start + i``.
    """
    lease = segment.sequence.lease
    if lease is None:
        return
    for place, node in enumerate(nodes):
        if node != place:
            moves.source_slots.append(lease.slot(segment.start + node))
            moves.target_slots.append(lease.slot(segment.start + place))
