"""How the rows of a step are shared out among draft trees. Holds no torch."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.params import SamplingParams
from specdec.policy.budget import Budget
from specdec.policy.tree import DraftTree

#: Chance that a sampled candidate is accepted, as far as may be known before it is drawn.
SAMPLED_ACCEPTANCE = 0.5


def estimates(tree: DraftTree, params: SamplingParams, budget: Budget) -> Sequence[float]:
    """Per node the chance that the walk reaches it, as the sharing of rows may use it.

    Args:
        tree: whose nodes.
        params: of its sequence. Candidates of the rejection rule were drawn at random, and
            whether one is tried must not depend on which token it is: to drop the unlikely
            ones would bias what is emitted. Their depth alone counts.
        budget: knows how often such candidates are accepted.
    """
    if params.acceptance == "rejection" and not params.greedy:
        return [SAMPLED_ACCEPTANCE**depth for depth in tree.depths]
    return budget.estimates(tree, params.greedy)


def tree_sizes(
    trees: Sequence[DraftTree],
    params: Sequence[SamplingParams],
    keys: int,
    rows: int,
    budget: Budget,
) -> list[int]:
    """Sizes to cut the trees of a step to, roots included.

    Args:
        trees: one per sequence.
        params: of the sequences.
        keys: their committed tokens, summed.
        rows: most candidates in all.
        budget: decides how many pay.
    """
    if not trees:
        return []
    values = [estimates(tree, p, budget) for tree, p in zip(trees, params, strict=True)]
    chances = sorted((value for row in values for value in row[1:]), reverse=True)
    return share_rows(values, budget.candidates(chances, len(trees), keys, rows))


def share_rows(values: Sequence[Sequence[float]], rows: int) -> list[int]:
    """Sizes to cut trees to, so that the likeliest candidates of all are verified.

    Args:
        values: per tree and node its estimate, falling, so that every prefix holds a tree's
            best nodes; the root's comes first.
        rows: for candidates, roots not counted; 0 or more.

    Returns:
        Per tree its size, root included; the candidates add up to ``rows`` at most. Of equally
        likely candidates the ones of earlier trees are kept.
    """
    sizes = [len(row) for row in values]
    if sum(sizes) - len(sizes) <= rows:
        return sizes
    candidates = [(-value, i) for i, row in enumerate(values) for value in row[1:]]
    candidates.sort()
    kept = [1] * len(values)
    for _, i in candidates[:rows]:
        kept[i] += 1
    return kept
