"""Drafts without a model: what followed the last time these tokens stood here. Holds no torch.

Prompt lookup (n-gram matching; Saxena 2023, Prompt Lookup Decoding): the longest suffix of a
sequence that occurred in it before, and what came after it, is the guess for what comes now.
Answers quote their prompts and repeat themselves, where heads that see one hidden state do not
know what was quoted.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Longest suffix that is looked up, in tokens: a longer match is hardly more often right.
MAX_MATCH = 8

#: Share of right tokens by match length, 1 to ``MAX_MATCH``, before any is seen.
PRIOR_RATES = (0.25, 0.5, 0.62, 0.68, 0.73, 0.8, 0.8, 0.9)
#: Observations that a prior is worth.
PRIOR_WEIGHT = 20
#: Observations that an estimate remembers; older ones fade, so that it follows the traffic.
MEMORY = 400


class SuffixIndex:
    """Where each n-gram of one sequence was last seen.

    An n-gram is entered only once its own last n-1 tokens have occurred twice: before that no
    lookup can need it. So most tokens cost few entries, at most ``MAX_MATCH`` each.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._length = 0
        self._earlier = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append ``tokens``; O(MAX_MATCH) for each."""
        known, ends = self._tokens, self._ends
        for token in tokens:
            known.append(token)
            end = len(known)
            self._length = 0
            for length in range(1, min(MAX_MATCH, end) + 1):
                gram = tuple(known[end - length :])
                earlier = ends.get(gram)
                ends[gram] = end
                if earlier is None:
                    break
                self._length, self._earlier = length, earlier
                if length < MAX_MATCH and earlier > length:
                    ends.setdefault(tuple(known[earlier - length - 1 : earlier]), earlier)

    def continuation(self, limit: int) -> tuple[int, list[int]]:
        """What followed the longest suffix where it last occurred before.

        An occurrence that overlaps the suffix is a period: it is continued beyond the end, so
        that ``limit`` tokens come back whenever anything matches.

        Args:
            limit: tokens wanted.

        Returns:
            The length of the match, at most ``MAX_MATCH``, and the tokens; 0 and none without
            a match.
        """
        if self._length == 0 or limit < 1:
            return 0, []
        found = self._tokens[self._earlier : self._earlier + limit]
        period = len(self._tokens) - self._earlier
        while len(found) < limit:
            found.append(found[-period])
        return self._length, found


class MatchRates:
    """How often the token after a match of each length is right, over all sequences.

    Running means with prior counts; they depend on the order of observations alone.
    """

    def __init__(self) -> None:
        self._rates = list(PRIOR_RATES)
        self._seen = [PRIOR_WEIGHT] * MAX_MATCH

    def rate(self, length: int) -> float:
        """Estimated chance that the token after a match of ``length`` (1 or more) is right."""
        return self._rates[min(length, MAX_MATCH) - 1]

    def values(self, length: int, count: int) -> list[float]:
        """Per token of a continuation the chance that it and all before it are right.

        Token ``k`` counts as one that follows a match of ``length + k``.
        """
        values, value = [], 1.0
        for place in range(count):
            value *= self.rate(length + place)
            values.append(value)
        return values

    def learn(self, length: int, proposed: Sequence[int], actual: Sequence[int]) -> None:
        """Compare a continuation with what came, up to its first wrong token.

        Args:
            length: of the match it followed.
            proposed: the continuation.
            actual: the tokens committed instead, more or fewer.
        """
        for place, (guess, token) in enumerate(zip(proposed, actual, strict=False)):
            bucket = min(length + place, MAX_MATCH) - 1
            self._seen[bucket] = min(self._seen[bucket] + 1, MEMORY)
            right = guess == token
            self._rates[bucket] += (right - self._rates[bucket]) / self._seen[bucket]
            if not right:
                return
