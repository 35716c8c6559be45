"""From a folder to a module in evaluation mode, with weights laid out for the processor."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specdec.config import EngineSettings
from specdec.errors import ModelNotFoundError, UnsupportedModelError
from specdec.model.linear import has_fp16_packing, has_native_bfloat16
from specdec.model.native.build import load_kernels
from specdec.model.pack import pack_linears

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

#: Rotary frequencies of these kinds depend on the longest sequence in the batch once it
#: is longer than the model was trained on.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def choose_device(device: str) -> torch.device:
    """``auto`` is CUDA where there is one, else the CPU.

    Raises:
        UnsupportedModelError: ``cuda`` was asked for and there is none.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModelError("device: cuda was asked for, but torch sees no CUDA device")
    return torch.device(device)


def wanted_kernels(settings: EngineSettings, device: torch.device) -> ctypes.CDLL | None:
    """Our own CPU kernels, where the settings want them and they are what is fastest."""
    wanted = device.type == "cpu" and settings.dtype == "bfloat16" and settings.native_kernels
    return load_kernels(settings.cache_dir) if wanted else None


def load_model(
    folder: Path, device: torch.device, dtype: str, kernels: ctypes.CDLL | None = None
) -> PreTrainedModel:
    """Load a causal language model for inference.

    On a CPU, ``bfloat16`` means weights rounded to bfloat16, kept in 16 bits, and float32
    arithmetic (see :mod:`specdec.model.linear`); without our own kernels and with bfloat16 units
    it means torch's bfloat16.

    Args:
        folder: a local folder in Hugging Face's format.
        device: where the weights go.
        dtype: ``float32`` or ``bfloat16``.
        kernels: our own CPU kernels, see :func:`wanted_kernels`; None for torch's.

    Raises:
        ModelNotFoundError: there is no model in that folder.
        UnsupportedModelError: it is not a causal language model that transformers knows.
    """
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{folder} holds no config.json, so it is no model folder")
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=_DTYPES[dtype], local_files_only=True
        )
    except OSError as error:
        raise ModelNotFoundError(f"{folder}: {error}") from error
    except (KeyError, ValueError) as error:
        raise UnsupportedModelError(f"{folder}: {error}") from error
    model.eval().requires_grad_(False)
    torchs = kernels is None and has_native_bfloat16()
    if device.type == "cpu" and dtype == "bfloat16" and not torchs:
        if kernels is not None or has_fp16_packing():
            pack_linears(model, kernels)
        model.float()
    nn.Module.to(model, device)
    return model


def context_limit(config: PretrainedConfig, asked: int | None) -> int:
    """Longest sequence in tokens: the model's own limit, or ``asked`` where that is shorter.

    Where the rotary frequencies would change with the longest sequence in the batch, the
    limit is the length up to which they do not: a request's text must not depend on others.

    Raises:
        UnsupportedModelError: the config states no limit and none was asked for.
    """
    text = config.get_text_config(decoder=True)
    limits = [getattr(text, "max_position_embeddings", None), asked]
    limits += [_rope_limit(text)]
    known = [int(limit) for limit in limits if limit is not None]
    if not known:
        raise UnsupportedModelError(
            f"{config.model_type}: the config states no max_position_embeddings; "
            "set max_model_length"
        )
    return min(known)


def _rope_limit(config: PretrainedConfig) -> int | None:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    limits = [
        kind.get("original_max_position_embeddings") or config.max_position_embeddings
        for kind in (nested or [parameters])
        if kind.get("rope_type") in _BATCH_DEPENDENT_ROPE
    ]
    return min(limits) if limits else None
