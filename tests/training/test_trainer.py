"""The training loop: it learns, and an interruption changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.errors import HeadsError
from specdec.heads.base import DraftHeads
from specdec.training.dataset import load_answers
from specdec.training.evaluate import rank_accuracies
from specdec.training.options import TrainOptions
from specdec.training.teacher import load_teacher
from specdec.training.trainer import Trainer, new_heads, schedule
from tests.training.making import rule_target, write_rule_answers

OPTIONS = TrainOptions(
    depths=3,
    width=32,
    inner=32,
    draft_vocab=20,
    epochs=12,
    batch_size=32,
    warmup=5,
    negatives=4,
    seed=3,
    checkpoint_every=7,
    learning_rate=1e-2,
)


class Killed(Exception):
    """Stands for the process's death: nothing after it runs."""


def trainer_in(folder: Path, options: TrainOptions = OPTIONS) -> Trainer:
    torch.set_num_threads(1)
    target = rule_target()
    shards = write_rule_answers(folder / "answers")
    data = load_answers(shards)
    token_map = None if options.draft_vocab is None else torch.arange(options.draft_vocab)
    teacher = load_teacher(shards, target.rows(token_map), token_map, folder / "work")
    heads = new_heads(options, target, token_map)
    return Trainer(heads, data, teacher, options, folder / "work" / "checkpoint.pt")


def weights(heads: DraftHeads) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in heads.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", ["sequential", "medusa"])
def test_killed_and_resumed_it_ends_with_the_same_weights(kind: str, tmp_path: Path) -> None:
    options = TrainOptions.model_validate(OPTIONS.model_dump() | {"kind": kind})
    whole = trainer_in(tmp_path / "whole", options)
    whole.run()

    def die_at(last: int) -> None:
        def on_step(step: int, loss: float) -> None:
            if step == last:
                raise Killed

        with pytest.raises(Killed):
            trainer_in(tmp_path / "cut", options).run(on_step)

    die_at(5)  # before the first checkpoint
    die_at(18)  # between two
    die_at(21)  # right after one
    resumed = trainer_in(tmp_path / "cut", options)
    assert resumed.step == 21
    resumed.run()
    expected, found = weights(whole.heads), weights(resumed.heads)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert [p.name for p in (tmp_path / "cut" / "work").glob("*.tmp")] == []


def test_sequential_heads_learn_the_rule(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, OPTIONS.model_copy(update={"draft_vocab": None, "epochs": 60}))
    losses: list[float] = []
    trainer.run(lambda step, loss: losses.append(loss))
    assert len(losses) == trainer.steps
    accuracies = rank_accuracies(trainer.heads, trainer.data)
    assert all(row[0] > 0.95 for row in accuracies)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    trainer_in(tmp_path).run()
    with pytest.raises(HeadsError, match="another run"):
        trainer_in(tmp_path, OPTIONS.model_copy(update={"seed": 4}))
    # how often checkpoints are written makes no other run
    again = trainer_in(tmp_path, OPTIONS.model_copy(update={"checkpoint_every": 3}))
    assert again.step == again.steps


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "checkpoint.pt").write_bytes(b"half")
    with pytest.raises(HeadsError, match=r"checkpoint\.pt"):
        trainer_in(tmp_path)


def test_seeds_make_different_heads_and_leave_the_global_state() -> None:
    target = rule_target()
    before = torch.random.get_rng_state()
    first, again = (new_heads(OPTIONS, target, None) for _ in range(2))
    other = new_heads(OPTIONS.model_copy(update={"seed": 4}), target, None)
    assert torch.equal(torch.random.get_rng_state(), before)
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)]
    assert all(same)
    assert not all(
        torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True)
    )


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [schedule(step, 100, 10) for step in range(100)]
    assert rates[0] == pytest.approx(0.1, abs=1e-3)
    assert max(rates) == rates[9] == pytest.approx(1.0, abs=0.03)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.02, abs=1e-3)
