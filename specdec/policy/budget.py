"""How many candidates a step verifies, whether to draft at all, and how much prefill a step
takes: whatever gives the most tokens per second. Holds no torch.

A candidate is worth a row if the tokens that it is expected to add come sooner than the engine
would have made them otherwise: ``chance > rate * (cost with the row - cost without)``, with
``rate`` the tokens per second at this number of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from specdec.policy.calibration import Calibration
from specdec.policy.cost import CostCurve
from specdec.policy.tree import DraftTree

#: Chances of a sequence's best candidates before anything was seen: what small heads reach.
PRIOR_CHANCES = (0.55, 0.4, 0.25, 0.2, 0.15, 0.1)
#: Rounds without heads at one load after which they are tried again.
PROBE_ROUNDS = 256
#: Weight of the newest round in running means.
_FRESH = 0.05
_FIXED_POINT = 4


class Budget(Protocol):
    """Decides how much of a step goes where."""

    def estimates(self, tree: DraftTree, greedy: bool) -> Sequence[float]:
        """Per node the chance that the walk reaches it, falling; the root's is 1."""

    def candidates(self, chances: Sequence[float], decodes: int, keys: int, limit: int) -> int:
        """How many of the likeliest candidates to verify.

        Args:
            chances: of all candidates of the step, falling.
            decodes: roots that the step verifies in any case, 1 or more.
            keys: committed tokens of these sequences.
            limit: most candidates that fit.
        """

    def prefill_rows(self, rows: int, keys: int, start: int, limit: int) -> int:
        """How many prefill rows go with a step, at least 1 and at most ``limit``.

        Args:
            rows: of the trees; 0 if the step has nothing but prefill.
            keys: that these attend to.
            start: tokens before the first prefill row.
            limit: most that fit or are wanted, 1 or more.
        """

    def worth_drafting(self, sequences: int, keys: int) -> bool:
        """Whether the heads should draft for a step of that many sequences.

        ``keys`` are the sequences' committed tokens.
        """

    def least(self, sequences: int) -> float:
        """Estimate below which a candidate will hardly be verified at this load."""

    def learn(self, rows: int, keys: int, prefill: int, prefill_keys: int, seconds: float) -> None:
        """Enter how long a step took, drafting left out.

        Args:
            rows: of its trees.
            keys: that these attend to.
            prefill: rows of its prefill chunks.
            prefill_keys: that these attend to.
            seconds: measured.
        """

    def drafted(self, sequences: int, seconds: float) -> None:
        """Enter for how many sequences the heads drafted, and how long it took.

        Told once per step; 0 where nothing was left for them to draft.
        """

    def learn_verdict(self, tree: DraftTree, walked: Sequence[int], greedy: bool) -> None:
        """Enter which nodes of a verified tree the walk reached."""

    def describe(self) -> dict[str, object]:
        """For statistics: costs, chances and what followed from them."""


class UnlimitedBudget:
    """Takes all that fits and learns nothing: where a row costs nothing, and for tests."""

    def estimates(self, tree: DraftTree, greedy: bool) -> Sequence[float]:
        """As the drafter said."""
        return tree.values

    def candidates(self, chances: Sequence[float], decodes: int, keys: int, limit: int) -> int:
        """All that fit."""
        return min(len(chances), limit)

    def prefill_rows(self, rows: int, keys: int, start: int, limit: int) -> int:
        """All that fit."""
        return limit

    def worth_drafting(self, sequences: int, keys: int) -> bool:
        """Always."""
        return True

    def least(self, sequences: int) -> float:
        """All may be."""
        return 0.0

    def learn(self, rows: int, keys: int, prefill: int, prefill_keys: int, seconds: float) -> None:
        """Nothing."""

    def drafted(self, sequences: int, seconds: float) -> None:
        """Nothing."""

    def learn_verdict(self, tree: DraftTree, walked: Sequence[int], greedy: bool) -> None:
        """Nothing."""

    def describe(self) -> dict[str, object]:
        """Nothing."""
        return {}


@dataclass
class Load:
    """Running means over the rounds at one load, with the heads drafting or without.

    Attributes:
        tokens: expected per sequence and step.
        candidates: verified per sequence and step.
        least: chance of the least likely candidate verified.
        rounds: entered so far.
    """

    tokens: float = 0.0
    candidates: float = 0.0
    least: float = 0.0
    rounds: int = 0

    def enter(self, tokens: float, candidates: float, least: float) -> None:
        """Add a round."""
        share = max(_FRESH, 1 / (self.rounds + 1))
        self.tokens += share * (tokens - self.tokens)
        self.candidates += share * (candidates - self.candidates)
        self.least += share * (least - self.least)
        self.rounds += 1


@dataclass
class _Loads:
    with_heads: Load = field(default_factory=Load)
    without: Load = field(default_factory=Load)
    unprobed: int = 0


class _Mode(Enum):
    """Who drafted for the coming step. Rounds that lookup alone filled say nothing of either."""

    HEADS = "heads"
    PLAIN = "plain"
    NEITHER = "neither"


