"""Self-distillation data: the target model answers prompts; its hidden states are kept.

Every shard holds, for a batch of prompts, the answer tokens and, for each of them,
the final-norm hidden state that predicted it, so that training the heads needs no
second pass through the backbone. Shards are written atomically and named by their
number, so an interrupted run continues where it stopped.
"""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from specdec.training.growing_cache import GrowingLayer
from specdec.training.prompts import Prompt, balanced_order, encode_chat


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are made.

    Attributes:
        batch_size: prompts answered at once.
        max_new_tokens: longest answer.
        max_prompt_tokens: longer prompts are passed over.
        sampled_share: share of batches answered at ``temperature`` instead of greedily.
        temperature: of the sampled batches.
        seed: of the order of prompts and of the sampling.
    """

    batch_size: int = 64
    max_new_tokens: int = 128
    max_prompt_tokens: int = 112
    sampled_share: float = 0.2
    temperature: float = 0.7
    seed: int = 0


def prompt_batches(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], options: AnswerOptions
) -> Iterator[list[list[int]]]:
    """The prompts of each shard, in order; the same for the same options."""
    encoded = (encode_chat(tokenizer, p.text) for p in balanced_order(prompts, options.seed))
    fitting = (ids for ids in encoded if 0 < len(ids) <= options.max_prompt_tokens)
    return make_batches(fitting, options)


def make_batches(encoded: Iterable[list[int]], options: AnswerOptions) -> Iterator[list[list[int]]]:
    """Batches of prompts of similar length, so that padding is small."""
    source, start = iter(encoded), 0
    while window := list(islice(source, options.batch_size * 8)):
        window.sort(key=len)
        batches = [
            window[at : at + options.batch_size] for at in range(0, len(window), options.batch_size)
        ]
        random.Random(options.seed + start).shuffle(batches)
        yield from batches
        start += len(window)


@torch.inference_mode()
def answer_batch(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    end_tokens: frozenset[int],
    options: AnswerOptions,
    generator: torch.Generator | None,
) -> list[tuple[list[int], Tensor]]:
    """Answer a batch; finished rows leave the batch.

    Args:
        model: attending by :data:`~.growing_cache.ATTENTION`.
        prompts: token ids.
        end_tokens: tokens that end an answer.
        options: lengths and temperature.
        generator: None for greedy answers, else the source of noise.

    Returns:
        Per prompt its answer tokens (length N, the end token included) and the hidden
        states ``[N, H]`` (bfloat16) from which each of them was predicted.
    """
    backbone, head = model.base_model, model.get_output_embeddings()
    width = max(map(len, prompts))
    device = model.device
    ids = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
    mask = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
        mask[row, width - len(prompt) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache()
    cache.layer_class_to_replicate = GrowingLayer
    # The argument was renamed in transformers 5; some families still have the old name alone.
    names = inspect.signature(backbone.forward).parameters
    cache_name = "cache" if "cache" in names else "past_key_values"
    alive = list(range(len(prompts)))
    finished: set[int] = set()
    tokens: list[list[int]] = [[] for _ in prompts]
    hidden: list[list[Tensor]] = [[] for _ in prompts]
    while alive:
        out = backbone(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{cache_name: cache},
        )
        last = out.last_hidden_state[:, -1]
        logits = head(last).float()
        if generator is None:
            drawn = logits.argmax(-1)
        else:
            probabilities = (logits / options.temperature).softmax(-1)
            drawn = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        for row, (index, token) in enumerate(zip(alive, drawn.tolist(), strict=True)):
            if index not in finished:
                tokens[index].append(token)
                hidden[index].append(last[row].bfloat16().cpu())
                if token in end_tokens or len(tokens[index]) == options.max_new_tokens:
                    finished.add(index)
        keep = [row for row, index in enumerate(alive) if index not in finished]
        if not keep:
            break
        if len(keep) <= 0.8 * len(alive):  # each removal copies the cache
            chosen = torch.tensor(keep, device=device)
            cache.batch_select_indices(chosen)
            mask, positions, drawn = mask[chosen], positions[chosen], drawn[chosen]
            alive = [alive[row] for row in keep]
        ids = drawn[:, None]
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], 1)
    return [(t, torch.stack(h)) for t, h in zip(tokens, hidden, strict=True)]


def make_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    folder: Path,
    *,
    tokens_wanted: int,
    end_tokens: frozenset[int],
    options: AnswerOptions,
    on_progress: Callable[[int], None] = lambda tokens: None,
) -> list[Path]:
    """Write shards of answers until they hold ``tokens_wanted`` tokens or prompts run out.

    Existing shards are kept and counted.

    Returns:
        The shards, in order. Each holds ``tokens`` [N] int32, ``lengths`` [prompts] int32
        and ``hidden`` [N, H] bfloat16, answers one after the other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    total, shards = 0, []
    for number, batch in enumerate(prompt_batches(tokenizer, prompts, options)):
        if total >= tokens_wanted:
            break
        path = folder / f"answers-{number:05d}.safetensors"
        if not path.exists():
            seed = sampling_seed(options, number)
            generator = None
            if seed is not None:
                generator = torch.Generator(model.device).manual_seed(seed)
            answers = answer_batch(model, batch, end_tokens, options, generator)
            write_shard(path, answers)
        total += count_tokens(path)
        shards.append(path)
        on_progress(total)
    return shards


def sampling_seed(options: AnswerOptions, number: int) -> int | None:
    """Seed of the noise of shard ``number``; None if its answers are greedy."""
    rng = random.Random(options.seed * 1_000_003 + number)
    return rng.getrandbits(32) if rng.random() < options.sampled_share else None


def write_shard(path: Path, answers: Sequence[tuple[list[int], Tensor]]) -> None:
    """Write one shard, under a temporary name first."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    save_file(
        {
            "tokens": torch.tensor([t for tokens, _ in answers for t in tokens], dtype=torch.int32),
            "lengths": torch.tensor([len(tokens) for tokens, _ in answers], dtype=torch.int32),
            "hidden": torch.cat([states for _, states in answers]),
        },
        temporary,
    )
    os.replace(temporary, path)


def count_tokens(path: Path) -> int:
    """Number of answer tokens in a shard (reads only its header)."""
    with safe_open(path, "pt") as shard:
        return int(shard.get_slice("tokens").get_shape()[0])
