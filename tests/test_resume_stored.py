"""A long generation goes on elsewhere: all but a tail of its KV comes from the store."""

from __future__ import annotations

from pathlib import Path

from specdec.params import SamplingParams
from tests.engines import answer, tokens_of
from tests.prefix_engines import PAGE, engine_for, settle, text
from tests.tiny_models import tiny_model

LENGTH, LEFT = 400, 10


def test_only_a_tail_is_computed_again(tmp_path: Path) -> None:
    model, prompt = tiny_model("llama"), text(0, 30)
    params = SamplingParams(max_tokens=LENGTH, speculation=False, temperature=0.7, seed=3)
    url = f"lmdb://{tmp_path}/blocks"
    first = engine_for(model, url)
    whole, _ = answer(first, prompt, params)
    settle(first)
    first.close()

    second = engine_for(model, url)
    known = whole[: LENGTH - LEFT]
    second.add_request("r", prompt, params, prior_tokens=known)
    outputs = []
    while second.has_work:
        outputs += second.step()
    assert tokens_of(outputs) == whole[LENGTH - LEFT :]
    # the tail of a block, the root, and one row for each token that was left
    assert second.stats.rows <= PAGE + LEFT
    assert second.pages_in_use == 0
    second.close()
