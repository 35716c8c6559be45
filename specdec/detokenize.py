"""From tokens to text, token by token. Holds no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specdec.stop_text import StopCutter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: What a decoder puts for bytes that are no (or not yet) UTF-8.
REPLACEMENT = "\ufffd"
#: A character has at most this many bytes, and a token of bytes has at least one.
_LONGEST_CHARACTER = 4
#: Tokens without a settled end after which the window is cut by force.
_LONGEST_WINDOW = 16


class IncrementalDetokenizer:
    r"""Text of a growing list of tokens; what was returned once never changes.

    The parts joined equal ``tokenizer.decode(tokens, skip_special_tokens=...)`` of all tokens
    in one go, cut at the first stop string. How the tokens are split over calls makes no
    difference.

    Example:
        >>> detokenizer = IncrementalDetokenizer(tokenizer, stop=["\n"])
        >>> text = "".join(detokenizer.add([token]) for token in tokens) + detokenizer.finish()
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Args:
        tokenizer: of the model.
        stop: strings to cut at; see ``StopCutter``.
        skip_special_tokens: leave out end tokens and the like.
        context: tokens that the text continues. Decoders that drop the space before the
            first word then keep it.
        include_stop: leave the stop string in the text.
        min_tokens: a stop string that is complete with so many tokens does not count.
        """
        self._text = _TokenText(tokenizer, skip_special_tokens, context)
        self._cutter = StopCutter(stop, include_stop)
        self._min_tokens = min_tokens
        self._count = 0

    @property
    def matched_stop(self) -> str | None:
        """The stop string at which the text ends, once met."""
        return self._cutter.matched

    @property
    def held(self) -> int:
        """Characters that could yet turn out to be a stop string."""
        return self._cutter.held

    def add(self, tokens: Sequence[int]) -> str:
        """Take tokens; returns the text that can be shown now, perhaps none."""
        return "".join([self._add(token) for token in tokens])

    def finish(self) -> str:
        """The rest of the text, when no token follows."""
        text = self._cutter.add(self._text.finish(), self._count > self._min_tokens)
        return text + self._cutter.finish()

    @property
    def count(self) -> int:
        """Tokens taken, up to the one that completed a stop string; no later one is looked at."""
        return self._count

    def _add(self, token: int) -> str:
        if self.matched_stop is not None:
            return ""
        self._count += 1
        return self._cutter.add(self._text.add(token), self._count > self._min_tokens)


def text_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """A function from tokens, special ones included, to text without clean-up of spaces."""
    if tokenizer.is_fast:
        decode = tokenizer.backend_tokenizer.decode
        return lambda tokens: str(decode(tokens, skip_special_tokens=False))
    return lambda tokens: str(
        tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that ``skip_special_tokens`` leaves out."""
    if not tokenizer.is_fast:
        return frozenset(tokenizer.all_special_ids)
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(token for token, entry in added if entry.special)


class _TokenText:
    """Decodes a short window of tokens again for each new one::

        ... settled ... | context | pending | new token

    The text of settled and context tokens has been returned. The context is decoded along
    with what follows, for decoders whose text depends on the token before. Pending tokens end
    in an unfinished character, or in bytes whose text the tokens to come may still change.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, skip_special: bool, context: Sequence[int]
    ) -> None:
        self._decode = text_decoder(tokenizer)
        self._skipped = special_ids(tokenizer) if skip_special else frozenset[int]()
        self._byte_tokens = _byte_tokens(tokenizer)
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._returned = ""  # the part of the pending tokens' text that has been returned
        if context:
            kept = [token for token in context[-_LONGEST_WINDOW:] if token not in self._skipped]
            whole = not self._decode(kept).endswith(REPLACEMENT)
            if kept and whole and kept[-1] not in self._byte_tokens:
                self._set_context(kept)

    def add(self, token: int) -> str:
        """Text that became certain with ``token``."""
        if token in self._skipped:
            return ""
        self._pending.append(token)
        if token in self._byte_tokens:
            return ""  # one bad byte turns its whole run of byte tokens into U+FFFD
        text = self._pending_text()
        certain = text.rstrip(REPLACEMENT)
        fresh = certain[len(self._returned) :]
        self._returned = certain
        if certain == text:
            self._settle(len(self._pending))
        elif len(self._pending) > _LONGEST_WINDOW:
            fresh += self._cut(text)
        return fresh

    def finish(self) -> str:
        """Text of the pending tokens, taken as it is."""
        fresh = self._pending_text()[len(self._returned) :]
        self._settle(len(self._pending))
        return fresh

    def _pending_text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._context_text) :]

    def _settle(self, count: int) -> None:
        """Make the first ``count`` pending tokens context for the rest."""
        self._set_context(self._context + self._pending[:count])
        del self._pending[:count]
        self._returned = ""

    def _set_context(self, tokens: list[int]) -> None:
        """Keep the shortest end of ``tokens`` that has a text; its last token is no byte."""
        start = max(len(tokens) - 1, 0)
        oldest = max(len(tokens) - _LONGEST_WINDOW, 0)
        while start > oldest and not self._decode(tokens[start:]):
            start -= 1
        self._context = tokens[start:]
        self._context_text = self._decode(self._context)

    def _cut(self, text: str) -> str:
        """Settle all but the last pending tokens if no character lies across the cut.

        Bytes that are no UTF-8 at all would else keep the window growing. Returns the text that
        this makes certain.
        """
        count = len(self._pending) - _LONGEST_CHARACTER
        before = (list(self._context), self._context_text, list(self._pending), self._returned)
        head = self._decode(self._context + self._pending[:count])[len(self._context_text) :]
        returned = self._returned
        self._settle(count)
        if head + self._pending_text() != text:
            self._context, self._context_text, self._pending, self._returned = before
            return ""
        self._returned = returned[len(head) :]
        return head[len(returned) :]


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], bytes]:
    """A function from a token to the bytes it stands for; of special tokens, their names'."""
    added = {token: entry.content for token, entry in tokenizer.added_tokens_decoder.items()}
    if not tokenizer.is_fast:
        decode = text_decoder(tokenizer)
        return lambda token: (added.get(token) or decode([token])).encode()
    name_of = tokenizer.backend_tokenizer.id_to_token
    table = _byte_table()
    byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)

    def to_bytes(token: int) -> bytes:
        name = added.get(token)
        if name is not None:
            return name.encode()
        name = name_of(token) or ""
        if byte_level and all(letter in table for letter in name):
            return bytes(table[letter] for letter in name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return name.replace("\u2581", " ").encode()

    return to_bytes


def _byte_table() -> dict[str, int]:
    """The letters that byte-level vocabularies write bytes with (GPT-2's): printable Latin-1
    stands for itself, the other bytes in their order for what follows U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _byte_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that stand for one byte each, in vocabularies that fall back to bytes."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    if tokenizer.is_fast:
        ids = [tokenizer.backend_tokenizer.token_to_id(name) for name in names]
    else:
        ids = [tokenizer.convert_tokens_to_ids(name) for name in names]
    return frozenset(ids) - {None, tokenizer.unk_token_id}
