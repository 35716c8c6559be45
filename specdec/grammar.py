"""Grammars of outputs by llguidance: compiled once, then asked token by token. No torch."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from specdec.errors import GrammarError, RequestError
from specdec.params import GrammarSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

#: Longest source of a grammar. Bytes.
MOST_SOURCE = 2**18
#: Compiled grammars that are kept, and the bytes of their sources together.
_KEPT, _KEPT_SOURCE = 64, 2**20

#: What bounds compiling to some hundred milliseconds and a mask to some ten, in llguidance's
#: units: its lexer's fuel, items and states (1 to 2 kB each).
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)

#: A mask that takes longer fails its request, since all others wait for it. CPU seconds.
_SLOWEST_MASK_S = 0.25


class GrammarCursor:
    """One request's place in its grammar. Moves to any output that it is asked about, by
    taking back what differs and consuming what is new: a tree costs what its paths differ in.

    Args:
        matcher: at the grammar's start; from now on the cursor's own.
        vocab_size: V, of the model.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._consumed: list[int] = []

    def allowed(self, output: Sequence[int]) -> NDArray[np.bool_]:
        """Which tokens may follow, ``[V]``; end tokens where the output may end.

        Raises:
            GrammarError: ``output`` is not of the grammar, or it is too complex.
        """
        self._go_to(output)
        began = time.thread_time()
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        if time.thread_time() - began > _SLOWEST_MASK_S:
            raise GrammarError("the grammar is too complex to be followed token by token")
        bits = np.unpackbits(words, count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def accepted(self, output: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of ``tokens`` may follow one after the other; 0 where that cannot be told."""
        try:
            self._go_to(output)
        except GrammarError:
            return 0
        return int(self._matcher.validate_tokens(list(tokens)))

    def forced(self, output: Sequence[int]) -> list[int]:
        """Tokens of the text that must follow, if only one may; none where that is not known."""
        try:
            self._go_to(output)
        except GrammarError:
            return []
        return list(self._matcher.compute_ff_tokens())

    def is_complete(self, output: Sequence[int]) -> bool:
        """Whether nothing but the end may follow."""
        try:
            self._go_to(output)
        except GrammarError:  # it fails the request where the next token is drawn
            return False
        return bool(self._matcher.is_stopped())

    def _go_to(self, output: Sequence[int]) -> None:
        wanted = list(output)
        same = min(len(wanted), len(self._consumed))
        while wanted[:same] != self._consumed[:same]:
            same -= 1
        if same < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - same)
            del self._consumed[same:]
        if same < len(wanted):
            taken = self._matcher.try_consume_tokens(wanted[same:])
            self._consumed += wanted[same : same + taken]
        self._check()
        if len(self._consumed) < len(wanted) and not self._matcher.is_stopped():
            place = len(self._consumed)
            raise GrammarError(f"output token {place} ({wanted[place]}) is not of the grammar")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed: {self._matcher.get_error():.300}")


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the last ones. Thread-safe.

    Args:
        tokenizer: of the model; None refuses every grammar.
        vocab_size: V, of the model.
        end_tokens: that may end an output.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        end_tokens: Collection[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = sorted(end_tokens)
        self._lock = threading.Lock()
        self._known: LLTokenizer | None = None
        self._known_for_json: LLTokenizer | None = None
        self._compiled: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()

    def prepare(self) -> None:
        """Read the vocabulary now: it takes a second, which else the first grammar waits.

        Raises:
            RequestError: this tokenizer cannot be used with grammars.
        """
        with self._lock:
            self._vocabulary()

    def compile(self, spec: GrammarSpec) -> GrammarCursor:
        """A cursor at the grammar's start. Beyond the last grammars this takes up to some hundred
        milliseconds, so do it outside of the engine's thread first.

        Raises:
            RequestError: it is no grammar, too large, or uses what is not supported.
        """
        with self._lock:
            found = self._compiled.get(spec)
            if found is not None:
                self._compiled.move_to_end(spec)
            known = self._vocabulary()
            if spec.kind == "json_schema":
                known = self._known_for_json or known
        if found is None:
            found = _compile(spec, known)
            with self._lock:
                self._compiled[spec] = found
                while self._is_full():
                    self._compiled.popitem(last=False)
        return GrammarCursor(found.deep_copy(), self._vocab_size)

    def _is_full(self) -> bool:
        source = sum(len(spec.source) for spec in self._compiled)
        return len(self._compiled) > _KEPT or (source > _KEPT_SOURCE and len(self._compiled) > 1)

    def _vocabulary(self) -> LLTokenizer:
        if self._known is None:
            if self._tokenizer is None or not self._tokenizer.is_fast:
                raise RequestError("grammars need a fast tokenizer, and this engine has none")
            if not self._end_tokens:
                raise RequestError("grammars need an end token, and this model has none")
            from llguidance import hf  # it imports transformers

            self._known = hf.from_tokenizer(
                cast("PreTrainedTokenizerFast", self._tokenizer),
                n_vocab=self._vocab_size,
                eos_token=self._end_tokens,
            )
            self._known_for_json = self._known.with_slices(LLTokenizer.json_slices())
        return self._known


def _compile(spec: GrammarSpec, known: LLTokenizer) -> LLMatcher:
    if len(spec.source) > MOST_SOURCE:
        raise RequestError(f"a grammar may have {MOST_SOURCE} characters", spec.param)
    try:
        grammar = _as_grammar(spec)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{spec.param} cannot be read: {error}", spec.param) from error
    matcher = LLMatcher(known, grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        reason = matcher.get_error().split("\n<")[0]
        raise RequestError(f"{spec.param} cannot be used: {reason:.300}", spec.param)
    if matcher.is_stopped() and not matcher.is_accepting():
        raise RequestError(f"{spec.param} cannot be used: no text fits it", spec.param)
    matcher.compute_bitmask()  # the first one takes longest
    if not matcher.is_error():
        began = time.thread_time()
        matcher.compute_bitmask()
        if time.thread_time() - began <= _SLOWEST_MASK_S:
            return matcher
    elif "NoExtension" in matcher.get_error():
        raise RequestError(f"{spec.param} cannot be used: no text fits it", spec.param)
    raise RequestError(f"{spec.param} is too complex", spec.param)


def _as_grammar(spec: GrammarSpec) -> str:
    if spec.kind == "json_schema":
        schema = json.loads(spec.source)
        if isinstance(schema, dict):
            schema = {key: value for key, value in schema.items() if key != "x-guidance"}
        # On one line, as Python's json.dumps writes it: with free white space a small model may
        # never stop to indent, and each place that is fixed is a token drafted for free.
        return LLMatcher.grammar_from_json_schema(
            json.dumps(schema),
            overrides={
                "whitespace_flexible": False,
                "item_separator": ", ",
                "key_separator": ": ",
                "lenient": False,
            },
        )
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.source)
    return LLMatcher.grammar_from_lark(spec.source)
