"""Verdicts on all segments of a step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specdec.model.runner import StepOutput
from specdec.policy.plan import StepPlan
from specdec.policy.sequence import Sequence
from specdec.policy.tree import DraftTree
from specdec.policy.verdict import Verdict
from specdec.verify import VerifyInput, verify_batch

#: From a sequence and its tree to the distributions its nodes were drawn from, or None.
DraftProbabilities = Callable[[Sequence, DraftTree | None], Tensor | None]


def verify_plan(
    plan: StepPlan, output: StepOutput, probabilities: DraftProbabilities
) -> list[Verdict | None]:
    """One verdict per segment; None for prefill chunks that draw no token.

    Args:
        plan: of the step.
        output: of its forward.
        probabilities: of the drafts.
    """
    inputs, places = [], []
    for place, (segment, (start, end)) in enumerate(zip(plan.segments, output.spans, strict=True)):
        if not segment.wants_logits:
            continue
        sequence = segment.sequence
        inputs.append(
            VerifyInput(
                # of a prefill chunk the last row, whatever others were asked for
                logits=output.logits[start if segment.tree else end - 1 : end],
                tree=segment.tree or DraftTree.root_only(sequence.tokens[-1]),
                params=sequence.params,
                committed=sequence.tokens,
                prompt_length=sequence.prompt_length,
                draft_probabilities=probabilities(sequence, segment.tree),
                constraint=sequence.constraint,
            )
        )
        places.append(place)
    verdicts: list[Verdict | None] = [None] * len(plan.segments)
    for place, verdict in zip(places, verify_batch(inputs), strict=True):
        verdicts[place] = verdict
    return verdicts
