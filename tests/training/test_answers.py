"""Self-distillation data against transformers' own ``generate()``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.reference import generate_greedy
from specdec.engine import Engine
from specdec.errors import ConfigError, HeadsError
from specdec.heads.drafter import NullDrafter
from specdec.params import SamplingParams
from specdec.training.answers import (
    AnswerOptions,
    answer_all,
    count_tokens,
    make_answers,
    make_batches,
    prompt_batches,
)
from specdec.training.own_prompts import own_prompts
from specdec.training.prompts import (
    Prompt,
    balanced_order,
    common_ending,
    read_prompts,
    take_turns,
)
from tests.engines import tiny_engine
from tests.tiny_models import tiny_model
from tests.training.tiny_tokenizer import word_tokenizer

OPTIONS = AnswerOptions(batch_size=4, max_new_tokens=12, sampled_share=0.5)


def answering_engine(eos: frozenset[int] = frozenset()) -> Engine:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = sorted(eos)
    return tiny_engine(model, NullDrafter(), max_sequences=3)


def test_greedy_answers_are_those_of_generate() -> None:
    model = tiny_model("llama")
    prompts = [[5, 9, 11, 40, 2], [7], [8, 8, 100, 3, 55, 21, 90], [64, 2]]
    expected = [generate_greedy(model, prompt, 12) for prompt in prompts]
    # tokens that come at different times, so that answers end one by one
    ends = frozenset({expected[0][3], expected[2][7]})
    params = SamplingParams(max_tokens=12, speculation=False)
    engine = answering_engine(ends)
    answers = dict(answer_all(engine, ((str(i), p, params) for i, p in enumerate(prompts))))
    assert engine.pages_in_use == 0
    for index, (prompt, whole) in enumerate(zip(prompts, expected, strict=True)):
        tokens, hidden = answers[str(index)]
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
    tokenizer = word_tokenizer()
    prompts = [Prompt("a" if i % 3 else "b", f"w{i} w{i + 1}") for i in range(40)]

    def run(folder: Path, wanted: int) -> list[Path]:
        return make_answers(
            answering_engine(frozenset({5})),
            prompt_batches(tokenizer, [prompts[:15], prompts[15:]], OPTIONS),
            folder,
            tokens_wanted=wanted,
            options=OPTIONS,
        )

    whole = run(tmp_path / "whole", 150)
    first = run(tmp_path / "cut", 60)
    kept = first[0].stat().st_mtime_ns
    rest = run(tmp_path / "cut", 150)
    assert rest[0].stat().st_mtime_ns == kept
    shared = [p.name for p in rest if p.name in {q.name for q in whole}]
    assert len(shared) >= 3
    assert sum(map(count_tokens, whole)) >= 150
    for name in shared:
        old, new = load_file(tmp_path / "whole" / name), load_file(tmp_path / "cut" / name)
        assert all(torch.equal(old[key], new[key]) for key in ("tokens", "lengths"))
        # other answers stood in the same steps
        torch.testing.assert_close(old["hidden"], new["hidden"], rtol=2e-2, atol=2e-2)


def test_a_failed_answer_is_told(tmp_path: Path) -> None:
    engine = answering_engine()
    with torch.no_grad():
        engine.runner.model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(HeadsError, match="training prompt"):
        list(answer_all(engine, [("a", [1, 2], SamplingParams(max_tokens=4))]))
    assert engine.on_committed is None


def test_files_take_turns() -> None:
    files = [[Prompt("a", str(i)) for i in range(2)], [Prompt("b", str(i)) for i in range(4)]]
    assert [p.source for p in take_turns(files)] == ["a", "b", "a", "b", "b", "b"]


def test_the_model_writes_prompts_itself(tmp_path: Path) -> None:
    """Only turns that end, each once, the same for the same seed; kept for the next run."""
    tokenizer = word_tokenizer()
    with pytest.raises(HeadsError, match="chat template"):
        own_prompts(answering_engine(), tokenizer, tmp_path / "none.jsonl", 2, 0)
    tokenizer.chat_template = "{% for m in messages %}w1 {{ m.content }} w2 {% endfor %}w3"
    ends = frozenset(range(4, 24))
    path = tmp_path / "sub" / "own.jsonl"
    made = own_prompts(answering_engine(ends), tokenizer, path, 5, 1)
    assert len({prompt.text for prompt in made}) == 5
    assert all(prompt.source == "own" and len(prompt.text.split()) >= 4 for prompt in made)
    assert not any(f"w{end}" in prompt.text.split() for prompt in made for end in ends)
    assert read_prompts(path) == made
    again = own_prompts(answering_engine(ends), tokenizer, tmp_path / "again.jsonl", 5, 1)
    assert again == made
    with pytest.raises(HeadsError, match="rarely end"):
        own_prompts(answering_engine(), tokenizer, tmp_path / "never.jsonl", 1, 1)


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
