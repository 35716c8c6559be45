"""Shards as training data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdec.errors import HeadsError
from specdec.training.answers import write_shard
from specdec.training.dataset import frequent_tokens, load_answers, split_shards


def test_positions_know_their_answer_and_the_lead_in(tmp_path: Path) -> None:
    for number, answers in enumerate([[[5, 6, 7], [8]], [[9, 10]]]):
        write_shard(
            tmp_path / f"{number}.safetensors",
            [(a, torch.zeros(len(a), 4).bfloat16()) for a in answers],
        )
    data = load_answers([tmp_path / "0.safetensors", tmp_path / "1.safetensors"], [1, 2])
    assert data.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert data.before.tolist() == [0, 1, 2, 0, 0, 1]
    assert data.after.tolist() == [2, 1, 0, 0, 1, 0]
    assert data.answers() == [range(3), range(3, 4), range(4, 6)]
    known = data.known(torch.arange(6), 3)
    assert known.tolist() == [
        [-1, 1, 2, 5],
        [1, 2, 5, 6],
        [2, 5, 6, 7],
        [-1, 1, 2, 8],
        [-1, 1, 2, 9],
        [1, 2, 9, 10],
    ]
    assert data.known(torch.tensor([1]), 0).tolist() == [[6]]


def test_a_broken_shard_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    save_file(
        {"tokens": torch.zeros(3), "lengths": torch.tensor([2]), "hidden": torch.zeros(3, 4)}, path
    )
    with pytest.raises(HeadsError, match=r"bad\.safetensors.*disagree"):
        load_answers([path])
    save_file({"tokens": torch.zeros(3)}, path)
    with pytest.raises(HeadsError, match=r"bad\.safetensors"):
        load_answers([path])
    with pytest.raises(HeadsError, match="no answers"):
        load_answers([])


def test_held_out_shards_are_spread_and_disjoint() -> None:
    shards = [Path(str(number)) for number in range(10)]
    learn, held = split_shards(shards, 2, [True] * 10)
    assert held == [Path("2"), Path("7")]
    assert sorted(learn + held) == shards
    _, held = split_shards(shards, 2, [number in (3, 4, 5) for number in range(10)])
    assert held == [Path("3"), Path("5")]
    for greedy in ([True, True], [False, True, False]):
        with pytest.raises(HeadsError, match="too few"):
            split_shards(shards[: len(greedy)], 2, greedy)


def test_frequent_tokens_fall_back_on_low_ids() -> None:
    tokens = torch.tensor([9, 9, 9, 4, 4, 7])
    assert frequent_tokens(tokens, 12, 5).tolist() == [0, 1, 4, 7, 9]
    assert frequent_tokens(tokens, 4 + 8, 100).tolist() == list(range(12))
