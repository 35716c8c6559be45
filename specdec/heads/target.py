"""What draft heads borrow from the model they draft for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.errors import HeadsError
from specdec.model.linear import PackedLinear


@dataclass(frozen=True)
class Target:
    """The base model's tables; not copied.

    Attributes:
        embedding: ``[V, H]`` input embeddings.
        output: ``[V, H]`` rows of the output head; the same tensor where they are tied.
    """

    embedding: Tensor
    output: Tensor

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.output.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.output.shape[1]

    @staticmethod
    def of(model: nn.Module) -> Target:
        """Take the tables from a transformers model, its layers packed or not.

        Raises:
            HeadsError: the model has no such tables, or they differ in width.
        """
        inputs, head = (
            getattr(model, name, lambda: None)()
            for name in ("get_input_embeddings", "get_output_embeddings")
        )
        if not isinstance(inputs, nn.Embedding) or not isinstance(head, nn.Module):
            raise HeadsError(f"{type(model).__name__} has no embeddings or no output head")
        embedding = inputs.weight.detach()
        if isinstance(head, PackedLinear):
            config = getattr(model, "config", None)
            tied = bool(getattr(config, "tie_word_embeddings", False))
            output = embedding if tied else head.unpacked()
        else:
            weight = head.weight
            assert isinstance(weight, Tensor)
            output = weight.detach()
        if embedding.shape[1] != output.shape[1]:
            raise HeadsError(
                f"{type(model).__name__}: embeddings of width {embedding.shape[1]}, but an "
                f"output head of width {output.shape[1]}; heads need them equal"
            )
        return Target(embedding, output)

    def rows(self, token_map: Tensor | None) -> Tensor:
        """Output rows ``[V', H]`` of the tokens in ``token_map``, float32; all without one."""
        chosen = self.output if token_map is None else self.output[token_map.to(self.output.device)]
        return chosen.float()


def model_digest(target: Target) -> str:
    """SHA-256 over shape and every 61st row of the embeddings, rounded to bfloat16.

    Names the base model that heads were trained on, whatever type its weights were loaded
    in. A fine-tuned model with the same embeddings has the same digest: that heads fit is
    proved by the acceptance floor, not by the digest.
    """
    rows = target.embedding[::61].to("cpu", torch.bfloat16).contiguous()
    digest = hashlib.sha256(repr(tuple(target.embedding.shape)).encode())
    digest.update(rows.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
