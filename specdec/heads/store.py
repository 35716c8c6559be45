"""Draft heads on disk: saving, strict loading, and finding those that ship for a model."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from specdec.errors import HeadsError
from specdec.heads.base import DraftHeads, pack_for_inference
from specdec.heads.config import CONFIG_NAME, WEIGHTS_NAME, HeadsConfig, Probe, read_config
from specdec.heads.drafter import Drafter, NullDrafter
from specdec.heads.drafting import LEAST_CPU, HeadsDrafter
from specdec.heads.layouts import heads_from_tensors, read_tensors, tensors_of_medusa
from specdec.heads.medusa import MedusaHeads
from specdec.heads.native import accelerate
from specdec.heads.sequential import SequentialHeads
from specdec.heads.sequential_layout import sequential_from_tensors, tensors_of_sequential
from specdec.heads.target import Target, model_digest
from specdec.model.native.linear import kernels_of
from specdec.policy.shapes import TreeShape, static_tree

log = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent / "shipped"
#: Size at which static trees are searched; smaller ones are their beginnings.
_STATIC_NODES = 64

#: From tokens to the final-norm hidden states ``[T, H]`` float32 that follow each of them.
HiddenOf = Callable[[Sequence[int]], Tensor]


@dataclass(frozen=True)
class LoadedHeads:
    """Heads attached to their model, not yet packed.

    Attributes:
        heads: the modules, float32.
        config: what is known about them; None for published layouts.
    """

    heads: DraftHeads
    config: HeadsConfig | None


def save_heads(folder: Path, heads: DraftHeads, config: HeadsConfig) -> None:
    """Write weights (bfloat16) and config; each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(heads, SequentialHeads):
        tensors = tensors_of_sequential(heads)
    elif isinstance(heads, MedusaHeads):
        tensors = tensors_of_medusa(heads)
    else:
        raise HeadsError(f"{type(heads).__name__} has no layout on disk")
    stored = {
        name: tensor.detach().cpu().bfloat16().contiguous()
        for name, tensor in tensors.items()
        if name != "token_map"
    }
    if "token_map" in tensors:
        stored["token_map"] = tensors["token_map"].cpu().int()
    _replace(folder / WEIGHTS_NAME, lambda path: save_file(stored, path))
    text = json.dumps(config.model_dump(mode="json"), indent=1) + "\n"
    _replace(folder / CONFIG_NAME, lambda path: path.write_text(text, encoding="utf-8"))


def load_heads(path: Path, target: Target) -> LoadedHeads:
    """Load heads of this package's own format or of any published layout.

    Args:
        path: a folder or file.
        target: the model they are to draft for.

    Raises:
        HeadsError: something is missing, extra, malformed or made for another model.
    """
    if path.is_dir() and _is_own(path / CONFIG_NAME):
        config = read_config(path)
        _check_target(config, target, path)
        tensors = read_tensors(path / WEIGHTS_NAME)
        heads = _own_heads(config, tensors, path)
    else:
        config = None
        heads = heads_from_tensors(read_tensors(path), target.hidden_size, target.vocab_size)
    heads.attach(target)
    return LoadedHeads(heads, config)


def shipped_heads(target: Target) -> Path | None:
    """The folder of the set that ships for this model, whatever name it was loaded by."""
    digest = None
    for path in sorted(SHIPPED.glob(f"*/{CONFIG_NAME}")):
        digest = digest or model_digest(target)
        if read_config(path.parent).model_digest == digest:
            return path.parent
    return None


def make_drafter(
    heads: str | None,
    model: nn.Module,
    model_name: str,
    tree: Literal["static", "dynamic"],
    hidden_of: HiddenOf | None = None,
) -> Drafter:
    """The drafter that the settings ask for.

    Args:
        heads: a folder or file, ``auto`` for the shipped set, or None for none.
        model: the base model, its layers packed or not.
        model_name: for messages.
        tree: kind of tree.
        hidden_of: runs the model, so that heads which carry a probe can prove that they
            fit it; None leaves that out.

    Raises:
        HeadsError: the heads do not load or do not fit the model.
    """
    target = Target.of(model)
    if heads is None:
        return NullDrafter(target.vocab_size)
    path = shipped_heads(target) if heads == "auto" else Path(heads).expanduser()
    if path is None:
        log.warning(
            "no draft heads ship for %s: at most prompt lookup drafts "
            "(train some with `specdec train-heads`)",
            model_name,
        )
        return NullDrafter(target.vocab_size)
    loaded = load_heads(path, target)
    packed = accelerate(pack_for_inference(loaded.heads, target.output.device, kernels_of(model)))
    probe = None if loaded.config is None else loaded.config.probe
    if probe is not None and hidden_of is not None:
        check_floor(packed, probe, hidden_of, path)
    least = LEAST_CPU if target.output.device.type == "cpu" else 0.0
    shape = _shape(loaded.config, path) if tree == "static" else None
    return HeadsDrafter(packed, shape, least=least)


def probe_share(heads: DraftHeads, probe: Probe, hidden: Tensor) -> float:
    """Share of the probe's answer that depth 1 ranks first.

    Args:
        hidden: ``[T, H]`` states that follow the probe's tokens.
    """
    roots = torch.arange(probe.answer_start, len(probe.tokens) - 1)
    tokens = torch.tensor(probe.tokens)
    back = roots[:, None] - torch.arange(heads.recent, -1, -1)
    known = torch.where(back >= 0, tokens[back.clamp(min=0)], -1)
    with torch.inference_mode():
        state = heads.begin(hidden[(roots - 1).to(hidden.device)], known.to(hidden.device))
        best = heads.logits(1, state).argmax(-1)
    if heads.token_map is not None:
        best = heads.token_map[best]
    return float((best.cpu() == tokens[roots + 1]).float().mean())


def check_floor(heads: DraftHeads, probe: Probe, hidden_of: HiddenOf, path: Path) -> None:
    """Prove that heads fit the model at hand.

    Raises:
        HeadsError: they draft worse than their recorded floor.
    """
    share = probe_share(heads, probe, hidden_of(probe.tokens))
    if share < probe.floor:
        raise HeadsError(
            f"{path}: these heads guess {share:.1%} of a known answer, their floor is "
            f"{probe.floor:.1%}: they were trained for another model"
        )


def _shape(config: HeadsConfig | None, path: Path) -> TreeShape:
    if config is None or not config.measured.accuracies:
        raise HeadsError(
            f"{path}: a static tree needs measured accuracies and these heads have none; "
            "set tree: dynamic"
        )
    return static_tree(config.measured.accuracies, _STATIC_NODES)


def _is_own(path: Path) -> bool:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and str(values.get("format", "")).startswith("specdec-heads")


def _own_heads(config: HeadsConfig, tensors: Mapping[str, Tensor], path: Path) -> DraftHeads:
    build = sequential_from_tensors if config.kind == "sequential" else heads_from_tensors
    try:
        return build(tensors, config.hidden_size, config.vocab_size)
    except HeadsError as error:
        raise HeadsError(f"{path / WEIGHTS_NAME}: {error}") from error


def _check_target(config: HeadsConfig, target: Target, path: Path) -> None:
    made_for = (config.vocab_size, config.hidden_size)
    given = (target.vocab_size, target.hidden_size)
    if made_for != given:
        raise HeadsError(
            f"{path}: made for a model with [vocabulary, hidden size] {list(made_for)}, "
            f"this one has {list(given)}"
        )
    if config.model_digest != model_digest(target):
        raise HeadsError(
            f"{path}: made for another model ({config.provenance.base_model or 'unnamed'}): "
            "its embeddings differ from this one's"
        )


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
