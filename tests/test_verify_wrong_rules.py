"""Rejection rules that are slightly wrong fail the test that the right one passes.

The same statistic, size and false-alarm rate as in test_verify_rejection.py; it has the
power to tell.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdec.params import SamplingParams
from specdec.verify import rejection
from tests.toy import SampledTrees, Toy, p_value

torch.set_num_threads(1)

FALSE_ALARM = 1e-4
COUNT = 20_000
LENGTH = 3
TOY = Toy.random(5, seed=3)
PLAIN = SamplingParams(temperature=1.0, acceptance="rejection")
try_siblings = rejection.try_siblings


def draw_the_rest_from_the_draft(
    target: Tensor, draft: Tensor, siblings: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    accepted, _ = try_siblings(target, draft, siblings, uniforms)
    return accepted, draft


WRONG: dict[str, tuple[str, Callable[..., object]]] = {
    "residual not renormalised": ("residual", lambda q, p: (q - p).clamp_min(0)),
    "draft not subtracted": ("residual", lambda q, p: q),
    "draft not renormalised": ("without", lambda p, tokens: p.scatter(1, tokens[:, None], 0.0)),
    "bonus drawn from the draft": ("try_siblings", draw_the_rest_from_the_draft),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rule_fails(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, replacement = WRONG[wrong]
    monkeypatch.setattr(rejection, name, replacement)
    assert p_value(TOY, SampledTrees(TOY, (3, 1)), PLAIN, COUNT, LENGTH) < FALSE_ALARM


def test_siblings_in_another_order_than_drawn_fail() -> None:
    trees = SampledTrees(TOY, (3, 1), by_probability=True)
    assert p_value(TOY, trees, PLAIN, COUNT, LENGTH) < FALSE_ALARM
