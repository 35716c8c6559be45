"""Published layouts: the same heads whatever they are called, and nothing let through."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.errors import HeadsError
from specdec.heads.layouts import heads_from_tensors, read_tensors, tensors_of_medusa
from specdec.heads.medusa import MedusaHeads
from tests.heads.making import HIDDEN, VOCAB, original_tensors, small_target


def expected_logits(tensors: dict[str, Tensor], heads: int, layers: int, x: Tensor) -> Tensor:
    """The published formula, written out: ``x + SiLU(Wx + b)`` per layer, then the rows."""
    out = []
    for i in range(heads):
        y = x.double()
        for j in range(layers):
            weight, bias = tensors[f"{i}.{j}.linear.weight"], tensors[f"{i}.{j}.linear.bias"]
            z = y @ weight.double().T + bias.double()
            y = y + z / (1 + torch.exp(-z))
        out.append(y @ tensors[f"{i}.{layers}.weight"].double().T)
    return torch.stack(out).float()


def logits(heads: MedusaHeads, x: Tensor) -> Tensor:
    return torch.stack([heads.logits(d, heads.begin(x, x)) for d in range(1, heads.depths + 1)])


def renamed(tensors: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """As vLLM names them."""
    out = {}
    for name, tensor in tensors.items():
        i, j, *rest = name.split(".")
        if rest == ["weight"] or int(j) == layers:
            out[f"lm_heads.{i}.weight"] = tensor
        else:
            out[f"blocks.{i}.layers.{j}.{rest[-1]}"] = tensor
    return out


def write(layout: str, folder: Path, tensors: dict[str, Tensor]) -> Path:
    if layout == "pt":
        torch.save(tensors, folder / "medusa_lm_head.pt")
        return folder / "medusa_lm_head.pt"
    if layout == "full checkpoint":
        model = {"model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}
        halves = [dict(list(tensors.items())[:3]), dict(list(tensors.items())[3:])]
        for number, half in enumerate(halves):
            inside = {f"medusa_head.{name}": tensor for name, tensor in half.items()}
            extra = model if number == 0 else {}
            save_file(inside | extra, folder / f"model-{number}.safetensors")
        return folder
    if layout == "safetensors":
        save_file(tensors, folder / "medusa_lm_head.safetensors")
        return folder
    save_file(renamed(tensors, 2), folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize("layout", ["pt", "full checkpoint", "safetensors", "renamed"])
def test_every_layout_gives_the_published_formula(layout: str, tmp_path: Path) -> None:
    tensors = original_tensors(heads=3, layers=2)
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 5, "medusa_num_layers": 1}')
    path = write(layout, tmp_path, tensors)
    heads = heads_from_tensors(read_tensors(path), HIDDEN, VOCAB)
    heads.attach(small_target())
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert heads.depths == 3
    torch.testing.assert_close(
        logits(heads, x), expected_logits(tensors, 3, 2, x), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("layout", ["pt", "safetensors"])
def test_heads_without_rows_share_the_targets(layout: str, tmp_path: Path) -> None:
    tensors = {n: t for n, t in original_tensors(2, 1).items() if "linear" in n}
    heads = heads_from_tensors(read_tensors(write(layout, tmp_path, tensors)), HIDDEN, VOCAB)
    target = small_target(tied=False)
    heads.attach(target)
    x = torch.randn(4, HIDDEN)
    full = tensors | {f"{i}.1.weight": target.output for i in range(2)}
    torch.testing.assert_close(
        logits(heads, x), expected_logits(full, 2, 1, x), rtol=1e-4, atol=1e-4
    )


def test_renamed_layout_with_one_shared_head_and_token_map() -> None:
    own = original_tensors(2, 1)
    token_map = torch.tensor([7, 3, 11, 29])
    rows = own["0.1.weight"][:4].clone()
    tensors = {n: t for n, t in renamed(own, 1).items() if "lm_heads" not in n}
    heads = heads_from_tensors(
        tensors | {"lm_heads.0.weight": rows, "token_map": token_map}, HIDDEN, VOCAB
    )
    heads.attach(small_target())
    x = torch.randn(4, HIDDEN)
    own |= {"0.1.weight": rows, "1.1.weight": rows}
    assert heads.width == 4
    torch.testing.assert_close(
        logits(heads, x), expected_logits(own, 2, 1, x), rtol=1e-4, atol=1e-4
    )


def test_layers_of_a_head_are_its_own() -> None:
    heads = heads_from_tensors(original_tensors(1, 2), HIDDEN, VOCAB)
    first, second = heads.blocks[0].children()
    assert first is not second
    weights = [dict(layer.named_parameters())["linear.weight"] for layer in (first, second)]
    assert weights[0].data_ptr() != weights[1].data_ptr()


def test_writing_and_reading_again_changes_nothing() -> None:
    heads = heads_from_tensors(original_tensors(2, 2), HIDDEN, VOCAB)
    again = heads_from_tensors(tensors_of_medusa(heads), HIDDEN, VOCAB)
    x = torch.randn(3, HIDDEN)
    assert torch.equal(logits(heads, x), logits(again, x))


FAULTS = {
    "missing bias": ("0.1.linear.bias", None),
    "missing weight": ("1.0.linear.weight", None),
    "missing rows": ("1.2.weight", None),
    "extra": ("0.2.bias", torch.zeros(VOCAB)),
    "extra of another kind": ("embed.weight", torch.zeros(2)),
    "misshapen weight": ("2.1.linear.weight", torch.zeros(HIDDEN, HIDDEN + 1)),
    "misshapen rows": ("2.2.weight", torch.zeros(VOCAB - 1, HIDDEN)),
    "integers": ("0.0.linear.weight", torch.zeros(HIDDEN, HIDDEN, dtype=torch.int8)),
    "not finite": ("0.0.linear.bias", torch.full((HIDDEN,), float("nan"))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tampered_tensor_is_named(fault: str) -> None:
    name, tensor = FAULTS[fault]
    tensors = original_tensors(3, 2)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    with pytest.raises(HeadsError, match=name.replace(".", r"\.")):
        heads_from_tensors(tensors, HIDDEN, VOCAB)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("blocks.0.layers.1.weight", None),
        ("blocks.1.layers.0.bias", None),
        ("lm_heads.1.weight", None),
        ("lm_heads.3.weight", torch.zeros(VOCAB, HIDDEN)),
        ("token_map", torch.tensor([0.5])),
        ("token_map", torch.tensor([1, 1])),
        ("token_map", torch.tensor([VOCAB])),
    ],
)
def test_a_tampered_tensor_of_the_renamed_layout_is_named(name: str, tensor: Tensor | None) -> None:
    tensors = renamed(original_tensors(3, 2), 2)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    with pytest.raises(HeadsError, match=name.replace(".", r"\.")):
        heads_from_tensors(tensors, HIDDEN, VOCAB)


def test_a_head_that_is_missing_in_the_middle_is_named() -> None:
    tensors = {n: t for n, t in original_tensors(3, 1).items() if not n.startswith("1.")}
    with pytest.raises(HeadsError, match=r"1\.0\.linear\.weight"):
        heads_from_tensors(tensors, HIDDEN, VOCAB)


def test_heads_of_another_model_do_not_attach() -> None:
    heads = heads_from_tensors(original_tensors(), HIDDEN, VOCAB)
    heads.vocab_size += 1
    with pytest.raises(HeadsError, match=f"{VOCAB}, {HIDDEN}"):
        heads.attach(small_target())


def test_a_pickle_that_holds_code_is_refused(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("never printed",)

    torch.save({"0.0.linear.weight": Hostile()}, tmp_path / "heads.pt")
    with pytest.raises(HeadsError, match=r"heads\.pt"):
        read_tensors(tmp_path / "heads.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"a": 1}, protocol=2))
    with pytest.raises(HeadsError, match=r"plain\.pt"):
        read_tensors(tmp_path / "plain.pt")


def test_what_is_no_file_of_heads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadsError, match="no draft heads"):
        read_tensors(tmp_path / "absent.pt")
    with pytest.raises(HeadsError, match="no draft heads"):
        read_tensors(tmp_path)
    (tmp_path / "broken.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(HeadsError, match=r"broken\.safetensors"):
        read_tensors(tmp_path)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(HeadsError, match="not a mapping"):
        read_tensors(tmp_path / "list.pt")
