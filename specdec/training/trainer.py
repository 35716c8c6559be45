"""The training loop: resumable, and with the same result however often it was interrupted."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from specdec.errors import HeadsError
from specdec.heads.base import DraftHeads
from specdec.heads.medusa import MedusaHeads
from specdec.heads.sequential import SequentialHeads, SequentialShape
from specdec.heads.target import Target
from specdec.heads.tensors import BROKEN_FILE
from specdec.training.dataset import AnswerSet
from specdec.training.objective import Objective
from specdec.training.options import TrainOptions
from specdec.training.teacher import Teacher


def new_heads(options: TrainOptions, target: Target, token_map: Tensor | None) -> DraftHeads:
    """Untrained heads, attached to the target; their weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        heads: DraftHeads
        if options.kind == "medusa":
            heads = MedusaHeads(
                [options.blocks] * options.depths,
                target.hidden_size,
                target.vocab_size,
                token_map=token_map,
            )
        else:
            shape = SequentialShape(
                target.hidden_size,
                target.vocab_size,
                options.depths,
                options.width,
                options.inner,
                options.blocks,
                options.recent,
            )
            heads = SequentialHeads(shape, token_map)
    heads.attach(target)
    return heads


class Trainer:
    """Trains heads in place.

    The batch of a step and its random tokens depend on seed and step alone, so a
    checkpoint holds nothing but the step, the weights and the optimizer.

    Args:
        heads: attached to the target, on the device to train on.
        data: to learn from.
        teacher: soft labels of ``data``.
        options: of the run.
        checkpoint: file to keep the state in, and to go on from if it is there.

    Raises:
        HeadsError: the checkpoint belongs to other options or data, or is broken.
    """

    def __init__(
        self,
        heads: DraftHeads,
        data: AnswerSet,
        teacher: Teacher,
        options: TrainOptions,
        checkpoint: Path,
    ) -> None:
        self.heads, self.data, self.teacher, self.options = heads, data, teacher, options
        self.step = 0
        self._positions = (data.after >= 1).nonzero()[:, 0]
        if not len(self._positions):
            raise HeadsError("the answers are too short to learn from")
        self.steps = max(1, math.ceil(options.epochs * len(self._positions) / options.batch_size))
        self._objective = Objective(options.hard, options.decay, options.negatives)
        self._device = next(heads.parameters()).device
        self._ranks = draft_ranks(heads)
        self._named = {n: p for n, p in heads.named_parameters() if p.requires_grad}
        self._parameters = list(self._named.values())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=options.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=options.weight_decay,
            fused=True,
        )
        self._order: tuple[int, Tensor] | None = None
        self._checkpoint = checkpoint
        #: What a checkpoint must agree with. How often one is written changes no weight.
        self._identity = options.model_copy(update={"checkpoint_every": 1}).model_dump_json()
        self._identity += f" on {len(data)} tokens, sum {int(data.tokens.sum())}"
        if checkpoint.exists():
            self._resume()

    def run(self, on_step: Callable[[int, float], None] = lambda step, loss: None) -> None:
        """Train to the end.

        Args:
            on_step: told the number of steps done and the last loss.
        """
        self.heads.train()
        while self.step < self.steps:
            loss = self._train_step()
            self.step += 1
            if self.step % self.options.checkpoint_every == 0 or self.step == self.steps:
                self._save()
            on_step(self.step, loss)
        self.heads.eval()

    def _train_step(self) -> float:
        options = self.options
        rate = options.learning_rate * schedule(self.step, self.steps, options.warmup)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        generator = torch.Generator().manual_seed(_mix(options.seed, self.step, 1))
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            loss = self._objective(
                self.heads, self.data, self.teacher, self._batch(), self._ranks, generator
            )
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise HeadsError(f"the loss is {value} at step {self.step}: lower the learning rate")
        return value

    def _batch(self) -> Tensor:
        size = min(self.options.batch_size, len(self._positions))
        per_epoch = len(self._positions) // size
        epoch, index = divmod(self.step, per_epoch)
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(_mix(self.options.seed, epoch, 0))
            self._order = (epoch, torch.randperm(len(self._positions), generator=generator))
        chosen = self._order[1][index * size : (index + 1) * size]
        return self._positions[chosen.sort().values]

    def _save(self) -> None:
        temporary = self._checkpoint.with_suffix(f".{os.getpid()}.tmp")
        with temporary.open("wb") as file:
            torch.save(
                {
                    "identity": self._identity,
                    "step": self.step,
                    "heads": {name: p.detach() for name, p in self._named.items()},
                    "optimizer": self._optimizer.state_dict(),
                },
                file,
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._checkpoint)

    def _resume(self) -> None:
        try:
            state = torch.load(self._checkpoint, map_location=self._device, weights_only=True)
        except BROKEN_FILE as error:
            raise HeadsError(f"{self._checkpoint}: no checkpoint: {error}") from error
        if state["identity"] != self._identity:
            raise HeadsError(
                f"{self._checkpoint} belongs to another run ({state['identity']}); "
                f"this one is {self._identity}. Remove it or choose another folder"
            )
        self.step = state["step"]
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(state["heads"][name])
        self._optimizer.load_state_dict(state["optimizer"])


def _mix(seed: int, index: int, stream: int) -> int:
    """One seed per run, step or epoch, and use."""
    return (seed * 1_000_003 + index) * 2 + stream


def schedule(step: int, steps: int, warmup: int) -> float:
    """Share of the peak learning rate: a linear rise, then a cosine down to 2 %."""
    rise = min(1.0, (step + 1) / max(1, warmup))
    return rise * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def draft_ranks(heads: DraftHeads) -> Tensor:
    """``[V]`` row of each token in the draft vocabulary, -1 where it has none; on the CPU."""
    if heads.token_map is None:
        return torch.arange(heads.vocab_size)
    ranks = torch.full((heads.vocab_size,), -1)
    ranks[heads.token_map.cpu()] = torch.arange(len(heads.token_map))
    return ranks
