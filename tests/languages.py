"""Grammars of finite languages, with all of their sentences: an oracle that knows no library."""

from __future__ import annotations

import itertools

from bench.letters import letter_tokenizer
from specdec.params import GrammarSpec

#: Single letters: where a text is forced, llguidance allows the one way alone in which the
#: tokenizer would write it, and with letters there is no other.
TOKENIZER = letter_tokenizer(())
END, VOCABULARY = 256, 257
TEXTS = [str(TOKENIZER.decode([token])) for token in range(END)]

#: Grammars, and all of their sentences.
LANGUAGES: dict[str, tuple[GrammarSpec, frozenset[str]]] = {
    "regex": (
        GrammarSpec("regex", "(ab|c){2,5}[12]?"),
        frozenset(
            "".join(parts) + last
            for count in range(2, 6)
            for parts in itertools.product(("ab", "c"), repeat=count)
            for last in ("", "1", "2")
        ),
    ),
    "long": (
        GrammarSpec("regex", "(ab|cc){8}[12]"),
        frozenset(
            "".join(parts) + last
            for parts in itertools.product(("ab", "cc"), repeat=8)
            for last in ("1", "2")
        ),
    ),
    "choice": (
        GrammarSpec("lark", 'start: "aab" | "aabba" | "bc\\n" | "caab"'),
        frozenset({"aab", "aabba", "bc\n", "caab"}),
    ),
    "json": (
        GrammarSpec("json_schema", '{"enum": ["aa", 12, true, null, "ba"]}'),
        frozenset({'"aa"', "12", "true", "null", '"ba"'}),
    ),
}


def allowed_next(output: list[int], sentences: frozenset[str]) -> set[int]:
    """By enumeration: tokens whose text goes on towards a sentence; the end after one."""
    begun = "".join(TEXTS[token] for token in output)
    rest = {s[len(begun) :] for s in sentences if s.startswith(begun)}
    found = {
        token
        for token, text in enumerate(TEXTS)
        if any(sentence.startswith(text) for sentence in rest)
    }
    return found | ({END} if begun in sentences else set())
