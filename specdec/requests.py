"""What the engine checks of a request before it takes it, and counts once it ran."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.errors import ContextLengthError, RequestError
from specdec.outputs import EngineStats, RequestOutput, RequestStats, TokenLogprobs
from specdec.params import SamplingParams
from specdec.policy.budget import Budget, StepSeen
from specdec.policy.plan import CommitResult, StepPlan
from specdec.policy.sequence import Sequence as SequenceState
from specdec.policy.verdict import Verdict


def check_request(
    tokens: Sequence[int], params: SamplingParams, vocabulary: int, max_length: int
) -> None:
    """See that the model can answer.

    Args:
        tokens: of the prompt.
        params: valid in themselves.
        vocabulary: tokens that the model knows.
        max_length: most tokens of a sequence.

    Raises:
        RequestError: the prompt is empty, or a token lies outside the vocabulary.
        ContextLengthError: the prompt leaves no room for an answer.
    """
    if not tokens:
        raise RequestError("the prompt is empty", param="prompt")
    outside = next((t for t in tokens if not 0 <= t < vocabulary), None)
    if outside is not None:
        raise RequestError(
            f"prompt token {outside} lies outside the vocabulary of {vocabulary}",
            param="prompt",
        )
    outside = next((t for t in params.logit_bias if t >= vocabulary), None)
    if outside is not None:
        raise RequestError(
            f"logit_bias names token {outside}, outside the vocabulary of {vocabulary}",
            param="logit_bias",
        )
    outside = next((t for t in params.stop_token_ids if not 0 <= t < vocabulary), None)
    if outside is not None:
        raise RequestError(
            f"stop_token_ids names token {outside}, outside the vocabulary of {vocabulary}",
            param="stop_token_ids",
        )
    if len(tokens) >= max_length:
        raise ContextLengthError(
            f"the prompt has {len(tokens)} tokens; the model's context of "
            f"{max_length} leaves no room for an answer",
            param="prompt",
        )


def count_step(stats: EngineStats, plan: StepPlan, result: CommitResult) -> None:
    """Add one step to the engine's counts."""
    stats.steps += 1
    stats.rows += plan.rows
    emitted = {c.sequence.request_id: len(c.tokens) for c in result.committed}
    stats.emitted += sum(emitted.values())
    for segment in plan.segments:
        if segment.tree is not None and segment.sequence.request_id in emitted:
            stats.rounds += 1
            stats.drafted += len(segment.tree) - 1
            stats.accepted += emitted[segment.sequence.request_id] - 1


def learn_step(
    budget: Budget, plan: StepPlan, verdicts: Sequence[Verdict | None], seconds: float
) -> None:
    """Tell the budget how long a step took, drafting left out, and what its trees gave."""
    rows = decodes = keys = prefill = prefill_keys = committed = 0
    for segment, verdict in zip(plan.segments, verdicts, strict=True):
        count = len(segment.tokens)
        if segment.tree is None:
            prefill += count
            prefill_keys += count * segment.start
            continue
        rows, decodes, keys = rows + count, decodes + 1, keys + count * segment.start
        params = segment.sequence.params
        if verdict is None or verdict.error is not None:
            continue
        committed += len(verdict.nodes)
        if params.acceptance == "match":
            budget.learn_verdict(segment.tree, verdict.nodes, params.greedy)
    budget.learn(StepSeen(rows, decodes, keys, prefill, prefill_keys, committed, seconds))


def request_stats(sequence: SequenceState) -> RequestStats:
    """What is told of a finished sequence."""
    stats = sequence.stats
    finished = stats.finished if stats.finished is not None else stats.arrival
    scheduled = stats.first_scheduled if stats.first_scheduled is not None else finished
    return RequestStats(
        prompt_tokens=sequence.prompt_length,
        completion_tokens=len(sequence.tokens) - sequence.prompt_length,
        rounds=stats.rounds,
        drafted=stats.drafted,
        accepted=stats.accepted,
        accepted_by_depth=tuple(stats.accepted_by_depth),
        walked_by_depth=tuple(stats.walked_by_depth),
        preemptions=stats.preemptions,
        cached_tokens=stats.cached,
        loaded_tokens=stats.loaded,
        queue_s=scheduled - stats.arrival,
        first_token_s=None if stats.first_token is None else stats.first_token - stats.arrival,
        total_s=finished - stats.arrival,
    )


def request_output(
    sequence: SequenceState,
    tokens: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...] = (),
) -> RequestOutput:
    """What is told of a sequence after a step that gave it ``tokens``, or ended it."""
    ended = sequence.finish_reason is not None
    prompt: tuple[TokenLogprobs, ...] = ()
    if tokens and sequence.prompt_logprobs is not None:
        prompt, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), None
    return RequestOutput(
        sequence.request_id,
        tokens,
        sequence.finish_reason,
        sequence.error if ended else None,
        request_stats(sequence) if ended else None,
        sequence.stats.cached,
        sequence.stats.drafted,
        sequence.stats.accepted,
        logprobs,
        prompt,
    )


def count_finished(stats: EngineStats, output: RequestOutput) -> None:
    """Add a request that has ended to the engine's counts."""
    if output.stats is None or output.finish_reason is None:
        return
    stats.finished[output.finish_reason] = stats.finished.get(output.finish_reason, 0) + 1
    stats.prompt_tokens += output.stats.prompt_tokens
    stats.cached_tokens += output.stats.cached_tokens
    stats.loaded_tokens += output.stats.loaded_tokens
