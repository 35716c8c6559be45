"""Simulated rounds against decoding that really verifies trees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.heads.drafting import HeadsDrafter
from specdec.policy.shapes import static_tree
from specdec.policy.tree import DraftTree, walk
from specdec.training.answers import write_shard
from specdec.training.dataset import AnswerSet, load_answers
from specdec.training.evaluate import (
    greedy_answers,
    matched_nodes,
    rank_accuracies,
    tokens_per_round,
)
from specdec.training.options import TrainOptions
from specdec.training.trainer import new_heads
from tests.training.making import follower, rule_target, write_rule_answers

OPTIONS = TrainOptions(depths=3, width=16, inner=8, draft_vocab=None, seed=1)


@pytest.fixture(name="data")
def _data(tmp_path: Path) -> AnswerSet:
    torch.set_num_threads(1)
    return load_answers(write_rule_answers(tmp_path))


def rounds_by_decoding(drafter: HeadsDrafter, data: AnswerSet, size: int) -> float:
    """Decode each answer: the target (the rule) draws at every node, and the tree is walked."""
    rounds = committed = 0
    for answer in data.answers():
        at = answer.start
        while at < answer.stop - 1:
            root = int(data.tokens[at])
            (tree,) = drafter.draft(data.hidden[at : at + 1].float(), [[root]], [size])
            _, tokens = walk(tree, [follower(token) for token in tree.tokens])
            tokens = tokens[: answer.stop - 1 - at]
            assert tokens == data.tokens[at + 1 : at + 1 + len(tokens)].tolist()
            rounds, committed, at = rounds + 1, committed + len(tokens), at + len(tokens)
    return committed / rounds


@pytest.mark.parametrize("static", [False, True])
def test_rounds_are_those_of_decoding(data: AnswerSet, static: bool) -> None:
    heads = new_heads(OPTIONS, rule_target(), None)
    for parameter in heads.parameters():
        parameter.data *= 1.5
    shape = static_tree([[0.6, 0.3, 0.2], [0.5, 0.3], [0.4]], 24) if static else None
    drafter = HeadsDrafter(heads, shape)
    simulated = tokens_per_round(drafter, data, (1, 4, 12, 24))
    assert simulated[1] == 1.0
    assert simulated[24] > 1.05  # else the comparison says little
    for size, value in simulated.items():
        # a drafter whose frontier is bounded may find more in a larger tree
        assert value == pytest.approx(rounds_by_decoding(drafter, data, size), abs=1e-4)


def test_accuracies_are_shares_of_hits(data: AnswerSet) -> None:
    heads = new_heads(OPTIONS, rule_target(), None)
    accuracies = rank_accuracies(heads, data)
    hits = counts = 0
    with torch.inference_mode():
        for at in range(len(data)):
            if data.after[at] >= 2:
                state = heads.begin(
                    data.hidden[at : at + 1].float(), data.tokens[at : at + 1, None]
                )
                state = heads.advance(1, state, data.tokens[at + 1 : at + 2])
                ranked = heads.logits(2, state)[0].argsort(descending=True)
                hits += int(ranked[3] == data.tokens[at + 2])
                counts += 1
    assert accuracies[1][3] == pytest.approx(hits / counts, abs=1e-4)


def test_only_greedy_answers_are_kept(tmp_path: Path) -> None:
    rows = rule_target().output
    states = (rows * 2).bfloat16()
    greedy, sampled = [3, 18, 21], [3, 18, 5]
    write_shard(tmp_path / "x.safetensors", [(sampled, states[greedy]), (greedy, states[greedy])])
    kept, chosen = greedy_answers(load_answers([tmp_path / "x.safetensors"]), rows)
    assert chosen == [1]
    assert kept.tokens.tolist() == greedy
    assert kept.before.tolist() == [0, 1, 2]


def test_matched_nodes_stop_at_the_first_miss() -> None:
    drafted = DraftTree((0, 5, 6, 7), (-1, 0, 0, 2), (0, 1, 1, 2), (1, 0.6, 0.3, 0.2))
    assert matched_nodes(drafted, [6, 7, 8]) == [2, 3]
    assert matched_nodes(drafted, [5, 7]) == [1]
    assert matched_nodes(drafted, [9]) == []
