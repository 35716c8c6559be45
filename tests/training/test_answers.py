"""Self-distillation data against transformers' own ``generate()``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationMixin

from specdec.errors import ConfigError
from specdec.training.answers import (
    AnswerOptions,
    answer_batch,
    count_tokens,
    make_answers,
    make_batches,
)
from specdec.training.growing_cache import ATTENTION, GrowingLayer
from specdec.training.prompts import Prompt, balanced_order, common_ending, read_prompts
from tests.tiny_models import tiny_model
from tests.training.tiny_tokenizer import word_tokenizer

OPTIONS = AnswerOptions(batch_size=4, max_new_tokens=12, sampled_share=0.5)


def test_greedy_answers_are_those_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrowingLayer, "GROWTH", 3)
    model = tiny_model("llama")
    prompts = [[5, 9, 11, 40, 2], [7], [8, 8, 100, 3, 55, 21, 90], [64, 2]]
    model.set_attn_implementation("eager")
    expected = []
    for prompt in prompts:
        ids = GenerationMixin.generate(
            model, torch.tensor([prompt]), max_new_tokens=12, do_sample=False
        )
        assert isinstance(ids, torch.Tensor)
        expected.append(ids[0, len(prompt) :].tolist())
    # tokens that come at different times, so that rows leave the batch one by one
    ends = frozenset({expected[0][3], expected[2][7]})
    model.set_attn_implementation(ATTENTION)
    answers = answer_batch(model, prompts, ends, OPTIONS, None)
    for prompt, whole, (tokens, hidden) in zip(prompts, expected, answers, strict=True):
        length = next((i + 1 for i, t in enumerate(whole) if t in ends), len(whole))
        assert tokens == whole[:length]
        assert hidden.shape == (length, 64)
        assert hidden.dtype == torch.bfloat16
        with torch.inference_mode():
            states = model.base_model(torch.tensor([prompt + tokens])).last_hidden_state[0]
        torch.testing.assert_close(
            hidden.float(), states[len(prompt) - 1 : -1], rtol=2e-2, atol=2e-2
        )


def test_an_interrupted_run_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation(ATTENTION)
    tokenizer = word_tokenizer()
    prompts = [Prompt("a" if i % 3 else "b", f"w{i} w{i + 1}") for i in range(40)]

    def run(folder: Path, wanted: int) -> list[Path]:
        return make_answers(
            model,
            tokenizer,
            prompts,
            folder,
            tokens_wanted=wanted,
            end_tokens=frozenset({5}),
            options=OPTIONS,
        )

    whole = run(tmp_path / "whole", 150)
    first = run(tmp_path / "cut", 60)
    kept = first[0].stat().st_mtime_ns
    rest = run(tmp_path / "cut", 150)
    assert rest[0].stat().st_mtime_ns == kept
    assert [p.name for p in whole] == [p.name for p in rest]
    assert sum(map(count_tokens, whole)) >= 150
    for a, b in zip(whole, rest, strict=True):
        old, new = load_file(a), load_file(b)
        assert all(torch.equal(old[name], new[name]) for name in ("tokens", "lengths", "hidden"))


def test_batches_hold_every_prompt_once_and_similar_lengths() -> None:
    encoded = [[i] * (1 + i * 7 % 50) for i in range(100)]
    batches = list(make_batches(encoded, OPTIONS))
    assert sorted(ids[0] for batch in batches for ids in batch) == list(range(100))
    spread = [len(batch[-1]) - len(batch[0]) for batch in batches]
    assert sum(spread) / len(spread) < 8  # lengths are 1 to 50


def test_small_sources_are_not_drowned() -> None:
    prompts = [Prompt("large", str(i)) for i in range(900)]
    prompts += [Prompt("small", str(i)) for i in range(100)]
    order = balanced_order(prompts, seed=1)
    assert sorted(p.text for p in order) == sorted(p.text for p in prompts)
    small = sum(p.source == "small" for p in order[:100])
    assert 15 <= small <= 35  # by the square root: a quarter, not a tenth
    assert order == balanced_order(prompts, seed=1) != balanced_order(prompts, seed=2)


def test_a_bad_prompt_file_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": 3, "source": "x"}\n{"text": "b"}\n')
    with pytest.raises(ConfigError, match="line 4"):
        read_prompts(path)
    with pytest.raises(ConfigError, match="no prompt file"):
        read_prompts(tmp_path / "absent.jsonl")


def test_the_common_ending_is_the_templates() -> None:
    assert common_ending([[1, 2, 8, 9], [4, 8, 9], [8, 9]]) == [8, 9]
    assert common_ending([[1], [2]]) == []
