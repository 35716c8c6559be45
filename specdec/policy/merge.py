"""Joining candidates of two sources in one draft tree. Holds no torch."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.policy.tree import DraftTree


def merge_path(
    tree: DraftTree, tokens: Sequence[int], values: Sequence[float], size: int
) -> DraftTree:
    """The best nodes of a tree and of one path of candidates below its root.

    A candidate that both propose is one node with the higher of both values. Ties go to the
    tree, so that parents stand before their children.

    Args:
        tree: no two siblings hold the same token.
        tokens: the path from depth 1 down.
        values: per token the estimated probability that the walk reaches it, 0 to 1; a value
            above its parent's counts as its parent's.
        size: most nodes of the result, root included.
    """
    if not tokens:
        return tree if len(tree) <= size else tree.prefix(size)
    all_tokens, parents = list(tree.tokens), list(tree.parents)
    depths, merged = list(tree.depths), list(tree.values)
    node = 0
    for token, value in zip(tokens, values, strict=True):
        value = min(value, merged[node])
        for child in range(node + 1, len(tree)):
            if parents[child] == node and all_tokens[child] == token:
                merged[child] = max(merged[child], value)
                node = child
                break
        else:
            all_tokens.append(token)
            parents.append(node)
            depths.append(depths[node] + 1)
            merged.append(value)
            node = len(all_tokens) - 1
    # a stable sort: a parent is never behind a child of equal value
    best = sorted(range(len(merged)), key=merged.__getitem__, reverse=True)[: max(1, size)]
    place = {node: index for index, node in enumerate(best)}
    place[-1] = -1
    return DraftTree(
        tuple([all_tokens[node] for node in best]),
        tuple([place[parents[node]] for node in best]),
        tuple([depths[node] for node in best]),
        tuple([merged[node] for node in best]),
    )
