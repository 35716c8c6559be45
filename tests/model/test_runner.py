"""Rows through pages, chunks, trees and moves equal the model's own forward."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from specdec.config import EngineSettings, KvSettings
from specdec.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from specdec.model.kv import KvLayout, pool_pages
from specdec.model.linear import PackedLinear, has_native_bfloat16
from specdec.model.load import choose_device, context_limit
from specdec.model.native.build import load_kernels
from specdec.model.runner import ModelRunner
from specdec.params import SamplingParams
from specdec.policy.pages import PageAllocator
from specdec.policy.plan import Segment, StepPlan
from specdec.policy.sequence import Sequence
from specdec.policy.stop import StopChecker
from specdec.policy.tree import DraftTree
from tests.model.paged import (
    ROUNDING,
    Paged,
    assert_rounding,
    check_tree,
    lend_pages,
    own_logits,
    random_tokens,
    random_tree,
    rows_of,
    tiny_runner,
)
from tests.tiny_models import FAMILIES, WINDOW, save_tiny, tiny_config, tiny_model

ALL = (*FAMILIES, "gpt_oss")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", ALL)
def test_prefill_trees_and_moves_equal_the_models_own_forward(family: str) -> None:
    chance = random.Random(family)
    runner, model = tiny_runner(family), tiny_model(family)
    prompt = random_tokens(chance, 3 * WINDOW - 5)
    (pages,) = lend_pages(runner, chance, [128])
    sequence = Paged(prompt, pages)
    own = own_logits(model, prompt)
    for size in (13, 1, 20, 100):  # odd cuts, in the middle of pages and across the window
        segment = sequence.chunk(size)
        output = runner.forward([segment], runner.pool)
        assert output.hidden.shape == (output.logits.shape[0], runner.hidden_size)
        if segment.wants_logits:
            assert_rounding(output.logits[0], own[-1])
        else:
            assert output.logits.shape == (0, runner.vocab_size)
    sequence.tokens += random_tokens(chance, 1)
    for nodes in (11, 1, 6, 9):
        tree = random_tree(chance, sequence.tokens[-1], nodes)
        output = runner.forward([sequence.verify(tree)], runner.pool)
        check_tree(model, sequence.tokens[:-1], tree, output.logits)
        leaf = max(range(nodes), key=lambda node: (tree.depths[node], node))
        sequence.accept(runner, tree, leaf, random_tokens(chance, 1)[0])


@pytest.mark.parametrize("family", ALL)
def test_a_packed_step_equals_each_sequence_alone(family: str) -> None:
    chance = random.Random(family)
    runner, model = tiny_runner(family, page_size=5), tiny_model(family)
    lengths = [1, 2, 3, 9, WINDOW, 31, 32, 33, 60, 90]
    pages = lend_pages(runner, chance, [length + 24 for length in lengths])
    sequences = [
        Paged(random_tokens(chance, length), lent)
        for length, lent in zip(lengths, pages, strict=True)
    ]
    # All prompts in one step: the short ones whole, the long ones in part.
    waiting = sequences
    while waiting:
        output = runner.forward([s.chunk(32) for s in waiting], runner.pool)
        for i, sequence in enumerate(waiting):
            if sequence.computed == len(sequence.tokens):
                assert_rounding(rows_of(output, i)[0], own_logits(model, sequence.tokens)[-1])
        waiting = [s for s in waiting if s.computed < len(s.tokens)]
    # Trees of mixed sizes, plain decodes and a newcomer's prompt, in any order.
    newcomer = Paged(random_tokens(chance, 17), lend_new(runner, chance, sequences))
    for sequence in sequences:
        sequence.tokens += random_tokens(chance, 1)
    trees = [random_tree(chance, s.tokens[-1], chance.choice([1, 1, 4, 12])) for s in sequences]
    segments = [s.verify(t) for s, t in zip(sequences, trees, strict=True)]
    segments.insert(4, newcomer.chunk(17))
    output = runner.forward(segments, runner.pool)
    assert_rounding(rows_of(output, 4)[0], own_logits(model, newcomer.tokens)[-1])
    spans = [i for i in range(len(segments)) if i != 4]
    for i, sequence, tree in zip(spans, sequences, trees, strict=True):
        check_tree(model, sequence.tokens[:-1], tree, rows_of(output, i))


def lend_new(runner: ModelRunner, chance: random.Random, taken: list[Paged]) -> list[int]:
    used = {page for sequence in taken for page in sequence.pages}
    return [page for page in range(runner.pool.num_pages) if page not in used][:8]


def test_hidden_is_the_final_norms_output() -> None:
    chance = random.Random(0)
    for family in ("llama", "gemma2", "opt"):
        runner, model = tiny_runner(family), tiny_model(family)
        tokens = random_tokens(chance, 20)
        output = runner.forward([Paged(tokens, list(range(5))).chunk(20)], runner.pool)
        with torch.no_grad():
            base: torch.nn.Module = model.base_model
            own = base(input_ids=torch.tensor([tokens])).last_hidden_state[0]
        assert_rounding(output.hidden[0], own[-1])


def test_a_projected_head_gets_the_projected_state() -> None:
    model = tiny_model("opt", word_embed_proj_dim=32)
    runner = ModelRunner(
        tiny_model("opt", word_embed_proj_dim=32), KvSettings(page_size=4, pages=8)
    )
    tokens = random_tokens(random.Random(0), 9)
    output = runner.forward([Paged(tokens, [5, 1, 2]).chunk(9)], runner.pool)
    assert output.hidden.shape == (1, 32)
    assert_rounding(output.logits[0], own_logits(model, tokens)[-1])


def test_results_may_be_changed_and_do_not_change_later() -> None:
    runner = tiny_runner("llama")
    first = runner.forward([Paged([1, 2, 3], [0]).chunk(3)], runner.pool)
    kept = first.logits.clone()
    runner.forward([Paged([4, 5, 6], [1]).chunk(3)], runner.pool)
    assert torch.equal(first.logits, kept)
    first.logits.add_(1)  # an inference tensor would refuse
    first.hidden.mul_(2)


def test_two_runners_do_not_disturb_each_other() -> None:
    chance = random.Random(1)
    families = ("llama", "mistral", "llama")
    runners = [tiny_runner(family, seed) for seed, family in enumerate(families)]
    models = [tiny_model(family, seed) for seed, family in enumerate(families)]
    sequences = [Paged(random_tokens(chance, 40), list(range(20))) for _ in runners]
    for _ in range(2):
        outputs = [
            r.forward([s.chunk(25)], r.pool) for r, s in zip(runners, sequences, strict=True)
        ]
    for model, sequence, output in zip(models, sequences, outputs, strict=True):
        assert_rounding(output.logits[0], own_logits(model, sequence.tokens)[-1])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_nan_stays_with_its_sequence_and_leaves_with_it(family: str) -> None:
    chance = random.Random(2)
    runner, model = tiny_runner(family), tiny_model(family)
    with torch.no_grad():
        table: torch.nn.Module = runner.model.get_input_embeddings()
        table.get_parameter("weight")[7] = float("nan")
    healthy = [1, 2, 3, 4, 5] * 6
    pages = lend_pages(runner, chance, [40, 40])
    good, bad = Paged(list(healthy), pages[0]), Paged([1, 7, 3] * 4, pages[1])
    output = runner.forward([bad.chunk(50), good.chunk(50)], runner.pool)
    assert torch.isnan(rows_of(output, 0)).all()
    assert_rounding(rows_of(output, 1)[0], own_logits(model, healthy)[-1])
    for sequence in (good, bad):
        sequence.tokens.append(9)
    trees = [random_tree(chance, 9, 5), random_tree(chance, 9, 3)]
    output = runner.forward([good.verify(trees[0]), bad.verify(trees[1])], runner.pool)
    check_tree(model, healthy, trees[0], rows_of(output, 0))
    # Its pages serve another sequence, beside one that is longer.
    heir = Paged(list(healthy[:9]), pages[1])
    output = runner.forward([good.verify(trees[0]), heir.chunk(9)], runner.pool)
    assert_rounding(rows_of(output, 1)[0], own_logits(model, heir.tokens)[-1])


def test_run_takes_the_schedulers_plan() -> None:
    runner, model = tiny_runner("qwen3", page_size=4), tiny_model("qwen3")
    allocator = PageAllocator(runner.pool.num_pages, 4)
    params = SamplingParams()

    def sequence(name: str, tokens: list[int]) -> Sequence:
        checker = StopChecker(params, frozenset(), 512, len(tokens))
        lease = allocator.allocate(allocator.pages_for(len(tokens) + 4))
        return Sequence(name, tokens, len(tokens), params, checker, lease=lease)

    first, second = sequence("a", [1, 2, 3, 4, 5, 6]), sequence("b", [9, 8, 7])
    plan = StepPlan(
        (
            Segment(first, 0, (1, 2, 3, 4, 5, 6), None, True),
            Segment(second, 0, (9, 8), None, False),
        ),
        8,
    )
    output = runner.run(plan)
    assert output.spans == ((0, 1), (1, 1))
    assert_rounding(output.logits[0], own_logits(model, first.tokens)[-1])
    tree = DraftTree((5, 6, 7), (-1, 0, 0), (0, 1, 1), (1.0, 0.5, 0.4))
    first.tokens.append(5)
    plan = StepPlan(
        (Segment(first, 6, tree.tokens, tree, True), Segment(second, 2, (7,), None, True)), 4
    )
    output = runner.run(plan)
    assert output.spans == ((0, 3), (3, 4))
    check_tree(model, first.tokens[:-1], tree, output.logits[:3])
    assert_rounding(output.logits[3], own_logits(model, second.tokens)[-1])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "opt"])
def test_load_float32_equals_the_saved_model(family: str, tmp_path: Path) -> None:
    settings = EngineSettings(dtype="float32", device="cpu", kv=KvSettings(pages=16))
    runner = ModelRunner.load(save_tiny(family, tmp_path, seed=3), settings)
    tokens = random_tokens(random.Random(3), 30)
    output = runner.forward([Paged(tokens, [3, 1]).chunk(30)], runner.pool)
    assert runner.pool.keys.dtype == torch.float32
    assert_rounding(output.logits[0], own_logits(tiny_model(family, 3), tokens)[-1])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "opt"])
@pytest.mark.parametrize("native", [True, False])
def test_load_bfloat16(
    family: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torch's bfloat16: 16-bit weights and float32 arithmetic, head and tied head too."""
    monkeypatch.setattr("specdec.model.load.has_native_bfloat16", lambda: native)
    settings = EngineSettings(
        dtype="bfloat16", device="cpu", kv=KvSettings(pages=16), native_kernels=not native
    )
    runner = ModelRunner.load(save_tiny(family, tmp_path, seed=4), settings)
    tokens = random_tokens(random.Random(4), 30)
    output = runner.forward([Paged(tokens, [3, 1]).chunk(30)], runner.pool)
    rounded = tiny_model(family, 4)
    with torch.no_grad():
        for parameter in rounded.parameters():  # not the buffers: they stay float32
            parameter.copy_(parameter.bfloat16())
    want = own_logits(rounded, tokens)[-1]
    assert runner.pool.keys.dtype == (torch.bfloat16 if native else torch.float32)
    assert output.logits.dtype == torch.float32
    if native:
        assert float((output.logits[0] - want).norm() / (want - want.mean()).norm()) < 0.1
        return
    assert isinstance(runner.output_head, PackedLinear)
    kinds = {type(m).__name__ for m in runner.model.modules()}
    assert not kinds & {"Linear", "Conv1D"}
    assert float((output.logits[0] - want).abs().max()) < 10 * ROUNDING * float(want.abs().max())


