"""The reference: transformers' own model and ``generate``."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.generation.streamers import BaseStreamer


def load_reference(folder: Path, dtype: str) -> PreTrainedModel:
    """The model in ``folder`` with transformers' attention."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype)
    )
    model.eval()
    return model


@torch.inference_mode()
def generate_greedy(
    model: PreTrainedModel, prompt: list[int], count: int, streamer: BaseStreamer | None = None
) -> list[int]:
    """At most ``count`` tokens that ``generate`` answers, without the prompt."""
    ids = torch.tensor([prompt], device=model.device)
    out = cast(GenerationMixin, model).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        streamer=streamer,
        pad_token_id=0,
    )
    answer: list[int] = cast(torch.Tensor, out)[0, len(prompt) :].tolist()
    return answer