class MeasuredBudget:
    """Decides by measured costs and observed chances.

    Args:
        step: seconds of a step, drafting left out, by rows.
        draft: seconds of drafting by sequences; None if no heads draft.
        prefill_row: seconds that a prefill row adds to a step.
        stall: steps of the usual length by which prefill may lengthen one with decodes.

    Attributes:
        skipped: steps after which drafting was left out.
    """

    def __init__(
        self, step: CostCurve, draft: CostCurve | None, prefill_row: float, stall: float
    ) -> None:
        self.step, self.draft = step, draft
        self._prefill_row, self._stall = prefill_row, stall
        self.greedy, self.sampled = Calibration(), Calibration()
        self.skipped = 0
        self._loads: dict[int, _Loads] = {}
        self._mode = _Mode.PLAIN

    def estimates(self, tree: DraftTree, greedy: bool) -> Sequence[float]:
        """Observed chances of such candidates."""
        chances = (self.greedy if greedy else self.sampled).chances(tree.values)
        chances[0] = 1.0
        return chances

    def candidates(self, chances: Sequence[float], decodes: int, keys: int, limit: int) -> int:
        """As many as pay for their rows; see :class:`Budget`."""
        loads = self._load(decodes)
        heads = self._mode is _Mode.HEADS
        plain = not heads and (self._mode is _Mode.PLAIN or not loads.with_heads.rounds)
        load = loads.without if plain else loads.with_heads
        draft = 0.0 if plain else self._draft_seconds(decodes)
        rate = self._rate(load, decodes, keys, draft)
        count, tokens = self._choose(chances, decodes, keys, limit, rate)
        for _ in range(0 if load.rounds else _FIXED_POINT):
            rate = tokens / self._seconds(decodes, count, keys, draft)
            count, tokens = self._choose(chances, decodes, keys, limit, rate)
        if self._mode is not _Mode.NEITHER:
            least = chances[count - 1] if count else 1.0
            load.enter(tokens / decodes, count / decodes, least)
        return count

    def prefill_rows(self, rows: int, keys: int, start: int, limit: int) -> int:
        """As many as keep the step within the stall."""
        if rows == 0:
            return limit
        row = self._prefill_row + self.step.per_key * start
        room = self._stall * self.step.seconds(rows, keys)
        return max(1, min(limit, int(room / row))) if row > 0 else limit

    def worth_drafting(self, sequences: int, keys: int) -> bool:
        """Whether tokens then come sooner; see :class:`Budget`."""
        pays = self._drafting_pays(sequences, keys)
        self._mode = _Mode.HEADS if pays else _Mode.PLAIN
        self.skipped += not pays
        return pays

    def least(self, sequences: int) -> float:
        """The mean chance of the last candidate verified; see :class:`Budget`."""
        load = self._load(sequences).with_heads
        return load.least if load.rounds else 0.0

    def learn(self, rows: int, keys: int, prefill: int, prefill_keys: int, seconds: float) -> None:
        """Correct the costs; see :class:`Budget`."""
        if prefill == 0:
            self.step.learn(rows, seconds, keys)
            return
        usual = self.step.seconds(rows, keys) if rows else 0.0
        row = (seconds - usual - self.step.per_key * prefill_keys) / prefill
        most = 2 * self._prefill_row
        self._prefill_row += _FRESH * (max(0.0, min(row, most)) - self._prefill_row)

    def drafted(self, sequences: int, seconds: float) -> None:
        """Correct the cost; see :class:`Budget`."""
        if sequences and self.draft is not None:
            self.draft.learn(sequences, seconds)
        elif self._mode is _Mode.HEADS:
            self._mode = _Mode.NEITHER

    def learn_verdict(self, tree: DraftTree, walked: Sequence[int], greedy: bool) -> None:
        """Correct the chances; see :class:`Budget`."""
        if len(tree) > 1:
            reached = set(walked)
            calibration = self.greedy if greedy else self.sampled
            calibration.learn(tree.values[1:], [i in reached for i in range(1, len(tree))])

    def describe(self) -> dict[str, object]:
        """The cost model, the chances and what followed; see :class:`Budget`."""
        return {
            "step_ms": {n: round(s * 1e3, 3) for n, s in self.step.points().items()},
            "prefill_row_ms": round(self._prefill_row * 1e3, 3),
            "step_us_per_key": round(self.step.per_key * 1e6, 4),
            "draft_ms": {}
            if self.draft is None
            else {n: round(s * 1e3, 3) for n, s in self.draft.points().items()},
            "chances_greedy": [round(chance, 3) for chance in self.greedy.table()],
            "chances_sampled": [round(chance, 3) for chance in self.sampled.table()],
            "skipped_drafts": self.skipped,
            "candidates": {
                f"up to {(1 << bucket) - 1}": round(loads.with_heads.candidates, 2)
                for bucket, loads in sorted(self._loads.items())
            },
        }

    def _drafting_pays(self, sequences: int, keys: int) -> bool:
        if self.draft is None:
            return False
        loads = self._load(sequences)
        draft = self._draft_seconds(sequences)
        plain = self._rate(loads.without, sequences, keys, 0.0)
        if loads.with_heads.rounds:
            speculative = self._rate(loads.with_heads, sequences, keys, draft)
        else:
            prior = sorted(PRIOR_CHANCES * sequences, reverse=True)
            count, tokens = self._choose(prior, sequences, keys, len(prior), plain)
            speculative = tokens / self._seconds(sequences, count, keys, draft)
        loads.unprobed += 1
        if speculative > plain or loads.unprobed > PROBE_ROUNDS:
            loads.unprobed = 0
            return True
        return False

    def _rate(self, load: Load, sequences: int, keys: int, draft: float) -> float:
        """Tokens per second at that load, by what was seen there; of plain steps at first."""
        if not load.rounds:
            return sequences / (self.step.seconds(sequences, keys) + draft)
        candidates = load.candidates * sequences
        return load.tokens * sequences / self._seconds(sequences, candidates, keys, draft)

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
            over = tokens - decodes - rate * extra
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

    def _load(self, sequences: int) -> _Loads:
        return self._loads.setdefault(sequences.bit_length(), _Loads())
