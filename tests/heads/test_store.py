"""Heads on disk: what is saved comes back, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specdec.errors import HeadsError
from specdec.heads.config import HeadsConfig, Measured, Probe
from specdec.heads.drafter import NullDrafter
from specdec.heads.drafting import HeadsDrafter
from specdec.heads.layouts import heads_from_tensors, read_tensors
from specdec.heads.sequential_layout import sequential_from_tensors
from specdec.heads.store import (
    SHIPPED,
    check_floor,
    load_heads,
    make_drafter,
    probe_share,
    save_heads,
    shipped_heads,
)
from specdec.heads.target import Target, model_digest
from specdec.model.pack import pack_linear
from tests.heads.making import HIDDEN, VOCAB, original_tensors, small_sequential, small_target


class TinyModel(nn.Module):
    """What the store needs of a transformers model."""

    def __init__(self, target: Target, packed: bool = False) -> None:
        super().__init__()
        self.inputs: nn.Module = nn.Embedding.from_pretrained(target.embedding)
        plain = nn.Linear(HIDDEN, VOCAB, bias=False)
        plain.weight = nn.Parameter(target.output)
        self.head: nn.Module = pack_linear(target.output) if packed else plain

    def get_input_embeddings(self) -> nn.Module:
        return self.inputs

    def get_output_embeddings(self) -> nn.Module:
        head: nn.Module = self.head
        return head


def config_for(target: Target, **more: object) -> HeadsConfig:
    return HeadsConfig.model_validate(
        {
            "kind": "sequential",
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            "model_digest": model_digest(target),
            **more,
        }
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    heads = small_sequential(3, 1, torch.tensor([4, 1, 7, 9]))
    save_heads(tmp_path / "heads", heads, config_for(small_target()))
    return tmp_path / "heads"


def test_sequential_heads_come_back(saved: Path) -> None:
    loaded = load_heads(saved, small_target())
    heads = small_sequential(3, 1, torch.tensor([4, 1, 7, 9]))
    for name, parameter in heads.named_parameters():
        if not name.startswith("borrowed."):
            parameter.data = parameter.data.bfloat16().float()
    hidden, known = torch.randn(2, HIDDEN), torch.tensor([[-1, 3], [2, 5]])
    again = loaded.heads
    torch.testing.assert_close(
        heads.logits(1, heads.begin(hidden, known)), again.logits(1, again.begin(hidden, known))
    )
    assert loaded.config is not None
    assert sorted(file.name for file in saved.iterdir()) == ["config.json", "heads.safetensors"]
    assert load_file(saved / "heads.safetensors")["first.weight"].dtype == torch.bfloat16


def test_medusa_heads_come_back_in_the_own_format(tmp_path: Path) -> None:
    tensors = {n: t for n, t in original_tensors(2, 1).items() if "linear" in n}
    heads = heads_from_tensors(tensors, HIDDEN, VOCAB)
    target = small_target()
    heads.attach(target)
    save_heads(tmp_path, heads, config_for(target, kind="medusa"))
    loaded = load_heads(tmp_path, target)
    assert loaded.heads.depths == 2
    hidden = torch.randn(2, HIDDEN)
    torch.testing.assert_close(
        loaded.heads.logits(2, hidden), heads.logits(2, hidden), rtol=0.05, atol=0.3
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("first.weight", torch.zeros(16, 3 * HIDDEN + 1)),
        ("blocks.0.up.bias", None),
        ("blocks.0.down.weight", torch.zeros(16, 9)),
        ("out.bias", torch.zeros(HIDDEN, dtype=torch.int32)),
        ("token_map", torch.tensor([3, 3])),
        ("more", torch.zeros(1)),
    ],
)
def test_a_tampered_tensor_is_named(saved: Path, name: str, change: Tensor | None) -> None:
    path = saved / "heads.safetensors"
    tensors = load_file(path)
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change
    save_file(tensors, path)
    with pytest.raises(HeadsError, match=name.replace(".", r"\.")):
        load_heads(saved, small_target())


def test_heads_of_another_model_are_refused(saved: Path) -> None:
    with pytest.raises(HeadsError, match="another model"):
        load_heads(saved, small_target(seed=5))
    wide = Target(torch.zeros(VOCAB, HIDDEN + 1), torch.zeros(VOCAB, HIDDEN + 1))
    with pytest.raises(HeadsError, match=f"{VOCAB}, {HIDDEN + 1}"):
        load_heads(saved, wide)


def test_a_bad_config_names_the_key(saved: Path) -> None:
    values = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(values | {"kind": "eagle"}))
    with pytest.raises(HeadsError, match="kind"):
        load_heads(saved, small_target())


def test_the_digest_does_not_depend_on_how_weights_were_loaded() -> None:
    target = small_target()
    rounded = target.embedding.bfloat16()
    assert model_digest(target) == model_digest(Target(rounded, rounded))
    assert model_digest(target) != model_digest(small_target(seed=1))


@pytest.mark.parametrize("packed", [False, True])
def test_the_target_is_found_in_a_packed_model_too(packed: bool) -> None:
    target = small_target(tied=False)
    found = Target.of(TinyModel(target, packed))
    torch.testing.assert_close(found.output, target.output, rtol=1e-2, atol=1e-3)
    assert torch.equal(found.embedding, target.embedding)
    with pytest.raises(HeadsError, match="no embeddings"):
        Target.of(nn.Linear(1, 1))


def test_the_drafter_that_the_settings_ask_for(saved: Path) -> None:
    model = TinyModel(small_target())
    assert isinstance(make_drafter(None, model, "tiny", "dynamic"), NullDrafter)
    drafter = make_drafter(str(saved), model, "tiny", "dynamic")
    assert isinstance(drafter, HeadsDrafter)
    assert drafter.max_depth == 3
    with pytest.raises(HeadsError, match="tree: dynamic"):
        make_drafter(str(saved), model, "tiny", "static")


def test_a_static_tree_is_found_from_measured_accuracies(tmp_path: Path) -> None:
    measured = Measured(accuracies=((0.5, 0.2), (0.4, 0.1)))
    config = config_for(small_target(), measured=measured)
    save_heads(tmp_path, small_sequential(3), config)
    drafter = make_drafter(str(tmp_path), TinyModel(small_target()), "tiny", "static")
    (tree,) = drafter.draft(torch.randn(1, HIDDEN), [[3]], [4])
    assert tree.values == (1.0, 0.5, 0.2, 0.2)


def test_a_model_without_shipped_heads_decodes_plainly(caplog: pytest.LogCaptureFixture) -> None:
    drafter = make_drafter("auto", TinyModel(small_target()), "tiny", "dynamic")
    assert isinstance(drafter, NullDrafter)
    assert "no draft heads ship for tiny" in caplog.text


def test_the_floor_refuses_heads_that_guess_worse(saved: Path) -> None:
    heads = load_heads(saved, small_target()).heads
    tokens = (2, 3, 4, 4, 7, 9, 4)
    hidden = torch.randn(len(tokens), HIDDEN, generator=torch.Generator().manual_seed(1))
    right = 0
    for root in range(2, 6):
        state = heads.begin(hidden[root - 1 : root], torch.tensor([tokens[root - 1 : root + 1]]))
        best = int(heads.logits(1, state).argmax())
        right += int([4, 1, 7, 9][best] == tokens[root + 1])
    probe = Probe(tokens=tokens, answer_start=2, floor=right / 4)
    assert probe_share(heads, probe, hidden) == right / 4
    check_floor(heads, probe, lambda _: hidden, saved)
    above = probe.model_copy(update={"floor": right / 4 + 0.01})
    with pytest.raises(HeadsError, match="floor"):
        check_floor(heads, above, lambda _: hidden, saved)


def test_shipped_sets_load_strictly_and_are_small() -> None:
    folders = [path.parent for path in SHIPPED.glob("*/config.json")]
    assert folders
    for folder in folders:
        config = HeadsConfig.model_validate_json((folder / "config.json").read_text())
        tensors = read_tensors(folder / "heads.safetensors")
        heads = sequential_from_tensors(tensors, config.hidden_size, config.vocab_size)
        assert heads.depths == len(config.measured.accuracies)
        assert config.probe is not None
        assert config.probe.floor > 0.1
        assert config.provenance.command
        assert sum(file.stat().st_size for file in folder.iterdir()) < 16e6


def test_a_shipped_set_is_found_by_its_models_weights() -> None:
    assert shipped_heads(small_target()) is None
