"""Calls out of a model's text, whichever way the text is split."""

from __future__ import annotations

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.tools.hermes import CLOSE, OPEN, HermesParser

Call = tuple[str, str]


def read(
    parts: list[str], cut: bool = False, several: bool = True
) -> tuple[str, list[Call], list[str]]:
    """Content, calls, and the content as it was known after each part."""
    parser = HermesParser(several)
    content, shown = "", []
    calls: list[list[str]] = []
    for parsed in [*map(parser.add, parts), parser.finish(cut)]:
        content += parsed.content
        shown.append(content)
        for index, delta in parsed.deltas.items():
            assert delta.index == index
            if delta.name is not None:
                assert index == len(calls), "a call begins once, in order"
                calls.append([delta.name, ""])
            calls[index][1] += delta.arguments
    assert parser.calls == len(calls)
    return content, [(name, arguments) for name, arguments in calls], shown


def call(name: str, arguments: str) -> str:
    return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}'


WEATHER = '{"city": "Rome"}'
NASTY = json.dumps({"text": f'}} {{ \\ " {CLOSE} {OPEN} é日👩‍👧 [', "list": [{"a": []}, None, 1.5]})
#: Text of the model, and the content and calls that are in it.
TEXTS: list[tuple[str, str, list[Call]]] = [
    ("", "", []),
    ("Hello, world.\n", "Hello, world.\n", []),
    ("a < b and <tool> and <tool_cal l>", "a < b and <tool> and <tool_cal l>", []),
    ("<<tool_call", "<<tool_call", []),
    (call("f", WEATHER), "", [("f", WEATHER)]),
    ("I look.\n\n" + call("f", WEATHER), "I look.", [("f", WEATHER)]),
    (f"<{call('f', '{}')} done ", "< done", [("f", "{}")]),
    (call("f", NASTY), "", [("f", NASTY)]),
    (
        call("f", WEATHER) + "\n" + call("g", "{}") + call("f", NASTY) + "\n",
        "",
        [("f", WEATHER), ("g", "{}"), ("f", NASTY)],
    ),
    (call("f", WEATHER).removesuffix(CLOSE), "", [("f", WEATHER)]),
    (
        call("f", WEATHER).removesuffix(CLOSE) + call("g", "{}"),
        "",
        [("f", WEATHER), ("g", "{}")],
    ),
    (f'{OPEN}{{"arguments": {WEATHER}, "name": "f"}}{CLOSE}', "", [("f", WEATHER)]),
    (f'{OPEN}{{"name":"f"}}{CLOSE}', "", [("f", "{}")]),
    (f'{OPEN}{{"name":"f","arguments":null}}{CLOSE}', "", [("f", "{}")]),
    (f'{OPEN}{{"name":"f","parameters":{WEATHER}}}{CLOSE}', "", [("f", WEATHER)]),
    (
        f'{OPEN}{{"id": 7, "x": [1, {{"name": "no"}}], "name":"f","arguments":{{}}}}{CLOSE}',
        "",
        [("f", "{}")],
    ),
    (
        f'{OPEN}{{"name":"f","arguments":{json.dumps(WEATHER)}}}{CLOSE}',
        "",
        [("f", WEATHER)],
    ),
    (f"{OPEN}not json{CLOSE}", f"{OPEN}not json{CLOSE}", []),
    (f'{OPEN}{{"name": 5}}{CLOSE}', f'{OPEN}{{"name": 5}}{CLOSE}', []),
    (f"{OPEN}{{}}{CLOSE} x", f"{OPEN}{{}}{CLOSE} x", []),
    (f"{OPEN}{{'name': 'f'}}{CLOSE}", f"{OPEN}{{'name': 'f'}}{CLOSE}", []),
    (OPEN + call("f", "{}"), OPEN, [("f", "{}")]),
    (f'{OPEN}{{"name": "f", "arguments": ]}} junk{CLOSE}after', "after", [("f", "")]),
    (f'{OPEN}{{"arguments": {{"a": 1', f'{OPEN}{{"arguments": {{"a": 1', []),
]
cases = pytest.mark.parametrize(
    ("text", "content", "calls"), TEXTS, ids=[repr(text[:30]) for text, _, _ in TEXTS]
)


@cases
def test_every_split_gives_the_same(text: str, content: str, calls: list[Call]) -> None:
    assert read([text])[:2] == (content, calls)
    assert read(list(text))[:2] == (content, calls)
    for place in range(len(text) + 1):
        assert read([text[:place], text[place:]])[:2] == (content, calls)


@cases
def test_no_part_of_a_mark_is_shown_before_a_call(
    text: str, content: str, calls: list[Call]
) -> None:
    """What was shown at any moment is the beginning of what the whole text comes to."""
    for shown in read(list(text))[2]:
        assert content.startswith(shown)


@settings(max_examples=120, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            [*[t for t, _, _ in TEXTS], OPEN, CLOSE, '{"', "}", '"name"', ":", "\n", "x"]
        )
    ),
    rng=st.randoms(use_true_random=False),
)
def test_any_mixture_in_any_parts_gives_the_same(pieces: list[str], rng: random.Random) -> None:
    text = "".join(pieces)
    parts, start = [], 0
    while start < len(text):
        size = rng.randint(1, 7)
        parts.append(text[start : start + size])
        start += size
    assert read(parts)[:2] == read([text])[:2]


@pytest.mark.parametrize("length", range(1, len(OPEN) + 30))
def test_an_answer_that_is_cut_shows_no_half_mark(length: int) -> None:
    text = "Well. " + call("weather", WEATHER)[:length]
    content, calls, _ = read(list(text), cut=True)
    assert content.rstrip() in ("Well.", "Well. <")
    assert (content == "Well. <") == (length == 1)
    assert all(name == "weather" and WEATHER.startswith(got) for name, got in calls)


def test_one_call_at_most_where_several_are_not_wanted() -> None:
    text = "a " + call("f", WEATHER) + " b " + call("g", "{}")
    for parts in ([text], list(text)):
        assert read(parts, several=False)[:2] == ("a", [("f", WEATHER)])


def test_name_comes_first_and_arguments_in_pieces() -> None:
    parser = HermesParser()
    deltas = [d for char in call("f", WEATHER) for d in parser.add(char).deltas.values()]
    assert (deltas[0].name, deltas[0].arguments) == ("f", "")
    assert all(delta.name is None for delta in deltas[1:])
    assert [delta.arguments for delta in deltas[1:]] == list(WEATHER)


def test_cost_grows_with_the_length_alone() -> None:
    """Marks upon marks, each of which begins a call that fails at its end."""

    def seconds(count: int) -> float:
        text = (OPEN + '{"a": "') * count
        began = time.process_time()
        read([text])
        return time.process_time() - began

    seconds(10)
    assert seconds(4000) < 40 * max(seconds(400), 1e-3)
