"""Log-probabilities of tokens, from the logits that a step computes anyway.

They are the model's own: log-softmax of its logits, before grammar, bias, penalties and
temperature, as OpenAI and vLLM (``raw_logprobs``) tell them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.model.runner import StepOutput
from specdec.outputs import TokenLogprobs
from specdec.policy.plan import Committed, Segment, StepPlan
from specdec.policy.verdict import Verdict

#: Rows of a vocabulary that are worked on at once.
_ROWS = 32


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """What rows of logits say of the tokens that followed them.

    Args:
        logits: ``[R, V]`` float32.
        tokens: R of them.
        count: likeliest tokens to tell besides; of equals those with the smaller id.
    """
    told: list[TokenLogprobs] = []
    for first in range(0, len(tokens), _ROWS):
        rows, chosen = logits[first : first + _ROWS], tokens[first : first + _ROWS]
        total = rows.logsumexp(-1, keepdim=True)
        index = torch.tensor(chosen, device=rows.device)[:, None]
        own = (rows.gather(1, index) - total)[:, 0].tolist()
        if count == 0:
            told += [TokenLogprobs(t, value, ()) for t, value in zip(chosen, own, strict=True)]
            continue
        best = rows.topk(min(count, rows.shape[1]))
        ids, values = best.indices.tolist(), (best.values - total).tolist()
        for token, value, row_ids, row_values in zip(chosen, own, ids, values, strict=True):
            pairs = zip(row_ids, row_values, strict=True)
            top = tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
            told.append(TokenLogprobs(token, value, top))
    return told


def collect_logprobs(
    plan: StepPlan,
    verdicts: Sequence[Verdict | None],
    committed: Sequence[Committed],
    output: StepOutput,
) -> dict[str, tuple[TokenLogprobs, ...]]:
    """Those of the tokens that a step committed, by request; those of prompts go to their
    sequences. Costs nothing where no request of the step asks.

    Args:
        plan: of the step.
        verdicts: on its segments.
        committed: what was kept of these.
        output: of its forward.
    """
    if not any(_asks(segment) for segment in plan.segments):
        return {}
    kept = {entry.sequence.request_id: entry.tokens for entry in committed}
    told: dict[str, tuple[TokenLogprobs, ...]] = {}
    for segment, verdict, (start, end) in zip(plan.segments, verdicts, output.spans, strict=True):
        sequence = segment.sequence
        if segment.every_row:
            _add_prompt(segment, output.logits[start:end])
        count, tokens = sequence.params.logprobs, kept.get(sequence.request_id)
        if count is None or tokens is None or verdict is None:
            continue
        rows = [end - 1]
        if segment.tree is not None:
            rows = [start + node for node in verdict.nodes[: len(tokens)]]
        told[sequence.request_id] = tuple(token_logprobs(output.logits[rows], tokens, count))
    return told


def _asks(segment: Segment) -> bool:
    return segment.every_row or segment.sequence.params.logprobs is not None


def _add_prompt(segment: Segment, logits: Tensor) -> None:
    """Enter what a chunk's rows say of the prompt's tokens, those known already left out."""
    sequence = segment.sequence
    known, count = sequence.prompt_logprobs, sequence.params.prompt_logprobs
    if known is None or count is None:
        return
    first = len(known) - segment.start  # row i of the chunk is about token start + i + 1
    last = min(len(segment.tokens), sequence.prompt_length - 1 - segment.start)
    if 0 <= first < last:
        place = segment.start + 1
        tokens = sequence.tokens[place + first : place + last]
        known += token_logprobs(logits[first:last], tokens, count)
