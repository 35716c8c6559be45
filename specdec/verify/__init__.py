"""Verification: which draft tokens are kept, and what is emitted after them.

Three rules behind one protocol. ``match`` emits what plain decoding with the same seed
emits; ``rejection`` emits the same distribution; ``typical`` is lossy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from specdec.params import AcceptanceRule
from specdec.policy.verdict import Verdict
from specdec.verify.match import verify_match
from specdec.verify.rejection import (
    sample_siblings,
    sample_siblings_batch,
    verify_rejection,
)
from specdec.verify.typical import verify_typical
from specdec.verify.walks import VerifyInput

__all__ = [
    "RULES",
    "Rule",
    "Verdict",
    "VerifyInput",
    "is_lossy",
    "sample_siblings",
    "sample_siblings_batch",
    "verify_batch",
]


@dataclass(frozen=True)
class Rule:
    """A way to accept draft tokens.

    Attributes:
        verify: verdicts on inputs that all ask for this rule, in their order.
        lossy: whether it changes the distribution of the output; to be shown wherever the
            rule's name is.
    """

    verify: Callable[[Sequence[VerifyInput]], list[Verdict]]
    lossy: bool


RULES: Mapping[AcceptanceRule, Rule] = MappingProxyType(
    {
        "match": Rule(verify_match, lossy=False),
        "rejection": Rule(verify_rejection, lossy=False),
        "typical": Rule(verify_typical, lossy=True),
    }
)


def is_lossy(rule: AcceptanceRule) -> bool:
    """Whether the rule changes the distribution of the output."""
    return RULES[rule].lossy


def verify_batch(inputs: Sequence[VerifyInput]) -> list[Verdict]:
    """Verdicts on the trees of one step, in the order of ``inputs``.

    Sequences never influence each other: a row that is not finite fails its own sequence,
    and only if the walk reaches it.
    """
    verdicts: dict[int, Verdict] = {}
    for name, rule in RULES.items():
        chosen = [number for number, i in enumerate(inputs) if i.params.acceptance == name]
        if chosen:
            results = rule.verify([inputs[number] for number in chosen])
            verdicts.update(zip(chosen, results, strict=True))
    return [verdicts[number] for number in range(len(inputs))]
