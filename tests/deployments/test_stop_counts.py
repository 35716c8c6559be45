"""What a stop string does to the counts of an answer, however its tokens come."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from deployments.choice_text import ChoiceText
from specdec.config import DEFAULT_MODEL, EngineSettings
from specdec.model.resolve import resolve_model
from specdec.outputs import TokenLogprobs
from specdec.params import SamplingParams


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("portion", [1, 3, 20])
def test_tokens_behind_a_stop_string_are_told(portion: int, logprobs: bool) -> None:
    """Also where bytes that are no text wait to be shown, as the gateway then sees it first."""
    tokenizer = AutoTokenizer.from_pretrained(
        resolve_model(DEFAULT_MODEL, EngineSettings().cache_dir), local_files_only=True
    )
    taken = set()
    for tokens, stop in (([138] * 20, "\ufffd" * 3), ([28, 1500, 30, 28, 1500], ".")):
        told = ChoiceText(tokenizer, SamplingParams(max_tokens=50, stop=(stop,)))
        came = 0
        while not told.stopped and came < len(tokens):
            some = tokens[came : came + portion]
            told.add(some, [TokenLogprobs(0, -1.0, ())] * len(some) if logprobs else ())
            came += len(some)
        assert told.stopped
        taken.add((stop, came - told.unread))
    one_by_one = {("\ufffd" * 3, 17), (".", 3)}
    assert taken == one_by_one
