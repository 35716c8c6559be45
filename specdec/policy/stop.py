"""When a request ends. Holds no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from specdec.errors import RequestError
from specdec.params import SamplingParams
from specdec.policy.constraint import Constraint

#: What a decoder puts for bytes that are no (or not yet) UTF-8.
REPLACEMENT = "\ufffd"
#: A character has at most this many bytes, so an unfinished one lies in this many tokens.
MAX_PENDING = 4


@dataclass(frozen=True)
class StopVerdict:
    """Why a request ends with the token just checked, which is committed and counted.

    Attributes:
        reason: ``stop`` or ``length``.
        matched: the stop token or stop string met; None for ``length`` and a grammar's end.
        hide_token: whether the token is no part of the text (an end token).
    """

    reason: Literal["stop", "length"]
    matched: int | str | None = None
    hide_token: bool = False


class StopChecker:
    """Checks tokens one by one, in the order that plain decoding would meet the conditions:
    end tokens, stop strings, the grammar's end, ``max_tokens``, the model's length.

    Attributes:
        max_length: most committed tokens.
        prompt_length: tokens of the prompt.
        end_tokens: that end the request.
        constraint: whose completion ends it; set by who knows it.

    Everything but the stop strings is stateless; their state follows the tokens checked and is
    rebuilt where a request resumes with tokens that this object has not seen. The cost of a
    token does not grow with the length of the output.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_ids: Collection[int],
        max_length: int,
        prompt_length: int,
        detokenize: Callable[[list[int]], str] | None = None,
    ) -> None:
        """Args:
            eos_ids: the model's end tokens.
            max_length: most committed tokens, prompt included.
            prompt_length: tokens of the prompt; stop strings are not looked for in it.
            detokenize: from tokens to text, without clean-up of spaces; bytes that are no
                UTF-8 become U+FFFD. Needed for stop strings only.

        Raises:
            RequestError: stop strings are asked for without ``detokenize``.
        """
        self.max_length = max_length
        self.prompt_length = prompt_length
        self.constraint: Constraint | None = None
        self._last_length = min(prompt_length + params.max_tokens, max_length)
        self._min_tokens = params.min_tokens
        self.end_tokens = params.stop_token_ids | (
            frozenset() if params.ignore_eos else frozenset(eos_ids)
        )
        self._finder: _StopStrings | None = None
        if params.stop:
            if detokenize is None:
                raise RequestError("stop strings need a tokenizer, and none is loaded", "stop")
            self._finder = _StopStrings(params.stop, detokenize, prompt_length)

    def remaining(self, length: int) -> int:
        """Tokens that may follow ``length`` committed ones."""
        return self._last_length - length

    def check(self, tokens: Sequence[int], new_token: int) -> StopVerdict | None:
        """Whether the request ends with ``new_token``.

        Args:
            tokens: all committed tokens before it, prompt included.
        """
        if new_token in self.end_tokens:
            return StopVerdict("stop", new_token, hide_token=True)
        if self._finder is not None:
            found = self._finder.add(tokens, new_token)
            if found is not None and len(tokens) + 1 - self.prompt_length > self._min_tokens:
                return StopVerdict("stop", found)
        if self.constraint is not None and self.constraint.is_complete(
            [*tokens[self.prompt_length :], new_token]
        ):
            return StopVerdict("stop")
        if len(tokens) + 1 >= self._last_length:
            return StopVerdict("length")
        return None


class _StopStrings:
    """Finds stop strings in text that grows token by token.

    Only a short window of tokens is decoded again for each new one::

        ... settled ... | context | pending | new token
                        ^ _start  ^ _read

    Text up to ``_read`` is settled, and its last characters are kept in ``_tail``. ``context``
    is decoded along with what follows it, for decoders whose text depends on the token
    before; ``pending`` tokens end in an unfinished character.
    """

    def __init__(
        self, stops: tuple[str, ...], detokenize: Callable[[list[int]], str], prompt_length: int
    ) -> None:
        self._stops = stops
        self._detokenize = detokenize
        self._prompt_length = prompt_length
        self._keep = max(map(len, stops)) - 1
        self._reset()

    def _reset(self) -> None:
        self._window: list[int] = []
        self._read = 0
        self._tail = ""
        self._tail_end = 0  # characters of the output up to where the tail ends
        self._searched = 0  # characters of the output that were seen
        self._seen = self._prompt_length

    def add(self, tokens: Sequence[int], new_token: int) -> str | None:
        """The stop string that the text first holds with ``new_token``, if any."""
        if self._seen != len(tokens):
            self._reset()
            for token in tokens[self._prompt_length :]:
                self._push(token)
        fresh, added = self._push(new_token)
        hits = [
            (place, stop)
            for stop in self._stops
            if (place := fresh.find(stop, max(0, len(fresh) - added - len(stop) + 1))) >= 0
        ]
        return min(hits)[1] if hits else None

    def _push(self, token: int) -> tuple[str, int]:
        """Take a token; returns the end of the text that a new match must lie in, and how many
        of its last characters were not there before.
        """
        self._seen += 1
        self._window.append(token)
        before = self._text(self._read)
        text = self._text(len(self._window))[len(before) :]
        whole = bool(text) and not text.endswith(REPLACEMENT)
        certain = text if whole else text.rstrip(REPLACEMENT)
        fresh = self._tail + certain
        added = max(0, self._tail_end + len(certain) - self._searched)
        self._searched += added
        settled = len(self._window)
        if not whole:
            settled -= MAX_PENDING - 1
            text = self._text(settled)[len(before) :] if settled > self._read else ""
        if settled > self._read:
            self._tail = (self._tail + text)[-self._keep :] if self._keep else ""
            self._tail_end += len(text)
            del self._window[: self._read]
            self._read = settled - self._read
        return fresh, added

    def _text(self, count: int) -> str:
        return self._detokenize(self._window[:count]) if count > 0 else ""
