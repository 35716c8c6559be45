"""When, how large and from which sources to draft: the engine's side of the drafter."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.config import SpeculationSettings
from specdec.errors import GrammarError
from specdec.heads.drafter import Drafter, SiblingChoice
from specdec.model.linear import PackedLinear
from specdec.model.runner import ModelRunner
from specdec.policy.budget import Budget, Source
from specdec.policy.constrained import add_forced, cut_path, prune
from specdec.policy.constraint import PathLimits
from specdec.policy.lookup import Continuation, PromptLookup
from specdec.policy.merge import merge_path
from specdec.policy.plan import Committed
from specdec.policy.rows import SAMPLED_ACCEPTANCE, drawn_at_random
from specdec.policy.sequence import Sequence as SequenceState
from specdec.policy.tree import DraftTree
from specdec.sampling import RowHistory, finite_rows, process_logits
from specdec.verify import sample_siblings

log = logging.getLogger(__name__)

#: Siblings drawn at each depth under every node, for the rejection rule.
BRANCHING = (2, 1, 1, 1)

#: Nodes of a tree at most, root included: where rows have their price (packed weights and vector
#: instructions), on CPUs with matrix units, on CUDA. How many are verified is the budget's.
NODES_PACKED, NODES_MATRIX_UNITS, NODES_CUDA = 16, 32, 64
#: Where lookup alone gives this many candidates of at least this chance, the heads are left
#: out: what they would add is rarely reached.
STRONG_CANDIDATES, STRONG = 5, 0.5
#: Running sequences up to which candidates are drawn for the rejection rule: one sequence after
#: the other, and a text may depend on their number, so no measured time may decide it.
SAMPLED_STREAMS = 8
#: Chance from which on a level of sampled siblings is drawn.
_WORTH_SAMPLING = 0.2


class Drafting:
    """Gives each sequence its next tree: the heads' candidates and those of prompt lookup.

    Args:
        drafter: the source of candidates beside the lookup.
        settings: switches and the size of trees.
        max_nodes: most nodes of a tree where the settings say nothing.
        budget: says whether the heads pay at the load of the moment.

    Attributes:
        drafter: as given.
        max_nodes: most nodes of a tree, root included.
        lookup_enabled: whether lookup proposes too; may be switched between requests.
        lookup: what it keeps of the unfinished sequences.
    """

    def __init__(
        self,
        drafter: Drafter,
        settings: SpeculationSettings,
        max_nodes: int,
        budget: Budget,
    ) -> None:
        self.drafter = drafter
        self.max_nodes = settings.max_nodes or max_nodes
        self._budget = budget
        self.lookup_enabled = settings.lookup
        self.lookup = PromptLookup()
        self._enabled = settings.enabled
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
        going_on = [entry for entry in committed if entry.sequence.finish_reason is None]
        together: list[Committed] = []
        for entry in going_on:
            sequence = entry.sequence
            if depth_left(sequence) == 0:
                continue
            if not drawn_at_random(sequence.params):
                together.append(entry)
            elif self.drafter.max_depth > 0 and len(going_on) <= SAMPLED_STREAMS:
                self._draft_sampled(sequence, hidden[entry.logits_row], depth_left(sequence))
        depths = [depth_left(entry.sequence) for entry in together]
        self._draft_likeliest(together, hidden, depths, going_on)

    def probabilities(self, sequence: SequenceState, tree: DraftTree | None) -> Tensor | None:
        """Per node of ``tree`` the distribution its children were drawn from, ``[N, V]``;
        None where drafts are deterministic.
        """
        stored = self._probabilities.get(sequence.request_id)
        return None if stored is None or tree is None else stored[: len(tree)]

    def forget(self, sequence: SequenceState) -> None:
        """Drop what is kept of a finished sequence."""
        self._probabilities.pop(sequence.request_id, None)
        self.lookup.forget(sequence)

    def _draft_likeliest(
        self,
        entries: Sequence[Committed],
        hidden: Tensor,
        depths: Sequence[int],
        roots: Sequence[Committed],
    ) -> None:
        """Trees for the match and typical rules, of all sources, in a step with ``roots``."""
        limits = [limits_of(entry.sequence) for entry in entries]
        sizes = [self._size(entry.sequence) for entry in entries]
        paths = [
            self._path(entry.sequence, min(depth, size - 1), limit)
            for entry, depth, size, limit in zip(entries, depths, sizes, limits, strict=True)
        ]
        trees = [DraftTree.root_only(entry.sequence.tokens[-1]) for entry in entries]
        asked = [i for i, path in enumerate(paths) if not _is_strong(path, sizes[i])]
        started = time.perf_counter()
        source = self._source(bool(asked), roots)
        if source is Source.HEADS:
            drafted = self.drafter.draft(
                hidden[[entries[i].logits_row for i in asked]],
                [entries[i].sequence.tokens for i in asked],
                [sizes[i] for i in asked],
                self._budget.least(len(roots)),
                *([[limits[i] for i in asked]] if any(limits) else []),
            )
            for i, tree in zip(asked, drafted, strict=True):
                trees[i] = tree.limit_depth(depths[i])
        self._budget.drafted(source, len(asked), time.perf_counter() - started)
        for i, (entry, path) in enumerate(zip(entries, paths, strict=True)):
            limit, tree = limits[i], trees[i]
            if limit is not None:
                tree = prune(tree, limit)
            tree = merge_path(tree, path.tokens, path.values, sizes[i])
            if limit is not None:
                tree = add_forced(tree, limit, depths[i], sizes[i])
            entry.sequence.draft = tree

    def _source(self, asked: bool, roots: Sequence[Committed]) -> Source:
        """Whether the heads draft for the coming step, and what that says of them."""
        if not asked or self.drafter.max_depth == 0:
            return Source.NEITHER
        keys = sum(len(entry.sequence) for entry in roots)
        pays = self._budget.worth_drafting(len(roots), keys)
        return Source.HEADS if pays else Source.LOOKUP

    def _size(self, sequence: SequenceState) -> int:
        """Most nodes of its tree, root included."""
        return min(self.max_nodes, sequence.params.max_nodes or self.max_nodes)

    def _path(self, sequence: SequenceState, depth: int, limits: PathLimits | None) -> Continuation:
        if not self.lookup_enabled:
            return Continuation([], [])
        path = self.lookup.propose(sequence, depth)
        if limits is None or not path.tokens:
            return path
        length = cut_path(path.tokens, limits)
        return Continuation(path.tokens[:length], path.values[:length])

    def _draft_sampled(self, sequence: SequenceState, hidden: Tensor, depth: int) -> None:
        def choose(logits: Tensor, path: tuple[int, ...], count: int) -> SiblingChoice:
            params, tokens = sequence.params, sequence.tokens
            output = [*tokens[sequence.prompt_length :], *path]
            try:
                limits = limits_of(sequence)
                allowed = None if limits is None else limits.allowed(path)
            except GrammarError:  # it fails the request where the target's token is drawn
                return SiblingChoice(torch.zeros_like(logits), [])
            history = RowHistory(tokens[: sequence.prompt_length], output, allowed)
            rows = process_logits(logits[None], [params], [history])
            if not bool(finite_rows(rows)):  # the heads know none of the allowed tokens
                return SiblingChoice(torch.zeros_like(logits), [])
            processed = rows.softmax(-1)[0]
            position = len(tokens) + len(path)
            return SiblingChoice(
                processed, sample_siblings(processed, count, params.seed, position)
            )

        sampled = self.drafter.draft_sampled(
            hidden, sequence.tokens, self._branching(depth, self._size(sequence)), choose
        )
        # The scheduler cuts trees by value. Values that knew the tokens drawn would bias
        # which of them are tested, so here they follow the order alone.
        values = tuple(1.0 / (1 + place) for place in range(len(sampled.tree)))
        sequence.draft = replace(sampled.tree, values=values)
        self._probabilities[sequence.request_id] = sampled.probabilities

    def _branching(self, depth: int, size: int) -> tuple[int, ...]:
        """As many levels of ``BRANCHING`` as fit the depth and the size of trees, and are
        worth their rows by what may be known of them before they are drawn.
        """
        levels: list[int] = []
        nodes, width, value = 1, 1, 1.0
        for siblings in BRANCHING[: min(depth, self.drafter.max_depth)]:
            width *= siblings
            value *= SAMPLED_ACCEPTANCE
            if nodes + width > size or value < _WORTH_SAMPLING:
                break
            nodes += width
            levels.append(siblings)
        return tuple(levels)


def limits_of(sequence: SequenceState) -> PathLimits | None:
    """The constraint on the nodes of a sequence's next tree; None where any token may come."""
    if sequence.constraint is None:
        return None
    return PathLimits(sequence.constraint, sequence.emitted)


def _is_strong(path: Continuation, size: int) -> bool:
    """Whether a path alone gives enough likely candidates for a tree of that size."""
    needed = min(size - 1, STRONG_CANDIDATES)
    return 0 < needed <= len(path.values) and path.values[needed - 1] >= STRONG


def default_max_nodes(runner: ModelRunner) -> int:
    """Most nodes of a tree on this device, root included."""
    if runner.device.type == "cuda":
        return NODES_CUDA
    if runner.native is not None and runner.native.units == "tiles":
        return NODES_MATRIX_UNITS
    return NODES_PACKED if isinstance(runner.output_head, PackedLinear) else NODES_MATRIX_UNITS
