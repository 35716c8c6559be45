"""Grammars by themselves: their cursors, what they make of a tree, and which are refused.

What these catch: a cursor that depends on where it was before, a node that cannot come, a forced
token that is left out, a grammar that fails within a step in place of when it is asked for.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

from specdec.constraint import TokenConstraint
from specdec.errors import GrammarError, RequestError
from specdec.grammar import GrammarCompiler
from specdec.params import GrammarSpec
from specdec.policy.constrained import add_forced, prune
from specdec.policy.constraint import PathLimits
from specdec.policy.tree import DraftTree
from tests.languages import END, LANGUAGES, TOKENIZER, VOCABULARY, allowed_next

COMPILER = GrammarCompiler(TOKENIZER, VOCABULARY, [END])


def test_a_cursor_that_moves_about_says_what_a_new_one_says() -> None:
    rng = random.Random(4)
    for spec, sentences in LANGUAGES.values():
        cursor = COMPILER.compile(spec)
        assert cursor.forced([]) == []
        paths = [TOKENIZER(text)["input_ids"] for text in rng.sample(sorted(sentences), 4)]
        for _ in range(60):
            path = rng.choice(paths)
            output = path[: rng.randrange(len(path) + 1)]
            fresh = COMPILER.compile(spec)
            assert (cursor.allowed(output) == fresh.allowed(output)).all()
            allowed = set(np.flatnonzero(cursor.allowed(output)).tolist())
            assert allowed == allowed_next(output, sentences)
            assert cursor.is_complete(output) == (allowed == {END})
            assert cursor.accepted(output, path[len(output) :]) == len(path) - len(output)


def test_what_is_not_of_the_grammar_is_told() -> None:
    cursor = COMPILER.compile(LANGUAGES["regex"][0])
    wrong = TOKENIZER("b")["input_ids"]
    with pytest.raises(GrammarError, match="output token 0"):
        cursor.allowed(wrong)
    assert cursor.accepted([], wrong) == 0
    assert cursor.accepted(wrong, wrong) == 0
    assert not cursor.is_complete(wrong)
    assert cursor.forced(wrong) == []


def test_trees_lose_what_cannot_come_and_gain_what_must() -> None:
    spec = GrammarSpec("lark", 'start: "aab" /x|y/ "caab"')
    constraint = TokenConstraint(COMPILER.compile(spec), [END], 0, VOCABULARY)
    start, x = TOKENIZER("aab")["input_ids"], TOKENIZER("x")["input_ids"][0]
    z = TOKENIZER("z")["input_ids"][0]
    limits = PathLimits(constraint, start)
    tree = DraftTree(
        (start[-1], z, x, z, 3), (-1, 0, 0, 2, 1), (0, 1, 1, 2, 2), (1, 0.5, 0.4, 0.3, 0.2)
    )
    pruned = prune(tree, limits)
    assert pruned == DraftTree((start[-1], x), (-1, 0), (0, 1), (1, 0.4))
    grown = add_forced(pruned, limits, 8, 8)
    path = [grown.tokens[node] for node in grown.path_to(len(grown) - 1)[1:]]
    assert "xcaab".startswith(str(TOKENIZER.decode(path)))
    assert len(path) >= 2
    assert len(add_forced(pruned, limits, 2, 8)) <= 3
    assert len(add_forced(pruned, limits, 8, 2)) == 2


BAD = [
    (GrammarSpec("json_schema", "no json"), "cannot be read"),
    (GrammarSpec("json_schema", '{"type": "thing"}'), "thing"),
    (GrammarSpec("json_schema", '{"not": {"type": "string"}}'), "not"),
    (GrammarSpec("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}'), "not"),
    (GrammarSpec("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}'), "minimum"),
    (GrammarSpec("json_schema", '{"$ref": "http://127.0.0.1/x"}'), "retriev"),
    (GrammarSpec("json_schema", "[" * 50_000), "cannot be read"),
    (GrammarSpec("regex", "(a"), "unclosed"),
    (GrammarSpec("regex", "(?=a)b"), "look-around"),
    (GrammarSpec("lark", "start: other"), "other"),
    (GrammarSpec("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
    (GrammarSpec("regex", "a" * 2**19), "characters"),
]


@pytest.mark.parametrize(("spec", "words"), BAD, ids=[f"{s.kind} {s.source:.20}" for s, _ in BAD])
def test_grammars_that_cannot_be_used_are_refused(spec: GrammarSpec, words: str) -> None:
    named = replace(spec, param="the.field")
    with pytest.raises(RequestError, match=words) as caught:
        COMPILER.compile(named)
    assert caught.value.param == "the.field"
    assert len(str(caught.value)) < 500


def test_without_a_tokenizer_grammars_are_refused() -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        GrammarCompiler(None, VOCABULARY, [END]).compile(LANGUAGES["regex"][0])
    with pytest.raises(RequestError, match="end token"):
        GrammarCompiler(TOKENIZER, VOCABULARY, []).compile(LANGUAGES["regex"][0])


def test_only_the_last_grammars_are_kept() -> None:
    compiler = GrammarCompiler(TOKENIZER, VOCABULARY, [END])
    for number in range(100):
        compiler.compile(GrammarSpec("regex", f"a{{{number + 1}}}"))
    assert len(compiler._compiled) == 64
    for number in range(8):
        compiler.compile(GrammarSpec("regex", f"b{number}|" + "c" * 250_000))
    assert sum(len(spec.source) for spec in compiler._compiled) <= 2**20


def test_json_is_written_on_one_line() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": "x"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    cursor = COMPILER.compile(GrammarSpec("json_schema", json.dumps(schema)))
    tokens = TOKENIZER(json.dumps({"a": 1, "b": "x"}))["input_ids"]
    assert cursor.accepted([], tokens) == len(tokens)
    assert cursor.is_complete(tokens)
    jsonschema.validate(json.loads(str(TOKENIZER.decode(tokens))), schema)
