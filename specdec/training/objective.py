"""What heads are trained towards: the target's own distribution, on paths of its own answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.heads.base import DraftHeads
from specdec.training.dataset import AnswerSet
from specdec.training.teacher import Teacher

#: Least probability with which a soft label puts its token among those competed against.
_COMPETING = 0.02


@dataclass(frozen=True)
class Objective:
    """The loss of a batch of positions.

    Per depth, ``(1 - hard) * KL(target || heads) + hard * CE(token that followed)``, with
    the softmax taken over the tokens that matter in this batch (all labels and likely
    tokens, and ``negatives`` random others): the full draft vocabulary would cost several
    times as much and teach little more.

    Attributes:
        hard: share of the tokens that really followed against soft labels.
        decay: weight of a depth against the one above it: a deep token only counts if
            all above it were right.
        negatives: random tokens per batch to compete against.
    """

    hard: float = 0.3
    decay: float = 0.8
    negatives: int = 256

    def __call__(
        self,
        heads: DraftHeads,
        data: AnswerSet,
        teacher: Teacher,
        positions: Tensor,
        ranks: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Mean loss over ``positions`` ``[P]``, each with at least one token after it.

        Args:
            ranks: ``[V]`` row of a token in the draft vocabulary, -1 where it has none.
            generator: on the CPU, of the random tokens.
        """
        features, labels = self._features(heads, data, positions)
        at = torch.cat([where for where, _ in labels])
        device = features[0].device
        soft = teacher.indices[at].long()
        log_soft = teacher.log_probabilities[at].float()
        hard = ranks[data.tokens[at]]
        competing = torch.zeros(heads.width, dtype=torch.bool)
        competing[soft[log_soft.exp() > _COMPETING]] = True
        competing[hard[hard >= 0]] = True
        competing[torch.randint(heads.width, (self.negatives,), generator=generator)] = True
        chosen = competing.nonzero()[:, 0]
        local = torch.full((heads.width,), -1).scatter(0, chosen, torch.arange(len(chosen)))

        logits = [
            torch.nn.functional.linear(x, heads.rows(depth)[chosen.to(device)])
            for depth, x in enumerate(features, 1)
        ]
        log_q = torch.cat(logits).float().log_softmax(-1)
        place = local[soft]
        p = log_soft.exp() * (place >= 0)
        p = (p / p.sum(-1, keepdim=True).clamp(min=1e-6)).to(device)
        divergence = -(p * log_q.gather(1, place.clamp(min=0).to(device))).sum(-1)
        token = local[hard.clamp(min=0)].clamp(min=0).to(device)
        error = -log_q.gather(1, token[:, None])[:, 0] * (hard >= 0).to(device)
        weight = torch.cat([w for _, w in labels]).to(device)
        loss = (1 - self.hard) * divergence + self.hard * error
        return (loss * weight).sum() / weight.sum()

    def _features(
        self, heads: DraftHeads, data: AnswerSet, positions: Tensor
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Per depth the features ``[P_d, H]``, and the labels' positions with their weights."""
        device = next(heads.parameters()).device
        hidden = data.hidden[positions].to(device, torch.float32)
        state = heads.begin(hidden, data.known(positions, heads.recent).to(device))
        features, labels = [], []
        for depth in range(1, heads.depths + 1):
            if depth > 1:
                keep = data.after[positions] >= depth
                positions = positions[keep]
                if not len(positions):
                    break
                tokens = data.tokens[positions + depth - 1].to(device)
                state = heads.advance(depth - 1, state[keep.to(device)], tokens)
            features.append(heads.features(depth, state))
            labels.append(
                (positions + depth, torch.full((len(positions),), self.decay ** (depth - 1)))
            )
        return features, labels
