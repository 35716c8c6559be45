"""What the arms of a comparison did, case by case, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from bench.arms import Answer, Ask, decoding_speed, mean_first_token, tokens_per_round


@dataclass(frozen=True)
class Case:
    """One load.

    Attributes:
        name: of the case.
        batch: requests at once.
        ask: how they are answered.
        arms: that take part.
    """

    name: str
    batch: int
    ask: Ask
    arms: tuple[str, ...]


@dataclass
class Outcome:
    """What one arm did in one case, per block.

    Attributes:
        speeds: tokens per second, prompts' forwards included.
        decoding: tokens per second from the first tokens on.
        answers: of all blocks.
    """

    speeds: list[float] = field(default_factory=list)
    decoding: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def enter(self, runs: Sequence[list[Answer]]) -> None:
        """Add a block: runs one after the other."""
        tokens = sum(len(answer.times) for answers in runs for answer in answers)
        seconds = sum(max(answer.times[-1] for answer in answers) for answers in runs)
        self.speeds.append(tokens / seconds)
        self.decoding.append(mean(decoding_speed(answers) for answers in runs))
        self.answers += [answer for answers in runs for answer in answers]


def ratio(
    outcomes: Mapping[str, Outcome],
    over: str,
    of: str = "speculative",
    kind: Callable[[Outcome], list[float]] = lambda outcome: outcome.speeds,
) -> float:
    """Median over blocks of one arm's speed over another's in the same block."""
    pairs = zip(kind(outcomes[of]), kind(outcomes[over]), strict=True)
    return median(ours / theirs for ours, theirs in pairs)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def rows_of(outcomes: Mapping[str, Outcome]) -> list[tuple[object, ...]]:
    """A table's rows: one arm each."""
    rows: list[tuple[object, ...]] = []
    for name, outcome in outcomes.items():
        per_token = [a.time_per_token * 1e3 for a in outcome.answers if len(a.times) > 1]
        rows.append(
            (
                name,
                f"{median(outcome.speeds):.1f}",
                f"{min(outcome.speeds):.1f} to {max(outcome.speeds):.1f}",
                f"{median(outcome.decoding):.1f}",
                f"{tokens_per_round(outcome.answers):.2f}" if outcome.answers[0].rounds else "-",
                f"{mean_first_token(outcome.answers) * 1e3:.0f}",
                " / ".join(f"{percentile(per_token, p):.1f}" for p in (0.5, 0.9, 1.0)),
            )
        )
    return rows


HEADER = (
    "arm",
    "tokens/s (median)",
    "range",
    "after first token",
    "tokens/round",
    "first token, ms",
    "ms per token p50 / p90 / max",
)


def accepted_by_depth(answers: Sequence[Answer]) -> list[float]:
    """Per depth the share of rounds that accepted a candidate there."""
    rounds = sum(answer.rounds for answer in answers)
    depths = max((len(answer.accepted_by_depth) for answer in answers), default=0)
    counts = [
        sum(a.accepted_by_depth[d] for a in answers if d < len(a.accepted_by_depth))
        for d in range(depths)
    ]
    return [round(count / rounds, 4) for count in counts] if rounds else []


def describe(results: Mapping[str, Mapping[str, Outcome]]) -> dict[str, object]:
    """All that was measured, by case and arm."""
    return {
        name: {
            arm: {
                "tokens_per_s": outcome.speeds,
                "tokens_per_s_after_first": outcome.decoding,
                "tokens_per_round": tokens_per_round(outcome.answers),
                "accepted_by_depth": accepted_by_depth(outcome.answers),
                "first_token_s": [answer.times[0] for answer in outcome.answers],
                "time_per_token_s": [answer.time_per_token for answer in outcome.answers],
            }
            for arm, outcome in outcomes.items()
        }
        for name, outcomes in results.items()
    }
