"""How the rows of a step are shared out among draft trees. Holds no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from specdec.params import SamplingParams
from specdec.policy.budget import Budget
from specdec.policy.sequence import Sequence as SequenceState
from specdec.policy.tree import DraftTree

#: Chance that a sampled candidate is accepted, as far as may be known before it is drawn.
SAMPLED_ACCEPTANCE = 0.5


def drawn_at_random(params: SamplingParams) -> bool:
    """Whether a request's candidates are sampled, for the rejection rule.

    Whether one of them is tried must not depend on which token it is: to drop the unlikely ones
    would bias what is emitted. Nor on how fast the machine is, or the same seed would give
    another text. So their number is the drafter's, cut by depth alone where rows are short.
    """
    return params.acceptance == "rejection" and not params.greedy


def usable_draft(sequence: SequenceState, depth: int, limit: int) -> DraftTree:
    """What of a sequence's draft can be verified; its root alone where there is none.

    Args:
        sequence: decoding.
        depth: of the deepest node that can be committed.
        limit: most nodes.

    Raises:
        ValueError: the draft grows from another token than the last committed one.
    """
    draft = sequence.draft
    if draft is None or not sequence.params.speculation:
        return DraftTree.root_only(sequence.tokens[-1])
    if draft.tokens[0] != sequence.tokens[-1]:
        raise ValueError(f"the draft of {sequence.request_id} grows from another token")
    tree = draft.limit_depth(depth)
    limit = min(limit, sequence.params.max_nodes or limit)
    return tree if len(tree) <= limit else tree.prefix(limit)


class Chosen(NamedTuple):
    """A tree to verify, and how many of its candidates may be expected to be accepted."""

    tree: DraftTree
    expected: float


def choose_trees(
    drafts: Sequence[DraftTree],
    decodes: Sequence[SequenceState],
    rows: int,
    budget: Budget,
    hold: Callable[[SequenceState, int], int],
) -> list[Chosen]:
    """What to verify of the drafts in a step.

    Args:
        drafts: one per sequence.
        decodes: the sequences.
        rows: most candidates in all.
        budget: decides how many pay.
        hold: gets a sequence slots for a tree of that size, and says how many it got: a tree is
            cut to the free pages rather than anyone preempted for it.
    """
    keys = sum(map(len, decodes))
    params = [s.params for s in decodes]
    chances = node_chances(drafts, params, budget)
    sizes = tree_sizes(chances, params, keys, rows, budget)
    chosen = []
    for sequence, draft, values, size in zip(decodes, drafts, chances, sizes, strict=True):
        if size > 1:
            size = hold(sequence, size)
        # each candidate counts if the walk reaches it
        tree = draft.prefix(size) if size < len(draft) else draft
        chosen.append(Chosen(tree, sum(values[1:size], 0.0)))
    return chosen


def node_chances(
    trees: Sequence[DraftTree], params: Sequence[SamplingParams], budget: Budget
) -> list[Sequence[float]]:
    """Per tree and node how likely the walk reaches it, falling; the root's comes first."""
    return [
        [SAMPLED_ACCEPTANCE**depth for depth in tree.depths]
        if drawn_at_random(p)
        else budget.estimates(tree, p.greedy)
        for tree, p in zip(trees, params, strict=True)
    ]


def tree_sizes(
    chances: Sequence[Sequence[float]],
    params: Sequence[SamplingParams],
    keys: int,
    rows: int,
    budget: Budget,
) -> list[int]:
    """Sizes to cut the trees of a step to, roots included.

    Args:
        chances: of each tree, see :func:`node_chances`.
        params: of the sequences.
        keys: their committed tokens, summed.
        rows: most candidates in all.
        budget: decides how many pay.
    """
    if not chances:
        return []
    sampled = [drawn_at_random(p) for p in params]
    free = rows - sum(len(c) - 1 for c, random in zip(chances, sampled, strict=True) if random)
    if free < 0:
        return share_rows(chances, rows)
    shared = [row[:1] if random else row for row, random in zip(chances, sampled, strict=True)]
    line = sorted((value for row in shared for value in row[1:]), reverse=True)
    sizes = share_rows(shared, budget.candidates(line, len(chances), keys, free))
    return [
        len(row) if random else size
        for row, size, random in zip(chances, sizes, sampled, strict=True)
    ]


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
