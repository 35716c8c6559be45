"""Strict loading of the layouts in which Medusa heads are published.

Counts come from the tensors, never from a config: published configs give wrong ones.
Every tensor must be expected, present, of the right shape and of a float type.

- ``{i}.{j}.linear.weight`` [H, H], ``{i}.{j}.linear.bias`` [H], ``{i}.{L}.weight`` [V, H]:
  the original, as a ``.pt`` or safetensors file. The last may be absent from all heads,
  which then share the base model's output head, or stand once as ``lm_head.weight``.
- the same below ``medusa_head.``, inside the full checkpoint of model and heads.
- ``blocks.{i}.layers.{j}.weight``, ``lm_heads.{i}.weight``, optional ``token_map`` [V']:
  vLLM's; one ``lm_heads.0`` may serve all heads. Also this package's own for Medusa heads.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from specdec.errors import HeadsError
from specdec.heads.medusa import MedusaHeads, ResidualBlock
from specdec.heads.tensors import BROKEN_FILE, TensorTaker

_INSIDE = "medusa_head."


@dataclass(frozen=True)
class _Names:
    """How a layout names things; ``{i}`` is the head, ``{j}`` the layer, ``{L}`` their count."""

    head: str
    layer: str
    layer_pattern: str
    block: str
    rows: str


_ORIGINAL = _Names(
    head=r"(\d+)\.",
    layer="{i}.{j}.linear",
    layer_pattern=r"{i}\.(\d+)\.linear\.",
    block=r"\d+\.\d+\.linear\.bias$",
    rows="{i}.{L}.weight",
)
_RENAMED = _Names(
    head=r"blocks\.(\d+)\.",
    layer="blocks.{i}.layers.{j}",
    layer_pattern=r"blocks\.{i}\.layers\.(\d+)\.",
    block=r"blocks\.\d+\.layers\.\d+\.bias$",
    rows="lm_heads.{i}.weight",
)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a ``.safetensors``, ``.pt`` or ``.bin`` file, or of all in a folder.

    Of a full checkpoint only the tensors below ``medusa_head.`` are kept, renamed without it.

    Raises:
        HeadsError: nothing there, not such a file, or a name stands in two files.
    """
    found: dict[str, Tensor] = {}
    for file in _files(path):
        for name, tensor in _read_file(file).items():
            if name in found:
                raise HeadsError(f"{file}: tensor {name!r} stands in another file too")
            found[name] = tensor
    inside = {
        name.removeprefix(_INSIDE): tensor
        for name, tensor in found.items()
        if name.startswith(_INSIDE)
    }
    return inside or found


def heads_from_tensors(
    tensors: Mapping[str, Tensor], hidden_size: int, vocab_size: int
) -> MedusaHeads:
    """Build Medusa heads from any published layout.

    Args:
        tensors: by name, as read by :func:`read_tensors`.
        hidden_size: H of the base model.
        vocab_size: V of the base model.

    Raises:
        HeadsError: a tensor is missing, extra, misshapen or of a type that is no float;
            names it.
    """
    taker = TensorTaker(tensors)
    renamed = taker.matches(r"(blocks|lm_heads)\.|token_map$")
    names = _RENAMED if renamed else _ORIGINAL
    token_map = taker.take_token_map(vocab_size) if renamed else None
    layers = [
        taker.count(names.layer_pattern.format(i=i), names.layer.format(i=i, j="{}") + ".weight")
        for i in range(taker.count(names.head, names.layer.format(i="{}", j=0) + ".weight"))
    ]
    if 0 in layers or not layers:
        empty = layers.index(0) if layers else 0
        raise HeadsError(f"tensor {names.layer.format(i=empty, j=0) + '.weight'!r} is missing")
    # the original always has biases, vLLM's converter leaves them out: all or none
    biased = not renamed or taker.matches(names.block)
    blocks = [
        [_block(taker, names.layer.format(i=i, j=j), hidden_size, biased) for j in range(count)]
        for i, count in enumerate(layers)
    ]
    width = vocab_size if token_map is None else len(token_map)
    rows = [taker.take(name, width, hidden_size) for name in _row_names(taker, names, layers)]
    taker.finish()
    heads = MedusaHeads(
        layers, hidden_size, vocab_size, bias=biased, lm_heads=rows, token_map=token_map
    )
    heads.blocks = nn.ModuleList(nn.Sequential(*stack) for stack in blocks)
    return heads


def tensors_of_medusa(heads: MedusaHeads) -> dict[str, Tensor]:
    """Named tensors in the renamed layout, the only one that can hold a token map."""
    tensors: dict[str, Tensor] = {}
    for i, stack in enumerate(heads.blocks):
        for j, block in enumerate(stack.children()):
            for name, tensor in block.state_dict().items():
                part = name.removeprefix("linear.")
                tensors[f"{_RENAMED.layer.format(i=i, j=j)}.{part}"] = tensor
    if heads.owns_lm_head:
        for i, head in enumerate(heads.lm_heads):
            tensors[_RENAMED.rows.format(i=i)] = head.state_dict()["linear.weight"]
    if heads.token_map is not None:
        tensors["token_map"] = heads.token_map
    return tensors


def _row_names(taker: TensorTaker, names: _Names, layers: list[int]) -> list[str]:
    """Names of the output rows: one per head, one for all, or none at all."""
    if "lm_head.weight" in taker and names is _ORIGINAL:
        return ["lm_head.weight"]
    own = [names.rows.format(i=i, L=count) for i, count in enumerate(layers)]
    present = [name for name in own if name in taker]
    if names is _RENAMED and present == own[:1]:
        return present
    return own if present else []


def _block(taker: TensorTaker, stem: str, hidden_size: int, biased: bool) -> ResidualBlock:
    block = ResidualBlock(hidden_size, biased)
    block.linear.weight.data = taker.take(f"{stem}.weight", hidden_size, hidden_size)
    if biased:
        block.linear.bias.data = taker.take(f"{stem}.bias", hidden_size)
    return block


def _files(path: Path) -> list[Path]:
    files = [path]
    if path.is_dir():
        # the same weights are often published as safetensors and as torch files
        safe = sorted(path.glob("*.safetensors"))
        files = safe or sorted([*path.glob("*.pt"), *path.glob("*.bin")])
    if not files or not all(file.is_file() for file in files):
        raise HeadsError(f"{path}: no draft heads (.safetensors, .pt or .bin) there")
    return files


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as stored:
                # of a full checkpoint, the model's own weights are not read
                keys = list(stored.keys())
                inside = [key for key in keys if key.startswith(_INSIDE)]
                return {key: stored.get_tensor(key) for key in inside or keys}
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise HeadsError(f"{file}: holds more than tensors, or is no torch file") from error
    except (SafetensorError, *BROKEN_FILE) as error:
        raise HeadsError(f"{file}: cannot be read: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise HeadsError(f"{file}: not a mapping of names to tensors")
    return loaded
