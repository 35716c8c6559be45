"""The text of one choice as it comes, and the tokens that stand behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deployments.logprobs import PlacedLogprobs
from specdec.detokenize import IncrementalDetokenizer
from specdec.outputs import TokenLogprobs
from specdec.params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChoiceText:
    """Takes tokens, gives text; with log-probabilities, each comes once its text is out.

    Tokens are looked at one by one, so that it makes no difference in which portions they come.
    Of a text cut at a stop string, the tokens that begin behind the cut are left out. So a token
    without a whole character (part of an emoji, a special token) waits for the next one: that may
    be where a stop string begins.

    Args:
        tokenizer: of the model.
        params: of the request.
        context: tokens that the text continues.
        offset: characters of the answer before it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams,
        context: Sequence[int] = (),
        offset: int = 0,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            params.stop,
            context=context,
            include_stop=params.include_stop,
            min_tokens=params.min_tokens,
        )
        #: Tokens that came behind a stop string.
        self.unread = 0
        self._offset = offset
        self._shown = 0  # characters given
        self._known = 0  # of them and those held back
        #: With how many characters must have been given before each is told.
        self._waiting: deque[tuple[int, PlacedLogprobs]] = deque()

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._detokenizer.matched_stop is not None

    def add(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()
    ) -> tuple[str, tuple[PlacedLogprobs, ...]]:
        """Take tokens, with one entry each where log-probabilities are told.

        Returns:
            The text that can be shown now, and the tokens of which all text is shown.
        """
        before = self._detokenizer.count
        text, released = self._add(tokens, logprobs)
        self.unread += len(tokens) - (self._detokenizer.count - before)
        return text, released

    def _add(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> tuple[str, tuple[PlacedLogprobs, ...]]:
        if not logprobs:
            return self._detokenizer.add(tokens), ()
        text = ""
        for token, entry in zip(tokens, logprobs, strict=True):
            if self.stopped:
                break
            start = self._known
            fresh = self._detokenizer.add([token])
            text += fresh
            self._shown += len(fresh)
            self._known = self._shown + self._detokenizer.held
            placed = PlacedLogprobs(token, self._offset + start, entry.logprob, entry.top)
            self._waiting.append((max(self._known, start + 1), placed))
        return text, self._released()

    def finish(self) -> tuple[str, tuple[PlacedLogprobs, ...]]:
        """The rest, when no token follows."""
        text = self._detokenizer.finish()
        self._shown += len(text)
        if not self.stopped:
            self._known = self._shown
            rest = tuple(entry for _, entry in self._waiting)
            self._waiting.clear()
            return text, rest
        return text, self._released()

    def _released(self) -> tuple[PlacedLogprobs, ...]:
        out: list[PlacedLogprobs] = []
        end = self._offset + self._shown
        while self._waiting:
            needed, entry = self._waiting[0]
            if needed > self._shown and not self.stopped:
                break
            self._waiting.popleft()
            if not self.stopped or entry.offset < end:
                out.append(entry)
        return tuple(out)


def place_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
) -> tuple[PlacedLogprobs, ...]:
    """The tokens of a prompt, of which the first has no log-probability."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    placed: list[PlacedLogprobs] = []
    length = 0
    for token, entry in zip(prompt, (None, *logprobs), strict=True):
        logprob, top = (None, ()) if entry is None else (entry.logprob, entry.top)
        placed.append(PlacedLogprobs(token, length, logprob, top))
        length += len(detokenizer.add([token]))
    return tuple(placed)
