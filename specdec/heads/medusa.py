"""Plain Medusa heads: each depth reads the root's hidden state alone (Cai et al. 2024)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from specdec.errors import HeadsError
from specdec.heads.base import DraftHeads, LmHead
from specdec.heads.target import Target


class ResidualBlock(nn.Module):
    """``x + SiLU(W x + b)``, zero at first so that a new head starts as the output head."""

    def __init__(self, hidden_size: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, bias=bias)
        nn.init.zeros_(self.linear.weight)
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., H]``."""
        out: Tensor = x + F.silu(self.linear(x))
        return out


class MedusaHeads(DraftHeads):
    """One stack of residual blocks per depth.

    Head ``i`` proposes the token at offset ``i + 2`` from the hidden state, which is depth
    ``i + 1`` below the root.

    Args:
        layers: per head its number of residual blocks; each block has its own weights.
        hidden_size: H.
        vocab_size: of the base model.
        bias: whether blocks add a bias.
        lm_heads: output rows ``[V', H]``, one per head; one for all heads; or none, which
            takes the base model's.
        token_map: ``[V']`` target tokens of the rows.
    """

    path_dependent = False

    def __init__(
        self,
        layers: list[int],
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = True,
        lm_heads: list[Tensor] | None = None,
        token_map: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.depths = len(layers)
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden_size, bias) for _ in range(count)))
            for count in layers
        )
        self.lm_heads = nn.ModuleList(LmHead(rows) for rows in lm_heads or [])
        self.owns_lm_head = bool(lm_heads)
        self.token_map: Tensor | None
        self.register_buffer("token_map", token_map)

    @property
    def width(self) -> int:
        """V'."""
        return self.vocab_size if self.token_map is None else len(self.token_map)

    def attach(self, target: Target) -> None:
        """Check sizes; take the base model's output rows if there are none of its own."""
        made_for, given = (self.vocab_size, self.hidden_size), tuple(target.output.shape)
        if made_for != given:
            raise HeadsError(
                f"the heads are for [vocabulary, hidden size] {list(made_for)}, "
                f"the model has {list(given)}"
            )
        if not self.owns_lm_head and not len(self.lm_heads):
            self.lm_heads.append(LmHead(target.rows(self.token_map)))

    def begin(self, hidden: Tensor, known: Tensor) -> Tensor:
        """The hidden state itself."""
        return hidden

    def advance(self, depth: int, state: Tensor, tokens: Tensor) -> Tensor:
        """The same state: a plain head does not see the tokens above."""
        return state

    def features(self, depth: int, state: Tensor) -> Tensor:
        """``[R, H]`` of head ``depth - 1``."""
        out: Tensor = self.blocks[depth - 1](state)
        return out

    def lm_head(self, depth: int) -> LmHead:
        """The rows of head ``depth - 1``, or those that all share."""
        head = self.lm_heads[depth - 1 if len(self.lm_heads) > 1 else 0]
        assert isinstance(head, LmHead)
        return head
