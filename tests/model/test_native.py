"""Our own kernels: right against transformers and NumPy, and the same bits in every batch.

What these catch: a fused projection in the wrong order, a norm or bias left out, a node that
reads its cousin's keys, a window off by one, a sum whose order depends on the batch, a
candidate that overflows and spoils its siblings, a machine without a compiler that cannot start.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bench.reference import generate_greedy
from specdec.config import EngineSettings, KvSettings
from specdec.model.native.build import load_kernels, use_tiles
from specdec.model.native.linear import BrainLinear, pack_blocks
from specdec.model.native.step import NativeStep
from specdec.model.pack import pack_linear, pack_linears
from specdec.model.runner import ModelRunner
from specdec.params import SamplingParams
from specdec.policy.tree import DraftTree
from tests.engines import ScriptedDrafter, run_all, tiny_engine, tokens_of
from tests.model.paged import (
    Paged,
    assert_rounding,
    check_tree,
    lend_pages,
    own_logits,
    random_tokens,
    random_tree,
)
from tests.tiny_models import VOCABULARY, WINDOW, save_tiny, tiny_model

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="the kernels are for AVX2",
)

#: Families on the fast path, with what differs in them: window, bias, per-head norms.
NATIVE: dict[str, dict[str, object]] = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "num_key_value_heads": 1},
}


def rounded(family: str, **changes: object) -> PreTrainedModel:
    """A float32 model whose weights have bfloat16's precision, so that packing loses nothing."""
    model = tiny_model(family, 3, **(NATIVE.get(family, {}) | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


KERNELS = load_kernels(EngineSettings().cache_dir)
#: Largest deviations: of a sum of one number, and of a model's logits in multiples of ROUNDING.
LAYER, MODEL = {False: 1e-5, True: 2e-5}, {False: 1.0, True: 20.0}


@pytest.fixture(params=[False, True], ids=["vectors", "tiles"], autouse=True)
def tiles(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Everything by vector instructions, and by the matrix units of a CPU that has them."""
    assert KERNELS is not None
    wanted: bool = request.param
    if use_tiles(KERNELS, wanted) != wanted:
        pytest.skip("this CPU has no AMX")
    yield wanted
    use_tiles(KERNELS, True)


def packed_copy(model: PreTrainedModel) -> PreTrainedModel:
    packed = copy.deepcopy(model)
    pack_linears(packed, KERNELS)
    return packed


def native_runner(family: str) -> tuple[ModelRunner, PreTrainedModel]:
    model = rounded(family)
    runner = ModelRunner(packed_copy(model), KvSettings(page_size=4, pages=256))
    assert runner.native is not None
    return runner, model


def test_this_machine_has_kernels() -> None:
    assert KERNELS is not None


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 9, 14, 16, 17, 32, 33, 97, 200])
@pytest.mark.parametrize(("out", "inputs"), [(16, 8), (33, 7), (7, 64), (160, 96), (71, 256)])
def test_linear(rows: int, out: int, inputs: int, tiles: bool) -> None:
    generator = torch.Generator().manual_seed(rows * out + inputs)
    weight = torch.randn(out, inputs, generator=generator).bfloat16()
    bias = torch.randn(out, generator=generator) if rows % 2 else None
    x = torch.randn(rows, inputs, generator=generator)
    layer = pack_linear(weight, bias, KERNELS)
    assert isinstance(layer, BrainLinear)
    want = x.double().numpy() @ weight.double().numpy().T
    if bias is not None:
        want = want + bias.double().numpy()
    got = layer(x)
    bound = LAYER[tiles] * inputs**0.5
    np.testing.assert_allclose(got.numpy(), want, rtol=LAYER[tiles], atol=bound)
    assert torch.equal(layer.unpacked(), weight.float())
    for row in range(min(rows, 8)):
        assert torch.equal(layer(x[row]), got[row])  # whoever stands beside it
    assert layer(x[:0]).shape == (0, out)


def test_linear_takes_views_and_refuses_other_types() -> None:
    layer = pack_linear(torch.randn(32, 8), None, KERNELS)
    x = torch.randn(8, 3)
    assert torch.equal(layer(x.T), layer(x.T.contiguous()))
    assert layer(torch.randn(2, 5, 8)).shape == (2, 5, 32)
    with pytest.raises(TypeError, match="float64"):
        layer(torch.randn(2, 8).double())


def test_packing_pads_the_last_block() -> None:
    assert pack_blocks(torch.ones(17, 3)).shape == (2, 2, 16)


@pytest.mark.parametrize("family", NATIVE)
def test_chunks_trees_and_moves_equal_the_models_own_forward(family: str, tiles: bool) -> None:
    chance = random.Random(family)
    runner, model = native_runner(family)
    assert runner.self_check() < MODEL[tiles] * 1e-5
    (pages,) = lend_pages(runner, chance, [128])
    sequence = Paged(random_tokens(chance, 3 * WINDOW - 5), pages)
    for size in (13, 1, 100):
        output = runner.forward([sequence.chunk(size)], runner.pool)
    sequence.tokens += random_tokens(chance, 1)
    for nodes in (11, 1, 6, 9):
        tree = random_tree(chance, sequence.tokens[-1], nodes)
        output = runner.forward([sequence.verify(tree)], runner.pool)
        check_tree(model, sequence.tokens[:-1], tree, output.logits, MODEL[tiles])
        leaf = max(range(nodes), key=lambda node: (tree.depths[node], node))
        sequence.accept(runner, tree, leaf, random_tokens(chance, 1)[0])


def bits(runner: ModelRunner, tokens: list[int], cuts: list[int], chance: random.Random) -> Tensor:
    """Logits after the last token, prefilled in chunks that end at ``cuts``."""
    (pages,) = lend_pages(runner, chance, [len(tokens)])
    sequence, start = Paged(tokens, pages), 0
    for cut in [*cuts, len(tokens)]:
        output = runner.forward([sequence.chunk(cut - start)], runner.pool)
        start = cut
    return output.logits[0]


@pytest.mark.parametrize("family", NATIVE)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_bits_in_every_batch_chunk_and_tree(family: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        chance = random.Random(family)
        runner, _ = native_runner(family)
        tokens = random_tokens(chance, 50)
        want = bits(runner, tokens, [], chance)
        assert torch.equal(bits(runner, tokens, [1, 2, 17, 49], chance), want)
        # the same path as the branch of a tree, among siblings and beside other sequences
        for trial in range(4):
            first, second = (
                Paged(list(tokens[:45]), p) for p in lend_pages(runner, chance, [80, 80])
            )
            runner.forward([first.chunk(45), second.chunk(30)], runner.pool)
            first.tokens, second.computed = tokens[:46], 30
            path = tokens[45:]
            noise = random_tree(chance, path[0], 6 + trial)
            nodes = list(zip(noise.tokens, noise.parents, noise.depths, strict=True))
            leaf = 0
            for depth, token in enumerate(path[1:], 1):
                nodes.append((token, leaf, depth))
                leaf = len(nodes) - 1
            ids, parents, depths = zip(*nodes, strict=True)
            tree = DraftTree(ids, parents, depths, (1.0,) * len(nodes))
            output = runner.forward([second.chunk(9), first.verify(tree)], runner.pool)
            assert torch.equal(output.logits[output.spans[1][0] + leaf], want)
    finally:
        torch.set_num_threads(before)


def test_a_poisoned_candidate_spoils_only_what_follows_it() -> None:
    chance = random.Random(4)
    runner, _ = native_runner("llama")
    (pages,) = lend_pages(runner, chance, [40])
    sequence = Paged(random_tokens(chance, 10), pages)
    runner.forward([sequence.chunk(10)], runner.pool)
    bad = 77
    with torch.no_grad():
        cast(nn.Embedding, runner.model.get_input_embeddings()).weight[bad] = float("nan")
    sequence.tokens.append(3)
    tree = DraftTree((3, bad, 5, 6), (-1, 0, 0, 1), (0, 1, 1, 2), (1.0,) * 4)
    logits = runner.forward([sequence.verify(tree)], runner.pool).logits
    assert logits.isfinite().all(dim=-1).tolist() == [True, False, True, False]


@pytest.mark.parametrize("family", NATIVE)
@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
def test_greedy_equals_generate(family: str, kind: str) -> None:
    model = rounded(family)
    prompts = [random_tokens(random.Random(n), n) for n in (1, 5, 17, 40)]
    answers = {tuple(p): p + generate_greedy(model, p, 24) for p in prompts}
    drafter = ScriptedDrafter(answers, kind, VOCABULARY)
    engine = tiny_engine(packed_copy(model), drafter, pages=64, prefill_chunk=7)
    assert engine.runner.native is not None
    outputs = run_all(
        engine, {str(len(p)): (list(p), SamplingParams(max_tokens=24)) for p in prompts}
    )
    for prompt in prompts:
        assert prompt + tokens_of(outputs[str(len(prompt))]) == answers[tuple(prompt)]


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3", {"head_dim": 24}), ("llama", {"hidden_act": "gelu"}), ("gemma2", {}), ("gpt2", {})],
)
def test_other_builds_take_the_hook(family: str, changes: dict[str, object]) -> None:
    runner = ModelRunner(packed_copy(rounded(family, **changes)), KvSettings(pages=64))
    assert runner.native is None
    assert runner.self_check() < 1e-4


def test_a_model_that_is_not_packed_takes_the_hook() -> None:
    model = rounded("llama")
    assert not NativeStep.fits(model, ModelRunner(model, KvSettings(pages=8)).shape)


ROPES: dict[str, dict[str, object]] = {
    "default": {},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "linear": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"factor": 2.0},
}


@pytest.mark.parametrize("rope", ROPES)
def test_rotation_in_long_contexts(rope: str, tiles: bool) -> None:
    """A limit that is no power of two: some frequencies change beyond the trained length."""
    parameters = {"rope_type": rope, "rope_theta": 10000.0} | ROPES[rope]
    model = rounded("llama", max_position_embeddings=300, rope_parameters=parameters)
    runner = ModelRunner(packed_copy(model), KvSettings(page_size=4, pages=256))
    assert runner.native is not None
    chance = random.Random(rope)
    tokens = random_tokens(chance, 290)
    got = bits(runner, tokens, [100, 200], chance)
    assert_rounding(got, own_logits(model, tokens)[-1], MODEL[tiles])


def test_a_small_pool_holds_while_states_of_a_long_text_are_computed() -> None:
    runner = ModelRunner(packed_copy(rounded("llama")), KvSettings(page_size=4, pages=2))
    assert runner.hidden_states(random_tokens(random.Random(1), 200)).isfinite().all()
    tokens = random_tokens(random.Random(1), 20)
    with pytest.raises(IndexError, match="outside a pool"):
        runner.forward([Paged(tokens, [0, 1, 2, 3, 4]).chunk(20)], runner.pool)


def test_our_kernels_can_be_switched_off(tmp_path: Path) -> None:
    settings = EngineSettings(native_kernels=False, device="cpu", kv=KvSettings(pages=16))
    runner = ModelRunner.load(save_tiny("llama", tmp_path), settings)
    assert runner.native is None
    assert not any(isinstance(module, BrainLinear) for module in runner.model.modules())


def test_what_the_kernels_would_not_see_keeps_a_model_off_them() -> None:
    """A forward hook, or a layer wrapped by an adapter."""
    model = packed_copy(rounded("llama"))
    shape = ModelRunner(packed_copy(rounded("llama")), KvSettings(pages=8)).shape
    assert NativeStep.fits(model, shape)
    layer = model.model.layers[1]
    hook = layer.mlp.register_forward_hook(lambda module, args, out: out * 2)
    assert not NativeStep.fits(model, shape)
    hook.remove()
    layer.self_attn.q_proj = nn.Sequential(layer.self_attn.q_proj)
    assert not NativeStep.fits(model, shape)
