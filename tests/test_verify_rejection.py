"""The rejection rule emits the target's distribution.

Statistic: Pearson's chi-square over all continuations of three tokens that the target can
emit (up to 5^3 = 125 cells, pooled below 5 expected), 20,000 seeded sequences, trees of
three siblings with one below each, so that one to three tokens come per round. A right rule
would fail one in 10,000 such tests if the seeds were drawn anew. test_verify_wrong_rules.py
shows that slightly wrong ones fail.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.params import SamplingParams
from specdec.policy.tree import DraftTree
from specdec.verify import VerifyInput, sample_siblings, verify_batch
from specdec.verify.rejection import try_siblings
from tests.toy import PROMPT, SampledTrees, Toy, p_value

torch.set_num_threads(1)

FALSE_ALARM = 1e-4
COUNT = 20_000
LENGTH = 3
TOY = Toy.random(5, seed=3)
PLAIN = SamplingParams(temperature=1.0, acceptance="rejection")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6, "top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.3},
        {"temperature": 1.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=["temperature", "top-k", "top-p", "min-p", "all"],
)
def test_the_distribution_is_the_targets(settings: dict[str, float]) -> None:
    params = replace(PLAIN, **settings)  # type: ignore[arg-type]
    assert p_value(TOY, SampledTrees(TOY, (3, 1)), params, COUNT, LENGTH) > FALSE_ALARM


def test_siblings_are_drawn_without_replacement_and_in_proportion() -> None:
    p = torch.tensor([0.5, 0.0, 0.3, 0.2])
    drawn = [sample_siblings(p, 4, seed, 9) for seed in range(200)]
    for pairs in drawn:
        assert sorted(token for token, _ in pairs) == [0, 2, 3]
        assert all(share == p[token] for token, share in pairs)
    assert drawn[5] == sample_siblings(p, 4, 5, 9)


def rejection_input(
    logits: Tensor, tree: DraftTree, params: SamplingParams = PLAIN, draft: Tensor | None = None
) -> VerifyInput:
    return VerifyInput(logits, tree, params, [*PROMPT, tree.tokens[0]], len(PROMPT), draft)


FORK = DraftTree((1, 2, 3), (-1, 0, 0), (0, 1, 1), (1.0, 0.6, 0.4))


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    logits = torch.randn(2, 6, generator=torch.manual_seed(2))
    p = logits.softmax(-1)
    for seed in range(300):
        params = replace(PLAIN, seed=seed)
        token = sample_siblings(p[0], 1, seed, 3)[0][0]
        tree = DraftTree((1, token), (-1, 0), (0, 1), (1.0, 0.5))
        (verdict,) = verify_batch([rejection_input(logits, tree, params, p)])
        assert verdict.nodes == (0, 1)
        assert verdict.tokens[0] == token


def test_a_token_the_target_forbids_is_never_emitted() -> None:
    logits = torch.zeros(3, 5)
    logits[:, 2] = -torch.inf
    draft = torch.full((3, 5), 0.05)
    draft[:, 2] = 0.8
    for seed in range(300):
        params = replace(PLAIN, seed=seed)
        (verdict,) = verify_batch([rejection_input(logits, FORK, params, draft)])
        assert 2 not in verdict.tokens


def test_a_token_of_no_target_probability_is_refused_whatever_the_noise() -> None:
    target = torch.tensor([[0.0, 0.25, 0.75]])
    draft = torch.tensor([[0.5, 0.5, 0.0]])
    noise = torch.zeros(1, 2, dtype=torch.float64)
    accepted, rest = try_siblings(target, draft, torch.tensor([[0, -1]]), noise)
    assert accepted.tolist() == [-1]
    assert rest.tolist() == [[0.0, 0.0, 1.0]]


def test_the_second_sibling_meets_the_corrected_distributions() -> None:
    """By hand: q = (.2 .3 .5), p = (.5 .3 .2), token 0 refused, then token 1 tested."""
    target, draft = torch.tensor([[0.2, 0.3, 0.5]]), torch.tensor([[0.5, 0.3, 0.2]])
    siblings = torch.tensor([[0, 1]])
    noise = torch.tensor([[0.41, 0.0]], dtype=torch.float64)  # 0 passes below 0.2 / 0.5
    accepted, rest = try_siblings(target, draft, siblings, noise)
    assert accepted.tolist() == [-1]  # (q - p)+ leaves nothing on token 1
    assert rest.tolist() == [[0.0, 0.0, 1.0]]
    accepted, _ = try_siblings(target, draft, siblings, noise - 0.02)
    assert accepted.tolist() == [0]


def test_a_sibling_the_draft_cannot_give_is_not_accepted_on_its_account() -> None:
    """It changes nothing: the token is drawn from the target as if it were not there."""
    logits = torch.randn(3, 5, generator=torch.manual_seed(3))
    draft = torch.zeros(3, 5)
    draft[:, 0] = 1.0
    for seed in range(50):
        params = replace(PLAIN, seed=seed)
        matching = replace(params, acceptance="match")
        assert verify_batch([rejection_input(logits, FORK, params, draft)]) == verify_batch(
            [rejection_input(logits, FORK, matching)]
        )


@pytest.mark.parametrize(
    ("params", "draft"),
    [
        (SamplingParams(acceptance="rejection"), torch.full((3, 5), 0.2)),
        (PLAIN, None),
    ],
    ids=["greedy", "candidates not sampled"],
)
def test_where_nothing_was_sampled_it_is_the_match_rule(
    params: SamplingParams, draft: Tensor | None
) -> None:
    logits = torch.randn(3, 5, generator=torch.manual_seed(4))
    for seed in range(50):
        chosen = replace(params, seed=seed)
        matching = replace(chosen, acceptance="match")
        assert verify_batch([rejection_input(logits, FORK, chosen, draft)]) == verify_batch(
            [rejection_input(logits, FORK, matching)]
        )


def test_only_visited_rows_have_to_be_finite() -> None:
    finite = torch.tensor([0.0, 0.0, -1.0, -1.0, 0.0]).repeat(3, 1)
    broken = finite.clone()
    broken[1] = torch.nan
    draft = torch.full((3, 5), 0.2)
    seen = set()
    for seed in range(50):
        params = replace(PLAIN, seed=seed)
        bad = rejection_input(broken, FORK, params, draft)
        good = rejection_input(finite, FORK, params, draft)
        first, second = verify_batch([bad, good])
        assert second.error is None
        if 1 in second.nodes:
            assert first.error == "the model produced non-finite logits at position 4"
            assert first.nodes == first.tokens == ()
        else:
            assert first == second
        seen.add(first.error)
    assert len(seen) == 2


def test_a_draft_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"draft_probabilities is \[2, 5\], logits \[3, 5\]"):
        rejection_input(torch.zeros(3, 5), FORK, PLAIN, torch.zeros(2, 5))
