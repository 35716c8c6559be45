"""The budget by measured costs and observed chances: what gives the most tokens per second.

A candidate is worth a row if the tokens that it is expected to add come sooner than the engine
would have made them otherwise: ``chance > rate * (cost with the row - cost without)``, with
``rate`` the tokens per second at this number of sequences. Holds no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.policy.budget import Source, StepSeen
from specdec.policy.calibration import Calibration
from specdec.policy.cost import CostCurve, StepCost
from specdec.policy.tree import DraftTree

#: Chances of a sequence's best candidates before anything was seen: what small heads reach.
PRIOR_CHANCES = (0.55, 0.4, 0.25, 0.2, 0.15, 0.1)
#: Steps at one load after which what looks slower, heads or no heads, is tried again, and
#: for how many.
PROBE_EVERY, PROBE_STEPS = 512, 4
#: What a row must bring beyond its price, and drafting beyond going without, as a share. Both are
#: estimates, and the best of many estimates is too good on average; close to the best number of
#: rows little is lost by taking fewer.
MARGIN, DRAFT_MARGIN = 0.1, 0.02
#: Weight of the newest step in running means.
_FRESH = 0.02
#: Steps' worth of trust in what heads are expected to give: a few unlucky rounds at the start
#: shall not end drafting.
_HEADS_PRIOR = 20
#: Steps after which a pace is known.
_KNOWN = 40


@dataclass
class _Pace:
    """Running means of what steps gave at one load with one source of drafts.

    Attributes:
        tokens: committed per sequence and step.
        candidates: verified per sequence and step.
        least: chance of the least likely candidate verified, where not cut by a limit.
        steps: entered so far.
        since: steps since it was last used.
        prior: steps' worth of trust in what was expected before any was entered.
    """

    tokens: float = 1.0
    candidates: float = 0.0
    least: float = 0.0
    steps: int = 0
    since: int = 0
    prior: int = 0

    def enter(self, tokens: float, candidates: float) -> None:
        share = max(_FRESH, 1 / (self.steps + self.prior + 1))
        self.tokens += share * (tokens - self.tokens)
        self.candidates += share * (candidates - self.candidates)
        self.steps += 1


@dataclass
class _Load:
    heads: _Pace = field(default_factory=lambda: _Pace(prior=_HEADS_PRIOR))
    lookup: _Pace = field(default_factory=_Pace)
    probing: int = 0


class MeasuredBudget:
    """See the module.

    Args:
        step: seconds of a step, drafting left out.
        draft: seconds of drafting by sequences; None if no heads draft.
        stall: steps of the usual length by which prefill may lengthen one with decodes.

    Attributes:
        skipped: steps for which the heads were left out.
        spent_s: seconds of the steps that had decodes and no prefill, drafting included.
        plain_s: seconds that steps without candidates would have taken for the same tokens.
    """

    def __init__(self, step: StepCost, draft: CostCurve | None, stall: float) -> None:
        self.step, self.draft, self._stall = step, draft, stall
        self.skipped = 0
        self.spent_s = self.plain_s = 0.0
        self._decoded = False
        self._greedy, self._sampled = Calibration(), Calibration()
        self._loads: dict[int, _Load] = {}
        self._source = Source.NEITHER

    def estimates(self, tree: DraftTree, greedy: bool) -> Sequence[float]:
        """Observed chances of such candidates."""
        chances = (self._greedy if greedy else self._sampled).chances(tree.values)
        chances[0] = 1.0
        return chances

    def candidates(self, chances: Sequence[float], decodes: int, keys: int, limit: int) -> int:
        """As many as pay for their rows; see :class:`Budget`."""
        load = self._load(decodes)
        heads = self._source is Source.HEADS
        pace = load.lookup if self._source is Source.LOOKUP else load.heads
        draft = self._draft_seconds(decodes) if heads else 0.0
        if pace.steps:
            rate = self._rate(pace, decodes, keys, draft)
            count, _ = self._choose(chances, decodes, keys, limit, rate)
        else:
            count = self._first_choice(chances, decodes, keys, limit, draft)
        if 0 < count < limit:
            pace.least += max(_FRESH, 1 / (pace.steps + 1)) * (chances[count - 1] - pace.least)
        return count

    def prefill_rows(self, rows: int, keys: int, start: int, limit: int) -> int:
        """As many as keep the step within the stall."""
        if rows == 0:
            return limit
        room = self._stall * self.step.seconds(rows, keys)
        row = self.step.prefill(1, start)
        return limit if row * limit <= room else max(1, int(room / row))

    def worth_drafting(self, decodes: int, keys: int) -> bool:
        """Whether tokens then come sooner; see :class:`Budget`."""
        pays = self._drafting_pays(decodes, keys)
        self.skipped += not pays
        return pays

    def drafted(self, source: Source, sequences: int, seconds: float) -> None:
        """Correct the cost; see :class:`Budget`."""
        self._source = source
        if self._decoded:
            self.spent_s += seconds
        if source is Source.HEADS and self.draft is not None and sequences:
            self.draft.learn(sequences, seconds)

    def least(self, decodes: int) -> float:
        """Half the mean chance of the last candidate verified; see :class:`Budget`."""
        return self._load(decodes).heads.least / 2

    def learn(self, seen: StepSeen) -> None:
        """Correct costs and paces; see :class:`Budget`."""
        self.step.learn(seen.rows, seen.keys, seen.prefill, seen.prefill_keys, seen.seconds)
        self._greedy.age()
        self._sampled.age()
        self._count_time(seen)
        if not seen.decodes or self._source is Source.NEITHER:
            return
        load = self._load(seen.decodes)
        used, other = load.heads, load.lookup
        if self._source is Source.LOOKUP:
            used, other = other, used
        per = 1 / seen.decodes
        used.enter(seen.committed * per, (seen.rows - seen.decodes) * per)
        used.since = 0
        other.since += 1

    def learn_verdict(self, tree: DraftTree, walked: Sequence[int], greedy: bool) -> None:
        """Correct the chances; see :class:`Budget`."""
        if len(tree) > 1:
            reached = set(walked)
            calibration = self._greedy if greedy else self._sampled
            calibration.learn(tree.values[1:], [i in reached for i in range(1, len(tree))])

    def describe(self) -> dict[str, object]:
        """The cost model, the chances and what followed; see :class:`Budget`."""
        draft = {} if self.draft is None else self.draft.points()
        return {
            "step_ms": {n: round(s * 1e3, 3) for n, s in self.step.rows.points().items()},
            "prefill_row_ms": round(self.step.prefill_row * 1e3, 3),
            "step_us_per_key": round(self.step.per_key * 1e6, 4),
            "draft_ms": {n: round(s * 1e3, 3) for n, s in draft.items()},
            "chances_greedy": [round(chance, 3) for chance in self._greedy.table()],
            "chances_sampled": [round(chance, 3) for chance in self._sampled.table()],
            "skipped_drafts": self.skipped,
            "candidates": {
                f"up to {(1 << bits) - 1} sequences": round(load.heads.candidates, 2)
                for bits, load in sorted(self._loads.items())
            },
        }

    def _count_time(self, seen: StepSeen) -> None:
        self._decoded = seen.decodes > 0 and not seen.prefill
        if self._decoded:
            keys = seen.keys * seen.decodes // seen.rows
            plain = self.step.seconds(seen.decodes, keys)
            self.spent_s += seen.seconds
            self.plain_s += plain * seen.committed / seen.decodes

    def _drafting_pays(self, decodes: int, keys: int) -> bool:
        if self.draft is None:
            return False
        load, draft = self._load(decodes), self._draft_seconds(decodes)
        plain = self._rate(load.lookup, decodes, keys, 0.0)
        if not load.heads.steps:
            prior = sorted(PRIOR_CHANCES * decodes, reverse=True)
            count, tokens = self._choose(prior, decodes, keys, len(prior), plain)
            load.heads.tokens, load.heads.candidates = tokens / decodes, count / decodes
        pays = self._rate(load.heads, decodes, keys, draft) > plain * (1 + DRAFT_MARGIN)
        other = load.lookup if pays else load.heads
        known = other.steps >= _KNOWN
        if other.since >= (PROBE_EVERY if known else PROBE_EVERY // 8):
            other.since, load.probing = 0, PROBE_STEPS
        if load.probing:
            load.probing -= 1
            return not pays
        return pays

    def _rate(self, pace: _Pace, decodes: int, keys: int, draft: float) -> float:
        """Tokens per second by what was seen; of plain steps at first."""
        candidates = pace.candidates * decodes
        return pace.tokens * decodes / self._seconds(decodes, candidates, keys, draft)

    def _first_choice(
        self, chances: Sequence[float], decodes: int, keys: int, limit: int, draft: float
    ) -> int:
        """How many candidates give the most tokens per second of this one round, rows beyond the
        roots at their price and the margin: by Dinkelbach's iteration, whose rates only rise.
        """
        plain = self._seconds(decodes, 0, keys, draft)
        count, tokens, before = 0, float(decodes), 0.0
        while True:
            dear = self._seconds(decodes, count, keys, draft) - plain
            rate = tokens / (plain + dear * (1 + MARGIN))
            if rate <= before:
                return count
            before = rate
            count, tokens = self._choose(chances, decodes, keys, limit, rate)

    def _choose(
        self, chances: Sequence[float], decodes: int, keys: int, limit: int, rate: float
    ) -> tuple[int, float]:
        """How many candidates gain the most over ``rate``, and the tokens then expected."""
        best, gain, expected = 0, 0.0, float(decodes)
        tokens = float(decodes)
        base = self.step.seconds(decodes, keys)
        for count, chance in enumerate(chances[:limit], 1):
            tokens += chance
            extra = self.step.seconds(decodes + count, keys * (1 + count / decodes)) - base
            over = tokens - decodes - rate * extra * (1 + MARGIN)
            if over > gain:
                best, gain, expected = count, over, tokens
        return best, expected

    def _seconds(self, decodes: int, candidates: float, keys: int, draft: float) -> float:
        """Of a step with that many candidates, on the line between whole numbers."""
        low = int(candidates)
        share = candidates - low
        here, above = (
            self.step.seconds(decodes + n, keys * (1 + n / decodes)) for n in (low, low + 1)
        )
        return here + share * (above - here) + draft

    def _draft_seconds(self, sequences: int) -> float:
        return 0.0 if self.draft is None else self.draft.seconds(sequences)

    def _load(self, decodes: int) -> _Load:
        return self._loads.setdefault(decodes.bit_length(), _Load())
