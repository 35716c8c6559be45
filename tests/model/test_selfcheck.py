"""The start-up check passes what is right and refuses what is wrong, by name."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdec.config import KvSettings
from specdec.errors import UnsupportedModelError
from specdec.model import attention, hook, segment_rows
from specdec.model.kv import KvPool
from specdec.model.runner import ModelRunner
from specdec.model.segment_rows import Bools, Ints, SegmentRows
from specdec.model.selfcheck import TOLERANCE
from specdec.model.widened import widened
from tests.model.paged import tiny_runner
from tests.tiny_models import FAMILIES, REFUSED, WINDOW, tiny_model


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
def test_served_families_pass_with_room_to_spare(family: str) -> None:
    runner = tiny_runner(family)
    assert runner.self_check() < TOLERANCE / 30
    windows = set(runner.shape.windows)
    mixed = {"gemma2", "gemma3_text", "gpt_oss"}
    want = {None, WINDOW} if family in mixed else {WINDOW} if family == "mistral" else {None}
    assert windows == want


def test_the_hook_is_back_in_place_after_the_check() -> None:
    runner = tiny_runner("llama")
    runner.self_check()
    assert runner.config._attn_implementation == hook.IMPLEMENTATION


@pytest.mark.parametrize("family", REFUSED)
def test_families_without_replaceable_attention_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"^{family}: .*does not let its attention"):
        tiny_runner(family)


@pytest.mark.parametrize("family", REFUSED)
def test_they_would_be_refused_even_if_they_claimed_otherwise(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate reads source code, by a pattern; what runs is looked at all the same."""
    monkeypatch.setattr(
        PreTrainedModel, "_can_set_attn_implementation", classmethod(lambda _: True)
    )
    with pytest.raises(UnsupportedModelError, match=f"^{family}: "):
        ModelRunner(tiny_model(family), KvSettings(pages=8), 512).self_check()


def small(family: str, **keys: object) -> PreTrainedModel:
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "pad_token_id": 0,
        "max_position_embeddings": 512,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **(sizes | keys))
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval()
    return model


def chunked() -> PreTrainedModel:
    return small(
        "llama4_text",
        attention_chunk_size=64,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        intermediate_size_mlp=64,
    )


def latent() -> PreTrainedModel:
    return small(
        "deepseek_v2",
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        moe_intermediate_size=32,
        n_routed_experts=4,
    )