@pytest.mark.parametrize("own", [True, False])
def test_bfloat16_default_follows_the_processor(own: bool, tmp_path: Path) -> None:
    settings = EngineSettings(device="cpu", kv=KvSettings(pages=16), native_kernels=own)
    runner = ModelRunner.load(save_tiny("llama", tmp_path), settings)
    packed = not has_native_bfloat16() or (own and load_kernels(settings.cache_dir) is not None)
    assert runner.pool.keys.dtype == (torch.float32 if packed else torch.bfloat16)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        ModelRunner.load(tmp_path, EngineSettings())
    (tmp_path / "config.json").write_text('{"model_type": "no-such-family"}')
    with pytest.raises(UnsupportedModelError, match="no-such-family"):
        ModelRunner.load(tmp_path, EngineSettings())


def test_eos_tokens_and_limits() -> None:
    model = tiny_model("llama", eos_token_id=[3, 5])
    runner = ModelRunner(model, KvSettings(pages=4), max_model_length=100)
    assert runner.eos_token_ids == {3, 5}
    assert runner.max_length == 100
    assert tiny_runner("gpt2").max_length == 512
    assert tiny_runner("gpt2").eos_token_ids == frozenset()


def test_the_context_ends_where_rotary_frequencies_would_follow_the_batch() -> None:
    def limit(rope: dict[str, object], positions: int = 512) -> int:
        config: PretrainedConfig = tiny_config(
            "llama", rope_parameters=rope, max_position_embeddings=positions
        )
        return context_limit(config, None)

    factors = [1.0] * 8
    assert limit({"rope_type": "default", "rope_theta": 1e4}) == 512
    assert limit({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}) == 512
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 128,
    }
    assert limit(longrope) == 128
    assert context_limit(tiny_config("llama"), 64) == 64
    with pytest.raises(UnsupportedModelError, match="max_model_length"):
        context_limit(tiny_config("bloom"), None)


def test_pool_size_follows_memory() -> None:
    layout = KvLayout(layers=30, kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    assert layout.bytes_per_token == 23040
    assert pool_pages(KvSettings(memory_gib=1, page_size=16), layout) == 2**30 // (23040 * 16)
    assert pool_pages(KvSettings(memory_gib=1, pages=7), layout) == 7
    with pytest.raises(ConfigError, match=r"kv\.memory_gib"):
        pool_pages(KvSettings(memory_gib=0.0001), layout)


def test_cuda_asked_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"
    with pytest.raises(UnsupportedModelError, match="CUDA"):
        choose_device("cuda")
