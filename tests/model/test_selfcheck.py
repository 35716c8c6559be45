"""The start-up check passes what is right and refuses what is wrong, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdec.config import KvSettings
from specdec.errors import UnsupportedModelError
from specdec.model import attention, hook, segment_rows
from specdec.model.kv import KvPool
from specdec.model.runner import ModelRunner
from specdec.model.segment_rows import Bools, Ints, SegmentRows
from specdec.model.selfcheck import TOLERANCES
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
    assert runner.self_check() < TOLERANCES[torch.float32] / 30
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
