"""Start-up check: rows through pages and trees against the model's own forward.

Some families accept a replaced attention and then compute something else. The check runs
random tokens through everything that serving does (chunked prefill, shuffled pages, two
sequences in a step, a branching tree, a KV move and one more step) and compares each row
with the model's own eager forward over the same tokens.

A model with 16-bit weights is compared in float32, with these weights' values: in bfloat16 two
right ways to compute the same row differ by up to a third of its spread, which would hide a
wrong mask. One more run in its own numbers shows that nothing breaks there. Where the memory for
float32 is lacking, the comparison is a coarse one, which the log says.

The prompt exceeds the smallest sliding window up to ``MAX_PROMPT`` tokens. Longer windows are
read from the model's own mask functions (``hook.describe_mask``) and not run; anything else
that happens only in longer contexts is not seen here.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.errors import UnsupportedModelError
from specdec.model.hook import IMPLEMENTATION
from specdec.model.kv import KvLayout, KvPool
from specdec.model.probe import AttentionShape
from specdec.model.segment_rows import SegmentRows
from specdec.model.widened import narrow_tensors, widened
from specdec.policy.tree import DraftTree

log = logging.getLogger(__name__)

#: Logits per row ``[R, V]`` of packed segments whose KV lies in the pool.
Forward = Callable[[Sequence[SegmentRows], KvPool], Tensor]

#: Logits of all rows that the check's steps gave, and per row the tokens up to it.
Rows = tuple[Tensor, list[tuple[int, ...]]]

#: Largest relative deviation of a row that passes for rounding in float32.
TOLERANCE = 1e-3

#: Largest mean deviation of the rows where a model computes in its own numbers, whose rounding a
#: near-tie of experts or a deep model blows up. Unrelated logits deviate by 1.4, while bfloat16's
#: rounding was below 0.08 wherever it was measured (single rows: up to 0.4).
COARSE_TOLERANCE = 0.5

#: Where nothing but a coarse check is possible, it asks for more if the model knows two ways of
#: attention, eager and sdpa: at most so many times what these differ by, or what passes for
#: rounding in a model of few layers.
NOISES = 3.0
LEAST_NOISE = 6e-2

PROMPT = 33
MAX_PROMPT = 256
_SECOND_PROMPT = 7
_PAGE_SIZE = 5
_PARENTS = (-1, 0, 0, 2, 2, 1, 4)
#: From the root to the deepest node: slots 2, 4 and 6 move to 1, 2 and 3.
_WALKED = (0, 2, 4, 6)
_FOLLOWER_PARENTS = (-1, 0, 0)
#: Positions that the second sequence and the tree need beyond their prompts.
_MARGIN = len(_PARENTS) + len(_FOLLOWER_PARENTS)


@dataclass
class _Checked:
    """A sequence under check, and what its rows must equal.

    Attributes:
        tokens: committed tokens.
        pages: enough for all steps, in no order.
        wanted: per row of logits so far the tokens up to and including that row.
    """

    tokens: tuple[int, ...]
    pages: list[int]
    wanted: list[tuple[int, ...]]

    def chunk(self, start: int, stop: int) -> SegmentRows:
        last = stop == len(self.tokens)
        if last:
            self.wanted.append(self.tokens)
        return SegmentRows(self.pages, start, self.tokens[start:stop], None, last)

    def verify(self, tree: DraftTree) -> SegmentRows:
        """A tree whose root is the token after the committed ones."""
        for node in range(len(tree)):
            path = tuple(tree.tokens[i] for i in tree.path_to(node))
            self.wanted.append(self.tokens + path)
        return SegmentRows(self.pages, len(self.tokens), tree.tokens, tree, True)


def check_against_own_forward(
    model: PreTrainedModel, forward: Forward, shape: AttentionShape, vocabulary: int, limit: int
) -> float:
    """Compare and return the largest relative deviation of a row of logits.

    16-bit weights are in float32 meanwhile, which takes three times their memory. Without that
    memory it is the mean deviation in the model's own dtype.

    Args:
        model: with the hook in place; its own attention is put back for the reference.
        forward: the way through pages.
        shape: of the model's attention.
        vocabulary: number of tokens.
        limit: longest sequence in tokens.

    Raises:
        UnsupportedModelError: the deviation is no rounding, or the limit leaves no room.
    """
    family = model.config.model_type
    windows = [window for window in shape.windows if window is not None]
    prompt = min(windows) + _MARGIN if windows else PROMPT
    prompt = min(prompt if prompt <= MAX_PROMPT else PROMPT, limit - _MARGIN)
    if prompt < _SECOND_PROMPT:
        raise UnsupportedModelError(
            f"{family}: a longest sequence of {limit} tokens is too short to check the model"
        )

    def paged(dtype: torch.dtype) -> Rows:
        layout = replace(shape.layout, dtype=dtype)
        return _through_pages(forward, layout, model.device, prompt, vocabulary)

    narrow = bool(narrow_tensors(model))
    try:
        try:
            deviation, want = _compare(model, paged)
            if narrow:
                _compare_own_numbers(model, paged(shape.layout.dtype)[0], want)
            return deviation
        except torch.OutOfMemoryError as error:
            if not narrow:
                raise
            log.warning(
                "%s: no memory to check the model in float32, so it is checked coarsely and small "
                "faults would not be seen: %s",
                family,
                error,
            )
        # Behind the handler, which keeps alive what the failed forward holds.
        return _compare_coarsely(model, paged(shape.layout.dtype))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{family}: the model does not run with attention over pages: {error}"
        ) from error


def _compare(model: PreTrainedModel, paged: Callable[[torch.dtype], Rows]) -> tuple[float, Tensor]:
    """The largest deviation in float32, and the model's own logits ``[R, V]``."""
    with widened(model):
        got, wanted = paged(torch.float32)
        want = _own_logits(model, wanted)
    deviation = float(_deviations(got, want).max())
    _refuse_beyond(TOLERANCE, deviation, model, "the model's own forward")
    return deviation, want


