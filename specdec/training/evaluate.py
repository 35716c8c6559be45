"""How good heads are, measured on held-out answers without running the model.

Greedy decoding emits an answer's own tokens whatever is drafted, so for a greedy answer
the tokens per round that an engine would reach follow exactly from the stored hidden
states: draft at every position where a round would start and follow the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.heads.base import DraftHeads
from specdec.heads.drafting import HeadsDrafter
from specdec.policy.tree import DraftTree
from specdec.training.dataset import AnswerSet

#: Sizes of trees reported, root included.
SIZES = (1, 2, 4, 6, 8, 10, 12, 16, 24, 32)
#: Ranks of which the accuracy is measured.
RANKS = 8
_ROWS = 256


@torch.inference_mode()
def rank_accuracies(heads: DraftHeads, data: AnswerSet) -> tuple[tuple[float, ...], ...]:
    """Per depth and rank, how often that candidate was the token that followed.

    At depth ``d`` the path above is the answer's own, so this is the chance that a node
    of that rank is accepted once its parent is.
    """
    device = next(heads.buffers()).device
    hits = torch.zeros(heads.depths, RANKS)
    counts = torch.zeros(heads.depths)
    token_map = heads.token_map
    for positions in torch.arange(len(data)).split(_ROWS):
        hidden = data.hidden[positions].to(device, torch.float32)
        state = heads.begin(hidden, data.known(positions, heads.recent).to(device))
        for depth in range(1, heads.depths + 1):
            if depth > 1:
                above = data.tokens[(positions + depth - 1).clamp(max=len(data) - 1)]
                state = heads.advance(depth - 1, state, above.to(device))
            inside = data.after[positions] >= depth
            top = heads.logits(depth, state).topk(min(RANKS, heads.width), -1).indices
            tokens = top if token_map is None else token_map[top]
            right = data.tokens[(positions + depth).clamp(max=len(data) - 1)]
            hit = (tokens.cpu() == right[:, None])[inside].sum(0)
            hits[depth - 1, : len(hit)] += hit
            counts[depth - 1] += inside.sum()
    shares = hits / counts.clamp(min=1)[:, None]
    return tuple(tuple(round(share, 4) for share in row) for row in shares.tolist())


def tokens_per_round(
    drafter: HeadsDrafter, data: AnswerSet, sizes: Sequence[int] = SIZES
) -> dict[int, float]:
    """Mean of committed tokens per round by size of tree, on greedy answers.

    An answer's first token comes from its prefill and is not counted; neither is what a
    round would commit beyond the answer's end. A tree of ``size`` nodes is the beginning
    of a larger one, so all sizes are read from the largest.
    """
    accepted = _accepted(drafter, data, sizes)
    result = {}
    for column, size in enumerate(sizes):
        rounds = committed = 0
        runs = accepted[:, column].tolist()
        for answer in data.answers():
            at = answer.start
            while at < answer.stop - 1:
                step = min(runs[at] + 1, answer.stop - 1 - at)
                rounds, committed, at = rounds + 1, committed + step, at + step
        result[size] = round(committed / rounds, 4) if rounds else 1.0
    return result


def greedy_answers(data: AnswerSet, output: Tensor) -> tuple[AnswerSet, list[int]]:
    """The answers that greedy decoding gives: every token its state's likeliest.

    Args:
        data: greedy and sampled answers.
        output: ``[V, H]`` output rows of the model; softcaps and scales change no maximum.

    Returns:
        These answers, and which ones of ``data`` they are.
    """
    greedy: list[bool] = []
    for answer in data.answers():
        span = torch.arange(answer.start, answer.stop)
        logits = data.hidden[span].to(output.device, torch.float32) @ output.float().T
        agree = logits.argmax(-1).cpu() == data.tokens[span]
        # stored states are rounded, so near-ties may differ
        greedy.append(bool(agree.float().mean() > 0.97))
    return select_answers(data, greedy), [i for i, yes in enumerate(greedy) if yes]


def select_answers(data: AnswerSet, wanted: Sequence[bool]) -> AnswerSet:
    """The answers marked in ``wanted``, in their order."""
    chosen = torch.tensor(list(wanted), dtype=torch.bool)
    inside = chosen.repeat_interleave(data.lengths)
    return AnswerSet(
        data.tokens[inside],
        data.hidden[inside],
        data.lengths[chosen],
        data.before[inside],
        data.after[inside],
        data.lead_in,
    )


def _accepted(
    drafter: HeadsDrafter,
    data: AnswerSet,
    sizes: Sequence[int],
    on_progress: Callable[[int], None] = lambda positions: None,
) -> Tensor:
    """``[N, sizes]`` draft tokens that a round starting at each position accepts."""
    accepted = torch.zeros(len(data), len(sizes), dtype=torch.long)
    tokens = data.tokens.tolist()
    after = data.after.tolist()
    largest = max(sizes)
    recent = drafter.heads.recent
    device = next(drafter.heads.buffers()).device
    for positions in torch.arange(len(data)).split(_ROWS):
        trees = drafter.draft(
            data.hidden[positions].to(device, torch.float32),
            [[t for t in row if t >= 0] for row in data.known(positions, recent).tolist()],
            [largest] * len(positions),
        )
        for position, tree in zip(positions.tolist(), trees, strict=True):
            follows = tokens[position + 1 : position + 1 + after[position]]
            path = matched_nodes(tree, follows)
            accepted[position] = torch.tensor([sum(n < size for n in path) for size in sizes])
        on_progress(len(positions))
    return accepted


def matched_nodes(tree: DraftTree, follows: Sequence[int]) -> list[int]:
    """Nodes below the root, from the top, that hold the tokens that follow."""
    children = tree.children()
    node, path = 0, []
    for token in follows:
        found = next((child for child in children[node] if tree.tokens[child] == token), None)
        if found is None:
            break
        path.append(found)
        node = found
    return path
