"""A scheduler, sequences for it, and steps of a target that says what it is told."""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import count

from specdec.params import SamplingParams
from specdec.policy.pages import PageAllocator
from specdec.policy.plan import CommitResult, SchedulerConfig, StepPlan
from specdec.policy.scheduler import Scheduler
from specdec.policy.sequence import Sequence, Status
from specdec.policy.stop import StopChecker
from specdec.policy.tree import DraftTree
from specdec.policy.verdict import Verdict

CONFIG = SchedulerConfig(
    token_budget=32,
    max_sequences=4,
    max_waiting=3,
    max_tree_nodes=8,
    prefill_chunk=16,
    max_model_length=100,
)
EOS = 99


def make(
    name: str,
    prompt: int = 4,
    params: SamplingParams | None = None,
    config: SchedulerConfig = CONFIG,
) -> Sequence:
    params = params or SamplingParams(max_tokens=50)
    checker = StopChecker(params, (EOS,), config.max_model_length, prompt)
    return Sequence(name, list(range(prompt)), prompt, params, checker)


def scheduler(pages: int = 20, size: int = 4, config: SchedulerConfig = CONFIG) -> Scheduler:
    ticks = count()
    return Scheduler(config, PageAllocator(pages, size), lambda: float(next(ticks)))


def plain(plan: StepPlan, token: int = 50) -> list[Verdict | None]:
    """Verdicts of a target that emits ``token``, agreeing with no candidate."""
    return [Verdict((0,), (token,)) if s.wants_logits else None for s in plan.segments]


def step(served: Scheduler, verdicts: Items[Verdict | None] | None = None) -> CommitResult:
    plan = served.schedule()
    result = served.commit(plan, plain(plan) if verdicts is None else verdicts)
    served.check_integrity()
    return result


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(s.sequence.request_id, s.start, len(s.tokens), s.wants_logits) for s in plan.segments]


def fork(root: int) -> DraftTree:
    """Root; 61 and 62 below it; 71 below 62; 81 below 71."""
    tokens, values = (root, 61, 62, 71, 81), (1.0, 0.9, 0.8, 0.7, 0.6)
    return DraftTree(tokens, (-1, 0, 0, 2, 3), (0, 1, 1, 2, 3), values)


def started(served: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        served.add(sequence)
    while any(not s.decoding for s in sequences):
        assert all(s.status is not Status.FINISHED for s in sequences)
        step(served)
