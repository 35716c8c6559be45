"""The typical rule against Medusa's evaluate_posterior, restated in numpy on whole paths."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specdec.noise import uniform
from specdec.params import SamplingParams
from specdec.policy.tree import DraftTree
from specdec.sampling import process_logits
from specdec.verify import VerifyInput, verify_batch

torch.set_num_threads(1)


def random_tree(rng: random.Random, vocabulary: int) -> DraftTree:
    tokens, parents, depths = [rng.randrange(vocabulary)], [-1], [0]
    taken = set()
    for _ in range(rng.randrange(14)):
        key = parent, token = rng.randrange(len(tokens)), rng.randrange(vocabulary)
        if key not in taken:
            taken.add(key)
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return DraftTree(tuple(tokens), tuple(parents), tuple(depths), (1.0,) * len(tokens))


def medusa_path(
    tree: DraftTree, q: NDArray[np.float64], epsilon: float, delta: float
) -> tuple[int, ...]:
    """Nodes of the best candidate, as Medusa chooses it among all root-to-leaf paths.

    Of each candidate the leading tokens whose probability exceeds the threshold count; the
    most such tokens win, then the largest sum of their log-probabilities.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(q * np.log(q), axis=-1)
    threshold = np.minimum(epsilon, np.exp(-entropy) * delta)
    leaves = [node for node in range(len(tree)) if node not in tree.parents]
    best: tuple[int, ...] = (0,)
    best_score = (0, 0.0)
    for leaf in leaves:
        path = tree.path_to(leaf)
        shares = np.array([q[a, tree.tokens[b]] for a, b in itertools.pairwise(path)])
        passed = np.cumprod(shares > threshold[path[:-1]]) if len(shares) else shares
        length = int(passed.sum())
        score = length, float(np.log(shares[:length]).sum())
        if score > best_score:
            best, best_score = tuple(path[: length + 1]), score
    return best


SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.2, typical_epsilon=0.3, typical_delta=0.9),
    SamplingParams(temperature=1.0, top_k=3, typical_epsilon=0.02, typical_delta=0.1),
    SamplingParams(temperature=1.0, top_p=0.7),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_it_accepts_what_medusa_accepts(settings: SamplingParams, greedy: bool) -> None:
    rng = random.Random(3)
    params = replace(settings, acceptance="typical")
    if greedy:
        params = replace(params, temperature=0.0)
    lengths = set()
    inputs, expected = [], []
    for case in range(150):
        tree = random_tree(rng, 5)
        logits = torch.randn(len(tree), 5, generator=torch.manual_seed(case)) * 1.5
        judged = SamplingParams(temperature=1.0) if greedy else params
        processed = process_logits(logits, [judged] * len(tree), [None] * len(tree))
        q = processed.double().softmax(-1).numpy()
        nodes = medusa_path(tree, q, params.typical_epsilon, params.typical_delta)
        if greedy:
            bonus = int(logits[nodes[-1]].argmax())
        else:
            noise = uniform(case, 3 + len(nodes) - 1)
            bonus = int((np.cumsum(q[nodes[-1]]) <= noise).sum())
        expected.append((nodes, (*(tree.tokens[node] for node in nodes[1:]), bonus)))
        chosen = replace(params, seed=case)
        inputs.append(VerifyInput(logits, tree, chosen, [0, 1, tree.tokens[0]], 2))
        lengths.add(len(nodes))
    verdicts = verify_batch(inputs)
    assert [(verdict.nodes, verdict.tokens) for verdict in verdicts] == expected
    assert len(lengths) >= 3


def test_the_likelier_of_two_paths_of_one_length_is_kept() -> None:
    tree = DraftTree((0, 1, 2), (-1, 0, 0), (0, 1, 1), (1.0, 0.5, 0.5))
    logits = torch.tensor([[-9.0, 1.0, 1.5], [5.0, 0.0, 0.0], [0.0, 5.0, 0.0]])
    params = SamplingParams(acceptance="typical")
    (verdict,) = verify_batch([VerifyInput(logits, tree, params, [0], 1)])
    assert (verdict.nodes, verdict.tokens) == ((0, 2), (2, 1))


def test_a_refused_token_may_be_drawn_as_bonus_and_still_ends_the_walk() -> None:
    tree = DraftTree((0, 2), (-1, 0), (0, 1), (1.0, 0.5))
    logits = torch.tensor([[0.0, 3.0, 2.0], [9.0, 0.0, 0.0]])
    # q(2) = 0.26 is not above exp(-H) = 0.49.
    params = SamplingParams(
        temperature=1.0, acceptance="typical", typical_epsilon=0.5, typical_delta=1.0
    )
    verdicts = verify_batch(
        [VerifyInput(logits, tree, replace(params, seed=seed), [0], 1) for seed in range(100)]
    )
    assert {verdict.nodes for verdict in verdicts} == {(0,)}
    assert {verdict.tokens for verdict in verdicts} >= {(1,), (2,)}


def test_a_branch_that_is_not_finite_fails_only_if_kept() -> None:
    tree = DraftTree((0, 1, 2, 1), (-1, 0, 0, 2), (0, 1, 1, 2), (1.0,) * 4)
    logits = torch.zeros(4, 3)
    params = SamplingParams(temperature=1.0, acceptance="typical")
    logits[1] = torch.nan
    (verdict,) = verify_batch([VerifyInput(logits, tree, params, [0], 1)])
    assert verdict.error is None
    assert verdict.nodes == (0, 2, 3)
    logits[3] = torch.nan
    bad, good = verify_batch(
        [
            VerifyInput(logits, tree, params, [0], 1),
            VerifyInput(torch.zeros(4, 3), tree, params, [0], 1),
        ]
    )
    assert bad.error == "the model produced non-finite logits at position 3"
    assert good.nodes == (0, 2, 3)
