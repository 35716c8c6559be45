"""Soft labels against the full softmax."""

from __future__ import annotations

from pathlib import Path

import torch

from specdec.training.dataset import load_answers
from specdec.training.teacher import load_teacher
from tests.training.making import rule_target, write_rule_answers


def test_soft_labels_are_the_targets_likeliest_tokens(tmp_path: Path) -> None:
    shards = write_rule_answers(tmp_path / "answers", shards=2)
    token_map = torch.tensor([1, 4, 6, 20])
    rows = rule_target().rows(token_map)
    parts: list[int] = []
    teacher = load_teacher(shards, rows, token_map, tmp_path / "work", parts.append)
    data = load_answers(shards)
    assert sum(parts) == len(data) == len(teacher.indices)
    expected = (data.hidden.float() @ rows.T).log_softmax(-1)
    torch.testing.assert_close(
        teacher.log_probabilities.float(),
        expected.gather(1, teacher.indices.long()),
        rtol=1e-2,
        atol=1e-2,
    )
    assert torch.equal(teacher.indices[:, 0].long(), expected.argmax(-1))


def test_labels_are_kept_and_belong_to_their_vocabulary(tmp_path: Path) -> None:
    shards = write_rule_answers(tmp_path / "answers", shards=1)
    target = rule_target()
    first = torch.tensor([1, 4])
    load_teacher(shards, target.rows(first), first, tmp_path)
    kept = list(tmp_path.glob("teacher-*"))
    again = load_teacher(shards, target.rows(first) * 0, first, tmp_path)
    assert float(again.log_probabilities.float().min()) < -0.8  # not computed from zeros
    other = load_teacher(shards, target.rows(None), None, tmp_path)
    assert other.indices.shape[1] > again.indices.shape[1]
    assert len(list(tmp_path.glob("teacher-*"))) == len(kept) + 1