def recurrent() -> PreTrainedModel:
    return small("minimax", num_key_value_heads=2, head_dim=16, num_local_experts=2)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (chunked, r"llama4_text: .*neither causal nor a causal sliding window \(size 64\)"),
        (latent, "deepseek_v2: .*differ in size"),
        (recurrent, "minimax: only layers .* attend"),
        (lambda: small("roberta"), "roberta: .*neither causal"),
        (lambda: small("diffllama", num_key_value_heads=2), "diffllama: .*more than once"),
        (lambda: small("stablelm", num_key_value_heads=4), "stablelm: .*keyword arguments"),
    ],
)
def test_other_kinds_of_attention_are_refused(
    make: Callable[[], PreTrainedModel], why: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        ModelRunner(make(), KvSettings(pages=8), 512)


Break = Callable[[pytest.MonkeyPatch, ModelRunner], None]


def window_off_by_one(_: pytest.MonkeyPatch, runner: ModelRunner) -> None:
    windows = tuple(w and w + 1 for w in runner.shape.windows)
    runner.shape = dataclasses.replace(runner.shape, windows=windows)


def window_forgotten(_: pytest.MonkeyPatch, runner: ModelRunner) -> None:
    windows = (None,) * len(runner.shape.windows)
    runner.shape = dataclasses.replace(runner.shape, windows=windows)


def window_by_slot_order(patch: pytest.MonkeyPatch, runner: ModelRunner) -> None:
    """The masks count slots, while the model's positions stay right."""
    own = SegmentRows.positions
    asked: list[SegmentRows] = []

    def positions(self: SegmentRows) -> Ints:
        if any(self is one for one in asked):
            return np.arange(self.start, self.length)
        asked.append(self)
        return own(self)

    patch.setattr(SegmentRows, "positions", positions)


def positions_by_slot_order(patch: pytest.MonkeyPatch, _: ModelRunner) -> None:
    patch.setattr(SegmentRows, "positions", lambda self: np.arange(self.start, self.length))


def siblings_seen(patch: pytest.MonkeyPatch, _: ModelRunner) -> None:
    def chain(parents: tuple[int, ...]) -> Bools:
        return np.tri(len(parents), dtype=np.bool_)

    patch.setattr(segment_rows, "ancestors", chain)


def move_forgotten(patch: pytest.MonkeyPatch, _: ModelRunner) -> None:
    def move(self: KvPool, sources: Sequence[int], targets: Sequence[int]) -> None:
        pass

    patch.setattr(KvPool, "move", move)


def without(argument: int) -> Break:
    def forget(patch: pytest.MonkeyPatch, _: ModelRunner) -> None:
        own = attention.masked_attention

        def attend(*arguments: Any) -> Tensor:
            kept = list(arguments)
            kept[argument] = None
            return own(*kept)

        patch.setattr(attention, "masked_attention", attend)

    return forget


SCALING, SOFTCAP, SINKS = 4, 5, 6


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("mistral", window_off_by_one),
        ("mistral", window_forgotten),
        ("mistral", window_by_slot_order),
        ("gemma2", window_off_by_one),
        ("gpt_oss", window_forgotten),
        ("llama", positions_by_slot_order),
        ("gpt2", positions_by_slot_order),
        ("opt", positions_by_slot_order),
        ("llama", siblings_seen),
        ("gpt_neox", move_forgotten),
        ("opt", without(SCALING)),  # it scales its queries itself and passes 1
        ("gemma2", without(SOFTCAP)),
        ("gpt_oss", without(SINKS)),
    ],
)
def test_a_fault_is_noticed(family: str, fault: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tiny_runner(family)
    fault(monkeypatch, runner)
    with pytest.raises(UnsupportedModelError, match=rf"^{family}: .*deviate .* by [0-9.e-]+ of"):
        runner.self_check()


def test_nan_is_refused() -> None:
    runner = tiny_runner("llama")
    with torch.no_grad():
        runner.output_head.get_parameter("weight")[3] = float("nan")
    with pytest.raises(UnsupportedModelError, match="by nan of"):
        runner.self_check()


def narrow_runner(family: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> ModelRunner:
    """With parameters in 16 bits; buffers stay in float32, as ``from_pretrained`` leaves them."""
    model = tiny_model(family, **changes)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    runner = ModelRunner(model, KvSettings(pages=8))
    assert runner.shape.layout.dtype == dtype
    return runner


def memory_runs_out(patch: pytest.MonkeyPatch, _: ModelRunner) -> None:
    """At the third tensor that is widened from here on."""
    own = Tensor.float
    calls: list[Tensor] = []

    def widen(self: Tensor) -> Tensor:
        calls.append(self)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(self)

    patch.setattr(Tensor, "float", widen)


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
def test_bfloat16_models_are_compared_in_float32(family: str) -> None:
    assert narrow_runner(family).self_check() < TOLERANCE / 30


def test_so_are_models_in_half_precision() -> None:
    assert narrow_runner("llama", torch.float16).self_check() < TOLERANCE / 30


@pytest.mark.parametrize(
    ("runner", "fault"),
    [
        (lambda: narrow_runner("gemma2", attn_logit_softcapping=50.0), without(SOFTCAP)),
        (lambda: narrow_runner("gemma3_text", sliding_window=200), window_off_by_one),
    ],
)
def test_faults_that_bfloat16_would_hide_are_noticed(
    runner: Callable[[], ModelRunner], fault: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = runner()
    fault(monkeypatch, faulty)
    with pytest.raises(UnsupportedModelError, match=r"deviate .* by 0\.[0-9]+ of"):
        faulty.self_check()
    memory_runs_out(monkeypatch, faulty)
    assert faulty.self_check() < 0.06


@pytest.mark.parametrize("result", [float("nan"), 0.0])
def test_a_fault_in_bfloat16_alone_is_noticed(
    result: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = attention.masked_attention

    def attend(query: Tensor, *arguments: Any) -> Tensor:
        out = own(query, *arguments)
        return torch.full_like(out, result) if query.dtype == torch.bfloat16 else out

    monkeypatch.setattr(attention, "masked_attention", attend)
    with pytest.raises(UnsupportedModelError, match=r"deviate from float32, in torch\.bfloat16,"):
        narrow_runner("llama").self_check()


def accepted(_: pytest.MonkeyPatch, runner: ModelRunner) -> None:
    runner.self_check()


def refused(patch: pytest.MonkeyPatch, runner: ModelRunner) -> None:
    siblings_seen(patch, runner)
    with pytest.raises(UnsupportedModelError):
        runner.self_check()


def cramped(patch: pytest.MonkeyPatch, runner: ModelRunner) -> None:
    memory_runs_out(patch, runner)
    runner.self_check()


@pytest.mark.parametrize("outcome", [accepted, refused, cramped])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_weights_are_the_very_same_afterwards(
    family: str, outcome: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = narrow_runner(family, tie_word_embeddings=True)
    model = runner.model

    def state() -> dict[str, tuple[int, torch.dtype]]:
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        return {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in named}

    def bits() -> dict[str, bytes]:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return {n: t.detach().view(torch.uint8).numpy().tobytes() for n, t in tensors}

    before, bits_before = state(), bits()
    assert {dtype for _, dtype in before.values()} >= {torch.bfloat16}
    outcome(monkeypatch, runner)
    assert (state(), bits()) == (before, bits_before)
    embeddings = model.get_input_embeddings().get_parameter("weight")
    assert runner.output_head.get_parameter("weight") is embeddings


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_without_room_for_float32_the_check_is_coarse_and_says_so(
    family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = narrow_runner(family)
    memory_runs_out(monkeypatch, runner)
    with caplog.at_level(logging.WARNING):
        assert runner.self_check() > TOLERANCE
    assert f"{family}: no memory to check" in caplog.text
    assert "CUDA out of memory" in caplog.text


@pytest.mark.parametrize(
    ("family", "fault"), [("llama", siblings_seen), ("gpt_oss", window_forgotten)]
)
def test_the_coarse_check_still_sees_gross_faults(
    family: str, fault: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = narrow_runner(family)
    fault(monkeypatch, runner)
    memory_runs_out(monkeypatch, runner)
    with pytest.raises(UnsupportedModelError, match="deviate from the model's own forward"):
        runner.self_check()


def test_a_full_device_is_not_filled_further(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    model = nn.Module()
    with FakeTensorMode():
        model.register_buffer("weight", torch.empty(gib, dtype=torch.bfloat16, device="cuda"))
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (4 * gib, 80 * gib))
        why = r"4\.5 GiB are needed on cuda:0, 4\.0"
        with pytest.raises(torch.OutOfMemoryError, match=why), widened(model):
            raise AssertionError
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (5 * gib, 80 * gib))
        with widened(model):
            assert model.get_buffer("weight").dtype == torch.float32
        assert model.get_buffer("weight").dtype == torch.bfloat16
