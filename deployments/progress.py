"""How far a request has got, as gateway and worker keep it in its checkpoint."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from specdec.outputs import RequestOutput


class Progress(BaseModel):
    """Counts of one request, those of earlier attempts included.

    Attributes:
        finish_reason: how it ended, if it has.
        cached_tokens: of its prompt, found computed when it first started.
        drafted: candidates verified.
        accepted: candidates kept.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    finish_reason: Literal["stop", "length"] | None = None
    cached_tokens: int | None = None
    drafted: int = 0
    accepted: int = 0

    def after(self, output: RequestOutput) -> Progress:
        """With what an output of this attempt says."""
        reason = output.finish_reason
        return self.model_copy(
            update={
                "finish_reason": reason if reason in ("stop", "length") else None,
                "cached_tokens": output.cached_tokens,
                "drafted": output.drafted,
                "accepted": output.accepted,
            }
        )

    def encode(self) -> bytes:
        """As a checkpoint holds it."""
        return self.model_dump_json(exclude_defaults=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> Progress:
        """What a checkpoint holds; counts of nothing where it holds none.

        Raises:
            ValueError: it is not of this form.
        """
        try:
            return cls.model_validate_json(data) if data else cls()
        except ValidationError as error:
            raise ValueError("the checkpoint's progress cannot be read") from error
