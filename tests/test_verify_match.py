"""The match rule emits what plain decoding with the same seed emits, token for token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from specdec.noise import uniform
from specdec.params import SamplingParams
from specdec.policy.tree import DraftTree
from specdec.sampling import RowHistory, invert
from specdec.verify import Verdict, VerifyInput, is_lossy, verify_batch
from tests.toy import PROMPT, Toy, generate

torch.set_num_threads(1)

TOY = Toy.random(6, seed=2)

KINDS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=0.7, top_k=3),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8),
    "min-p": SamplingParams(temperature=1.0, min_p=0.3),
    "all": SamplingParams(temperature=1.5, top_k=4, top_p=0.9, min_p=0.1),
    "biased": SamplingParams(logit_bias={2: 1.0, 0: -2.0}),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2
    ),
    "greedy penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5),
}


def random_tree(root: int, vocabulary: int, rng: random.Random, size: int) -> DraftTree:
    """A tree of any shape; siblings differ, as a drafter's do."""
    tokens, parents, depths = [root], [-1], [0]
    taken: set[tuple[int, int]] = set()
    for _ in range(rng.randrange(size)):
        parent, token = rng.randrange(len(tokens)), rng.randrange(vocabulary)
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return DraftTree(tuple(tokens), tuple(parents), tuple(depths), (1.0,) * len(tokens))


def no_trees(
    committed: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[tuple[DraftTree, Tensor | None]]:
    return [(DraftTree.root_only(tokens[-1]), None) for tokens in committed]


def random_trees(
    committed: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[tuple[DraftTree, Tensor | None]]:
    return [
        (random_tree(tokens[-1], 6, random.Random(len(tokens) * 1000 + one.seed), 12), None)
        for tokens, one in zip(committed, params, strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_it_emits_what_plain_decoding_emits(kind: str) -> None:
    plain = generate(TOY, no_trees, KINDS[kind], 300, 12)
    assert (generate(TOY, random_trees, KINDS[kind], 300, 12) == plain).all()


def test_each_node_is_penalised_for_its_own_path() -> None:
    """Against transformers' processors on each path as a plain sequence."""
    rng = random.Random(7)
    params = SamplingParams(
        temperature=0.8, top_p=0.95, repetition_penalty=1.5, presence_penalty=0.4, seed=3
    )
    for case in range(40):
        tree = random_tree(4, 9, rng, 14)
        committed = [rng.randrange(9) for _ in range(5)] + [4]
        logits = torch.randn(len(tree), 9, generator=torch.manual_seed(case)) * 2
        chosen = replace(params, seed=case)
        (verdict,) = verify_batch([VerifyInput(logits, tree, chosen, committed, 3)])
        for place, node in enumerate(verdict.nodes):
            text = committed + [tree.tokens[i] for i in tree.path_to(node)[1:]]
            assert text == committed + list(verdict.tokens[:place])
            steps = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])
            scores = steps(torch.tensor([text]), logits[node : node + 1])  # type: ignore[arg-type]
            scores[0, sorted(set(text[3:]))] -= 0.4
            steps = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.95)])
            shares = steps(None, scores).softmax(-1)  # type: ignore[arg-type]
            noise = torch.tensor([uniform(case, len(text))], dtype=torch.float64)
            assert verdict.tokens[place] == int(invert(shares, noise))


def test_history_of_a_node_is_its_path() -> None:
    tree = DraftTree((5, 6, 7, 8), (-1, 0, 1, 0), (0, 1, 2, 1), (1.0,) * 4)
    one = VerifyInput(torch.zeros(4, 9), tree, SamplingParams(), [1, 2, 5], 2)
    assert one.history(0) == RowHistory([1, 2], [5])
    assert one.history(2) == RowHistory([1, 2], [5, 6, 7])
    assert one.history(3) == RowHistory([1, 2], [5, 8])
    assert one.position == 3


def some_inputs(count: int, kinds: Sequence[SamplingParams], seed: int) -> list[VerifyInput]:
    """Inputs whose logits are consecutive rows of one tensor."""
    rng = random.Random(seed)
    trees = [random_tree(rng.randrange(6), 6, rng, 12) for _ in range(count)]
    rows = torch.randn(sum(map(len, trees)), 6, generator=torch.manual_seed(seed)) * 2
    parts = rows.split([len(tree) for tree in trees])
    return [
        VerifyInput(
            part, tree, replace(kinds[i % len(kinds)], seed=i), [*PROMPT, tree.tokens[0]], 2
        )
        for i, (part, tree) in enumerate(zip(parts, trees, strict=True))
    ]


@pytest.mark.parametrize(
    "kinds", [[KINDS["greedy"]], list(KINDS.values())], ids=["greedy", "mixed"]
)
def test_a_sequence_gets_the_same_verdict_alone_and_in_any_batch(
    kinds: list[SamplingParams],
) -> None:
    rules = [
        replace(p, acceptance=rule) for p in kinds for rule in ("match", "rejection", "typical")
    ]
    inputs = some_inputs(60, kinds + rules, 11)
    together = verify_batch(inputs)
    assert together == [verify_batch([one])[0] for one in inputs]
    apart = [replace(one, logits=one.logits.clone()) for one in inputs]
    assert together == verify_batch(apart)
    assert together[::-1] == verify_batch(inputs[::-1])


def test_no_inputs_give_no_verdicts() -> None:
    assert verify_batch([]) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_only_visited_rows_have_to_be_finite(kind: str, poison: float) -> None:
    inputs = some_inputs(30, [KINDS[kind]], 12)
    right = verify_batch(inputs)
    failures = 0
    for broken, source in enumerate(inputs):
        row = random.Random(broken).randrange(len(source.tree))
        logits = source.logits.clone()
        logits[row, broken % 6] = poison
        batch = [*inputs]
        batch[broken] = replace(source, logits=logits)
        verdicts = verify_batch(batch)
        expected = right[broken]
        if row in expected.nodes:
            failures += 1
            position = source.position + expected.nodes.index(row)
            message = f"the model produced non-finite logits at position {position}"
            expected = Verdict((), (), message)
        assert verdicts == [*right[:broken], expected, *right[broken + 1 :]]
    assert failures >= 5


def test_a_row_of_forbidden_tokens_alone_fails() -> None:
    logits = torch.full((1, 6), -torch.inf)
    for params in KINDS.values():
        (verdict,) = verify_batch([VerifyInput(logits, DraftTree.root_only(1), params, [0, 1], 1)])
        assert verdict.error == "the model produced non-finite logits at position 2"


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows of logits for a tree of 1 nodes"):
        VerifyInput(torch.zeros(3, 6), DraftTree.root_only(1), SamplingParams(), [1], 1)
    with pytest.raises(ValueError, match="the tree's root is token 1, the last committed token 2"):
        VerifyInput(torch.zeros(1, 6), DraftTree.root_only(1), SamplingParams(), [2], 1)


def test_only_typical_is_lossy() -> None:
    assert not is_lossy("match")
    assert not is_lossy("rejection")
    assert is_lossy("typical")
