"""Settings of the checkpoint store."""

from __future__ import annotations

from pydantic import Field, SecretStr, model_validator

from prefix_cache.settings import LONGEST_MS, LONGEST_S, NAMESPACE, StoreSettings


class CheckpointSettings(StoreSettings):
    """Where checkpoints are kept, and what that may cost; see also StoreSettings.

    Attributes:
        ttl_s: how long the rest of an answer can be asked for, from the last write on, finished or
            not.
        lease_s: a worker that was not heard of for so long is taken for dead.
        read_deadline_ms: how long the start of an answer, or of its resumption, may wait for the
            store.
        write_deadline_ms: of a write, which nobody waits for.
        max_checkpoint_bytes: of one; requests with longer ones have none.
    """

    url: SecretStr = SecretStr("lmdb:///~/.cache/specdec/checkpoints")
    namespace: str = Field("ckpt", pattern=NAMESPACE)
    ttl_s: float = Field(600, gt=0, le=LONGEST_S)
    max_bytes: int = Field(256 * 2**20, ge=2**20)
    lease_s: float = Field(15, gt=0, le=LONGEST_S)
    read_deadline_ms: float = Field(250, gt=0, le=LONGEST_MS)
    write_deadline_ms: float = Field(2000, gt=0, le=LONGEST_MS)
    max_checkpoint_bytes: int = Field(4 * 2**20, ge=1024)

    @model_validator(mode="after")
    def _times_fit(self) -> CheckpointSettings:
        if self.lease_s > self.ttl_s:
            raise ValueError(f"lease_s ({self.lease_s:g}) is above ttl_s ({self.ttl_s:g})")
        if self.max_checkpoint_bytes > self.max_bytes // 8:
            raise ValueError(
                f"max_checkpoint_bytes ({self.max_checkpoint_bytes}) is above an eighth of "
                f"max_bytes ({self.max_bytes})"
            )
        return self
