"""Draft trees under a constraint: nothing that cannot come, and what must come. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.policy.constraint import PathLimits
from specdec.policy.merge import merge_path
from specdec.policy.tree import DraftTree

#: Chance that the next token is the one proposed where the text is forced. The mask allows the
#: one way alone in which the tokenizer would write it; below 1, so that shorter paths come first.
FORCED_RATE = 0.99
#: Nodes, the likeliest first, below which forced text is looked for.
_PLACES = 4


def cut_path(tokens: Sequence[int], limits: PathLimits) -> int:
    """How many of ``tokens``, one below the other from depth 1 down, may stand."""
    return limits.constraint.accepted(limits.output, tokens)


def prune(tree: DraftTree, limits: PathLimits) -> DraftTree:
    """The tree without the nodes that cannot come, and all below them."""
    place = {0: 0}
    paths: list[list[int]] = [[]]
    for node in range(1, len(tree)):
        above = place.get(tree.parents[node])
        if above is not None and limits.keeps(paths[above], [tree.tokens[node]])[0]:
            place[node] = len(place)
            paths.append([*paths[above], tree.tokens[node]])
    if len(place) == len(tree):
        return tree
    kept = list(place)
    return DraftTree(
        tuple(tree.tokens[node] for node in kept),
        tuple(place.get(tree.parents[node], -1) for node in kept),
        tuple(tree.depths[node] for node in kept),
        tuple(tree.values[node] for node in kept),
    )


def add_forced(tree: DraftTree, limits: PathLimits, depth: int, size: int) -> DraftTree:
    """The tree with the tokens that must come below its root and its likeliest nodes.

    Args:
        tree: pruned.
        limits: on its nodes.
        depth: of the deepest node that can be committed.
        size: most nodes of the result, root included.
    """
    result = tree
    for node in range(min(len(tree), _PLACES)):
        path = tree.path_to(node)[1:]
        above = [tree.tokens[i] for i in path]
        forced = limits.constraint.forced([*limits.output, *above])
        forced = forced[: max(0, min(depth, size) - len(above))]
        values = [tree.values[i] for i in path]
        values += [tree.values[node] * FORCED_RATE**k for k in range(1, len(forced) + 1)]
        result = merge_path(result, [*above, *forced], values, size)
    return result
