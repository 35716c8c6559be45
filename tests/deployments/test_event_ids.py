"""Ids of events, and the split of tokens at the place that they name."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from deployments.errors import ApiError
from deployments.event_ids import Cursor, Position, parse_event_id
from deployments.resumed import Resumption

ANSWER = f"chatcmpl-{'0a' * 16}"


def test_ids_name_their_place() -> None:
    rng = random.Random(0)
    for _ in range(300):
        cursors = tuple(
            Cursor(True, rng.randrange(10**6), rng.randrange(2**32), rng.random() < 0.3)
            if rng.random() < 0.7
            else Cursor()
            for _ in range(rng.randint(1, 16))
        )
        position = Position(ANSWER, cursors, rng.random() < 0.2)
        text = position.encode()
        assert text.isascii()
        assert text.isprintable()
        assert parse_event_id(text) == position


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        ANSWER,
        f"{ANSWER}:1",
        f"{ANSWER}:1-00000000f",
        f"{ANSWER}:-1-00000000",
        f"{ANSWER}:1-0000000",
        f"{ANSWER}:1-00000000:u:u",
        f"{ANSWER}:1-00000000\n",
        f"gpt-{'0a' * 16}:1-00000000",
        f"{ANSWER}:{'9' * 30}-00000000",
    ],
)
def test_others_are_refused(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_event_id(text)
    assert (caught.value.status, caught.value.param) == (400, "Last-Event-ID")


def chunks(rng: random.Random, tokens: list[int]) -> list[tuple[int, ...]]:
    cuts = sorted(rng.sample(range(len(tokens) + 1), rng.randint(0, min(6, len(tokens)))))
    edges = zip([0, *cuts], [*cuts, len(tokens)], strict=True)
    return [tuple(tokens[start:end]) for start, end in edges]


def test_tokens_are_split_where_the_text_was_sent_however_they_come() -> None:
    rng = random.Random(1)
    for _ in range(500):
        tokens = [rng.randrange(2**32) for _ in range(rng.randint(1, 40))]
        sent = Cursor(opened=True).after(tokens[: rng.randint(0, len(tokens))])
        resumption = Resumption(sent)
        known: list[int] = []
        new: list[int] = []
        for chunk in chunks(rng, tokens):
            before, after = resumption.split(chunk, chunk)
            known += before
            new += after
            assert resumption.behind == (len(known) < sent.tokens)
        assert (known, new) == (tokens[: sent.tokens], tokens[sent.tokens :])
        assert resumption.cursor(ended=True) == replace(Cursor().after(tokens), ended=True)


def test_other_tokens_than_those_sent_are_an_error() -> None:
    sent = Cursor(opened=True).after([1, 2, 3])
    with pytest.raises(ApiError) as caught:
        Resumption(sent).split((1, 2, 4, 5), (1, 2, 4, 5))
    assert caught.value.code == "answer_differs"
    shorter = Resumption(sent)
    shorter.split((1, 2), (1, 2))
    with pytest.raises(ApiError):
        shorter.cursor(ended=True)


def test_an_end_token_that_is_no_text_counts() -> None:
    sent = Cursor(opened=True).after([1, 2])
    resumption = Resumption(sent)
    assert resumption.split((1, 2, 3), (1, 2, 3, 9)) == ((1, 2), (3,))
    assert resumption.cursor(ended=True).tokens == 4
