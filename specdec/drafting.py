"""When and how large to draft: the engine's side of the drafter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from specdec.config import SpeculationSettings
from specdec.heads.drafter import Drafter, SiblingChoice
from specdec.model.linear import PackedLinear
from specdec.model.runner import ModelRunner
from specdec.policy.plan import Committed
from specdec.policy.sequence import Sequence as SequenceState
from specdec.policy.tree import DraftTree
from specdec.sampling import RowHistory, process_logits
from specdec.verify import sample_siblings

log = logging.getLogger(__name__)

#: Siblings drawn at each depth under every node, for the rejection rule.
BRANCHING = (2, 1, 1, 1)

#: Nodes, root included, that cost little more than one row: CUDA and CPUs with matrix
#: units read the weights once for all; packed weights on AVX2 are flat up to six rows.
NODES_CUDA, NODES_MATRIX_UNITS, NODES_PACKED = 64, 32, 8


class Drafting:
    """Gives each sequence its next tree.

    Args:
        drafter: the source of candidates.
        settings: switches and the size of trees.
        runner: the model that will verify.
    """

    def __init__(
        self, drafter: Drafter, settings: SpeculationSettings, runner: ModelRunner
    ) -> None:
        self.drafter = drafter
        self.max_nodes = settings.max_nodes or default_nodes(runner)
        self._enabled = settings.enabled and drafter.max_depth > 0
        self._probabilities: dict[str, Tensor] = {}

    def draft(
        self,
        committed: Sequence[Committed],
        hidden: Tensor,
        depth_left: Callable[[SequenceState], int],
    ) -> None:
        """Set ``draft`` of every sequence that goes on.

        Args:
            committed: what the step gave.
            hidden: ``[R, H]`` float32, the step's rows with logits.
            depth_left: deepest node worth drafting for a sequence.
        """
        if not self._enabled:
            return
        together: list[Committed] = []
        for entry in committed:
            sequence = entry.sequence
            if sequence.finish_reason is not None or depth_left(sequence) == 0:
                continue
            if sequence.params.acceptance == "rejection" and not sequence.params.greedy:
                self._draft_sampled(sequence, hidden[entry.logits_row], depth_left(sequence))
            else:
                together.append(entry)
        if together:
            trees = self.drafter.draft(
                hidden[[entry.logits_row for entry in together]],
                [entry.sequence.tokens for entry in together],
                [self.max_nodes] * len(together),
            )
            for entry, tree in zip(together, trees, strict=True):
                entry.sequence.draft = tree

    def probabilities(self, sequence: SequenceState, tree: DraftTree | None) -> Tensor | None:
        """Per node of ``tree`` the distribution its children were drawn from, ``[N, V]``;
        None where drafts are deterministic.
        """
        stored = self._probabilities.get(sequence.request_id)
        return None if stored is None or tree is None else stored[: len(tree)]

    def forget(self, sequence: SequenceState) -> None:
        """Drop what is kept of a finished sequence."""
        self._probabilities.pop(sequence.request_id, None)

    def _draft_sampled(self, sequence: SequenceState, hidden: Tensor, depth: int) -> None:
        def choose(logits: Tensor, path: tuple[int, ...], count: int) -> SiblingChoice:
            params, tokens = sequence.params, sequence.tokens
            output = [*tokens[sequence.prompt_length :], *path]
            history = RowHistory(tokens[: sequence.prompt_length], output)
            processed = process_logits(logits[None], [params], [history]).softmax(-1)[0]
            position = len(tokens) + len(path)
            return SiblingChoice(
                processed, sample_siblings(processed, count, params.seed, position)
            )

        sampled = self.drafter.draft_sampled(
            hidden, sequence.tokens, self._branching(depth), choose
        )
        # The scheduler cuts trees by value. Values that knew the tokens drawn would bias
        # which of them are tested, so here they follow the order alone.
        values = tuple(1.0 / (1 + place) for place in range(len(sampled.tree)))
        sequence.draft = replace(sampled.tree, values=values)
        self._probabilities[sequence.request_id] = sampled.probabilities

    def _branching(self, depth: int) -> tuple[int, ...]:
        """As many levels of ``BRANCHING`` as fit the depth and the size of trees."""
        levels: list[int] = []
        nodes, width = 1, 1
        for siblings in BRANCHING[: min(depth, self.drafter.max_depth)]:
            width *= siblings
            if nodes + width > self.max_nodes:
                break
            nodes += width
            levels.append(siblings)
        return tuple(levels)


def default_nodes(runner: ModelRunner) -> int:
    """How large a tree is by default on this device."""
    if runner.device.type == "cuda":
        return NODES_CUDA
    packed = isinstance(runner.output_head, PackedLinear)
    return NODES_PACKED if packed else NODES_MATRIX_UNITS