def _compare_own_numbers(model: PreTrainedModel, got: Tensor, want: Tensor) -> None:
    """Refuse what is not finite, or is wrong altogether, in the model's own dtype.

    Args:
        model: named in the error.
        got: ``[R, V]`` over pages, in the model's own dtype.
        want: ``[R, V]`` by the model's own forward in float32.
    """
    deviation = float(_deviations(got, want).mean())
    _refuse_beyond(COARSE_TOLERANCE, deviation, model, f"float32, in {model.dtype},")


def _compare_coarsely(model: PreTrainedModel, rows: Rows) -> float:
    """The mean deviation from the model's own forward in its own dtype."""
    got, wanted = rows
    want = _own_logits(model, wanted)
    tolerance = COARSE_TOLERANCE
    if model._supports_sdpa:
        noise = float(_deviations(_own_logits(model, wanted, "sdpa"), want).mean())
        tolerance = max(NOISES * noise, LEAST_NOISE)
    deviation = float(_deviations(got, want).mean())
    _refuse_beyond(tolerance, deviation, model, "the model's own forward")
    return deviation


def _deviations(got: Tensor, want: Tensor) -> Tensor:
    """Per row the distance relative to the spread of what is wanted, ``[R]``."""
    spread = (want - want.mean(-1, keepdim=True)).norm(dim=-1)
    deviations: Tensor = (got - want).norm(dim=-1) / spread
    return deviations


def _refuse_beyond(
    tolerance: float, deviation: float, model: PreTrainedModel, reference: str
) -> None:
    # A comparison with NaN is false, so NaN does not pass.
    if not deviation <= tolerance:
        raise UnsupportedModelError(
            f"{model.config.model_type}: logits over pages and trees deviate from {reference} by "
            f"{deviation:.2g} of their spread (at most {tolerance:.2g} is rounding), so "
            f"{type(model).__name__} would be served wrong"
        )


def _through_pages(
    forward: Forward,
    layout: KvLayout,
    device: torch.device,
    prompt: int,
    vocabulary: int,
) -> Rows:
    """Logits ``[R, V]`` of all rows that the steps gave, and the tokens behind each."""
    chance = random.Random(prompt)
    needed = -(-(prompt + _MARGIN) // _PAGE_SIZE)
    order = chance.sample(range(2 * needed), 2 * needed)
    pool = KvPool(layout, 2 * needed, _PAGE_SIZE, device)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(vocabulary) for _ in range(count))

    first = _Checked(draw(prompt), order[:needed], [])
    second = _Checked(draw(_SECOND_PROMPT), order[needed:], [])
    tree, follower = _tree(_PARENTS, draw), _tree(_FOLLOWER_PARENTS, draw)
    cut = prompt // 2 | 1
    logits: list[Tensor] = []
    wanted: list[tuple[int, ...]] = []

    def step(*segments: SegmentRows) -> None:
        logits.append(forward(segments, pool))
        for sequence in (first, second):
            wanted.extend(sequence.wanted)
            sequence.wanted.clear()

    step(first.chunk(0, cut))
    step(first.chunk(cut, prompt), second.chunk(0, _SECOND_PROMPT))
    step(first.verify(tree), second.verify(DraftTree.root_only(follower.tokens[1])))
    slots = pool.slots(first.pages, 0, prompt + len(tree))[prompt:].tolist()
    pool.move([slots[node] for node in _WALKED], slots[: len(_WALKED)])
    first.tokens += tuple(tree.tokens[node] for node in _WALKED)
    second.tokens += (follower.tokens[1],)
    step(first.verify(follower), second.verify(follower))
    return torch.cat(logits), wanted


def _tree(parents: tuple[int, ...], draw: Callable[[int], tuple[int, ...]]) -> DraftTree:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return DraftTree(draw(len(parents)), parents, tuple(depths), (1.0,) * len(parents))


@torch.no_grad()
def _own_logits(
    model: PreTrainedModel, wanted: Sequence[tuple[int, ...]], attention: str = "eager"
) -> Tensor:
    """Per entry the logits after its last token, by the model's own attention, ``[R, V]``."""
    # An entry that another one continues is read from that one's forward.
    whole = sorted({w for w in wanted if not any(o != w and o[: len(w)] == w for o in wanted)})
    lines = [next(i for i, o in enumerate(whole) if o[: len(w)] == w) for w in wanted]
    longest = max(len(tokens) for tokens in whole)
    # Padding stands on the right, where causal attention does not see it.
    padded = [tokens + (0,) * (longest - len(tokens)) for tokens in whole]
    ids = torch.tensor(padded, device=model.device)
    columns = sorted({len(w) - 1 for w in wanted})
    model.set_attn_implementation(attention)
    try:
        logits: Tensor = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            use_cache=False,
            logits_to_keep=torch.tensor(columns, device=model.device),
        ).logits
    finally:
        model.set_attn_implementation(IMPLEMENTATION)
    return torch.stack(
        [logits[i, columns.index(len(w) - 1)] for i, w in zip(lines, wanted, strict=True)]
    ).float()
